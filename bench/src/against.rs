//! `cargo xtask bench --against kube-proxy`: kube-proxy and kplane side by side.
//!
//! One real API server with Services of two endpoints each; every contender in a fresh network
//! namespace of its own, one at a time, joined to the API server by one link whose counters tell
//! what it reads. The kernel is the judge of what is programmed ([`kernel`]), the same for all.

pub(crate) mod contender;
mod first;
mod kernel;
pub(crate) mod measure;
mod packets;
mod plot;
mod report;
mod start;

use std::ffi::OsString;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::objects::{self, Each};
use anyhow::Result;
use clap::Parser;
use kplane_tests::cluster::{Cluster, Options};
use kplane_tests::link::Route;
use kplane_tests::netns::NetNs;

use crate::fleet::table;

use contender::{Contender, Place};
use measure::{Bench, Row};

/// The contender's end of its link.
pub(crate) const LINK: &str = "uplink";
const OURS: Ipv4Addr = Ipv4Addr::new(172, 30, 255, 1);
const THEIRS: Ipv4Addr = Ipv4Addr::new(172, 30, 255, 2);
/// The ends of the link to the pods.
const NODE: Ipv4Addr = Ipv4Addr::new(172, 30, 255, 5);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(172, 30, 255, 6);

/// Compares kube-proxy and kplane; started by `cargo xtask bench --against kube-proxy`.
#[derive(Debug, Parser)]
struct Args {
    /// Numbers of Services, ascending.
    #[arg(long, value_delimiter = ',', default_value = "1000,5000,10000")]
    services: Vec<u32>,
    /// Endpoints of each Service.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    endpoints: u32,
    /// Changes of one endpoint, each.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    changes: u32,
    /// Who is measured.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "kube-proxy-nftables,kplane-standalone,kplane"
    )]
    contenders: Vec<Contender>,
    /// Put the table and the plot into docs/.
    #[arg(long)]
    write: bool,
}

pub(crate) fn main(words: &[OsString]) -> Result<()> {
    kplane_tests::userns::enter()?;
    let mut args = Args::parse_from(words);
    args.services.sort_unstable();
    let folder = tempfile::tempdir()?;
    let cluster = Cluster::start(&Options::default())?;
    let rows = run(&args, &cluster, folder.path())?;
    let machine = machine(&cluster)?;
    drop(cluster);
    println!("\n{machine}\n\n{}", report::table(&rows));
    for line in report::summary(&rows) {
        println!("{line}");
    }
    report::goals(&rows);
    if args.write {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("docs");
        let text = format!(
            "{machine}\n\n{}\n{}",
            report::table(&rows),
            report::summary(&rows)
                .iter()
                .map(|line| format!("* {line}\n"))
                .collect::<String>()
        );
        table::write("cargo xtask bench --against kube-proxy", &text)?;
        fs::write(docs.join("benchmarks.svg"), plot::svg(&rows, &machine)?)?;
        println!("written to docs/benchmarks.md and docs/benchmarks.svg");
    }
    Ok(())
}

/// All sizes, all contenders.
fn run(args: &Args, cluster: &Cluster, folder: &Path) -> Result<Vec<Row>> {
    let api = cluster.api();
    objects::prepare(api)?;
    let kubeconfig = cluster.kubeconfig();
    let kube_proxy = cluster.programs().bin().join("kube-proxy");
    let (mut rows, mut have, each) = (Vec::new(), 0, Each(args.endpoints));
    for &services in &args.services {
        each.grow(api, have, services)?;
        have = services;
        for &contender in &args.contenders {
            let ns = NetNs::new("contender")?;
            join(&ns, cluster.ns())?;
            let pods = with_pods(&ns)?;
            let bare = NetNs::new("bare")?;
            let _others = with_pods(&bare)?;
            let place = Place {
                ns: &ns,
                kubeconfig: &kubeconfig,
                folder,
                kube_proxy: &kube_proxy,
            };
            let bench = Bench {
                api,
                services,
                each,
                changes: args.changes,
                link: LINK,
                pods: &pods,
                bare: &bare,
            };
            rows.push(bench.measure(contender, &place)?);
            // The kernel takes its time with a namespace; the next link has the same name.
            ns.netlink()?.delete(LINK)?;
        }
    }
    Ok(rows)
}

/// Has a namespace reach the API server over one link.
pub(crate) fn join(ns: &NetNs, cluster: &NetNs) -> Result<()> {
    let inside = ns.netlink()?;
    inside.veth(LINK, cluster, "contender")?;
    inside.add_address(LINK, THEIRS.into(), 30)?;
    let outside = cluster.netlink()?;
    outside.add_address("contender", OURS.into(), 30)?;
    outside.up("contender")?;
    inside.add_route(&Route::default_via(IpAddr::from(OURS)))
}

/// Where all pods are: packets to them arrive there, and are lost.
fn with_pods(node: &NetNs) -> Result<NetNs> {
    let pods = NetNs::new("pods")?;
    let inside = node.netlink()?;
    inside.veth("pods", &pods, "node")?;
    inside.add_address("pods", NODE.into(), 30)?;
    inside.add_address("lo", first::POD.into(), 32)?;
    let outside = pods.netlink()?;
    outside.add_address("node", GATEWAY.into(), 30)?;
    outside.up("node")?;
    let range = contender::PODS.parse()?;
    inside.add_route(&Route::to(range).via(IpAddr::from(GATEWAY)))?;
    Ok(pods)
}

/// Which value is at a percentile of sorted ones.
fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last * percent).div_ceil(100)).copied().unwrap_or_default()
}

/// When, on what and with which versions this was measured.
pub(crate) fn machine(cluster: &Cluster) -> Result<String> {
    let first_line = |mut command: Command| -> Result<String> {
        let text = kplane_tests::process::output({
            command.env("LC_ALL", "C");
            command
        })?;
        Ok(text.lines().next().unwrap_or_default().trim().to_owned())
    };
    let with = |program: &str, argument: &str| {
        let mut command = Command::new(program);
        command.arg(argument);
        command
    };
    let mut kube_proxy = cluster.programs().command("kube-proxy");
    kube_proxy.arg("--version");
    let processors = fs::read_to_string("/proc/cpuinfo")?;
    let model = processors
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map_or("unknown CPU", |rest| {
            rest.trim_start_matches([' ', '\t', ':'])
        });
    Ok(format!(
        "{}: {} cores ({model}), Linux {}; kube-proxy {}, {}; kplane {}",
        first_line(with("date", "-I"))?,
        std::thread::available_parallelism()?,
        first_line(with("uname", "-r"))?,
        first_line(kube_proxy)?.trim_start_matches("Kubernetes "),
        first_line(with("nft", "--version"))?,
        env!("CARGO_PKG_VERSION"),
    ))
}
