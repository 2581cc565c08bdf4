//! `cargo xtask bench`: speeds, printed as tables. Nothing here gates CI.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

use crate::cargo::{self, output, root};
use crate::figures::{PAGE, generated, regressions};
use crate::test::with_images;

const HELP: &str = "\
Measure how long changes take, in a real kernel, and print tables

Usage: cargo xtask bench [NAME] [OPTIONS]

Arguments:
  [NAME]  One benchmark of: change, reboot, drift, packet, conntrack, graph, fleet, policies, attacks,
          beside; or operators,
          kpctl's answers about 5,000 nodes and 17,000 Services [default: all but operators]

Options:
      --against <PROXY>     Compare with another proxy on a real API server, instead of measuring kplane alone:
                            ten minutes, and the first time on a machine as long again to build Kubernetes with Go.
                            kube-proxy: modes nftables and iptables
                            kube-proxy-ipvs: mode ipvs, in a virtual machine; takes --services and --changes only
                            kube-proxy-packets: packets of connections that are established, through a Service and to a
                            Pod, in all modes but ipvs; ten minutes; takes --services, --contenders, --runs, --seconds
                            proxies: the userspace proxy beside HAProxy, nginx and socat, Debian's if they are missing,
                            in network namespaces; a quarter of an hour; takes --runs, --seconds, --rows, --contenders
                            kube-proxy-rollouts: connections that fail while Pods are replaced, and while a node is cut off,
                            on real clusters; `--against kube-proxy-rollouts --help` lists its options
      --services <NUMBERS>  Numbers of Services, separated by commas [default: 1000,5000,10000]
      --endpoints <NUMBER>  Endpoints of each Service, 1 to 100; only with kube-proxy [default: 2]
      --changes <NUMBER>    Changes of one endpoint, for each proxy and size [default: 50]
      --contenders <NAMES>  Proxies to measure, of: kube-proxy-nftables, kube-proxy-iptables,
                            kube-proxy-iptables-legacy, kplane-standalone, kplane, kplane-iptables,
                            kplane-iptables-legacy [default: those of nftables]
                            With kube-proxy-packets also kplane-userspace [default: all but kplane]
      --runs <NUMBER>       With proxies and kube-proxy-packets: rounds, in which the contenders take turns
                            [default: 5 and 12]
      --seconds <NUMBER>    With these: length of each measurement of a rate [default: 2 and 1]
      --rows <NAMES>        With proxies: what is measured, of: one-stream, eight-streams, connections, requests, idle,
                            flows, new-flows, refusing, dead, neighbour, passes [default: all]. --contenders are then of:
                            direct, nftables, captured, sockets, haproxy, haproxy-splice, nginx, socat
      --compare             Measure kube-proxy (without --against, too), and print which numbers are higher by more than
                            20 % than in the committed table of docs/benchmarks.md. The exit code is 0 all the same
      --write               Write the results to docs/benchmarks.md (and docs/benchmarks.svg)
  -h, --help                Print help

All of these but --compare and --help need --against.
";

/// A comparison on real clusters, which needs images and not this build.
const ROLLOUTS: &str = "kube-proxy-rollouts";
const COMPARE: &str = "--compare";

/// Benchmarks of kplane alone.
const ALONE: [&str; 10] = [
    "change",
    "reboot",
    "drift",
    "packet",
    "conntrack",
    "graph",
    "fleet",
    "policies",
    "attacks",
    "beside",
];
/// One that runs only if it is named, and needs kpctl.
const OPERATORS: &str = "operators";

