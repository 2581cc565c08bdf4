//! The doors of the gRPC ports: how many connections there may be, and for how long one may be of no
//! use.
//!
//! A connection is **waiting** until it carries what the port is for: an agent that has said Hello, or a
//! request to the status API. Who waits too long is closed, whatever it does meanwhile: says nothing,
//! half of a preface, or a request without its first message; and so is a connection whose business is
//! over, though its peer does not read that. Of too many that wait the oldest goes, so that whoever
//! holds connections open shuts nobody out; a connection in use never goes for a newer one.

mod book;
mod connection;

#[cfg(test)]
mod tests;

pub use connection::{Connection, Occupancy, Occupied};

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::stream::{self, Stream};
use kplane_http::Acceptor;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

use self::book::{Book, Verdict};

/// A connection that waits for longer is closed. Longer than an agent may take for its Hello, so that
/// one that is too slow is told.
pub const PATIENCE: Duration = Duration::from_secs(15);

/// What was sent and is not acknowledged for so long ends a connection, also one that the process has
/// closed: the kernel forgets it then.
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);

/// A connection that has to go is waited for at most so long: its task has little to do.
const GOODBYE: Duration = Duration::from_secs(1);

/// Refusals are logged once in this time.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// Files that are not for agents: listeners, sources, the other ports.
const RESERVED_FILES: u64 = 400;

/// How many connections a port takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// In all.
    pub connections: usize,
    /// From one IPv4 address, or from one IPv6 network of 64 bits.
    pub per_address: usize,
    /// That wait, in all.
    pub waiting: usize,
    /// That wait, from one address.
    pub waiting_per_address: usize,
}

impl Limits {
    /// For agents: a fleet of 10,000 and as many that come anew, all of them from one address if they
    /// are behind a translation of addresses.
    pub const AGENTS: Self = Self {
        connections: 20_000,
        per_address: 12_000,
        waiting: 4_096,
        waiting_per_address: 1_024,
    };

    /// For the status API.
    pub const STATUS: Self = Self {
        connections: 256,
        per_address: 128,
        waiting: 64,
        waiting_per_address: 32,
    };

    /// Lowered to what a process may have that may open `files`.
    #[must_use]
    pub fn within(self, files: u64) -> Self {
        let room = files.saturating_sub(RESERVED_FILES).max(files / 4);
        let room = usize::try_from(room).unwrap_or(usize::MAX);
        Self {
            connections: self.connections.min(room),
            ..self
        }
    }
}

/// What happened at a door.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections now.
    pub open: usize,
    /// Those of them that wait.
    pub waiting: usize,
    /// Connections that were refused, since there were too many in use.
    pub refused: u64,
    /// Waiting connections that had to go for newer ones.
    pub displaced: u64,
    /// Connections that waited for too long.
    pub expired: u64,
    /// Connections that could not be accepted.
    pub failures: u64,
}

/// A door.
#[derive(Debug)]
pub struct Door {
    /// What comes through, for people.
    what: &'static str,
    limits: Limits,
    book: Mutex<Book>,
    said: Mutex<Option<Instant>>,
    refused: AtomicU64,
    displaced: AtomicU64,
    expired: AtomicU64,
    failures: AtomicU64,
}

impl Door {
    /// A door; `what` comes through it, for people.
    #[must_use]
    pub fn new(what: &'static str, limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            what,
            limits,
            book: Mutex::default(),
            said: Mutex::default(),
            refused: AtomicU64::new(0),
            displaced: AtomicU64::new(0),
            expired: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        })
    }

    /// What happened so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (open, waiting) = self.book().sizes();
        Counts {
            open,
            waiting,
            refused: read(&self.refused),
            displaced: read(&self.displaced),
            expired: read(&self.expired),
            failures: read(&self.failures),
        }
    }

    /// The connections that come to a listener and are let in. Never ends, never fails.
    pub fn incoming(
        self: &Arc<Self>,
        listener: TcpListener,
    ) -> impl Stream<Item = std::io::Result<Connection>> + Send + use<> {
        let acceptor = Acceptor::new(listener, self.what);
        let door = Arc::clone(self);
        stream::unfold((acceptor, door), |(mut acceptor, door)| async move {
            loop {
                let (stream, peer) = acceptor.accept(&door.failures).await;
                if let Some(connection) = door.admit(stream, peer).await {
                    return Some((Ok(connection), (acceptor, door)));
                }
            }
        })
    }

    async fn admit(self: &Arc<Self>, stream: TcpStream, peer: SocketAddr) -> Option<Connection> {
        let verdict = self.book().admit(peer.ip(), &self.limits);
        let number = match verdict {
            Verdict::Admitted(number) => number,
            Verdict::InsteadOf(oldest, number) => {
                self.displaced.fetch_add(1, Ordering::Relaxed);
                oldest.dismiss();
                // Else many would have descriptors that count no more.
                let _ = timeout(GOODBYE, oldest.gone()).await;
                number
            }
            Verdict::Refused(reason) => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                self.complain(peer, reason);
                return None;
            }
        };
        tune(&stream);
        let connection = Connection::new(stream, Occupancy::new(Arc::clone(self), number, peer));
        self.book().waits(number, connection.occupancy());
        Some(connection)
    }

    fn complain(&self, peer: SocketAddr, reason: &str) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.is_none_or(|said| said.elapsed() >= SAY_AGAIN) {
            *said = Some(Instant::now());
            let refused = self.refused.load(Ordering::Relaxed);
            warn!(%peer, refused, "a connection for {} is refused: {reason}", self.what);
        }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        // Entries are added and removed as a whole, so a panic elsewhere leaves the book usable.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Small messages go at once, and a peer that has vanished is noticed by the kernel.
fn tune(stream: &TcpStream) {
    let tuned = stream.set_nodelay(true);
    let socket = SockRef::from(stream);
    let tuned = tuned.and_then(|()| socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED)));
    if let Err(error) = tuned {
        debug!(%error, "a connection cannot be tuned");
    }
}
