//! Counts about the deletion of stale entries, for metrics.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kplane_model::Family;
use parking_lot::Mutex;

/// Number of buckets of the histogram of durations. The last bucket has no bound.
pub const BUCKETS: usize = 16;

/// Returns the upper bound of a bucket: 1 ms, 2 ms, .. 16.384 s as in kube-proxy; `None` for the last.
pub fn bucket_bound(bucket: usize) -> Option<Duration> {
    let exponent = u32::try_from(bucket).ok()?;
    (bucket + 1 < BUCKETS).then(|| Duration::from_millis(1 << exponent))
}

/// Counts of one family since the start: `conntrack_reconciler_deleted_entries_total` and
/// `conntrack_reconciler_sync_duration_seconds` (section h).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConntrackTotals {
    /// Number of deleted entries of UDP.
    pub deleted: u64,
    /// Number of deleted connections without a reply, to endpoints out of service.
    pub half_open: u64,
    /// Number of deleted connections with a reply, to dead nodes.
    pub dead: u64,
    /// Number of connections and flows that were cut because policies deny them.
    pub denied: u64,
    /// Number of failed scans. They were repeated, or will be.
    pub failures: u64,
    /// Sum of the durations of all scans.
    pub duration_sum: Duration,
    /// Number of scans by duration; see [`bucket_bound`]. Not cumulative.
    pub durations: [u64; BUCKETS],
    /// Why scans fail; `None` if the last one did not.
    pub problem: Option<FailedScans>,
}

/// Scans that failed one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedScans {
    /// The error of the last one, human-readable.
    pub reason: String,
    /// The time of the first one.
    pub since: SystemTime,
    /// Their number.
    pub times: u64,
}

/// A handle to the counts of both families, which a [`Sweeper`](super::Sweeper) updates after every scan.
#[derive(Clone, Debug, Default)]
pub struct ConntrackCounts(Arc<Mutex<[ConntrackTotals; 2]>>);

impl ConntrackCounts {
    /// Returns the counts of each family since the start, IPv4 first.
    pub fn totals(&self) -> [ConntrackTotals; 2] {
        self.0.lock().clone()
    }

    /// Adds one scan of a family: the number of deleted entries of UDP, the error, and its duration.
    pub fn count(&self, family: Family, deleted: u64, error: Option<String>, took: Duration) {
        let mut totals = self.0.lock();
        totals[family as usize].count(deleted, error, took);
    }

    /// Adds connections that ended: those that waited for endpoints out of service, those to dead nodes, and those that
    /// policies deny.
    pub fn ended(&self, family: Family, half_open: u64, dead: u64, denied: u64) {
        let totals = &mut self.0.lock()[family as usize];
        totals.half_open += half_open;
        totals.dead += dead;
        totals.denied += denied;
    }
}

impl ConntrackTotals {
    /// Returns the number of scans so far, including failed ones.
    pub fn looks(&self) -> u64 {
        self.durations.iter().sum()
    }

    pub(super) fn count(&mut self, deleted: u64, error: Option<String>, took: Duration) {
        self.deleted += deleted;
        self.failures += u64::from(error.is_some());
        let before = self.problem.take();
        self.problem = error.map(|reason| FailedScans {
            reason,
            since: before.as_ref().map_or_else(SystemTime::now, |of| of.since),
            times: before.map_or(0, |of| of.times) + 1,
        });
        self.duration_sum += took;
        let fits = |bucket: &usize| bucket_bound(*bucket).is_none_or(|bound| took <= bound);
        let bucket = (0..BUCKETS).find(fits).unwrap_or(BUCKETS - 1);
        self.durations[bucket] += 1;
    }
}
