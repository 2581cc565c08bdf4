//! `cargo xtask bench --against kube-proxy-ipvs`: kube-proxy in mode ipvs and kplane's IPVS backend,
//! in a virtual machine whose kernel has IPVS.
//!
//! The API server runs outside. Every contender has a fresh machine: this very program, started
//! inside, starts it, asks the kernel what is programmed, and writes down what it saw. Emulated
//! processors are some ten times slower than real ones: only ratios mean something.

mod inside;

use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::objects::{self, PAIRS};
use anyhow::{Context as _, Result, ensure};
use clap::{Parser, ValueEnum};
use kplane_tests::cluster::{Cluster, Options};
use kplane_tests::vm::{self, Run, Vm};
use serde::{Deserialize, Serialize};

/// For one contender at one size.
const DEADLINE: Duration = Duration::from_secs(7_200);
/// What the program inside leaves.
const RESULT: &str = "result.json";

/// Compares kube-proxy and kplane in mode ipvs.
#[derive(Debug, Parser)]
struct Args {
    /// Numbers of Services, ascending.
    #[arg(long, value_delimiter = ',', default_value = "1000,5000")]
    services: Vec<u32>,
    /// Changes of one endpoint, each.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    changes: u32,
    /// Inside: who is measured.
    #[arg(long, hide = true)]
    contender: Option<Contender>,
    /// Inside: how to reach the API server.
    #[arg(long, hide = true, default_value = "")]
    kubeconfig: String,
    /// Inside: where the result goes.
    #[arg(long, hide = true, default_value = "")]
    folder: String,
    /// Inside: kube-proxy.
    #[arg(long, hide = true, default_value = "")]
    kube_proxy: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Contender {
    KubeProxy,
    Kplane,
}

/// What was measured. Times in seconds, of the guest's clock.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Row {
    /// Start of the process until the kernel holds everything, and its CPU time.
    cold: f64,
    cold_cpu: f64,
    /// From the API server until then.
    start_bytes: u64,
    /// Sorted: from the API server's answer until the kernel holds the change.
    changes: Vec<f64>,
    /// CPU time for each.
    change_cpu: f64,
    /// Bytes.
    memory: u64,
}

impl Row {
    fn median(&self) -> f64 {
        let middle = self.changes.len() / 2;
        self.changes.get(middle).copied().unwrap_or_default()
    }
}

pub(crate) fn main(words: &[OsString]) -> Result<()> {
    let mut args = Args::parse_from(words);
    if vm::is_inside() {
        return inside::run(&args);
    }
    kplane_tests::userns::enter()?;
    args.services.sort_unstable();
    let mut vm = Vm::ensure()?;
    vm.network = true;
    let cluster = Cluster::start(&Options::default())?;
    objects::prepare(cluster.api())?;
    let (mut have, mut table) = (0, String::from(HEAD));
    for &services in &args.services {
        PAIRS.grow(cluster.api(), have, services)?;
        have = services;
        let [theirs, ours] = [Contender::KubeProxy, Contender::Kplane].map(|contender| {
            let row = measure(&vm, &cluster, &args, services, contender)?;
            for change in 0..args.changes {
                PAIRS.restore(cluster.api(), inside::service_of(change, services))?;
            }
            Ok::<_, anyhow::Error>(row)
        });
        table += &lines(services, &theirs?, &ours?)?;
        println!("\nLinux {}, emulated\n\n{table}", vm.kernel());
    }
    Ok(())
}

const HEAD: &str = "\
| Services | proxy | cold start | start CPU | start bytes | one endpoint, p50 | CPU per change | memory |
|---:|---|---:|---:|---:|---:|---:|---:|
";

fn lines(services: u32, theirs: &Row, ours: &Row) -> Result<String> {
    let mut text = String::new();
    for (name, row) in [("kube-proxy ipvs", theirs), ("kplane ipvs", ours)] {
        writeln!(
            text,
            "| {services} | {name} | {:.2} s | {:.2} s | {:.1} MB | {:.0} ms | {:.1} ms | {} MB |",
            row.cold,
            row.cold_cpu,
            row.start_bytes as f64 / 1e6,
            row.median() * 1e3,
            row.change_cpu * 1e3,
            row.memory / 1_000_000
        )?;
    }
    writeln!(
        text,
        "| {services} | ratio | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} |",
        theirs.cold / ours.cold,
        theirs.cold_cpu / ours.cold_cpu,
        theirs.start_bytes as f64 / ours.start_bytes as f64,
        theirs.median() / ours.median(),
        theirs.change_cpu / ours.change_cpu,
        theirs.memory as f64 / ours.memory as f64
    )?;
    Ok(text)
}

/// Starts a machine beside the API server, with this program in it.
fn measure(
    vm: &Vm,
    cluster: &Cluster,
    args: &Args,
    services: u32,
    contender: Contender,
) -> Result<Row> {
    let folder = tempfile::tempdir()?;
    let name = contender.to_possible_value().context("all contenders have names")?;
    eprintln!("{services} Services: {}", name.get_name());
    let mut command = Command::new(env::current_exe()?);
    command
        .arg("ipvs")
        .args(["--services", &services.to_string()])
        .args(["--changes", &args.changes.to_string()])
        .args(["--contender", name.get_name()])
        .arg("--kubeconfig")
        .arg(cluster.kubeconfig())
        .arg("--folder")
        .arg(folder.path())
        .arg("--kube-proxy")
        .arg(cluster.programs().bin().join("kube-proxy"));
    let run = Run::new(&command, DEADLINE).writable(folder.path());
    let code = cluster.ns().run(|| vm.run(&run))?;
    ensure!(code == 0, "{} failed", name.get_name());
    read(folder.path())
}

fn read(folder: &Path) -> Result<Row> {
    let text = fs::read_to_string(folder.join(RESULT)).context("the machine left no result")?;
    serde_json::from_str(&text).context("the machine's result")
}
