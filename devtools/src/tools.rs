//! Installs what the tests need beyond Rust, once and outside of the checkout.

use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use kplane_rig::browser;
use kplane_rig::cluster::{helm, promtool};
use kplane_rig::real::NodePrograms;
use kplane_rig::vm::{self, Vm};

/// Debian packages, besides those for [`vm`]: the program that shows that one is there, and its package.
/// Only tests need them: `nft` is an oracle for kplane's own netlink code, `iptables` makes what kube-proxy
/// leaves behind, `openssl` is a foreign client, and Chromium opens the control
/// plane's page.
const PACKAGES: [(&str, &str); 4] = [
    browser::PROGRAM,
    ("nft", "nftables"),
    ("iptables", "iptables"),
    ("openssl", "openssl"),
];
/// Modules of Debian's Python, and their packages: another foreign client.
const MODULES: [(&str, &str); 2] = [
    ("grpc", "python3-grpcio"),
    ("google.protobuf", "python3-protobuf"),
];
/// Debian's Python. Another one on the `PATH` would not find Debian's modules.
const PYTHON: &str = "/usr/bin/python3";

/// Installs what is missing.
pub(crate) fn install() -> Result<()> {
    let missing: Vec<&str> = PACKAGES
        .iter()
        .chain(&vm::PROGRAMS)
        .filter(|(program, _)| !has(program))
        .chain(MODULES.iter().filter(|(module, _)| !has_module(module)))
        .map(|(_, package)| *package)
        .collect();
    if !missing.is_empty() {
        install_packages(&missing)?;
    }
    // For tests with clusters: they leave the machine's network, and then Go cannot download.
    NodePrograms::ensure()?;
    helm()?;
    promtool()?;
    Vm::ensure().map(drop)
}

fn has(program: &str) -> bool {
    // That it starts is enough: some want privileges even to print their version, and plugins of protoc wait for input.
    let version = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    version.is_ok()
}

fn has_module(module: &str) -> bool {
    let mut import = Command::new(PYTHON);
    import.arg("-c").arg(format!("import {module}"));
    import
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn install_packages(packages: &[&str]) -> Result<()> {
    let list = packages.join(" ");
    let by_hand = || format!("install the Debian packages: apt-get install {list}");
    println!("installing {list}");
    apt(&["update"]).with_context(by_hand)?;
    let mut args = vec!["install", "--yes", "--no-install-recommends"];
    args.extend(packages);
    apt(&args).with_context(by_hand)
}

fn apt(args: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").arg("-qq");
    let status = command.args(args).status().context("cannot run apt-get")?;
    ensure!(status.success(), "apt-get {}: {status}", args.join(" "));
    Ok(())
}
