//! The rig without root: a user namespace in which this process is root.

use std::fs;

use anyhow::{Context as _, Result};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{getegid, geteuid};

use crate::{mounts, netns};

/// Variable that forces a user namespace, even for a privileged process, if set to anything but `0`
/// or nothing.
pub const FORCE_VAR: &str = "KPLANE_USERNS";

/// `CAP_NET_ADMIN`, `CAP_NET_RAW` and `CAP_SYS_ADMIN` as bits of `CapEff`.
const NEEDED: u64 = 1 << 12 | 1 << 13 | 1 << 21;

/// The way in which the process got its privileges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// The process had them; nothing was changed.
    Privileged,
    /// The process is now root of its own user, network and mount namespaces.
    UserNamespace,
}

/// Makes sure that this process can create network namespaces. Call it first in `main`, because the
/// kernel refuses this to a process with more than one thread.
///
/// In the new namespaces the process' own `lo` is up and `/run` is an empty writable folder (for
/// iptables' lock). There is no other network, and all other file systems are the same.
///
/// # Errors
/// One line that names what the kernel forbids.
pub fn enter() -> Result<Entry> {
    if !crate::privilege::is_set(FORCE_VAR) && is_privileged()? {
        return Ok(Entry::Privileged);
    }
    let (uid, gid) = (geteuid(), getegid());
    unshare(CloneFlags::CLONE_NEWUSER).context(
        "the kernel forbids user namespaces to this process (more than one thread, a container's \
         seccomp filter, user.max_user_namespaces or kernel.unprivileged_userns_clone)",
    )?;
    write_map("setgroups", "deny")?;
    write_map("uid_map", &format!("0 {uid} 1"))?;
    write_map("gid_map", &format!("0 {gid} 1"))?;
    netns::replace().context(
        "a user namespace without privileges (kernel.apparmor_restrict_unprivileged_userns)",
    )?;
    mounts::separate()?;
    mounts::empty("/run")?;
    Ok(Entry::UserNamespace)
}

/// Leaves the machine's network namespace, as root or not, so that a mistake cannot reach it. Call it first in
/// `main`, like [`enter`], which it does.
///
/// # Errors
/// One line that names what the kernel forbids.
pub fn isolate() -> Result<Entry> {
    let entry = enter()?;
    if entry == Entry::Privileged {
        netns::replace()?;
    }
    Ok(entry)
}

fn is_privileged() -> Result<bool> {
    let status = fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .context("no CapEff in /proc/self/status")?;
    let effective = u64::from_str_radix(effective.trim(), 16).context("CapEff")?;
    Ok(effective & NEEDED == NEEDED)
}

fn write_map(file: &str, text: &str) -> Result<()> {
    let path = format!("/proc/self/{file}");
    fs::write(&path, text).with_context(|| format!("write {text:?} to {path}"))
}
