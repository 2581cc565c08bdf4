//! The alarm that wakes the engine for other programs' changes in the kernel.

use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

/// Least time between two wake-ups. Other programs may change their own rules a thousand times a second,
/// and each change wakes the engine.
const PAUSE: Duration = Duration::from_millis(2);

/// Rings when the backend may have notifications to read.
#[derive(Debug)]
pub(super) struct Alarm {
    fd: Option<AsyncFd<OwnedFd>>,
    /// The number of the descriptor, for [`Alarm::follow`].
    generation: u64,
    next: Instant,
}

impl Alarm {
    /// Creates an alarm. Must be called on the engine's runtime. Without a descriptor it never rings.
    pub(super) fn new(fd: Option<OwnedFd>) -> Self {
        let fd = fd.and_then(|fd| {
            #[allow(
                deprecated,
                reason = "its unsafe successor is about descriptors that may be closed or swapped; an OwnedFd is not"
            )]
            let fd = AsyncFd::new(fd);
            fd.inspect_err(|error| {
                tracing::warn!(%error, "cannot wait for the kernel's notifications; the agent finds changes by other programs late");
            })
            .ok()
        });
        Self {
            fd,
            generation: 0,
            next: Instant::now(),
        }
    }

    /// Takes the descriptor of this number, if it has another one; 0 = there is none.
    pub(super) fn follow(&mut self, generation: u64, fd: impl FnOnce() -> Option<OwnedFd>) {
        if self.generation != generation {
            *self = Self {
                generation,
                ..Self::new(fd())
            };
        }
    }

    /// Waits until there may be notifications to read. Safe to cancel.
    pub(super) async fn ring(&mut self) {
        let Some(fd) = &self.fd else {
            return std::future::pending().await;
        };
        tokio::time::sleep_until(self.next).await;
        match fd.readable().await {
            // The backend reads everything that waits.
            Ok(mut ready) => ready.clear_ready(),
            // The runtime is ending.
            Err(_) => std::future::pending().await,
        }
        self.next = Instant::now() + PAUSE;
    }
}
