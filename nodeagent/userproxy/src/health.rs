//! The health of an endpoint: when new connections avoid it, and how they come back to it (U53).

use std::time::{Duration, Instant};

/// Number of failures in a row after which an endpoint is avoided.
const FAILURES: u32 = 3;

/// First and longest time for which an endpoint is avoided.
const AVOID: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Time for which an endpoint counts as avoided after its end, unless it takes a connection: without it, a report would
/// change with each pause of an endpoint that goes on failing.
const LINGER: Duration = Duration::from_secs(60);

/// Time in which an endpoint that recovered gets back its whole share of connections.
const SLOW_START: Duration = Duration::from_secs(10);

/// The share with which an endpoint that recovered begins.
const FIRST_SHARE: f64 = 0.1;

/// Bounds of [`Health::patience`] (U52).
const PATIENCE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(250));

/// The health of one endpoint, as connections to it show.
#[derive(Clone, Debug, Default)]
pub(crate) struct Health {
    /// Failures since the last success.
    failures: u32,
    /// Number of times that the endpoint was avoided since it was last well for the whole slow start.
    avoided: u32,
    /// The end of the time for which it is avoided.
    until: Option<Instant>,
    /// The first success after it was avoided.
    recovered: Option<Instant>,
    /// The usual time of a connection's start: a moving average.
    usual: Option<Duration>,
}

impl Health {
    /// Records a connection that was established after `took`.
    pub(crate) fn succeeded(&mut self, now: Instant, took: Duration) {
        self.failures = 0;
        self.usual = Some(self.usual.map_or(took, |usual| (usual * 7 + took) / 8));
        if self.avoided == 0 {
            return;
        }
        self.until = None;
        let since = *self.recovered.get_or_insert(now);
        if now.duration_since(since) >= SLOW_START {
            self.avoided = 0;
            self.recovered = None;
        }
    }

    /// Records a failure. `may_avoid` says whether enough other endpoints are left; `chance` in 0..1 spreads the
    /// ends of the times for which several agents avoid the endpoint. Returns whether it is avoided from now on.
    pub(crate) fn failed(
        &mut self,
        now: Instant,
        chance: f64,
        may_avoid: impl FnOnce() -> bool,
    ) -> bool {
        self.failures = self.failures.saturating_add(1);
        if self.failures < FAILURES || self.is_avoided(now) || !may_avoid() {
            return false;
        }
        let time = AVOID.0.saturating_mul(1 << self.avoided.min(6)).min(AVOID.1);
        self.until = Some(now + time.mul_f64(0.9 + 0.2 * chance));
        self.avoided = self.avoided.saturating_add(1);
        self.recovered = None;
        true
    }

    /// Returns whether new connections avoid the endpoint.
    pub(crate) fn is_avoided(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// Returns whether new connections avoid the endpoint, or did within the last minute, and none has succeeded since.
    pub(crate) fn was_avoided_lately(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until + LINGER)
    }

    /// Returns the end of the time for which the endpoint is avoided.
    pub(crate) fn avoided_until(&self) -> Option<Instant> {
        self.until
    }

    /// Returns the share of its connections that the endpoint gets, in 0.1..=1: less than 1 while it recovers.
    pub(crate) fn share(&self, now: Instant) -> f64 {
        let Some(since) = self.recovered else {
            return 1.0;
        };
        let part = now.duration_since(since).as_secs_f64() / SLOW_START.as_secs_f64();
        part.clamp(FIRST_SHARE, 1.0)
    }

    /// Returns how long to wait for the endpoint before another is tried beside it (U52): four times its usual
    /// time, within bounds.
    pub(crate) fn patience(&self) -> Duration {
        let usual = self.usual.map_or(PATIENCE.1, |usual| usual * 4);
        usual.clamp(PATIENCE.0, PATIENCE.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOOK: Duration = Duration::from_millis(1);

    fn fail(health: &mut Health, now: Instant) -> bool {
        health.failed(now, 0.5, || true)
    }

    #[test]
    fn u53_three_failures_in_a_row_and_twice_as_long_each_time() {
        let start = Instant::now();
        let mut health = Health::default();
        assert!(!fail(&mut health, start));
        assert!(!fail(&mut health, start));
        health.succeeded(start, TOOK);
        assert_eq!(
            [0, 1, 2].map(|_| fail(&mut health, start)),
            [false, false, true]
        );
        assert!(health.is_avoided(start + Duration::from_millis(999)));
        let mut now = start + Duration::from_secs(1);
        assert!(!health.is_avoided(now));
        // It gets one chance after each pause.
        for seconds in [2, 4, 8, 16, 32, 60, 60] {
            assert!(fail(&mut health, now));
            now += Duration::from_secs(seconds);
            assert!(health.is_avoided(now - TOOK), "{seconds}");
            assert!(!health.is_avoided(now), "{seconds}");
        }
    }

    #[test]
    fn u53_an_endpoint_that_recovers_gets_its_share_back_slowly() {
        let start = Instant::now();
        let mut health = Health::default();
        assert!((0..3).any(|_| fail(&mut health, start)));
        let back = start + Duration::from_secs(2);
        health.succeeded(back, TOOK);
        let share = |health: &Health, seconds| health.share(back + Duration::from_secs(seconds));
        assert!((share(&health, 0) - 0.1).abs() < 1e-9);
        assert!((share(&health, 5) - 0.5).abs() < 1e-9);
        assert!((share(&health, 10) - 1.0).abs() < 1e-9);
        health.succeeded(back + SLOW_START, TOOK);
        assert_eq!(health.avoided, 0);
    }

    #[test]
    fn u52_patience_follows_the_usual_time_within_bounds() {
        let now = Instant::now();
        let mut health = Health::default();
        assert_eq!(health.patience(), PATIENCE.1);
        health.succeeded(now, Duration::from_micros(50));
        assert_eq!(health.patience(), PATIENCE.0);
        let mut far = Health::default();
        far.succeeded(now, Duration::from_millis(30));
        assert_eq!(far.patience(), Duration::from_millis(120));
        far.succeeded(now, Duration::from_secs(30));
        assert_eq!(far.patience(), PATIENCE.1);
    }

    #[test]
    fn u53_an_endpoint_counts_as_avoided_until_it_takes_a_connection_or_a_minute_has_passed() {
        let start = Instant::now();
        let mut health = Health::default();
        assert!((0..3).any(|_| fail(&mut health, start)));
        let lately = |health: &Health, seconds| {
            health.was_avoided_lately(start + Duration::from_secs(seconds))
        };
        assert_eq!(
            [0, 30, 60, 62].map(|seconds| lately(&health, seconds)),
            [true, true, true, false]
        );
        health.succeeded(start + Duration::from_secs(30), TOOK);
        assert!(!lately(&health, 30));
        assert!(!lately(&Health::default(), 0));
    }

    #[test]
    fn without_leave_an_endpoint_is_not_avoided() {
        let now = Instant::now();
        let mut health = Health::default();
        assert!((0..9).all(|_| !health.failed(now, 0.5, || false)));
        assert!(fail(&mut health, now));
    }
}
