//! SIGTERM and SIGINT: the first lets agents leave before the control plane ends, the second ends it
//! at once.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use kplane_agents::hub::Hub;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::info;

/// The signals that end the program.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Begins to handle the signals. None is missed from now on.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for a signal, lets agents leave within a time, and ends the control plane.
    pub async fn follow(mut self, hub: Arc<Hub>, drain: Duration) {
        self.next().await;
        info!(?drain, "shutting down; agents leave, and keep their rules");
        tokio::select! {
            () = hub.streams().draining.begin(drain) => {}
            () = self.next() => info!("another signal: shutting down at once"),
        }
        hub.shutdown().cancel();
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
