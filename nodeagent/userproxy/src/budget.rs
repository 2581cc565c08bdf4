//! A budget of further attempts for each ServicePort, so that retries never multiply a flood (U52).

use std::time::Instant;

/// Further attempts that each connection pays for: one in five.
const EACH: f64 = 0.2;

/// Further attempts that each second pays for.
const A_SECOND: f64 = 10.0;

/// Most further attempts that can be saved up.
const MOST: f64 = 100.0;

/// The further attempts that a ServicePort may make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    saved: f64,
    at: Instant,
}

impl Budget {
    /// Returns a full budget.
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            saved: MOST,
            at: now,
        }
    }

    /// Adds what a new connection pays for.
    pub(crate) fn earn(&mut self) {
        self.saved = (self.saved + EACH).min(MOST);
    }

    /// Takes one attempt out of the budget; returns whether there was one.
    pub(crate) fn spend(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = now;
        self.saved = (self.saved + A_SECOND * passed).min(MOST);
        let enough = self.saved >= 1.0;
        if enough {
            self.saved -= 1.0;
        }
        enough
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn u52_a_fifth_of_the_connections_and_ten_a_second() {
        let start = Instant::now();
        let mut budget = Budget::new(start);
        let spend = |budget: &mut Budget, now| (0..200).take_while(|_| budget.spend(now)).count();
        assert_eq!(spend(&mut budget, start), 100);
        (0..50).for_each(|_| budget.earn());
        assert!((9..=10).contains(&spend(&mut budget, start)));
        assert!((19..=20).contains(&spend(&mut budget, start + Duration::from_secs(2))));
    }
}
