//! The way to a proxy that may start later than its backend.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use kplane_userproxy::Proxy;

/// A handle to a backend's userspace proxy. The proxy may start after the backend, and ends with it.
#[derive(Clone, Default)]
pub struct ProxyHandle(Arc<OnceLock<Weak<Proxy>>>);

impl ProxyHandle {
    /// Creates the handle to a proxy that runs.
    pub(super) fn of(proxy: &Arc<Proxy>) -> Self {
        let handle = Self::default();
        handle.set(proxy);
        handle
    }

    /// Sets the proxy, which is the only one of the backend.
    pub(super) fn set(&self, proxy: &Arc<Proxy>) {
        let _ = self.0.set(Arc::downgrade(proxy));
    }

    /// Returns the proxy, if it runs.
    #[must_use]
    pub fn get(&self) -> Option<Arc<Proxy>> {
        self.0.get()?.upgrade()
    }
}

impl fmt::Debug for ProxyHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.get().is_some();
        f.debug_struct("ProxyHandle").field("runs", &runs).finish()
    }
}
