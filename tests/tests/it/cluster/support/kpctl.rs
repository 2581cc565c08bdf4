//! kpctl beside the control planes.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kplane_tests::netns::NetNs;
use kplane_tests::wait::eventually;
use serde_json::Value;

use super::world::{DEADLINE, World, product};

/// Runs kpctl with the status API at a port; returns its exit code, what it printed, and how long it took.
pub(crate) fn kpctl(
    world: &World,
    port: u16,
    args: &[&str],
) -> Result<(Option<i32>, String, Duration)> {
    kpctl_in(world.topology.host("control")?.ns(), port, args)
}

/// Runs kpctl in the namespace of the control planes, also on other threads.
pub(crate) fn kpctl_in(
    control: &NetNs,
    port: u16,
    args: &[&str],
) -> Result<(Option<i32>, String, Duration)> {
    let mut kpctl = command(port, args)?;
    kpctl.args(["-o", "wide", "--no-color"]);
    let started = Instant::now();
    let output = control.run(|| Ok(kpctl.output()?))?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8(text)?;
    Ok((output.status.code(), text, started.elapsed()))
}

/// Runs kpctl, which must not fail; returns its document.
pub(crate) fn document(world: &World, port: u16, args: &[&str]) -> Result<Value> {
    let mut kpctl = command(port, args)?;
    kpctl.args(["-o", "json"]);
    let output = world.topology.host("control")?.ns().output(kpctl)?;
    serde_json::from_str(&output).context(output)
}

/// Returns kpctl with the status API at a port.
pub(crate) fn command(port: u16, args: &[&str]) -> Result<Command> {
    let mut kpctl = Command::new(&product()?.kpctl);
    kpctl.args(args).stdin(Stdio::null());
    kpctl.env("KPLANE_SERVER", format!("127.0.0.1:{port}"));
    Ok(kpctl)
}

/// Runs kpctl, which must do what it was told.
pub(crate) fn orders(world: &World, port: u16, args: &[&str]) -> Result<()> {
    let (code, text, _) = kpctl(world, port, args)?;
    ensure!(code == Some(0), "{args:?}: {text}");
    Ok(())
}

/// Waits until kpctl says all of these texts.
pub(crate) fn shows(world: &World, port: u16, args: &[&str], parts: &[&str]) -> Result<()> {
    ends(world, port, args, None, parts)
}

/// Waits until kpctl ends with this code and says all of these texts.
pub(crate) fn says(
    world: &World,
    port: u16,
    args: &[&str],
    code: i32,
    parts: &[&str],
) -> Result<()> {
    ends(world, port, args, Some(code), parts)
}

fn ends(world: &World, port: u16, args: &[&str], code: Option<i32>, parts: &[&str]) -> Result<()> {
    eventually(DEADLINE, &format!("{args:?} says {parts:?}"), || {
        let (ended, text, _) = kpctl(world, port, args)?;
        ensure!(code.is_none() || ended == code, "{ended:?}:\n{text}");
        for part in parts {
            ensure!(text.contains(part), "no {part:?}:\n{text}");
        }
        anyhow::Ok(())
    })
}
