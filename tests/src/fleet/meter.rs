//! The counts that all agents of a fleet share.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use kplane_rig::histogram::Histogram;

use super::held::Taken;

/// Ways in which agents got up to date after they had connected.
#[derive(Debug, Default)]
pub(super) struct Ways {
    pub(super) snapshots: AtomicU64,
    pub(super) equal: AtomicU64,
    pub(super) changes: AtomicU64,
    pub(super) ranges: AtomicU64,
    /// Bytes until then of agents that held something, of all and of the agent with the most.
    pub(super) bytes: AtomicU64,
    pub(super) most_bytes: AtomicU64,
}

/// Violations of what holds at any time.
#[derive(Debug, Default)]
pub(super) struct Violations {
    pub(super) differing: AtomicU64,
    pub(super) back: AtomicU64,
    pub(super) vanished: AtomicU64,
    pub(super) unreadable: AtomicU64,
}

/// Everything that is counted.
#[derive(Debug, Default)]
pub(super) struct Meter {
    /// Number of agents at each replica that are up to date.
    pub(super) on: Vec<AtomicUsize>,
    pub(super) ways: Ways,
    pub(super) violations: Violations,
    pub(super) updates: AtomicU64,
    pub(super) reports: AtomicU64,
    /// Number of agents that have the last change.
    pub(super) arrived: AtomicUsize,
    /// The time of each change, by its number; none is 0.
    published: RwLock<Vec<Instant>>,
    latencies: Mutex<Histogram>,
    /// The same, of the last second.
    latest: Mutex<Histogram>,
}

impl Meter {
    pub(super) fn new(replicas: usize) -> Self {
        Self {
            on: (0..replicas).map(|_| AtomicUsize::new(0)).collect(),
            published: RwLock::new(vec![Instant::now()]),
            ..Self::default()
        }
    }

    /// Returns the number of agents that are up to date.
    pub(super) fn attending(&self) -> usize {
        self.on.iter().map(|count| count.load(Relaxed)).sum()
    }

    /// Notes that the next change begins.
    pub(super) fn publishes(&self) {
        let published = self.published.write();
        self.arrived.store(0, Relaxed);
        published.unwrap_or_else(PoisonError::into_inner).push(Instant::now());
    }

    /// Notes the outcome of an update.
    pub(super) fn took(&self, taken: &Taken, changing: u64) {
        self.updates.fetch_add(1, Relaxed);
        let violations = &self.violations;
        violations.differing.fetch_add(taken.differs.into(), Relaxed);
        violations.back.fetch_add(taken.back, Relaxed);
        violations.vanished.fetch_add(taken.vanished, Relaxed);
        let now = Instant::now();
        let published = self.published.read().unwrap_or_else(PoisonError::into_inner);
        let mut took = Vec::new();
        for (before, after) in &taken.moved {
            // Changes that were skipped have arrived with a newer one.
            let mut change = *after;
            while change > *before {
                let begun = usize::try_from(change).ok().and_then(|n| published.get(n));
                took.extend(begun.map(|begun| now - *begun));
                change = change.saturating_sub(changing);
            }
            let last = published.len() as u64 - 1;
            self.arrived.fetch_add(usize::from(*after == last), Relaxed);
        }
        drop(published);
        for histogram in [&self.latencies, &self.latest] {
            let mut histogram = lock(histogram);
            took.iter().for_each(|took| histogram.record(*took));
        }
    }

    /// Notes how an agent got up to date after it had connected.
    pub(super) fn resumed(&self, way: &AtomicU64, bytes: u64) {
        way.fetch_add(1, Relaxed);
        self.ways.bytes.fetch_add(bytes, Relaxed);
        self.ways.most_bytes.fetch_max(bytes, Relaxed);
    }

    /// Takes the times from changes until agents had them.
    pub(super) fn latencies(&self) -> Histogram {
        std::mem::take(&mut *lock(&self.latencies))
    }

    /// Takes the same of the last second.
    pub(super) fn latest(&self) -> Histogram {
        std::mem::take(&mut *lock(&self.latest))
    }

    /// Returns the number of violations.
    pub(super) fn violated(&self) -> Violated {
        let of = &self.violations;
        Violated {
            lost: of.differing.load(Relaxed) + of.vanished.load(Relaxed),
            back: of.back.load(Relaxed),
            unreadable: of.unreadable.load(Relaxed),
        }
    }

    /// Returns the ways of agents since the last call.
    pub(super) fn take_ways(&self) -> WayCounts {
        let ways = &self.ways;
        let take = |count: &AtomicU64| count.swap(0, Relaxed);
        WayCounts {
            snapshots: take(&ways.snapshots),
            equal: take(&ways.equal),
            changes: take(&ways.changes),
            ranges: take(&ways.ranges),
            bytes: take(&ways.bytes),
            most_bytes: take(&ways.most_bytes),
        }
    }
}

fn lock(histogram: &Mutex<Histogram>) -> MutexGuard<'_, Histogram> {
    histogram.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Violations of what must hold, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Violated {
    /// Ends of updates whose digest is not that of what the agent holds, and objects that vanished.
    pub lost: u64,
    /// Objects or states that were older than those before.
    pub back: u64,
    /// Messages that are none.
    pub unreadable: u64,
}

/// How agents that came back got up to date.
#[derive(Clone, Copy, Debug, Default)]
pub struct WayCounts {
    /// Got everything anew.
    pub snapshots: u64,
    /// Lacked nothing.
    pub equal: u64,
    /// Got the changes since.
    pub changes: u64,
    /// Got the key ranges that differed.
    pub ranges: u64,
    /// Bytes that they received until then.
    pub bytes: u64,
    /// Bytes that one of them received at most.
    pub most_bytes: u64,
}

impl WayCounts {
    /// Returns the mean number of bytes that an agent received.
    pub fn mean_bytes(&self) -> u64 {
        let all = self.snapshots + self.equal + self.changes + self.ranges;
        self.bytes.checked_div(all).unwrap_or_default()
    }
}

/// Returns the 50th, 90th and 99th percentile and the maximum.
pub fn percentiles(of: &Histogram) -> [Duration; 4] {
    let [p50, p90, p99] = [50.0, 90.0, 99.0].map(|percent| of.percentile(percent));
    [p50, p90, p99, of.max()]
}
