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
    /// Nothing.
    Off,
    /// What would go because it is not named any more.
    Absence,
}

/// Flags about absence.
#[derive(Debug, Args)]
pub(super) struct AbsenceFlags {
    /// Folder in which the agent writes down what it serves, so that it knows after a restart what
    /// was there; empty = nowhere [default: /var/lib/kplane; with --backend noop nowhere]
    #[arg(long, value_name = "DIR", help_heading = "What is not named")]
    cache_dir: Option<String>,

    /// Whether Services stay when many would go at once because the source does not name them (any
    /// more), or would lose all endpoints, until a person agrees. Deletions by name are believed in
    /// any case, and a source that could not be read in full deletes nothing in any case.
    #[arg(
        long,
        value_enum,
        default_value = "absence",
        help_heading = "What is not named"
    )]
    cliff_guard: Guarded,

    /// Many are more than so many percent of the Services that are there, 0 to 100,
    #[arg(
        long,
        value_name = "PERCENT",
        default_value = "30",
        help_heading = "What is not named"
    )]
    #[arg(value_parser = clap::value_parser!(u8).range(0..=100))]
    cliff_guard_share: u8,

    /// and at least so many.
    #[arg(
        long,
        value_name = "COUNT",
        default_value = "10",
        help_heading = "What is not named"
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
