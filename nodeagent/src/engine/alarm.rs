//! The engine's ear for what others change in the kernel.

use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

/// Least time from one hearing to the next: other programs may change rules of theirs a thousand times a
/// second, and each wakes us.
const PAUSE: Duration = Duration::from_millis(2);

/// Rings when the backend may have something to hear.
#[derive(Debug)]
pub(super) struct Alarm {
    fd: Option<AsyncFd<OwnedFd>>,
    next: Instant,
}

impl Alarm {
    /// Must be called on the engine's runtime. Never rings without a descriptor.
    pub(super) fn new(fd: Option<OwnedFd>) -> Self {
        let fd = fd.and_then(|fd| {
            #[allow(
                deprecated,
                reason = "its unsafe successor is about descriptors that may be closed or swapped; an OwnedFd is not"
            )]
            let fd = AsyncFd::new(fd);
            fd.inspect_err(|error| {
                tracing::warn!(%error, "cannot wait for the kernel's notifications; what others change is found late");
            })
            .ok()
        });
        Self {
            fd,
            next: Instant::now(),
        }
    }

    /// Waits until there may be something to hear. Safe to cancel.
    pub(super) async fn ring(&mut self) {
        let Some(fd) = &self.fd else {
            return std::future::pending().await;
        };
        tokio::time::sleep_until(self.next).await;
        match fd.readable().await {
            // Whoever listens takes everything that waits.
            Ok(mut ready) => ready.clear_ready(),
            // The runtime ends.
            Err(_) => std::future::pending().await,
        }
        self.next = Instant::now() + PAUSE;
    }
}
