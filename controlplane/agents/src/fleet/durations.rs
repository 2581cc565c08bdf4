//! A histogram of durations of any length, in a few bytes.

use std::time::Duration;

use kplane_proto::v1 as pb;

/// Durations are counted in units of 1/64 ms, so that powers of two are bounds of whole milliseconds.
const UNIT_NANOS: u128 = 1_000_000 / 64;
/// Number of buckets into which each doubling is divided: durations are exact to an eighth.
const PARTS: u64 = 8;
/// Longest duration with a bucket of its own, in units: 35 minutes.
const LONGEST: u64 = (1 << 27) - 1;
/// The bounds in a printed histogram are these powers of two, in units: 0.125 ms to 17 minutes.
const BOUNDS: std::ops::RangeInclusive<u32> = 3..=26;

/// A histogram. Only buckets that are not empty take memory, and there are 200 at most.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Durations {
    /// Number and count of each bucket, sorted.
    buckets: Vec<(u16, u32)>,
    count: u64,
    sum: Duration,
    longest: Duration,
}

impl Durations {
    /// Adds a duration.
    pub fn add(&mut self, duration: Duration) {
        self.add_to(bucket_of(duration), 1);
        self.count += 1;
        self.sum = self.sum.saturating_add(duration);
        self.longest = self.longest.max(duration);
    }

    /// Adds the durations of another histogram.
    pub fn merge(&mut self, other: &Self) {
        for (bucket, count) in &other.buckets {
            self.add_to(*bucket, *count);
        }
        self.count_again();
        self.sum = self.sum.saturating_add(other.sum);
        self.longest = self.longest.max(other.longest);
    }

    fn add_to(&mut self, bucket: u16, more: u32) {
        match self.buckets.binary_search_by_key(&bucket, |(number, _)| *number) {
            Ok(at) => self.buckets[at].1 = self.buckets[at].1.saturating_add(more),
            Err(at) => self.buckets.insert(at, (bucket, more)),
        }
    }

    /// Returns the histogram for the wire, without the sum.
    pub fn to_wire(&self) -> pb::Histogram {
        pb::Histogram {
            buckets: self.buckets.iter().map(|(bucket, _)| (*bucket).into()).collect(),
            counts: self.buckets.iter().map(|(_, count)| *count).collect(),
            longest_us: u64::try_from(self.longest.as_micros()).unwrap_or(u64::MAX),
        }
    }

    /// Reads a histogram from the wire. Buckets that no replica has are left out.
    pub fn from_wire(wire: &pb::Histogram) -> Self {
        let last = bucket_of(Duration::MAX);
        let mut read = Self {
            longest: Duration::from_micros(wire.longest_us),
            ..Self::default()
        };
        for (bucket, count) in wire.buckets.iter().zip(&wire.counts) {
            let bucket = u16::try_from(*bucket).ok();
            if let Some(bucket) = bucket.filter(|bucket| *bucket <= last) {
                read.add_to(bucket, *count);
            }
        }
        read.count_again();
        read
    }

    /// Makes the total that of the buckets, none of which counts further than it can.
    fn count_again(&mut self) {
        let counts = self.buckets.iter().map(|(_, count)| u64::from(*count));
        self.count = counts.sum();
    }

    /// Returns the number of durations.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the longest duration.
    pub fn longest(&self) -> Duration {
        self.longest
    }

    /// Returns the duration that this many percent of all do not exceed, rounded up by an eighth at most; zero
    /// without any.
    pub fn percentile(&self, percent: u64) -> Duration {
        let rank = (self.count * percent).div_ceil(100).max(1);
        let mut counted = 0;
        self.buckets
            .iter()
            .find(|(_, count)| {
                counted += u64::from(*count);
                counted >= rank
            })
            .map_or(self.longest, |(bucket, _)| {
                bound_of(*bucket).min(self.longest)
            })
    }

    /// Returns the sum in seconds, and the number of durations up to each bound in seconds and above the one before.
    pub fn distribution(&self) -> (f64, Vec<(f64, u64)>) {
        let mut rest = self.buckets.iter().peekable();
        let mut up_to = |limit: u64| {
            let mut sum = 0;
            while let Some((_, count)) = rest.next_if(|(bucket, _)| last_of(*bucket) < limit) {
                sum += u64::from(*count);
            }
            sum
        };
        let bounds = BOUNDS.map(|power| 1_u64 << power);
        let mut counts: Vec<_> = bounds.map(|b| (seconds_of(b), up_to(b))).collect();
        counts.push((f64::INFINITY, up_to(u64::MAX)));
        (self.sum.as_secs_f64(), counts)
    }
}

