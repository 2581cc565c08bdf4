//! `cargo xtask bench --against kube-proxy-packets`: what packets cost once their connection is established.
//!
//! Each contender has a client, a node and a server of its own, all of which are network namespaces. One after the other
//! writes its rules, and stops; only the userspace proxy goes on. Then the API server ends, and packets have the machine
//! for themselves. In each round all contenders take turns, so that a busy machine is busy for all of them.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::objects::{self, PAIRS};
use anyhow::{Context as _, Result};
use clap::Parser;
use kplane_tests::cluster::{Cluster, Options};
use kplane_tests::netns::NetNs;
use kplane_tests::process::Process;
use nix::sys::signal::Signal;

use crate::against::contender::{Contender, Place as Node};
use crate::against::measure::explain;
use crate::against::{LINK, join, machine};
use crate::fleet::table;
use crate::proxies::contender::{Contender as Way, manifest};
use crate::proxies::place::Place;
use crate::proxies::results::cell;
use crate::proxies::target::Target;
use crate::proxies::{captures, rows, serves};

/// The command, by whose name docs/benchmarks.md has markers.
const COMMAND: &str = "cargo xtask bench --against kube-proxy-packets";
/// Time in which a contender does what follows a start.
const SETTLE: Duration = Duration::from_secs(3);
/// What clients ask for: round trips, and bulk data.
const TARGETS: [Target; 2] = [Target::Echo, Target::Sink];
/// Ways to a server: to the Pod's address, and through a Service, at the address that all contenders serve.
const POD: Way = Way::Direct;
const SERVICE: Way = Way::Captured;

const HEAD: &str = "\
| proxy | to | round trip | its CPU | Gbit/s | CPU a GB |
| ----- | -- | ---------: | ------: | -----: | -------: |
";

/// Time and CPU of a round trip in microseconds, Gbit/s, and CPU of a GB in milliseconds.
type Values = [f64; 4];

/// Compares packets; started by `cargo xtask bench --against kube-proxy-packets`.
#[derive(Debug, Parser)]
struct Args {
    /// Services beside those that are asked.
    #[arg(long, default_value_t = 1_000)]
    services: u32,
    /// Rounds.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Who is measured.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "kube-proxy-nftables,kplane-standalone,kube-proxy-iptables,kplane-iptables,\
                         kube-proxy-iptables-legacy,kplane-iptables-legacy,kplane-userspace"
    )]
    contenders: Vec<Contender>,
    /// Put the table into docs/benchmarks.md.
    #[arg(long)]
    write: bool,
}

pub(crate) fn main(words: &[OsString]) -> Result<()> {
    kplane_tests::userns::enter()?;
    let args = Args::parse_from(words);
    let folder = tempfile::tempdir()?;
    let cluster = cluster(args.services)?;
    let (runs, services) = (args.runs, args.services);
    let title = format!("{}; {services} Services; {runs} rounds", machine(&cluster)?);
    let mut bare = Stand::bare("no rules, no connection tracking")?;
    let mut stands = Vec::new();
    for contender in args.contenders {
        if contender.is_legacy() && !has_legacy(&bare.place.proxy) {
            println!(
                "{} is left out: this machine has no x_tables",
                contender.name()
            );
            continue;
        }
        let folder = folder.path().join(contender.name());
        fs::create_dir(&folder)?;
        let stand = Stand::start(contender, &cluster, &folder);
        stands.push(stand.with_context(|| explain(contender, &folder))?);
    }
    drop(cluster);
    let time = Duration::from_secs_f64(args.seconds);
    for round in 0..runs {
        eprintln!("round {} of {runs}", round + 1);
        bare.measure(&[POD], time)?;
        for stand in &mut stands {
            stand.measure(&[POD, SERVICE], time)?;
        }
    }
    let text = format!(
        "{title}; medians (lowest to highest)\n\n{}",
        table_of(&bare, &stands)
    );
    println!("\n{text}");
    if args.write {
        table::write(COMMAND, &text)?;
        println!("written to docs/benchmarks.md");
    }
    Ok(())
}

