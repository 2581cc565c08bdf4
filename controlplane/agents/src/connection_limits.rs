//! The limiters of the gRPC ports: limits on the number of connections, and on the time that a
//! connection may be unused.
//!
//! A connection is **waiting** until it carries what the port is for: an agent's Hello, or a
//! request to the status API. A connection that waits too long is closed, whatever its peer does
//! meanwhile: send nothing, half of a preface, or a request without its first message. A connection
//! whose stream or request is over is closed as well, even if its peer does not read that. When too
//! many connections wait, the oldest whose peer has sent nothing is closed, so that clients that hold
//! connections open cannot lock out others. If all peers have sent something, the oldest is closed
//! once it had some seconds; until then new connections are refused, and their peers try again. A
//! connection in use is never closed for a newer one.

mod book;
mod connection;
mod wire;

#[cfg(test)]
mod tests;

pub use connection::{Connection, ConnectionGuard, Occupied, TransportIdentity};
use parking_lot::{Mutex, MutexGuard};
pub use wire::Wire;

pub(crate) use book::network;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::{BoxFuture, Shared};
use futures_util::stream::{self, Stream, StreamExt as _};
use kplane_http::Acceptor;
use kplane_tls::{Follower, ServerConfig};
use kplane_util::buckets::{Buckets, Rate};
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

use self::book::{Book, Verdict};
use crate::snapshots::PER_SECOND;

/// The configuration of TLS as soon as there is one.
pub type ServerTls = Shared<BoxFuture<'static, Option<Follower<ServerConfig>>>>;

/// Maximum time that a connection may wait. It is longer than the time that an agent may take for
/// its Hello, so that an agent that is too slow gets an answer.
pub const PATIENCE: Duration = Duration::from_secs(15);

/// Time without acknowledgement of sent data after which a connection ends. This holds also for a
/// connection that the process has closed: the kernel forgets it then.
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);

/// Maximum time to wait for the end of a closed connection: its task has little to do.
const GOODBYE: Duration = Duration::from_secs(1);

/// Minimum time between two log lines about refusals.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// Most addresses whose handshakes are counted; further ones share theirs.
const MAX_ADDRESSES: usize = 65_536;

/// Number of files that are not for agents: listeners, sources, the other ports.
const RESERVED_FILES: u64 = 400;

/// Limits on the number of connections of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of connections.
    pub connections: usize,
    /// Maximum number from one IPv4 address, or from one IPv6 network of 64 bits.
    pub per_address: usize,
    /// Maximum number that wait.
    pub waiting: usize,
    /// Maximum number that wait from one address.
    pub waiting_per_address: usize,
    /// Maximum number of TLS handshakes a second from one address. Further ones are closed at once.
    pub handshakes_per_second: u32,
    /// Maximum number of snapshots that begin a second, for all addresses together.
    pub snapshots_per_second: u32,
}

impl Limits {
    /// Limits for agents: a fleet of 10,000 and as many that connect anew, all from one address if
    /// they are behind network address translation.
    pub const AGENTS: Self = Self {
        connections: 20_000,
        per_address: 12_000,
        waiting: 4_096,
        waiting_per_address: 1_024,
        handshakes_per_second: 1_000,
        snapshots_per_second: PER_SECOND,
    };

    /// Limits for the status API.
    pub const STATUS: Self = Self {
        connections: 256,
        per_address: 128,
        waiting: 64,
        waiting_per_address: 32,
        handshakes_per_second: 50,
        snapshots_per_second: PER_SECOND,
    };

    /// Returns the rate of handshakes from one address: those of some seconds may come at once.
    fn handshakes(&self) -> Rate {
        let a_second = self.handshakes_per_second.max(1);
        Rate {
            burst: a_second.saturating_mul(4),
            refill: Duration::from_secs(1) / a_second,
        }
    }

    /// Lowers the limits for a process that may open `files` files.
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

/// Counters of a limiter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Current number of connections.
    pub open: usize,
    /// Current number of connections that wait.
    pub waiting: usize,
    /// Connections that were refused because too many were in use.
    pub refused: u64,
    /// Waiting connections that were closed for newer ones.
    pub displaced: u64,
    /// Connections that waited for too long.
    pub expired: u64,
    /// Connections that could not be accepted.
    pub failures: u64,
    /// TLS handshakes that failed.
    pub handshakes: u64,
}

/// The protection of a port at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cover {
    /// No listener.
    #[default]
    Closed,
    /// Connections wait until there are certificates.
    Waiting,
    /// Connections are in plain text.
    PlainText,
    /// Connections are inside TLS.
    Tls,
}

