//! Waiting times that grow after each failure.

use std::time::Duration;

use kplane_model::chance;

/// A waiting time that doubles from `first` up to `longest`.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    attempts: u32,
}

impl Backoff {
    /// Returns waiting times that begin with `first` and grow up to `longest`.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self {
            first,
            longest,
            attempts: 0,
        }
    }

    /// Returns whether nothing failed since the last reset.
    pub fn is_fresh(&self) -> bool {
        self.attempts == 0
    }

    /// Starts again with the first waiting time.
    pub fn reset(&mut self) {
        self.attempts = 0;
    }

    /// Returns a random time between zero and the next waiting time. This spreads many clients that were
    /// interrupted at the same moment.
    pub fn full_jitter(&mut self) -> Duration {
        chance::between(Duration::ZERO, self.advance())
    }

    /// Returns a random time between half of the next waiting time and all of it. This suits a single client,
    /// which must not retry without a pause.
    pub fn half_jitter(&mut self) -> Duration {
        let wait = self.advance();
        chance::between(wait / 2, wait)
    }

    fn advance(&mut self) -> Duration {
        let factor = 1_u32.checked_shl(self.attempts).unwrap_or(u32::MAX);
        self.attempts = self.attempts.saturating_add(1);
        self.first.saturating_mul(factor).min(self.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Duration = Duration::from_millis(100);
    const LONGEST: Duration = Duration::from_secs(10);

    #[test]
    fn waits_double_up_to_the_longest_and_start_over() {
        let mut backoff = Backoff::new(FIRST, LONGEST);
        assert!(backoff.is_fresh());
        let ceilings: Vec<_> = (0..9).map(|_| backoff.advance().as_millis()).collect();
        assert_eq!(
            ceilings,
            [100, 200, 400, 800, 1_600, 3_200, 6_400, 10_000, 10_000]
        );
        assert!(!backoff.is_fresh());
        backoff.reset();
        assert_eq!(backoff.advance(), FIRST);
    }

    #[test]
    fn jitter_stays_in_its_bounds_for_ever() {
        let mut full = Backoff::new(FIRST, LONGEST);
        let mut half = Backoff::new(FIRST, LONGEST);
        for attempt in 0..1_000 {
            assert!(full.full_jitter() <= LONGEST);
            let wait = half.half_jitter();
            assert!(
                wait >= FIRST / 2 && wait <= LONGEST,
                "attempt {attempt}: {wait:?}"
            );
        }
        assert!(half.half_jitter() >= LONGEST / 2);
    }
}
