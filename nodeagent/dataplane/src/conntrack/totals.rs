//! Counts about the deletion of stale entries, for metrics.

use std::time::Duration;

/// Number of buckets of the histogram of durations. The last bucket has no bound.
pub const BUCKETS: usize = 16;

/// Returns the upper bound of a bucket: 1 ms, 2 ms, .. 16.384 s as in kube-proxy; `None` for the last.
#[must_use]
pub fn bucket_bound(bucket: usize) -> Option<Duration> {
    let exponent = u32::try_from(bucket).ok()?;
    (bucket + 1 < BUCKETS).then(|| Duration::from_millis(1 << exponent))
}

/// Counts of one family since the start: `conntrack_reconciler_deleted_entries_total` and
/// `conntrack_reconciler_sync_duration_seconds` (section h).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConntrackTotals {
    /// Number of deleted entries.
    pub deleted: u64,
    /// Number of failed scans. They were repeated, or will be.
    pub failures: u64,
    /// Sum of the durations of all scans.
    pub duration_sum: Duration,
    /// Number of scans by duration; see [`bucket_bound`]. Not cumulative.
    pub durations: [u64; BUCKETS],
}

impl ConntrackTotals {
    /// Returns the number of scans so far, including failed ones.
    #[must_use]
    pub fn looks(&self) -> u64 {
        self.durations.iter().sum()
    }

    pub(super) fn count(&mut self, deleted: u64, failed: bool, took: Duration) {
        self.deleted += deleted;
        self.failures += u64::from(failed);
        self.duration_sum += took;
        let fits = |bucket: &usize| bucket_bound(*bucket).is_none_or(|bound| took <= bound);
        let bucket = (0..BUCKETS).find(fits).unwrap_or(BUCKETS - 1);
        self.durations[bucket] += 1;
    }
}
