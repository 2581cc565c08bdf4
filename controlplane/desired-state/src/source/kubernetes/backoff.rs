//! Pauses after failures.

use std::time::Duration;

/// Upper bound of the first pause.
const FIRST: Duration = Duration::from_millis(100);
/// Upper bound of every pause.
const LONGEST: Duration = Duration::from_secs(5);
/// Lower bound of every pause, so that the reflector never spins.
const SHORTEST: Duration = Duration::from_millis(10);

/// Pauses whose upper bound doubles from 100 ms to 5 s. Each pause is random up to the bound, so
/// that clients that were interrupted at the same moment do not come back together.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Returns the number of failures in a row.
    pub(super) fn failures(&self) -> u32 {
        self.failures
    }

    /// Resets the pause after a success.
    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }

    /// Returns the pause after one more failure.
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
