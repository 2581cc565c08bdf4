//! kube-proxy's chains in iptables, by way of the programs `iptables-save` and `iptables-restore`.
//!
//! The kernel may have both kinds of iptables at once, and kube-proxy uses the one that kubelet
//! used first; so all are looked at for which there is a program.

use std::env;
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use kplane_model::Family;

use super::Problem;
use super::kernel;
use super::process::{Limits, RunError, run};
use super::rules::{self, Table};

/// Limits of `iptables-save`: 100,000 Services take about 100 MB.
const SAVE: Limits = Limits {
    within: Duration::from_secs(60),
    output_bytes: 256 << 20,
};
/// Limits of `iptables-restore`. It waits [`LOCK_WAIT_S`] of that for its turn.
const RESTORE: Limits = Limits {
    within: Duration::from_secs(180),
    output_bytes: 1 << 20,
};
/// Longest wait for the lock of iptables, in seconds, as an argument.
const LOCK_WAIT_S: &str = "10";
/// How often a table is tried that others change meanwhile.
const ATTEMPTS: u32 = 3;
/// Where system programs are when `PATH` does not say so.
const FOLDERS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// A kind of iptables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flavour {
    /// Its own part of the kernel, x_tables.
    Legacy,
    /// A layer above nf_tables.
    Nft,
}

/// The programs for one kind of iptables and one family.
#[derive(Clone, Debug)]
pub(super) struct Tool {
    /// `iptables-nft`.
    name: String,
    save: PathBuf,
    restore: PathBuf,
}

/// What was found by one tool.
#[derive(Debug)]
pub(super) struct Rules {
    pub(super) tool: Tool,
    /// One of the tables.
    pub(super) table: Table,
}

/// Looks for kube-proxy's chains of a family. Creates nothing: asked for all tables, the programs
/// print those that exist.
pub(super) fn find(family: Family) -> (Vec<Rules>, Vec<Problem>) {
    let (mut rules, mut problems) = (Vec::new(), Vec::new());
    for flavour in [Flavour::Legacy, Flavour::Nft] {
        if !flavour.may_have_rules(family) {
            continue;
        }
        let Some(tool) = Tool::find(flavour, family) else {
            problems.extend(flavour.unseen(family));
            continue;
        };
        match tool.look() {
            Ok(tables) => {
                for table in tables {
                    problems.extend(tool.kept(&table));
                    if !table.is_empty() {
                        let tool = tool.clone();
                        rules.push(Rules { tool, table });
                    }
                }
            }
            Err(source) => problems.push(Problem::Save {
                tool: tool.name,
                source,
            }),
        }
    }
    (rules, problems)
}

impl Flavour {
    /// What its programs begin with.
    fn name(self, family: Family) -> String {
        let kind = match self {
            Self::Legacy => "legacy",
            Self::Nft => "nft",
        };
        format!("{}-{kind}", plain_name(family))
    }

    /// Whether there can be rules of this kind at all.
    fn may_have_rules(self, family: Family) -> bool {
        match self {
            // The kernel lists the tables that exist; no file: this kind is not in the kernel.
            Self::Legacy => {
                let file = match family {
                    Family::V4 => "/proc/thread-self/net/ip_tables_names",
                    Family::V6 => "/proc/thread-self/net/ip6_tables_names",
                };
                match fs::read_to_string(file) {
                    Ok(names) => !names.trim().is_empty(),
                    Err(error) => error.kind() != std::io::ErrorKind::NotFound,
                }
            }
            Self::Nft => true,
        }
    }

    /// What is wrong when there is no program to look with.
    fn unseen(self, family: Family) -> Option<Problem> {
        let program = format!("{}-save", self.name(family));
        match self {
            Self::Legacy => Some(Problem::Unseen { program }),
            // These are in nf_tables, where we can look ourselves.
            Self::Nft => match kernel::has_iptables_chains(family) {
                Ok(false) => None,
                Ok(true) | Err(_) => Some(Problem::NoTool { program }),
            },
        }
    }
}

impl Tool {
    fn find(flavour: Flavour, family: Family) -> Option<Self> {
        let tool = Self::named(flavour.name(family));
        match flavour {
            Flavour::Nft => tool,
            // Before version 1.8 there was one kind only, and its programs did not say which.
            Flavour::Legacy => tool.or_else(|| {
                let newer = Self::named(Flavour::Nft.name(family)).is_some();
                (!newer).then(|| Self::named(plain_name(family).to_owned()))?
            }),
        }
    }

    fn named(name: String) -> Option<Self> {
        Some(Self {
            save: on_path(&format!("{name}-save"))?,
            restore: on_path(&format!("{name}-restore"))?,
            name,
        })
    }

    fn look(&self) -> Result<Vec<Table>, RunError> {
        let text = run(&self.save, &[], b"", SAVE)?;
        // Comments may hold any bytes; what is not plain text is not repeated anyway.
        Ok(rules::parse(&String::from_utf8_lossy(&text)))
    }

    fn kept(&self, table: &Table) -> Option<Problem> {
        let chains: Vec<&str> = table.kept.iter().map(String::as_str).collect();
        (!chains.is_empty()).then(|| Problem::Kept {
            tool: self.name.clone(),
            table: table.name,
            chains: chains.join(", "),
        })
    }
}

impl Rules {
    /// Removes what was found in one transaction; looks again when others changed it meanwhile.
    pub(super) fn remove(self) -> Result<(), Problem> {
        let (tool, mut table) = (self.tool, self.table);
        for attempt in 1.. {
            if table.is_empty() {
                break;
            }
            let wait = ["--noflush", "--wait", LOCK_WAIT_S];
            let removed = run(&tool.restore, &wait, table.removal().as_bytes(), RESTORE);
            match removed {
                Ok(_) => break,
                Err(RunError::Failed { .. }) if attempt < ATTEMPTS => {}
                Err(source) => {
                    return Err(Problem::Restore {
                        tool: tool.name,
                        table: table.name,
                        source,
                    });
                }
            }
            let name = table.name;
            let tables = tool.look().map_err(|source| Problem::Save {
                tool: tool.name.clone(),
                source,
            })?;
            match tables.into_iter().find(|t| t.name == name) {
                Some(now) => table = now,
                None => break,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.tool.name, self.table)
    }
}

/// What the programs of a family begin with.
fn plain_name(family: Family) -> &'static str {
    match family {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    }
}

fn on_path(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(FOLDERS.map(PathBuf::from));
    let mut files = folders.filter(|f| f.is_absolute()).map(|f| f.join(program));
    files.find(|file| file.is_file())
}
