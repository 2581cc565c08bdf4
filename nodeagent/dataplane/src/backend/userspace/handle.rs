//! The way to a proxy that may start later than its backend.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use kplane_userproxy::Proxy;

/// A handle to a backend's userspace proxy. The proxy may start after the backend, and ends with it.
#[derive(Clone, Default)]
pub struct ProxyHandle {
    proxy: Arc<OnceLock<Weak<Proxy>>>,
    lapse: Arc<Mutex<Option<Lapse>>>,
}

/// A moment in which the kernel served new connections in the proxy's place.
#[derive(Clone, Debug)]
pub struct Lapse {
    /// The reason, human-readable.
    pub reason: String,
    /// The moment.
    pub at: Instant,
}

impl ProxyHandle {
    /// Creates the handle to a proxy that runs.
    pub(super) fn of(proxy: &Arc<Proxy>) -> Self {
        let handle = Self::default();
        handle.set(proxy);
        handle
    }

    /// Sets the proxy, which is the only one of the backend.
    pub(super) fn set(&self, proxy: &Arc<Proxy>) {
        let _ = self.proxy.set(Arc::downgrade(proxy));
    }

    /// Returns the proxy, if it runs.
    #[must_use]
    pub fn get(&self) -> Option<Arc<Proxy>> {
        self.proxy.get()?.upgrade()
    }

    /// Notes that the kernel serves new connections now, and why.
    pub(super) fn note_lapse(&self, reason: &str) {
        let lapse = Lapse {
            reason: reason.to_owned(),
            at: Instant::now(),
        };
        *self.lapse.lock().unwrap_or_else(PoisonError::into_inner) = Some(lapse);
    }

    /// Returns the last moment in which the kernel served new connections in the proxy's place, if there was one.
    #[must_use]
    pub fn last_lapse(&self) -> Option<Lapse> {
        let lapse = self.lapse.lock().unwrap_or_else(PoisonError::into_inner);
        lapse.clone()
    }
}

impl fmt::Debug for ProxyHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.get().is_some();
        f.debug_struct("ProxyHandle").field("runs", &runs).finish()
    }
}
