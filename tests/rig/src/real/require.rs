//! The requirements of a real cluster on this machine.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use nix::unistd::geteuid;

use super::images::which;
use crate::privilege;
use crate::userns::FORCE_VAR;

/// Programs that are started besides those that [`super::NodePrograms`] has, and Debian's packages that contain them.
const PROGRAMS: [(&str, &str); 9] = [
    ("go", "golang"),
    ("setpriv", "util-linux"),
    ("unshare", "util-linux"),
    ("nsenter", "util-linux"),
    ("pivot_root", "util-linux"),
    ("mount", "mount"),
    ("busybox", "busybox-static"),
    ("nft", "nftables"),
    ("xtables-nft-multi", "iptables"),
];

/// Returns whether a real cluster can run on this machine; use as `if !real::require()? { return Ok(()) }`.
///
/// # Errors
/// It cannot, and [`CI` or `REQUIRE_NETNS`](privilege::is_strict) is set.
pub fn require() -> Result<bool> {
    Ok(privilege::available(possible())?.is_some())
}

fn possible() -> Result<()> {
    ensure!(geteuid().is_root(), "a real cluster needs root");
    let forced = privilege::is_set(FORCE_VAR);
    ensure!(
        !forced,
        "{FORCE_VAR} is set, and a real cluster cannot run in a user namespace"
    );
    // In a user namespace root is an ordinary user of the machine.
    let map = fs::read_to_string("/proc/self/uid_map").context("/proc/self/uid_map")?;
    let all = map.split_whitespace().nth(2) == Some("4294967295");
    ensure!(all, "a real cluster needs root outside of user namespaces");
    for (program, package) in PROGRAMS {
        which(program).with_context(|| {
            format!("a real cluster needs {program}: apt-get install {package}")
        })?;
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("list mounts")?;
    let memory = mounts
        .lines()
        .any(|line| line.split_once(" - cgroup ").is_some_and(|(_, it)| it.contains("memory")));
    ensure!(memory, "a real cluster needs cgroups of version 1");
    Ok(())
}
