//! How long to wait after a failure.

use std::time::Duration;

/// The first waiting time at its longest.
const FIRST: Duration = Duration::from_millis(100);
/// The longest of all.
const LONGEST: Duration = Duration::from_secs(5);
/// Not even the luckiest draw spins.
const SHORTEST: Duration = Duration::from_millis(10);

/// Doubles from 100 ms to 5 s; each wait is drawn from all of it, so that a crowd that was
/// interrupted at one moment does not come back at one.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Failures in a row.
    pub(super) fn failures(&self) -> u32 {
        self.failures
    }

    /// All is well again.
    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }

    /// The wait after one more failure.
    pub(super) fn next(&mut self) -> Duration {
        let ceiling = self.ceiling();
        self.failures = self.failures.saturating_add(1);
        rand::random_range(SHORTEST..=ceiling)
    }

    fn ceiling(&self) -> Duration {
        let factor = 1_u32.checked_shl(self.failures).unwrap_or(u32::MAX);
        FIRST.saturating_mul(factor).min(LONGEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_longest_never_spin_and_start_over() {
        let mut backoff = Backoff::default();
        let mut ceilings = Vec::new();
        for _ in 0..40 {
            let ceiling = backoff.ceiling();
            let wait = backoff.next();
            assert!(SHORTEST <= wait && wait <= ceiling, "{wait:?} {ceiling:?}");
            ceilings.push(ceiling.as_millis());
        }
        assert_eq!(ceilings[..7], [100, 200, 400, 800, 1_600, 3_200, 5_000]);
        assert_eq!(ceilings[39], 5_000);
        assert_eq!(backoff.failures(), 40);
        backoff.reset();
        assert_eq!(backoff.ceiling(), FIRST);
    }
}
