//! When an agent looks whether it should be at another replica.
//!
//! An agent stays with a replica as long as its stream lives. So replicas that ended and came back, or are new, would get
//! no agents. Therefore each agent resolves the names again after a random time, and goes to its favourite replica if it
//! is at another one. If all are where they belong, nothing happens but the resolution.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use futures_util::future::BoxFuture;
use kplane_model::chance;
use tokio::time::{Instant, sleep_until, timeout};

use super::RESOLUTION;
use super::transport::Found;

/// Shortest and longest time between two looks. At most one agent in twenty moves within a minute.
const INTERVAL: (Duration, Duration) = (Duration::from_secs(600), Duration::from_secs(2_400));

/// The same while the replica is in another zone, and one that the agent does not know may be in the node's.
const SOONER: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(240));

/// The next look.
pub(super) struct Look {
    at: Instant,
    finding: Option<BoxFuture<'static, Vec<Found>>>,
}

impl Look {
    /// Plans the first look of a stream.
    pub(super) fn plan() -> Self {
        Self::within(INTERVAL)
    }

    /// Plans the first look of a stream to a replica in another zone.
    pub(super) fn plan_sooner() -> Self {
        Self::within(SOONER)
    }

    fn within((shortest, longest): (Duration, Duration)) -> Self {
        Self {
            at: Instant::now() + chance::between(shortest, longest),
            finding: None,
        }
    }

    /// Waits for the time of the look, and returns the replicas that there are then. Safe to drop at any time.
    pub(super) async fn found<F>(&mut self, find: impl FnOnce() -> F) -> Vec<Found>
    where
        F: Future<Output = Vec<Found>> + Send + 'static,
    {
        if self.finding.is_none() {
            sleep_until(self.at).await;
        }
        let found = self
            .finding
            .get_or_insert_with(|| {
                let found = find();
                Box::pin(async move { timeout(RESOLUTION, found).await.unwrap_or_default() })
            })
            .await;
        *self = Self::plan();
        found
    }
}

impl fmt::Debug for Look {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Look").field("at", &self.at).finish_non_exhaustive()
    }
}
