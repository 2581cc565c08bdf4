//! What processes use, as the kernel counts it.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::netns::NetNs;
use anyhow::{Context as _, Result};
use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;

/// `USER_HZ`, in which `/proc/PID/stat` counts: 100 on every architecture.
const TICK: Duration = Duration::from_millis(10);

/// CPU time of the processes since they began, with that of the children that they waited for (such
/// as `nft` and `iptables-restore`).
pub fn cpu(pids: &[u32]) -> Result<Duration> {
    pids.iter().map(|pid| cpu_of(*pid)).sum()
}

fn cpu_of(pid: u32) -> Result<Duration> {
    // The clock of the process counts nanoseconds, and those of threads that have ended as well.
    let clock = clock_getcpuclockid(Pid::from_raw(i32::try_from(pid)?))?;
    let mut total = Duration::from(clock.now()?);
    let process = Path::new("/proc").join(pid.to_string());
    let stat = fs::read_to_string(process.join("stat"))?;
    // The name, in parentheses, may contain anything.
    let (_, fields) = stat.rsplit_once(')').context("stat")?;
    // cutime and cstime are fields 16 and 17; the first after the name is 3.
    let children = fields.split_whitespace().skip(16 - 3).take(2);
    for ticks in children {
        total += TICK * ticks.parse::<u32>()?;
    }
    Ok(total)
}

/// Resident memory, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Memory {
    /// At the moment (`VmRSS`).
    pub now: u64,
    /// The most that it was (`VmHWM`).
    pub most: u64,
}

/// Resident memory of all the processes together.
pub fn memory(pids: &[u32]) -> Result<Memory> {
    let mut sum = Memory::default();
    for pid in pids {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        sum.now += kilobytes(&status, "VmRSS:")? * 1024;
        sum.most += kilobytes(&status, "VmHWM:")? * 1024;
    }
    Ok(sum)
}

fn kilobytes(status: &str, field: &str) -> Result<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let value = line.and_then(|line| line.split_whitespace().next());
    Ok(value.context("the process has ended")?.parse()?)
}

/// Bytes that have come in over a link of a namespace.
pub fn received(ns: &NetNs, link: &str) -> Result<u64> {
    let counters = ns.run(|| Ok(fs::read_to_string("/proc/thread-self/net/dev")?))?;
    let name = format!("{link}:");
    let line = counters.lines().find_map(|line| line.trim_start().strip_prefix(&name));
    let bytes = line.and_then(|line| line.split_whitespace().next());
    Ok(bytes.context("no such link")?.parse()?)
}
