//! Random waits: they keep many programs from acting at the same moment.
//!
//! All random waits that a simulation meets come from here, so that it can repeat them.

use std::cell::Cell;
use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

thread_local! {
    /// The state of this thread's repeatable sequence; `None` = numbers cannot be predicted.
    static SEQUENCE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Returns a random time in a range, both ends included.
pub fn between(shortest: Duration, longest: Duration) -> Duration {
    let span = longest.saturating_sub(shortest).as_nanos();
    // The product has 128 bits at most, and its upper half is at most the span.
    let share = (u128::from(number()) * (span.min(u128::from(u64::MAX)) + 1)) >> u64::BITS;
    shortest + Duration::from_nanos(u64::try_from(share).unwrap_or(u64::MAX))
}

/// Makes the random times of this thread the same for the same seed, from now on. For simulations.
pub fn repeat(seed: u64) {
    SEQUENCE.set(Some(seed));
}

fn number() -> u64 {
    let Some(state) = SEQUENCE.get() else {
        // Its keys are random in each process, and differ with each call.
        return RandomState::new().hash_one(());
    };
    let state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    SEQUENCE.set(Some(state));
    mix(state)
}

/// Returns the output function of the generator SplitMix64 (Steele, Lea, Flood 2014).
fn mix(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn times_are_in_their_range_and_spread_over_all_of_it() {
        let times: Vec<_> = (0..1_000).map(|_| between(SECOND, 2 * SECOND)).collect();
        assert!(times.iter().all(|t| *t >= SECOND && *t <= 2 * SECOND));
        for tenth in 0..10 {
            let from = SECOND + SECOND * tenth / 10;
            let inside = times.iter().filter(|t| **t >= from && **t < from + SECOND / 10);
            assert!((50..200).contains(&inside.count()), "{tenth}");
        }
        assert_eq!(between(SECOND, SECOND), SECOND);
        assert_eq!(between(2 * SECOND, SECOND), 2 * SECOND);
        assert!(between(Duration::ZERO, Duration::MAX) > Duration::ZERO);
    }

    #[test]
    fn a_seed_repeats_the_times_of_its_thread_only() {
        let some = || (0..8).map(|_| between(Duration::ZERO, SECOND)).collect::<Vec<_>>();
        let seeded = |seed| {
            std::thread::spawn(move || {
                repeat(seed);
                some()
            })
            .join()
            .unwrap()
        };
        assert_eq!(seeded(7), seeded(7));
        assert_ne!(seeded(7), seeded(8));
        assert_ne!(some(), some());
    }
}
