//! The admission of agents that need a snapshot, and how the others begin. Agents that resume with an equal digest, or
//! by differences, are always admitted: they cost little.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Snapshots that may begin a second, by default. See docs/security.md.
pub const PER_SECOND: u32 = 500;

/// Time whose snapshots may begin at once.
const BURST: Duration = Duration::from_secs(1);

/// Longest time for which an agent is sent away.
const LONGEST: Duration = Duration::from_secs(60);

/// Counts of the ways in which agents began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotCounts {
    /// Snapshots that began.
    pub begun: u64,
    /// Agents that were sent away, because too many needed a snapshot.
    pub refused: u64,
    /// Agents that held what they must hold.
    pub equal: u64,
    /// Agents that got what had changed since.
    pub changes: u64,
    /// Agents that got the key ranges in which they differed.
    pub ranges: u64,
}

/// A token bucket for snapshots. Agents that are sent away come back one after the other.
#[derive(Debug)]
pub struct Snapshots(Mutex<Schedule>);

#[derive(Debug)]
struct Schedule {
    /// Time between two snapshots.
    gap: Duration,
    /// End of the last reserved snapshot slot.
    booked: Instant,
    /// The time at which the last agent that was sent away comes back.
    back: Instant,
    counts: SnapshotCounts,
}

impl Default for Snapshots {
    fn default() -> Self {
        let now = Instant::now();
        Self(Mutex::new(Schedule {
            gap: BURST / PER_SECOND,
            booked: now,
            back: now,
            counts: SnapshotCounts::default(),
        }))
    }
}

impl Snapshots {
    /// Sets the number of snapshots that may begin a second, at least one.
    pub fn limit(&self, per_second: u32) {
        self.0.lock().gap = Duration::from_secs(1) / per_second.max(1);
    }

    /// Admits an agent that needs a snapshot.
    ///
    /// # Errors
    /// The time after which the agent is to come back.
    pub fn admit(&self) -> Result<(), Duration> {
        let mut state = self.0.lock();
        let now = Instant::now();
        let booked = state.booked.max(now) + state.gap;
        if booked <= now + BURST.max(state.gap) {
            state.booked = booked;
            state.counts.begun += 1;
            return Ok(());
        }
        state.counts.refused += 1;
        let back = state.back.max(now) + state.gap;
        state.back = back.min(now + LONGEST);
        Err(state.back - now)
    }

    /// Counts an agent that needs no snapshot.
    pub fn spared(&self, count: impl FnOnce(&mut SnapshotCounts)) {
        count(&mut self.0.lock().counts);
    }

    /// Returns the counts.
    pub fn counts(&self) -> SnapshotCounts {
        self.0.lock().counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 10,000 agents that come at once, and come back as they are asked to, plus up to half of the time.
    #[tokio::test(start_paused = true)]
    async fn ten_thousand_agents_begin_within_thirty_seconds_and_never_at_once() {
        let snapshots = Snapshots::default();
        let start = Instant::now();
        let mut coming: Vec<Duration> = vec![Duration::ZERO; 10_000];
        let (mut attempts, mut last) = (0, Duration::ZERO);
        let mut by_second = [0_u32; 60];
        while !coming.is_empty() {
            coming.sort_by(|one, other| other.cmp(one));
            let at = coming.pop().unwrap();
            tokio::time::advance((start + at) - Instant::now()).await;
            attempts += 1;
            match snapshots.admit() {
                Ok(()) => {
                    last = at;
                    by_second[usize::try_from(at.as_secs()).unwrap()] += 1;
                }
                Err(wait) => {
                    coming.push(at + wait + rand::random_range(Duration::ZERO..=wait / 2));
                }
            }
        }
        assert!(last <= Duration::from_secs(30), "{last:?}");
        assert!(by_second.iter().all(|begun| *begun <= 2 * PER_SECOND));
        assert!(attempts < 40_000, "{attempts}");
        let counts = snapshots.counts();
        assert_eq!(
            (counts.begun, counts.begun + counts.refused),
            (10_000, attempts)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn one_a_second_is_one_a_second() {
        let snapshots = Snapshots::default();
        snapshots.limit(1);
        assert_eq!(snapshots.admit(), Ok(()));
        assert_eq!(snapshots.admit(), Err(Duration::from_secs(1)));
        assert_eq!(snapshots.admit(), Err(Duration::from_secs(2)));
        for _ in 0..100 {
            assert!(snapshots.admit().unwrap_err() <= LONGEST);
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(snapshots.admit(), Ok(()));
    }
}