/// Returns the bucket of a duration: the first ones hold one unit each, and later ones an eighth of a doubling.
fn bucket_of(duration: Duration) -> u16 {
    let units = duration.as_nanos().div_ceil(UNIT_NANOS);
    // A bound belongs to the bucket below it.
    let units = u64::try_from(units).unwrap_or(u64::MAX).saturating_sub(1).min(LONGEST);
    let doublings = u64::from((units / PARTS).checked_ilog2().unwrap_or(0));
    let bucket = PARTS * doublings + (units >> doublings);
    u16::try_from(bucket).unwrap_or(u16::MAX)
}

/// Returns the last unit of a bucket, counted from 0.
fn last_of(bucket: u16) -> u64 {
    let bucket = u64::from(bucket);
    let doublings = (bucket / PARTS).saturating_sub(1);
    ((bucket - PARTS * doublings + 1) << doublings) - 1
}

/// Returns the longest duration of a bucket.
fn bound_of(bucket: u16) -> Duration {
    let nanos = u128::from(last_of(bucket) + 1) * UNIT_NANOS;
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

fn seconds_of(units: u64) -> f64 {
    let nanos = u128::from(units) * UNIT_NANOS;
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn of(all: impl IntoIterator<Item = Duration>) -> Durations {
        let mut durations = Durations::default();
        all.into_iter().for_each(|one| durations.add(one));
        durations
    }

    #[test]
    fn buckets_are_in_order_and_no_wider_than_an_eighth() {
        let mut before = None;
        for exponent in 0..36 {
            for part in 0..16_u64 {
                let nanos = (1_u64 << exponent) * 16 / 16 + part * (1 << exponent) / 16;
                let duration = Duration::from_nanos(nanos * 1_000);
                let bucket = bucket_of(duration);
                assert!(before <= Some(bucket), "{duration:?}");
                before = Some(bucket);
                let bound = bound_of(bucket);
                if bucket < bucket_of(Duration::MAX) {
                    assert!(bound >= duration, "{duration:?} {bound:?}");
                    let slack = duration / 8 + MS / 32;
                    assert!(bound <= duration + slack, "{duration:?} {bound:?}");
                }
            }
        }
        assert_eq!(bucket_of(Duration::ZERO), 0);
        assert!(bucket_of(Duration::MAX) < 200);
    }

    #[test]
    fn percentiles() {
        let none = Durations::default();
        assert_eq!((none.count(), none.percentile(50)), (0, Duration::ZERO));
        let one = of([7 * MS]);
        assert_eq!([one.percentile(50), one.percentile(99)], [7 * MS; 2]);
        let most = of((0..99).map(|_| 8 * MS).chain([5_000 * MS]));
        assert_eq!([most.percentile(50), most.percentile(99)], [8 * MS; 2]);
        assert_eq!(most.percentile(100), 5_000 * MS);
        assert_eq!(most.longest(), 5_000 * MS);
        let spread = of((1..=1_000).map(|n| n * MS));
        for percent in [10, 50, 90, 99] {
            let exact = MS * u32::try_from(percent * 10).unwrap();
            let found = spread.percentile(percent);
            assert!(
                found >= exact && found <= exact * 9 / 8,
                "{percent}: {found:?}"
            );
        }
    }

    #[test]
    fn parts_of_replicas_make_the_histogram_of_all() {
        let part = |from: u32| of((from..from + 400).map(|n| MS * n * n / 100));
        let mut merged = Durations::default();
        for from in [0, 400, 800] {
            merged.merge(&Durations::from_wire(&part(from).to_wire()));
        }
        let all = of((0..1_200).map(|n| MS * n * n / 100));
        assert_eq!(merged.buckets, all.buckets);
        assert_eq!((merged.count, merged.longest), (all.count, all.longest));
        let nonsense = pb::Histogram {
            buckets: vec![u32::MAX, 70_000, 250, 3, 3],
            counts: vec![1, 1, 1, u32::MAX, u32::MAX, 5],
            longest_us: u64::MAX,
        };
        let read = Durations::from_wire(&nonsense);
        assert_eq!(read.buckets, [(3, u32::MAX)]);
        merged.merge(&read);
        assert!(merged.percentile(99) <= MS);
    }

    #[test]
    fn a_printed_histogram_has_bounds_of_whole_powers_and_counts_all() {
        let all = of([MS / 100, MS, 2 * MS, 2 * MS + MS / 64, 3_600_000 * MS]);
        let (sum, counts) = all.distribution();
        assert!((sum - 3_600.005).abs() < 0.001, "{sum}");
        let some: Vec<_> = counts.iter().filter(|(_, count)| *count > 0).collect();
        assert_eq!(
            some,
            [
                &(0.000_125, 1),
                &(0.001, 1),
                &(0.002, 1),
                &(0.004, 1),
                &(f64::INFINITY, 1)
            ]
        );
        assert_eq!(counts.len(), 25);
    }
}