/// Builds everything as it is shipped and runs the benchmarks.
pub(crate) fn run(mut args: Vec<String>) -> Result<ExitCode> {
    let against = take(&mut args, "--against");
    if against.as_deref() == Some(ROLLOUTS) {
        return with_images("rollouts", &args);
    }
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        print!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    let compares = args.iter().any(|arg| arg == COMPARE);
    args.retain(|arg| arg != COMPARE);
    let against = against.or(compares.then(|| "kube-proxy".to_owned()));
    let mut names = ALONE.into_iter().chain([OPERATORS]);
    let named = names.find(|name| against.is_none() && args == [*name]);
    if named.is_some() {
        args.clear();
    }
    let chosen = match against.as_deref() {
        None if args.is_empty() => named,
        None => bail!(
            "{} needs --against; see `cargo xtask bench --help`",
            args[0]
        ),
        Some("kube-proxy") => Some("against"),
        Some(other) if compares => bail!("{COMPARE} does not compare {other}"),
        Some("kube-proxy-ipvs") => Some("ipvs"),
        Some("kube-proxy-packets") => Some("established"),
        Some("proxies") => Some("proxies"),
        Some(other) => bail!(
            "--against {other}: must be kube-proxy, kube-proxy-ipvs, kube-proxy-packets, kube-proxy-rollouts or proxies"
        ),
    };
    println!("Building kplane's programs as they are shipped, and the benchmarks.");
    let program = build("dist")?;
    if chosen == Some(OPERATORS) {
        cargo::run(&["build", "--profile", "dist", "--package", "kpctl"])?;
    }
    match chosen {
        Some(name) if compares => compare(bench(&program, name, &args))?,
        Some(name) => cargo::status(&mut bench(&program, name, &args))?,
        None => {
            for name in ALONE {
                cargo::status(&mut bench(&program, name, &[]))?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds the benchmarks, and kplane's programs beside them with the same dependencies; returns the program of all
/// benchmarks.
pub(crate) fn build(profile: &str) -> Result<PathBuf> {
    let packages = ["kplane-bench", "kp-controlplane", "kp-nodeagent"]
        .map(|name| ["--package", name])
        .concat();
    let mut build = cargo::apart(cargo::BENCH, "build")?;
    cargo::status(build.args(["--profile", profile]).args(packages))?;
    Ok(cargo::programs(profile)?.join("kplane-bench"))
}

/// Takes a flag with its value out of the arguments.
fn take(args: &mut Vec<String>, flag: &str) -> Option<String> {
    let place = args
        .iter()
        .position(|arg| arg == flag || arg.starts_with(&format!("{flag}=")))?;
    let found = args.remove(place);
    match found.split_once('=') {
        Some((_, value)) => Some(value.to_owned()),
        None if place < args.len() => Some(args.remove(place)),
        None => Some(String::new()),
    }
}

/// Prepares a benchmark.
fn bench(program: &Path, name: &str, options: &[String]) -> Command {
    let mut command = Command::new(program);
    command.arg(name).args(options);
    command
}

/// Runs a benchmark, and compares its table with the committed one.
fn compare(mut bench: Command) -> Result<()> {
    let mut git = Command::new("git");
    let page = output(git.args(["show", &format!("HEAD:{PAGE}")]).current_dir(root()?))?;
    let old = generated(&page).with_context(|| format!("the committed {PAGE} has no table"))?;
    let mut child = bench.stdout(Stdio::piped()).spawn()?;
    let mut new = String::new();
    for line in BufReader::new(child.stdout.take().context("no output")?).lines() {
        let line = line?;
        println!("{line}");
        new = new + &line + "\n";
    }
    let status = child.wait()?;
    ensure!(status.success(), "the benchmark: {status}");
    let worse = regressions(old, &new);
    println!(
        "\n{} numbers are worse than in the committed table by more than 20 %",
        worse.len()
    );
    for line in worse {
        println!("{line}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_taken_with_its_value_however_it_is_written() {
        for words in [
            &["--against", "x", "--write"][..],
            &["--against=x", "--write"],
        ] {
            let mut args: Vec<String> = words.iter().map(ToString::to_string).collect();
            assert_eq!(take(&mut args, "--against").as_deref(), Some("x"));
            assert_eq!(args, ["--write"]);
        }
        assert_eq!(take(&mut Vec::new(), "--against"), None);
        assert_eq!(
            take(&mut vec!["--against".to_owned()], "--against").as_deref(),
            Some("")
        );
    }
}
