//! Tools of the checks: installed once, kept outside of the checkout.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cargo::{run, status};

/// Checks licences, bans and sources.
const CARGO_DENY: &str = "0.20.2";

/// Installs what is missing.
pub(super) fn install(_: &Path) -> Result<()> {
    install_deny()?;
    // What only other platforms need is checked as well, and not downloaded by a build.
    run(&["fetch", "--locked", "--quiet"])?;
    // Packages, Kubernetes and the virtual machine of the tests.
    run(&["run", "--package", "kplane-dev", "--", "tools"])
}

/// Returns the folder of cargo-deny: shared by all checkouts of a user, one folder for each version.
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

fn install_deny() -> Result<()> {
    let tool = deny_root()?;
    if tool.join("bin/cargo-deny").exists() {
        return Ok(());
    }
    println!("building cargo-deny {CARGO_DENY}, once: about five minutes");
    let into = tool.to_string_lossy();
    let version = ["install", "cargo-deny", "--version", CARGO_DENY, "--locked"];
    run(&[&version[..], &["--root", &into]].concat())
}

/// Licences, bans and sources of all dependencies. Advisories need a download that not every
/// machine may make: `cargo deny check advisories` does it where one can.
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
