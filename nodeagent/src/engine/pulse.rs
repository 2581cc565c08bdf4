//! Whether the engine's thread comes back from its work.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Since when the engine's thread is at work; nothing while it waits for some.
#[derive(Clone, Debug, Default)]
pub struct Pulse(Arc<Mutex<Option<Instant>>>);

/// Work that lasts as long as this lives.
pub(super) struct Busy<'a>(&'a Pulse);

impl Pulse {
    /// How long the work at hand has taken so far.
    #[must_use]
    pub fn busy_for(&self, now: Instant) -> Option<Duration> {
        let since = *self.lock();
        since.map(|since| now.saturating_duration_since(since))
    }

    /// The thread begins to work.
    pub(super) fn busy(&self) -> Busy<'_> {
        self.begin(Instant::now());
        Busy(self)
    }

    pub(crate) fn begin(&self, at: Instant) {
        *self.lock() = Some(at);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        // One value, replaced as a whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}
