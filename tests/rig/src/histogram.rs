//! Durations counted in buckets of 6 % width: memory use is fixed, however long a run is.

use std::time::Duration;

/// Buckets per doubling, so that a bucket is at most 1/16 = 6 % wide.
const STEPS: u64 = 16;
/// `log2(STEPS)`.
const STEP_BITS: u32 = 4;

/// Counts of durations, exact below 16 us and to 6 % above.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    max: Duration,
}

impl Histogram {
    /// Counts one duration.
    pub fn record(&mut self, took: Duration) {
        let bucket = bucket(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
        if self.counts.len() <= bucket {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
        self.total += 1;
        self.max = self.max.max(took);
    }

    /// Adds the counts of another histogram.
    pub fn merge(&mut self, other: &Self) {
        let len = self.counts.len().max(other.counts.len());
        self.counts.resize(len, 0);
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.total += other.total;
        self.max = self.max.max(other.max);
    }

    /// Returns the number of durations counted.
    pub fn count(&self) -> u64 {
        self.total
    }

    /// Returns the longest duration, exactly.
    pub fn max(&self) -> Duration {
        self.max
    }

    /// Returns the duration that `percent` of the counted durations do not exceed, rounded up to
    /// its bucket's end; zero when nothing was counted.
    pub fn percentile(&self, percent: f64) -> Duration {
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            // Counts stay far below 2^52, where `f64` is exact.
            if seen as f64 * 100.0 >= self.total as f64 * percent && seen > 0 {
                return Duration::from_micros(last_of(bucket)).min(self.max);
            }
        }
        self.max
    }
}

/// Returns the bucket of a value. Values below 16 have a bucket each; then every doubling has 16.
fn bucket(micros: u64) -> usize {
    let bucket = if micros < STEPS {
        micros
    } else {
        let shift = micros.ilog2() - STEP_BITS;
        u64::from(shift) * STEPS + (micros >> shift)
    };
    usize::try_from(bucket).unwrap_or(usize::MAX)
}

/// Returns the largest value of a bucket.
fn last_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < 2 * STEPS {
        return bucket;
    }
    let shift = bucket / STEPS - 1;
    ((bucket % STEPS + STEPS + 1) << shift) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_contiguous_and_narrow() {
        for micros in (0..5_000).chain([u64::from(u32::MAX)]) {
            let bucket = bucket(micros);
            let last = last_of(bucket);
            assert!(last >= micros && last <= micros + micros / 16, "{micros}");
            assert!(bucket == 0 || last_of(bucket - 1) < micros, "{micros}");
        }
    }

    #[test]
    fn percentiles() {
        let mut histogram = Histogram::default();
        for micros in 1..=100 {
            histogram.record(Duration::from_micros(micros * 10));
        }
        let p50 = histogram.percentile(50.0).as_micros();
        assert!((500..=532).contains(&p50), "{p50}");
        assert_eq!(histogram.percentile(100.0), Duration::from_micros(1000));
        assert_eq!(Histogram::default().percentile(99.0), Duration::ZERO);
    }
}
