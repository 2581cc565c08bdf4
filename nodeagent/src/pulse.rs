//! Shows whether the engine's thread hangs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

/// The start of the current work of the engine's thread; `None` while the thread waits.
#[derive(Clone, Debug, Default)]
pub struct Pulse(Arc<Mutex<Option<Instant>>>);

/// Work that lasts as long as this value lives.
pub(crate) struct Busy<'a>(&'a Pulse);

impl Pulse {
    /// Returns how long the current work has taken so far.
    pub fn busy_for(&self, now: Instant) -> Option<Duration> {
        let since = *self.lock();
        since.map(|since| now.saturating_duration_since(since))
    }

    /// Records that the thread begins to work.
    pub(crate) fn busy(&self) -> Busy<'_> {
        self.begin(Instant::now());
        Busy(self)
    }

    pub(crate) fn begin(&self, at: Instant) {
        *self.lock() = Some(at);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        // The state is one value that is replaced as a whole, so a panic cannot spoil it.
        self.0.lock()
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}
