//! The programs `iptables-save` and `iptables-restore`: which of them a node uses, and what they support.
//!
//! The kernel may have both kinds of iptables at once, and rules of one kind are invisible to the other. All
//! programs on a node must use the same kind. kplane chooses as kube-proxy's images do: the kind in which
//! kubelet left a hint, else the kind with more rules, else the kind of plain `iptables`.

mod choice;
mod counters;
mod version;

use std::env;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use kplane_model::Family;
use nix::sched::{CloneFlags, unshare};

use self::choice::is_legacy;
use self::version::{OLDEST, Version};
use super::counting;
use crate::process::{ProcessLimits, RunError, run};

/// Limits of `iptables-save`: 100,000 Services take about 100 MB.
const SAVE: ProcessLimits = ProcessLimits {
    within: Duration::from_secs(60),
    output_bytes: 256 << 20,
};
/// Limits of `iptables-restore`, including the wait of [`LOCK_WAIT_S`] for the lock.
const RESTORE: ProcessLimits = ProcessLimits {
    within: Duration::from_secs(180),
    output_bytes: 1 << 20,
};
/// Limits of short calls such as `--version`.
const ASK: ProcessLimits = ProcessLimits {
    within: Duration::from_secs(10),
    output_bytes: 1 << 16,
};
/// Longest wait for the lock of legacy iptables, in seconds, as an argument (C9).
const LOCK_WAIT_S: &str = "5";
/// Text that the programs print when that wait was not long enough.
const LOCKED: &str = "xtables lock";
/// Name of a chain to try rules in, to which no rule leads.
const PROBE: &str = "KPLANE-PROBE";
/// Folders of system programs, if `PATH` does not contain them.
const FOLDERS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// A kind of iptables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    /// The kind with its own part of the kernel, x_tables.
    Legacy,
    /// The kind that is a layer above nf_tables.
    Nft,
}

/// The programs of one kind of iptables and one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tool {
    /// The name, for example `iptables-nft`.
    name: String,
    family: Family,
    flavour: Flavour,
    save: PathBuf,
    restore: PathBuf,
}

/// The reason why a family cannot be programmed with iptables.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// The programs are not installed.
    #[error("there is no {0}-save and {0}-restore: install iptables")]
    Missing(&'static str),
    /// The output of `--version` is unknown.
    #[error("{name} --version: {reason}; install iptables {OLDEST} or later")]
    Unknown {
        /// The program.
        name: String,
        /// The problem.
        reason: String,
    },
    /// The programs are too old.
    #[error("{name} is version {version}: install {OLDEST} or later")]
    TooOld {
        /// The program.
        name: String,
        /// The program's version.
        version: String,
    },
    /// The programs may not change rules.
    #[error(
        "{name} may not change rules ({source}): give this process CAP_NET_ADMIN, and CAP_NET_RAW for \
         legacy iptables"
    )]
    NotPermitted {
        /// The program.
        name: String,
        /// The program's failure.
        source: RunError,
    },
    /// The programs or the kernel lack a table, match or target.
    #[error("{name} or the kernel lacks {what}: {source}; load the kernel module or install it")]
    Lacking {
        /// The program.
        name: String,
        /// The parts that are missing.
        what: String,
        /// The program's failure for the first missing part.
        source: RunError,
    },
}

/// A feature that rules need.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct Feature {
    /// The feature's description.
    pub(in crate::backend) what: &'static str,
    /// The table that needs the feature.
    pub(in crate::backend) table: &'static str,
    /// A rule that uses the feature, without the chain's name; empty = the table itself is the feature.
    pub(in crate::backend) rule: &'static str,
    /// The functions that need an optional feature; `None` if the feature is required.
    pub(in crate::backend) without: Option<&'static str>,
}

impl Feature {
    /// Returns a feature that is required.
    pub(in crate::backend) const fn new(
        what: &'static str,
        table: &'static str,
        rule: &'static str,
    ) -> Self {
        Self {
            what,
            table,
            rule,
            without: None,
        }
    }
}

/// Features that both of kplane's backends with iptables need.
pub(in crate::backend) const COMMON: [Feature; 5] = [
    Feature::new("the table nat", "nat", ""),
    Feature::new("the table filter", "filter", ""),
    Feature::new(
        "the matches addrtype and mark, or the target MARK",
        "nat",
        " -m addrtype --dst-type LOCAL -m mark ! --mark 0x1/0x1 -j MARK --set-xmark 0x1/0x0",
    ),
    Feature::new(
        "the target MASQUERADE with --random-fully",
        "nat",
        " -m comment --comment \"a b\" -j MASQUERADE --random-fully",
    ),
    Feature::new(
        "the match conntrack or the target REJECT",
        "filter",
        " -m conntrack --ctstate NEW -j REJECT",
    ),
];

