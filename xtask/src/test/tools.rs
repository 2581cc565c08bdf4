//! Tools of the checks: installed once, kept outside of the checkout.

use std::env;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::book;
use crate::cargo::{BENCH, FUZZ, apart, cargo, run, status};
use crate::tool::Tool;

/// Checks licences, bans and sources.
const CARGO_DENY: Tool = Tool {
    name: "cargo-deny",
    version: "0.20.2",
    options: &[],
    takes: "three minutes",
};

/// Installs what is missing: everything that a build does not make itself.
pub(super) fn install(programs: &Path) -> Result<()> {
    CARGO_DENY.install()?;
    book::install()?;
    // What only other platforms need is checked as well, and not downloaded by a build.
    run(&["fetch", "--locked", "--quiet"])?;
    for manifest in [BENCH, FUZZ] {
        run(&["fetch", "--locked", "--quiet", "--manifest-path", manifest])?;
    }
    // Packages, Kubernetes and the virtual machine of the tests.
    status(Command::new(programs.join("kplane-dev")).arg("tools"))
}

/// Checks licences, bans and sources of all dependencies. Advisories need a download that not every
/// machine may make: `cargo deny check advisories` does it where one can.
pub(super) fn deny(root: &Path) -> Result<Command> {
    deny_of(root, "Cargo.toml")
}

/// Checks the same of the benchmarks.
pub(super) fn deny_bench(root: &Path) -> Result<Command> {
    deny_of(root, BENCH)
}

fn deny_of(root: &Path, manifest: &str) -> Result<Command> {
    let mut command = Command::new(CARGO_DENY.program()?);
    command.current_dir(root).args(["--manifest-path", manifest]);
    command.args(["--offline", "--log-level", "warn", "check"]);
    command.args(["licenses", "bans", "sources"]);
    Ok(command)
}

/// Checks that the benchmarks compile, without warnings.
pub(super) fn lint_bench(_: &Path) -> Result<Command> {
    let mut command = apart(BENCH, "clippy")?;
    command.args(["--", "-D", "warnings"]);
    Ok(command)
}

/// Checks that the targets for fuzzing compile.
pub(super) fn check_fuzz(_: &Path) -> Result<Command> {
    apart(FUZZ, "check")
}

/// Checks the agent without its features: no userspace proxy, and no control plane inside.
pub(super) fn bare_agent(_: &Path) -> Result<Command> {
    let mut command = cargo()?;
    command.args([
        "clippy",
        "--package",
        "kplane-dataplane",
        "--package",
        "kp-nodeagent",
    ]);
    command.args([
        "--no-default-features",
        "--lib",
        "--bins",
        "--",
        "-D",
        "warnings",
    ]);
    Ok(command)
}

/// Builds the book.
pub(super) fn book(_: &Path) -> Result<Command> {
    let mut command = Command::new(env::current_exe().context("cannot find this program")?);
    command.arg("book");
    Ok(command)
}
