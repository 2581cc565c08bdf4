//! `cargo xtask bench`: speeds, printed as tables. Nothing here gates CI.

use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::cargo::run as cargo;

const HELP: &str = "\
Measure how long changes take, in a real kernel, and print tables

Usage: cargo xtask bench [OPTIONS]

Options:
      --against <PROXY>     Compare with another proxy on a real API server, instead of measuring kplane alone:
                            ten minutes, and the first time on a machine as long again to build Kubernetes with Go.
                            kube-proxy: modes nftables and iptables
                            kube-proxy-ipvs: mode ipvs, in a virtual machine; takes --services and --changes only
                            proxies: the userspace proxy beside HAProxy, nginx and socat, Debian's if they are missing,
                            in network namespaces; a quarter of an hour; takes --runs, --seconds, --rows, --contenders
      --services <NUMBERS>  Numbers of Services, separated by commas [default: 1000,5000,10000]
      --changes <NUMBER>    Changes of one endpoint, for each proxy and size [default: 50]
      --contenders <NAMES>  Proxies to measure, of: kube-proxy-nftables, kube-proxy-iptables,
                            kube-proxy-iptables-legacy, kplane-standalone, kplane, kplane-iptables,
                            kplane-iptables-legacy [default: those of nftables]
      --runs <NUMBER>       With proxies: rounds, in which the contenders take turns [default: 5]
      --seconds <NUMBER>    With proxies: length of each measurement of a rate [default: 2]
      --rows <NAMES>        With proxies: what is measured, of: one-stream, eight-streams, connections, requests, idle,
                            flows, new-flows, refusing, dead, neighbour, passes [default: all]. --contenders are then of:
                            direct, nftables, captured, sockets, haproxy, haproxy-splice, nginx, socat
      --write               Write the results to docs/benchmarks.md (and docs/benchmarks.svg)
  -h, --help                Print help

All of these but --help need --against.
";

/// Benchmarks of kplane alone.
const ALONE: [&str; 6] = ["change", "reboot", "drift", "packet", "conntrack", "fleet"];

/// Builds everything as it is shipped and runs the benchmarks.
pub(crate) fn run(mut args: Vec<String>) -> Result<ExitCode> {
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        print!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    let against = match take(&mut args, "--against").as_deref() {
        None if args.is_empty() => None,
        None => bail!(
            "{} needs --against; see `cargo xtask bench --help`",
            args[0]
        ),
        Some("kube-proxy") => Some("against"),
        Some("kube-proxy-ipvs") => Some("ipvs"),
        Some("proxies") => Some("proxies"),
        Some(other) => {
            bail!("--against {other}: must be kube-proxy, kube-proxy-ipvs or proxies")
        }
    };
    println!("Building kplane's programs as they are shipped, and the benchmarks.");
    // With the tests, so that both builds take the same dependencies.
    let programs = ["kp-controlplane", "kp-nodeagent", "kplane-tests"];
    let programs = programs.map(|name| ["--package", name]);
    cargo(&[&["build", "--profile", "dist"][..], &programs.concat()].concat())?;
    match against {
        Some(name) => bench(name, &args)?,
        None => ALONE.into_iter().try_for_each(|name| bench(name, &[]))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Takes a flag with its value out of the arguments.
pub(crate) fn take(args: &mut Vec<String>, flag: &str) -> Option<String> {
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

fn bench(name: &str, options: &[String]) -> Result<()> {
    let package = ["--package", "kplane-tests"];
    let mut args = [
        &["bench", "--profile", "dist"][..],
        &package,
        &["--bench", "bench", "--", name],
    ]
    .concat();
    args.extend(options.iter().map(String::as_str));
    cargo(&args)
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