/// Features that only mode iptables needs.
const PARTS: [Feature; 4] = [
    Feature::new("the table mangle", "mangle", ""),
    Feature::new(
        "the match statistic",
        "nat",
        " -m statistic --mode random --probability 0.5 -j RETURN",
    ),
    Feature::new(
        "the target DNAT",
        "nat",
        " -p tcp -m tcp --dport 1 -j DNAT --to-destination :1",
    ),
    Feature {
        what: "the match recent",
        table: "nat",
        rule: " -m recent --name KPLANE-PROBE --set -j RETURN",
        without: Some("Services with session affinity are not served"),
    },
];

impl Tool {
    /// Returns the programs that a node uses for a family, after a check of the features that kplane needs.
    ///
    /// # Errors
    /// [`ToolError`] names the missing part.
    pub fn choose(family: Family) -> Result<Self, ToolError> {
        Ok(Self::choose_for(family, &PARTS)?.0)
    }

    /// Returns the same programs after a check of [`COMMON`] and these features. Also returns the missing
    /// optional features ([`Feature::what`]).
    ///
    /// # Errors
    /// [`ToolError`] names the missing part.
    pub(in crate::backend) fn choose_for(
        family: Family,
        parts: &[Feature],
    ) -> Result<(Self, Vec<&'static str>), ToolError> {
        let tool = Self::of_node(family).ok_or(ToolError::Missing(plain_name(family)))?;
        tool.check_version()?;
        let parts = COMMON.iter().chain(parts).copied();
        let missing = tool.check_parts(&parts.collect::<Vec<_>>())?;
        Ok((tool, missing))
    }

    /// Returns the programs that a node uses for a family, unchecked; `None` if there are none.
    fn of_node(family: Family) -> Option<Self> {
        Self::of_node_listed(family).map(|(tool, _)| tool)
    }

    /// Returns the same programs, and what [`Tool::list`] returns if the choice needed it.
    pub(super) fn of_node_listed(family: Family) -> Option<(Self, Option<String>)> {
        let nft = Self::find(Flavour::Nft, family);
        let legacy = Self::find(Flavour::Legacy, family);
        let plain = || Self::plain(family);
        let (Some(nft), Some(legacy)) = (&nft, &legacy) else {
            return Some((nft.or(legacy).or_else(plain)?, None));
        };
        let [in_nft, in_legacy] = [nft, legacy].map(|tool| tool.list().ok());
        let is_plain = || plain().is_some_and(|plain| plain.flavour == Flavour::Legacy);
        Some(
            if is_legacy(in_nft.as_deref(), in_legacy.as_deref(), is_plain) {
                (legacy.clone(), in_legacy)
            } else {
                (nft.clone(), in_nft)
            },
        )
    }

    /// Returns the programs of one kind, if their version output says which kind they are.
    pub fn find(flavour: Flavour, family: Family) -> Option<Self> {
        let tool = Self::named(flavour.name(family), flavour, family);
        match flavour {
            Flavour::Nft => tool,
            // Before version 1.8, there was only one kind, and its programs did not report it.
            Flavour::Legacy => tool.or_else(|| {
                let newer = Self::named(Flavour::Nft.name(family), Flavour::Nft, family);
                let plain = || Self::named(plain_name(family).to_owned(), flavour, family);
                if newer.is_some() { None } else { plain() }
            }),
        }
    }

    /// Returns the programs of plain `iptables`, of either kind.
    fn plain(family: Family) -> Option<Self> {
        let tool = Self::named(plain_name(family).to_owned(), Flavour::Legacy, family)?;
        let is_nft = tool.version_text().is_ok_and(|text| text.contains("nf_tables"));
        let flavour = if is_nft { Flavour::Nft } else { Flavour::Legacy };
        Some(Self { flavour, ..tool })
    }

    fn named(name: String, flavour: Flavour, family: Family) -> Option<Self> {
        Some(Self {
            save: on_path(&format!("{name}-save"))?,
            restore: on_path(&format!("{name}-restore"))?,
            name,
            family,
            flavour,
        })
    }

    /// Returns the name: `iptables-nft`, `ip6tables-legacy` and so on.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the kind.
    pub fn flavour(&self) -> Flavour {
        self.flavour
    }

