//! The tools that the checks need beyond Rust: installed once, outside of the checkout.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use kplane_tests::cluster::Programs;
use kplane_tests::vm::{self, Vm};

use super::{cargo, status};

/// The version of cargo-deny, which checks licences, bans and sources.
const CARGO_DENY: &str = "0.20.2";

/// Debian packages besides those for [`vm`]: a program of the package, and its name. Only tests need them. `nft`
/// verifies the results of kplane's own netlink code. The others create what kube-proxy leaves behind.
const PACKAGES: [(&str, &str); 2] = [("nft", "nftables"), ("iptables", "iptables")];

/// Installs what is missing.
pub(super) fn install(root: &Path) -> Result<()> {
    let missing: Vec<&str> = PACKAGES
        .iter()
        .chain(&vm::PROGRAMS)
        .filter(|(program, _)| !has(program))
        .map(|(_, package)| *package)
        .collect();
    if !missing.is_empty() {
        install_packages(&missing)?;
    }
    install_deny(root)?;
    // Crates for other platforms are checked as well, and a build does not download them.
    cargo(root, &["fetch", "--locked", "--quiet"], &[])?;
    // tests/tests/cluster needs these. Its tests leave the machine's network, and then Go cannot download.
    Programs::ensure()?;
    Vm::ensure().map(drop)
}

fn has(program: &str) -> bool {
    // A successful start is enough: some programs need privileges even to print their version.
    let version = Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    version.is_ok()
}

fn install_packages(packages: &[&str]) -> Result<()> {
    let list = packages.join(" ");
    let by_hand = format!("install the Debian packages: apt-get install {list}");
    println!("installing {list}");
    let apt = |args: &[&str]| {
        let mut command = Command::new("apt-get");
        command
            .env("DEBIAN_FRONTEND", "noninteractive")
            .arg("-qq")
            .args(args);
        status(&mut command)
    };
    apt(&["update"]).with_context(|| by_hand.clone())?;
    let mut args = vec!["install", "--yes", "--no-install-recommends"];
    args.extend(packages);
    apt(&args).context(by_hand)
}

/// Returns the folder of the tools: shared by all checkouts of a user, one folder for each version.
fn deny_root() -> Result<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = cache
        .or_else(home)
        .context("neither XDG_CACHE_HOME nor HOME is set")?;
    Ok(cache
        .join("kplane/tools")
        .join(format!("cargo-deny-{CARGO_DENY}")))
}

fn install_deny(root: &Path) -> Result<()> {
    let tool = deny_root()?;
    if tool.join("bin/cargo-deny").exists() {
        return Ok(());
    }
    println!("building cargo-deny {CARGO_DENY}, once: about five minutes");
    let into = tool.to_string_lossy();
    let version = ["install", "cargo-deny", "--version", CARGO_DENY, "--locked"];
    cargo(root, &[&version[..], &["--root", &into]].concat(), &[])
}

/// Checks licences, bans and sources of all dependencies. Advisories need a download that not every machine may
/// make: `cargo deny check advisories` checks them where one can.
pub(super) fn deny(root: &Path) -> Result<()> {
    let program = deny_root()?.join("bin/cargo-deny");
    ensure!(
        program.exists(),
        "cargo-deny is missing; run the step \"tools\" first"
    );
    let mut command = Command::new(program);
    command
        .current_dir(root)
        .args(["--offline", "--log-level", "warn", "check"]);
    status(command.args(["licenses", "bans", "sources"]))
}
