//! The time, as the engine's steps get it.

use std::time::Instant;

use crate::desired::now_ms;
use crate::report::LastingError;

/// A moment by both clocks. Waits use the monotonic one, which nothing can set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now {
    pub(super) instant: Instant,
    /// The wall clock, milliseconds since 1970.
    pub(super) ms: u64,
}

impl Now {
    /// Returns the present by the runtime's clock, which a simulation may stop.
    pub(super) fn real() -> Self {
        Self {
            instant: tokio::time::Instant::now().into_std(),
            ms: now_ms(),
        }
    }

    /// Records an error; an error that lasts keeps its start time.
    pub(super) fn stand(self, error: &mut Option<LastingError>, reason: String) {
        let (since_ms, since) = match &error {
            Some(old) => (old.since_ms, old.since),
            None => (self.ms, self.instant),
        };
        *error = Some(LastingError {
            reason,
            since_ms,
            since,
        });
    }

    /// Returns the wall clock by now, since the kernel may have taken its time.
    pub(super) fn moved_on_ms(self) -> u64 {
        let since = self.instant.elapsed().as_millis();
        self.ms.saturating_add(u64::try_from(since).unwrap_or(u64::MAX))
    }
}
