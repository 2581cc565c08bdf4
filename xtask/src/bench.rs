//! `cargo xtask bench`: speeds, printed as tables. Nothing here gates CI.

use std::env;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Builds everything as it is shipped and runs the benchmarks.
pub(crate) fn run() -> Result<()> {
    let programs = ["kp-controlplane", "kp-nodeagent"].map(|name| ["--package", name]);
    cargo(&[&["build", "--release"][..], &programs.concat()].concat())?;
    for bench in ["change", "packet", "conntrack"] {
        cargo(&["bench", "--package", "kplane-tests", "--bench", bench])?;
    }
    Ok(())
}

fn cargo(args: &[&str]) -> Result<()> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(crate::test::root()?).args(args);
    let status = command.status().context("cannot run cargo")?;
    ensure!(status.success(), "cargo {}: {status}", args.join(" "));
    Ok(())
}
