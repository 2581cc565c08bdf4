//! The lease of the rules that lead to the proxy: they work as long as the agent renews it. So a proxy that hangs or is
//! full, or an agent that has ended, leaves new connections to the kernel within about a second.

use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kplane_model::Family;
use kplane_userproxy::Proxy;

use super::ProxyHandle;

/// Time between two renewals: three may be late before the lease ends.
const RENEW: Duration = Duration::from_millis(250);

/// Longest time for which the proxy's threads may be busy with one thing.
const HUNG: Duration = Duration::from_secs(2);

/// The knowledge whether the proxy works, and where to note that it does not.
#[derive(Clone)]
pub(super) struct Alive {
    proxy: Weak<Proxy>,
    handle: ProxyHandle,
}

impl Alive {
    pub(super) fn of(proxy: &Arc<Proxy>, handle: &ProxyHandle) -> Self {
        Self {
            proxy: Arc::downgrade(proxy),
            handle: handle.clone(),
        }
    }

    /// Returns why the kernel must serve new connections, if it must.
    fn problem(&self) -> Option<&'static str> {
        match self.proxy.upgrade() {
            None => Some("the proxy has ended"),
            Some(proxy) if !proxy.is_alive(HUNG) => Some("a thread of the proxy hangs"),
            Some(proxy) if !proxy.has_room() => {
                Some("the proxy is full: raise RLIMIT_NOFILE of the agent")
            }
            Some(_) => None,
        }
    }
}

impl fmt::Debug for Alive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Alive")
    }
}

/// A lease of one family. A thread renews it until this object is dropped; then it ends within a second.
#[derive(Debug)]
pub(super) struct Lease {
    /// The thread ends when this is gone.
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Lease {
    /// Starts the lease in this thread's network namespace.
    ///
    /// # Errors
    /// The kernel's refusal: no lease holds.
    pub(super) fn start(
        family: Family,
        alive: Alive,
        mut renew: impl FnMut() -> Result<(), String> + Send + 'static,
    ) -> Result<Self, String> {
        renew()?;
        let (end, ended) = channel();
        let work = move || {
            let mut fails = false;
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(RENEW) {
                let renewed = match alive.problem() {
                    None => renew(),
                    Some(problem) => Err(problem.to_owned()),
                };
                if let Err(problem) = &renewed {
                    alive.handle.note_lapse(problem);
                    if !fails {
                        tracing::warn!(
                            %family,
                            problem,
                            "cannot renew the lease of the userspace proxy; the kernel serves its Services meanwhile"
                        );
                    }
                }
                fails = renewed.is_err();
            }
        };
        let thread = thread::Builder::new().name("lease".to_owned()).spawn(work);
        Ok(Self {
            end: Some(end),
            thread: Some(thread.map_err(|error| error.to_string())?),
        })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked renews nothing either.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use kplane_userproxy::Settings;

    use super::*;

    #[test]
    fn a_lease_that_is_not_renewed_is_noted_with_the_reason() {
        let handle = ProxyHandle::default();
        let proxy = Arc::new(Proxy::start(Settings::default()).unwrap());
        let alive = Alive::of(&proxy, &handle);
        let lease = Lease::start(Family::V4, alive, || Ok(())).unwrap();
        assert!(handle.last_lapse().is_none());
        drop(proxy);
        let deadline = Instant::now() + Duration::from_secs(30);
        let lapse = loop {
            if let Some(lapse) = handle.last_lapse() {
                break lapse;
            }
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(lapse.reason, "the proxy has ended");
        drop(lease);
    }
}
