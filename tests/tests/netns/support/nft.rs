//! The `nft` program, for what others do with rules and for a second opinion on ours.

use std::process::Command;

use anyhow::Result;
use kplane_tests::netns::NetNs;

/// Runs `nft` with commands, such as `"flush ruleset"`, one in a line; returns what it prints.
pub(crate) fn nft(ns: &NetNs, commands: &str) -> Result<String> {
    // Without the end of the line some commands are not understood.
    run(ns, &["--", &format!("{commands}\n")])
}

/// Runs `nft` with options, such as `["-j", "list", "ruleset"]`.
pub(crate) fn run(ns: &NetNs, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("nft");
    command.args(arguments);
    ns.output(command)
}

/// Runs `nft -f` on a text of any length.
pub(crate) fn load(ns: &NetNs, text: &str) -> Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), text)?;
    let mut command = Command::new("nft");
    command.arg("-f").arg(file.path());
    ns.output(command).map(drop)
}