impl std::fmt::Display for Cover {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Closed => "closed",
            Self::Waiting => "waiting for certificates; see the log",
            Self::PlainText => {
                "plain text: any machine that reaches the port can pose as any node or user"
            }
            Self::Tls => "TLS",
        })
    }
}

/// The admission of connections at one port.
#[derive(Debug)]
pub struct ConnectionLimiter {
    /// The kind of connections, human-readable.
    what: &'static str,
    limits: Limits,
    book: Mutex<Book>,
    said: Mutex<Option<Instant>>,
    cover: Mutex<Cover>,
    refused: AtomicU64,
    displaced: AtomicU64,
    expired: AtomicU64,
    failures: AtomicU64,
    handshakes: AtomicU64,
    /// Handshakes that addresses may still begin.
    turns: Mutex<Buckets<IpAddr>>,
}

impl ConnectionLimiter {
    /// Creates a limiter; `what` names the kind of connections, human-readable.
    pub fn new(what: &'static str, limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            what,
            limits,
            book: Mutex::default(),
            said: Mutex::default(),
            cover: Mutex::default(),
            refused: AtomicU64::new(0),
            displaced: AtomicU64::new(0),
            expired: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            handshakes: AtomicU64::new(0),
            turns: Mutex::new(Buckets::new(limits.handshakes(), MAX_ADDRESSES)),
        })
    }

    /// Returns the kind of connections, human-readable.
    pub fn what(&self) -> &'static str {
        self.what
    }

    /// Returns the protection at the moment.
    pub fn cover(&self) -> Cover {
        *self.cover.lock()
    }

    /// Records the protection.
    pub fn set_cover(&self, cover: Cover) {
        *self.cover.lock() = cover;
    }

    /// Returns the counters.
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
            handshakes: read(&self.handshakes),
        }
    }

    /// Returns the admitted connections of a listener, as a stream that never ends and never fails. With `tls`,
    /// a connection comes after its handshake. Handshakes do not wait for each other; connections that are not
    /// through with theirs are waiting ones, so their number is limited.
    pub fn incoming(
        self: &Arc<Self>,
        listener: TcpListener,
        tls: Option<Follower<ServerConfig>>,
    ) -> impl Stream<Item = std::io::Result<Wire>> + Send + use<> {
        self.set_cover(match tls {
            Some(_) => Cover::Tls,
            None => Cover::PlainText,
        });
        let limiter = Arc::clone(self);
        let greeted = self
            .admitted(listener)
            .map(move |connection| {
                let (limiter, config) = (Arc::clone(&limiter), tls.as_ref().map(Follower::current));
                async move {
                    match config {
                        None => {
                            connection.guard().identify(TransportIdentity::PlainText);
                            Some(Wire::Plain(connection))
                        }
                        Some(config) => {
                            // A panic has been printed already; it ends one connection.
                            let greeted = tokio::spawn(limiter.handshake(connection, config));
                            greeted.await.ok().flatten()
                        }
                    }
                }
            })
            .buffer_unordered(self.limits.waiting.max(1));
        greeted.filter_map(|wire| std::future::ready(wire.map(Ok)))
    }

    fn admitted(
        self: &Arc<Self>,
        listener: TcpListener,
    ) -> impl Stream<Item = Connection> + Send + use<> {
        let acceptor = Acceptor::new(listener, self.what);
        let limiter = Arc::clone(self);
        stream::unfold((acceptor, limiter), |(mut acceptor, limiter)| async move {
            loop {
                let (stream, peer) = acceptor.accept(&limiter.failures).await;
                if let Some(connection) = limiter.admit(stream, peer).await {
                    return Some((connection, (acceptor, limiter)));
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
                // Without this wait, descriptors that no longer count could accumulate.
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
        let connection =
            Connection::new(stream, ConnectionGuard::new(Arc::clone(self), number, peer));
        self.book().waits(number, connection.guard());
        Some(connection)
    }

    fn complain(&self, peer: SocketAddr, reason: &str) {
        let mut said = self.said.lock();
        if said.is_none_or(|said| said.elapsed() >= SAY_AGAIN) {
            *said = Some(Instant::now());
            let refused = self.refused.load(Ordering::Relaxed);
            warn!(%peer, refused, "refused a connection for {}: {reason}", self.what);
        }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        // Entries are added and removed as a whole, so a panic elsewhere leaves the book usable.
        self.book.lock()
    }
}

/// Makes the kernel send small messages at once and detect a peer that has vanished.
fn tune(stream: &TcpStream) {
    let tuned = stream.set_nodelay(true);
    let socket = SockRef::from(stream);
    let tuned = tuned.and_then(|()| socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED)));
    if let Err(error) = tuned {
        debug!(%error, "cannot set the options of a connection");
    }
}
