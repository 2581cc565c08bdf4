//! Taking connections from a listener when the process runs out of files.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep};

/// First pause when there are no resources for a connection; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The same trouble is logged again after this time.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// Takes connections. Without files or memory for one it pauses, says so once a minute, and counts:
/// connections wait in the kernel's queue meanwhile.
#[derive(Debug)]
pub struct Acceptor {
    listener: TcpListener,
    what: &'static str,
    pause: Duration,
    said: Option<Instant>,
}

impl Acceptor {
    /// Takes connections from a listener; `what` comes through them, for people.
    pub fn new(listener: TcpListener, what: &'static str) -> Self {
        Self {
            listener,
            what,
            pause: FIRST_PAUSE,
            said: None,
        }
    }

    /// The next connection, and where it comes from. Counts every failure in `failures`.
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
            // The connection's own trouble, such as a client that has gone.
            tracing::debug!(%error, "a connection for {} could not be accepted", self.what);
            return tokio::task::yield_now().await;
        }
        if self.said.is_none_or(|said| said.elapsed() >= SAY_AGAIN) {
            self.said = Some(Instant::now());
            tracing::error!(
                %error,
                "cannot accept connections for {}: they wait until others have ended; raise the limit \
                 of open files (LimitNOFILE, ulimit -n)?",
                self.what
            );
        }
        sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}

/// Whether the process or the machine lacks what any connection takes.
fn is_lack(error: &io::Error) -> bool {
    let lacks = [Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM];
    let number = error.raw_os_error().map(Errno::from_raw);
    number.is_some_and(|errno| lacks.contains(&errno))
}
