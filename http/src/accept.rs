//! Accepting connections from a listener, also when the process runs out of file descriptors.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep};

/// First pause when resources for a connection are missing. Each pause is twice as long as the one
/// before, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(20);

const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Minimum time between two log lines about missing resources.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// An acceptor of connections. When files or memory for a connection are missing, the acceptor pauses,
/// logs this at most once a minute, and counts the failure. Connections wait in the kernel's queue
/// meanwhile.
#[derive(Debug)]
pub struct Acceptor {
    listener: TcpListener,
    what: &'static str,
    pause: Duration,
    said: Option<Instant>,
}

impl Acceptor {
    /// Creates an acceptor for a listener; `what` names the kind of connections in logs.
    pub fn new(listener: TcpListener, what: &'static str) -> Self {
        Self {
            listener,
            what,
            pause: FIRST_PAUSE,
            said: None,
        }
    }

    /// Waits for the next connection; returns it with the client's address. Counts every failure in
    /// `failures`.
    pub async fn accept(&mut self, failures: &AtomicU64) -> (TcpStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok(accepted) => {
                    self.pause = FIRST_PAUSE;
                    return accepted;
                }
                Err(error) => {
                    failures.fetch_add(1, Ordering::Relaxed);
                    self.failed(&error).await;
                }
            }
        }
    }

    async fn failed(&mut self, error: &io::Error) {
        if !is_lack(error) {
            // The failure concerns this connection only, such as a client that has gone.
            tracing::debug!(%error, "cannot accept a connection for {}", self.what);
            return tokio::task::yield_now().await;
        }
        if self.said.is_none_or(|said| said.elapsed() >= SAY_AGAIN) {
            self.said = Some(Instant::now());
            tracing::error!(
                %error,
                "cannot accept connections for {}: they wait until other connections end; check \
                 the limit of open files (LimitNOFILE, ulimit -n)",
                self.what
            );
        }
        sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}

/// Returns whether the process or the machine lacks a resource that every connection needs.
fn is_lack(error: &io::Error) -> bool {
    let lacks = [Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM];
    error
        .raw_os_error()
        .map(Errno::from_raw)
        .is_some_and(|errno| lacks.contains(&errno))
}
