//! The flags about objects that a source does not name (any more).

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use crate::desired::CliffGuard;
use kplane_dataplane::backend;
use kplane_dataplane::leftovers::shares_our_network;

/// The default folder of the cache file.
const CACHE: &str = "/var/lib/kplane";

/// Parent of the default folders of other network namespaces, which end with the machine, too.
const OF_NAMESPACES: &str = "/run/kplane";

/// Returns the default folder. A network namespace that is not that of the machine, or of the container, has a folder of
/// its own, so that agents of one node's name do not meet in a file or socket.
fn default_folder() -> PathBuf {
    let own = fs::metadata("/proc/thread-self/ns/net");
    match (shares_our_network(1), own) {
        (Some(false), Ok(own)) => Path::new(OF_NAMESPACES).join(format!("netns-{}", own.ino())),
        _ => CACHE.into(),
    }
}

/// Values of the flag for the cliff guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Guarded {
    /// No deletions.
    Off,
    /// Services that the source no longer contains.
    Absence,
}

/// Flags about absence.
#[derive(Debug, Args)]
pub(super) struct AbsenceFlags {
    /// Folder in which the agent saves what it serves. After a start, the agent continues from there, and serves from
    /// there while no control plane answers. Empty = none [default: /var/lib/kplane; in a network namespace that is not
    /// the machine's, a folder in /run/kplane; none with --backend noop]
    #[arg(long, value_name = "DIR", help_heading = "Missing objects")]
    cache_dir: Option<String>,

    /// Deletions that the agent holds back when one step deletes too many Services, or leaves them without
    /// endpoints, until you approve the step. Deletions by name always take effect. A source that could not be
    /// read in full never deletes anything.
    #[arg(
        long,
        value_enum,
        default_value = "absence",
        help_heading = "Missing objects"
    )]
    cliff_guard: Guarded,

    /// Share of the Services, 0 to 100, that a step may delete before it is held back.
    #[arg(
        long,
        value_name = "PERCENT",
        default_value = "30",
        help_heading = "Missing objects"
    )]
    #[arg(value_parser = clap::value_parser!(u8).range(0..=100))]
    cliff_guard_share: u8,

    /// Number of Services below which a step is never held back.
    #[arg(
        long,
        value_name = "COUNT",
        default_value = "10",
        help_heading = "Missing objects"
    )]
    cliff_guard_minimum: u64,
}

impl AbsenceFlags {
    pub(super) fn cliff_guard(&self) -> CliffGuard {
        CliffGuard {
            enabled: self.cliff_guard == Guarded::Absence,
            share_percent: self.cliff_guard_share,
            minimum: self.cliff_guard_minimum,
        }
    }

    /// Returns the folder of the cache file. A dry run writes none, unless the flag asks for one.
    pub(super) fn cache_dir(&self, backend: backend::Kind) -> Option<PathBuf> {
        match self.cache_dir.as_deref() {
            Some("") => None,
            Some(folder) => Some(folder.into()),
            None => backend.describe().programs_kernel.then(default_folder),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_network_namespace_has_a_folder_of_its_own() {
        let here = default_folder();
        let mut other = None;
        kplane_rig::kernel::in_netns(|| other = Some(default_folder()));
        // Without the right to make a namespace there is none.
        assert!(other.is_none_or(|other| other.starts_with("/run/kplane") && other != here));
    }
}
