//! The flags about objects that a source does not name (any more).

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::desired::CliffGuard;
use kplane_dataplane::backend;

/// The default folder of the cache file.
const CACHE: &str = "/var/lib/kplane";

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
    /// there while no control plane answers. Empty = none [default: /var/lib/kplane; none with --backend noop]
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
        let default = backend.describe().programs_kernel.then_some(CACHE);
        let folder = self.cache_dir.as_deref().or(default);
        folder
            .filter(|folder| !folder.is_empty())
            .map(PathBuf::from)
    }
}