    /// Returns the output of `iptables-save`: all existing tables. No table is created.
    ///
    /// # Errors
    /// [`RunError`].
    pub fn list(&self) -> Result<String, RunError> {
        let text = run(&self.save, &[], b"", SAVE)?;
        // Comments may hold any bytes. Text that is not UTF-8 is never kplane's.
        Ok(String::from_utf8(text)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }

    /// Executes a text for `iptables-restore --noflush`: each table as a whole or not at all.
    ///
    /// # Errors
    /// [`RunError`]. Tables before the failed one are changed, later ones are not.
    pub fn restore(&self, text: &str) -> Result<(), RunError> {
        let arguments = ["--noflush", "--wait", LOCK_WAIT_S];
        run(&self.restore, &arguments, text.as_bytes(), RESTORE).map(drop)
    }

    /// Executes a text in a new network namespace, which exists only for this call, so that no rules in use
    /// are affected. Needs `CAP_SYS_ADMIN`.
    ///
    /// # Errors
    /// [`RunError`] as on empty tables; [`RunError::Io`] if the namespace cannot be created.
    pub fn try_out(&self, text: &str) -> Result<(), RunError> {
        let apart = || {
            unshare(CloneFlags::CLONE_NEWNET).map_err(std::io::Error::from)?;
            // A machine without counters cannot have rules with counters either.
            let _ = counting::make_all();
            self.restore(text)
        };
        thread::scope(|scope| {
            let thread = thread::Builder::new().name("scratch".to_owned());
            let outcome = thread.spawn_scoped(scope, apart)?.join();
            outcome.unwrap_or_else(|_| Err(std::io::Error::other("a thread panicked").into()))
        })
    }

    fn version_text(&self) -> Result<String, RunError> {
        // The program that changes single rules is not needed for anything else.
        let text = run(&self.restore, &["--version"], b"", ASK)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    fn check_version(&self) -> Result<(), ToolError> {
        let unknown = |reason: String| ToolError::Unknown {
            name: self.name.clone(),
            reason,
        };
        let text = self.version_text().map_err(|error| unknown(error.to_string()))?;
        let version = Version::parse(&text)
            .ok_or_else(|| unknown(format!("{:?} is no version", text.trim())))?;
        if version < OLDEST {
            return Err(ToolError::TooOld {
                name: self.name.clone(),
                version: version.to_string(),
            });
        }
        Ok(())
    }

    /// Checks all features at once, and each one if that fails.
    fn check_parts(&self, parts: &[Feature]) -> Result<Vec<&'static str>, ToolError> {
        let mut missing = Vec::new();
        if self.test(parts).is_ok() {
            return Ok(missing);
        }
        let mut lacking = Vec::new();
        let mut first = None;
        for part in parts {
            match (self.test(&[*part]), part.without) {
                (Ok(()), _) => {}
                (Err(error), Some(without)) => {
                    tracing::warn!(tool = self.name, %error, "{} is missing: {without}", part.what);
                    missing.push(part.what);
                }
                (Err(error), None) => {
                    lacking.push(part.what);
                    first.get_or_insert(error);
                }
            }
        }
        match first {
            None => Ok(missing),
            Some(source) if source.is_denied() => Err(ToolError::NotPermitted {
                name: self.name.clone(),
                source,
            }),
            Some(source) => Err(ToolError::Lacking {
                name: self.name.clone(),
                what: lacking.join(", "),
                source,
            }),
        }
    }

    /// Has the programs read rules without executing them.
    fn test(&self, parts: &[Feature]) -> Result<(), RunError> {
        let mut text = String::new();
        for table in ["filter", "nat", "mangle"] {
            let mut rules = parts.iter().filter(|part| part.table == table).peekable();
            if rules.peek().is_none() {
                continue;
            }
            text.push_str(&format!("*{table}\n:{PROBE} - [0:0]\n"));
            for part in rules.filter(|part| !part.rule.is_empty()) {
                text.push_str(&format!("-A {PROBE}{}\n", part.rule));
            }
            text.push_str("COMMIT\n");
        }
        let arguments = ["--test", "--noflush", "--wait", LOCK_WAIT_S];
        run(&self.restore, &arguments, text.as_bytes(), RESTORE).map(drop)
    }
}

/// Returns whether another program held the lock of legacy iptables for too long. In that case, nothing was
/// changed.
pub(super) fn is_locked(error: &RunError) -> bool {
    matches!(error, RunError::Failed { complaint, .. } if complaint.contains(LOCKED))
}

impl Flavour {
    /// Returns the common prefix of the names of its programs.
    pub fn name(self, family: Family) -> String {
        let kind = match self {
            Self::Legacy => "legacy",
            Self::Nft => "nft",
        };
        format!("{}-{kind}", plain_name(family))
    }

    /// Returns whether rules of this kind can exist at all.
    pub fn may_have_rules(self, family: Family) -> bool {
        self == Self::Nft || legacy_tables(family).is_none_or(|names| !names.is_empty())
    }

    /// Returns whether this kind can have a table of this name.
    pub(crate) fn may_have_table(self, family: Family, table: &str) -> bool {
        let has = |names: Vec<String>| names.iter().any(|name| name == table);
        self == Self::Nft || legacy_tables(family).is_none_or(has)
    }
}

/// Returns the tables of legacy iptables, which the kernel lists in a file; `None` if the file cannot be read. Without the
/// file, the kernel does not have this kind.
fn legacy_tables(family: Family) -> Option<Vec<String>> {
    let file = family.pick("ip_tables_names", "ip6_tables_names");
    match fs::read_to_string(format!("/proc/thread-self/net/{file}")) {
        Ok(names) => Some(names.split_whitespace().map(str::to_owned).collect()),
        Err(error) => (error.kind() == std::io::ErrorKind::NotFound).then(Vec::new),
    }
}

/// Returns the common prefix of the names of a family's plain programs.
pub fn plain_name(family: Family) -> &'static str {
    family.pick("iptables", "ip6tables")
}

fn on_path(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(FOLDERS.map(PathBuf::from))
        .filter(|f| f.is_absolute())
        .map(|f| f.join(program))
        .find(|file| file.is_file())
}
