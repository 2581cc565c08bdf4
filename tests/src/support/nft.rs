//! The `nft` program, for what others do with rules and for a second opinion on ours.

use std::process::Command;

use anyhow::{Context as _, Result};
use kplane_model::Family;
use kplane_netlink::NfSocket;
use kplane_rig::netns::NetNs;
use kplane_rig::privilege::{need_tools, skipped};
use serde_json::Value;

/// Runs `nft` with commands, such as `"flush ruleset"`, one in a line; returns what it prints.
pub fn nft(ns: &NetNs, commands: &str) -> Result<String> {
    // Without the end of the line some commands are not understood.
    run(ns, &["--", &format!("{commands}\n")])
}

/// Runs `nft` with options, such as `["-j", "list", "ruleset"]`.
pub fn run(ns: &NetNs, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("nft");
    command.args(arguments);
    ns.output(command)
}

/// Lists the objects of a family's table, as `nft` sees them.
pub fn objects(ns: &NetNs, family: Family) -> Result<Vec<Value>> {
    let table = match family {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    };
    let text = run(ns, &["-j", "list", "table", table, "kplane"])?;
    let mut listing: Value = serde_json::from_str(&text)?;
    let objects = listing["nftables"].as_array_mut().context("no objects")?;
    Ok(std::mem::take(objects))
}

/// Ends a test here unless `nft` can load a ruleset of ours: in one transaction, for which it needs a buffer
/// that the kernel grants to the administrator of the machine only.
pub fn need_loading() -> Result<()> {
    /// Well below what is granted where any size is, and above what is granted otherwise.
    const ANY_SIZE_BYTES: usize = 32 << 20;
    need_tools(&["nft"])?;
    if NfSocket::open()?.max_batch_bytes() > ANY_SIZE_BYTES {
        return Ok(());
    }
    let why = "nft cannot load a large ruleset without privileges on the machine";
    Err(skipped(why))
}

/// Runs `nft -f` on a text of any length.
pub fn load(ns: &NetNs, text: &str) -> Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), text)?;
    let mut command = Command::new("nft");
    command.arg("-f").arg(file.path());
    ns.output(command).map(drop)
}
