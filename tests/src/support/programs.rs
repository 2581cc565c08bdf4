//! The programs of iptables: to do what others do with them, and to make them fail.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::thread;

use anyhow::{Result, anyhow};
use kplane_model::Family;
use kplane_rig::mounts;
use kplane_rig::netns::NetNs;
use nix::fcntl::{Flock, FlockArg};

use super::under_test::UnderTest;

/// Where [`Apart`] puts programs before the system's.
const BEFORE: &str = "/usr/local/sbin";
/// Where the system has its own.
const SYSTEM: &str = "/usr/sbin";
/// What `iptables-restore` does before its work: shell, with the text in the file `$text`, the
/// program in `$real` and its arguments in `$@`.
const FAULT: &str = "/run/fault";
/// The lock of legacy iptables.
const LOCK: &str = "/run/xtables.lock";

/// Runs a program of iptables, such as `iptables` or `ip6tables-save`, of the kind under test.
pub fn run(node: &NetNs, family: Family, verb: &str, arguments: &str) -> Result<String> {
    let kind = match UnderTest::current()? {
        UnderTest::IptablesLegacy => "legacy",
        UnderTest::IptablesNft | UnderTest::Nftables | UnderTest::Userspace | UnderTest::Ipvs => {
            "nft"
        }
    };
    let base = match family {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    };
    let mut command = Command::new(format!("{SYSTEM}/{base}-{kind}{verb}"));
    command.args(arguments.split_whitespace());
    node.output(command)
}

/// Lists all tables of both families, without what changes from one moment to the next.
pub fn list(node: &NetNs) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for family in Family::ALL {
        lines.extend(without_counters(&run(node, family, "-save", "")?));
    }
    Ok(lines)
}

/// The lines of a listing, without what changes from one moment to the next.
pub(super) fn without_counters(text: &str) -> Vec<String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    // Counters of packets stand at the end of a chain's line.
    let line = |line: &str| line.split(" [").next().unwrap_or_default().to_owned();
    lines.map(line).collect()
}

/// A thread with programs and a `/run` of its own, which nobody else sees.
pub struct Apart(());

impl Apart {
    /// Runs a test there.
    pub fn run(body: impl FnOnce(&Self) -> Result<()> + Send) -> Result<()> {
        let backend = UnderTest::current()?;
        let inside = || {
            backend.set();
            mounts::separate()?;
            mounts::empty("/run")?;
            mounts::empty(BEFORE)?;
            for base in ["iptables", "ip6tables"] {
                for kind in ["nft", "legacy"] {
                    wrap(&format!("{base}-{kind}-restore"))?;
                }
            }
            body(&Self(()))
        };
        thread::scope(|scope| {
            let outcome = scope.spawn(inside).join();
            outcome.map_err(|_| anyhow!("the test panicked"))?
        })
    }

    /// From now on `iptables-restore` does this first.
    pub fn fault(&self, script: &str) -> Result<()> {
        Ok(fs::write(FAULT, script)?)
    }

    /// From now on it works.
    pub fn heal(&self) -> Result<()> {
        Ok(fs::remove_file(FAULT)?)
    }

    /// Takes the lock of iptables.
    pub fn lock(&self) -> Result<Flock<File>> {
        let file = File::create(LOCK)?;
        Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, error)| error.into())
    }
}

fn wrap(name: &str) -> Result<()> {
    let file = Path::new(BEFORE).join(name);
    let script = format!(
        "#!/bin/sh\n\
         real={SYSTEM}/{name}\n\
         [ \"$1\" = --version ] && exec $real \"$@\"\n\
         text=$(mktemp /run/text.XXXXXX)\n\
         cat > $text\n\
         [ -e {FAULT} ] && . {FAULT}\n\
         exec $real \"$@\" < $text\n"
    );
    fs::write(&file, script)?;
    Ok(fs::set_permissions(
        file,
        fs::Permissions::from_mode(0o755),
    )?)
}