/// An API server with so many Services, and those that are asked.
fn cluster(services: u32) -> Result<Cluster> {
    let cluster = Cluster::start(&Options::default())?;
    objects::prepare(cluster.api())?;
    PAIRS.grow(cluster.api(), 0, services)?;
    for target in TARGETS {
        for object in manifest(target).split_terminator("---\n") {
            cluster.api().apply(&serde_saphyr::from_str(object)?)?;
        }
    }
    Ok(cluster)
}

fn has_legacy(ns: &NetNs) -> bool {
    let mut command = Command::new("/usr/sbin/iptables-legacy");
    command.args(["-t", "nat", "-S"]);
    ns.output(command).is_ok()
}

/// A client, a node and a server, and what was measured there.
struct Stand {
    name: &'static str,
    place: Place,
    /// The contender's, which end with this.
    _processes: Vec<Process>,
    /// The rounds, to the Pod and through the Service.
    rounds: [Vec<Values>; 2],
}

impl Stand {
    fn bare(name: &'static str) -> Result<Self> {
        Ok(Self {
            name,
            place: Place::new()?,
            _processes: Vec::new(),
            rounds: [Vec::new(), Vec::new()],
        })
    }

    /// Has a contender write its rules.
    fn start(contender: Contender, cluster: &Cluster, folder: &Path) -> Result<Self> {
        let stand = Self::bare(contender.name())?;
        let ns = &stand.place.proxy;
        join(ns, cluster.ns())?;
        let processes = contender.start(&Node {
            ns,
            kubeconfig: &cluster.kubeconfig(),
            folder,
            kube_proxy: &cluster.programs().bin().join("kube-proxy"),
        })?;
        let is_userspace = contender == Contender::KplaneUserspace;
        for target in TARGETS {
            serves(&stand.place, SERVICE.address(target), target)?;
            if is_userspace {
                captures(&stand.place, SERVICE.address(target))?;
            }
        }
        thread::sleep(SETTLE);
        if !is_userspace {
            for process in &processes {
                process.signal(Signal::SIGSTOP)?;
            }
        }
        ns.netlink()?.delete(LINK)?;
        Ok(Self {
            _processes: processes,
            ..stand
        })
    }

    /// One round.
    fn measure(&mut self, ways: &[Way], time: Duration) -> Result<()> {
        for (rounds, way) in self.rounds.iter_mut().zip(ways) {
            // Of this process, which has clients and servers, and of its children: of those, only the userspace proxy runs.
            let to = |target| rows::Way {
                contender: *way,
                place: &self.place,
                pid: Some(std::process::id()),
                to: way.address(target),
                time,
            };
            let (trips, bulk) = (to(Target::Echo).requests(1)?, to(Target::Sink).bulk(1)?);
            rounds.push([1e6 / trips[0], trips[1], bulk[0], bulk[1]]);
        }
        Ok(())
    }
}

fn table_of(bare: &Stand, stands: &[Stand]) -> String {
    let mut text = HEAD.to_owned() + &row(bare.name, "Pod: µs, µs, Gbit/s, ms", &bare.rounds[0]);
    for stand in stands {
        let [pod, service] = &stand.rounds;
        text += &row(stand.name, "Pod / no rules", &ratios(pod, &bare.rounds[0]));
        text += &row(
            stand.name,
            "Service / no rules",
            &ratios(service, &bare.rounds[0]),
        );
        text += &row(stand.name, "Service / Pod", &ratios(service, pod));
    }
    text
}

/// Returns each round's ratios: its values were measured soon after each other.
fn ratios(rounds: &[Values], to: &[Values]) -> Vec<Values> {
    rounds
        .iter()
        .zip(to)
        .map(|(it, to)| std::array::from_fn(|column| it[column] / to[column]))
        .collect()
}

fn row(name: &str, to: &str, rounds: &[Values]) -> String {
    let cell = |column: usize| cell(rounds.iter().map(|values| values[column]).collect(), 2);
    let cells: [String; 4] = std::array::from_fn(cell);
    format!("| {name} | {to} | {} |\n", cells.join(" | "))
}
