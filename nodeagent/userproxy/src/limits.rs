//! Limits on what clients use, from the number of files that the process may open (U15).

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Bytes that one call of a copying relay reads.
pub(crate) const BUFFER: usize = 64 * 1024;

/// Files that are kept for everything else in the process.
const RESERVED_FILES: u64 = 64;

/// Most connections and flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most TCP connections in all.
    pub connections: usize,
    /// Most TCP connections between the same two addresses, a client's and an endpoint's.
    pub of_pair: usize,
    /// Most UDP flows in all.
    pub flows: usize,
}

impl Limits {
    /// Returns the limits of a process that may open so many files (`RLIMIT_NOFILE`). A connection needs two, and two
    /// more for each pipe. Flows need one. A quarter of the files is for flows, a quarter for pipes.
    pub fn of_files(files: u64) -> Self {
        let reserved = RESERVED_FILES.min(files / 2);
        let usable = usize::try_from(files - reserved).unwrap_or(usize::MAX).min(4_000_000);
        let connections = (usable / 4).max(1);
        Self {
            connections,
            of_pair: (connections / 2).clamp(64, 4096),
            flows: (usable / 4).max(1),
        }
    }
}

impl Limits {
    /// Returns how many pipes there may be. A connection without one is slower.
    pub(crate) fn pipes(&self) -> usize {
        (self.connections / 2).max(1)
    }
}

/// A number of things that are open, which all threads share.
#[derive(Debug, Default)]
pub(crate) struct Gauge(AtomicUsize);

impl Gauge {
    /// Adds one, unless there are `most` already; returns whether it was added.
    pub(crate) fn enter(&self, most: usize) -> bool {
        let added = self.0.fetch_add(1, Relaxed) < most;
        if !added {
            self.leave();
        }
        added
    }

    /// Adds one, whatever the limit.
    pub(crate) fn force(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    /// Takes one away.
    pub(crate) fn leave(&self) {
        self.0.fetch_sub(1, Relaxed);
    }

    /// Returns the number.
    pub(crate) fn get(&self) -> usize {
        self.0.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn u15_limits_follow_from_the_number_of_files() {
        let limits = Limits::of_files(64);
        assert_eq!(
            (limits.connections, limits.of_pair, limits.flows),
            (8, 64, 8)
        );
        assert_eq!(limits.pipes(), 4);
        let limits = Limits::of_files(1_048_576);
        let files = limits.connections * 2 + limits.pipes() * 2 + limits.flows;
        assert!(files < 1_048_576, "{files}");
        assert_eq!(Limits::of_files(0).connections, 1);
        assert!(Limits::of_files(u64::MAX).connections <= 1_000_000);
    }

    #[test]
    fn a_gauge_never_counts_more_than_its_limit() {
        let gauge = Gauge::default();
        assert!(gauge.enter(1));
        assert!(!gauge.enter(1));
        assert_eq!(gauge.get(), 1);
        gauge.leave();
        assert!(gauge.enter(1));
    }
}
