//! Tools of the checks: installed once, kept outside of the checkout.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::book;
use crate::cargo::{run, status};
use crate::tool::Tool;

/// Checks licences, bans and sources.
const CARGO_DENY: Tool = Tool {
    name: "cargo-deny",
    version: "0.20.2",
    options: &[],
    takes: "five minutes",
};

/// Installs what is missing.
pub(super) fn install(_: &Path) -> Result<()> {
    CARGO_DENY.install()?;
    book::install()?;
    // What only other platforms need is checked as well, and not downloaded by a build.
    run(&["fetch", "--locked", "--quiet"])?;
    // Packages, Kubernetes and the virtual machine of the tests.
    run(&["run", "--package", "kplane-dev", "--", "tools"])
}

/// Licences, bans and sources of all dependencies. Advisories need a download that not every
/// machine may make: `cargo deny check advisories` does it where one can.
pub(super) fn deny(root: &Path) -> Result<()> {
    let mut command = Command::new(CARGO_DENY.program()?);
    command
        .current_dir(root)
        .args(["--offline", "--log-level", "warn", "check"]);
    status(command.args(["licenses", "bans", "sources"]))
}
