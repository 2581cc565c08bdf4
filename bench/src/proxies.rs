//! `cargo xtask bench --against proxies`: kplane's userspace proxy beside HAProxy, nginx and socat.
//!
//! Each contender has three network namespaces of its own, for clients, proxy and servers, and one thread on one
//! processor. Contenders take turns within each row, so that a busy machine is busy for all of them.

pub(crate) mod contender;
mod goals;
mod load;
pub(crate) mod place;
mod programs;
pub(crate) mod results;
pub(crate) mod rows;
mod server;
pub(crate) mod target;
mod udp;

use std::ffi::OsString;
use std::fs;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, ValueEnum};
use kplane_tests::process::{self, last_words};
use kplane_tests::wait::eventually;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::fleet::table;

use contender::Contender;
use place::Place;
use programs::Programs;
use results::Results;
use rows::{Row, Way};
use target::Target;

/// The command, by whose name docs/benchmarks.md has markers.
const COMMAND: &str = "cargo xtask bench --against proxies";

/// Longest time for a contender to start.
const START: Duration = Duration::from_secs(60);

/// Compares proxies; started by `cargo xtask bench --against proxies`.
#[derive(Debug, Parser)]
struct Args {
    /// Rounds.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    /// Seconds of each measurement of a rate.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// What is measured; all if there are none.
    #[arg(long, value_delimiter = ',')]
    rows: Vec<Row>,
    /// Who is measured; all if there are none.
    #[arg(long, value_delimiter = ',')]
    contenders: Vec<Contender>,
    /// Put the tables into docs/benchmarks.md.
    #[arg(long)]
    write: bool,
}

pub(crate) fn main(words: &[OsString]) -> Result<()> {
    let mut args = Args::parse_from(words);
    // Before this process leaves the network.
    let programs = Programs::ensure()?;
    kplane_tests::userns::isolate()?;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    all_if_empty(&mut args.rows);
    all_if_empty(&mut args.contenders);
    let text = format!(
        "{}\n\n{}",
        machine(&args, &programs)?,
        run(&args, &programs)?
    );
    println!("\n{text}");
    if args.write {
        table::write(COMMAND, &text)?;
        println!("written to docs/benchmarks.md");
    }
    Ok(())
}

fn all_if_empty<T: ValueEnum + Clone>(list: &mut Vec<T>) {
    if list.is_empty() {
        list.extend_from_slice(T::value_variants());
    }
}

/// All rows; returns their tables.
fn run(args: &Args, programs: &Programs) -> Result<String> {
    let folder = tempfile::tempdir()?;
    let places: Result<Vec<_>> = args
        .contenders
        .iter()
        .map(|contender| Ok((*contender, Place::new()?)))
        .collect();
    let places = places?;
    let mut results = Results::default();
    for row in args.rows.iter().copied() {
        for _ in 0..args.runs {
            for (contender, place) in places.iter().filter(|(it, _)| row.has(*it)) {
                let values = measure(args, row, *contender, place, programs, folder.path())
                    .with_context(|| {
                        let log = folder.path().join(format!("{contender:?}.log"));
                        format!("{row:?} of {contender:?}; its log: {}", last_words(&log))
                    })?;
                println!("{row:?} {contender:?} {values:.3?}");
                results.add(row, *contender, values);
            }
        }
    }
    Ok(args
        .rows
        .iter()
        .map(|row| results.table(*row, &args.contenders) + "\n")
        .collect::<String>()
        + &goals::table(&results))
}

/// One contender, which has just started.
fn measure(
    args: &Args,
    row: Row,
    contender: Contender,
    place: &Place,
    programs: &Programs,
    folder: &Path,
) -> Result<Vec<f64>> {
    let target = row.target();
    let process = contender.start(place, programs, target, folder)?;
    // Dead endpoints are unknown to it before the measurement.
    let known = match target {
        Target::Refusing | Target::Dead => Target::Once,
        target => target,
    };
    serves(place, contender.address(known), known)?;
    if contender == Contender::Captured {
        captures(place, contender.address(target))?;
    }
    let way = Way {
        contender,
        place,
        pid: process.as_deref().map(std::process::Child::id),
        to: contender.address(target),
        time: Duration::from_secs_f64(args.seconds),
    };
    way.settle()?;
    let measured = row.measure(&way)?;
    // It removes what it has put into its namespace.
    if let Some(process) = process {
        process.terminate(START)?;
    }
    Ok(measured)
}

/// Waits until a contender serves a target at an address.
pub(crate) fn serves(place: &Place, to: SocketAddr, target: Target) -> Result<()> {
    place.client.run(|| {
        eventually(START, "it serves", || -> Result<()> {
            if !target.is_udp() {
                TcpStream::connect_timeout(&to, load::PATIENCE)?;
                return Ok(());
            }
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.set_read_timeout(Some(Duration::from_millis(100)))?;
            socket.connect(to)?;
            socket.send(b"?")?;
            socket.recv(&mut [0])?;
            Ok(())
        })
    })
}

/// Waits until rules lead connections to the proxy. The kernel has served them until then.
pub(crate) fn captures(place: &Place, to: SocketAddr) -> Result<()> {
    let element = to.ip().to_string();
    eventually(START, "the proxy is in front of the kernel", || {
        let mut list = Command::new("nft");
        list.args(["list", "table", "ip", "kplane-capture"]);
        let table = place.proxy.output(list)?;
        ensure!(table.contains(&element), "{table}");
        Ok(())
    })
}

/// When, on what and with which versions this was measured.
fn machine(args: &Args, programs: &Programs) -> Result<String> {
    let line = |program: &str, argument: &str| -> Result<String> {
        let mut command = Command::new(program);
        command.arg(argument);
        Ok(process::output(command)?.trim().to_owned())
    };
    let load = fs::read_to_string("/proc/loadavg")?;
    Ok(format!(
        "{}: {} cores, Linux {}, load {} before the start; {}, {}, {}; {} runs; medians (lowest to highest)",
        line("date", "-I")?,
        std::thread::available_parallelism()?,
        line("uname", "-r")?,
        load.split(' ').next().unwrap_or_default(),
        programs.version("haproxy", "-v")?,
        programs.version("nginx", "-v")?,
        programs.version("socat", "-V")?,
        args.runs,
    ))
}
