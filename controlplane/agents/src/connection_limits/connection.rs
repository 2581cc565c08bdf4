//! A connection that ends itself when it waits for too long.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::SystemTime;

use futures_util::task::AtomicWaker;
use kplane_tls::Subject;
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::transport::server::Connected;

use super::{ConnectionLimiter, PATIENCE};

/// A connection that a limiter admitted.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    /// Time at which it has waited for too long.
    deadline: Pin<Box<Sleep>>,
    /// The peer has sent something.
    spoken: bool,
    entry: Entry,
}

/// The state of a connection: waiting or in use. Requests on the connection carry it as an
/// extension.
#[derive(Clone, Debug)]
pub struct ConnectionGuard(Arc<Shared>);

/// The identity of a connection's peer, as far as the transport proves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransportIdentity {
    /// Nothing: the connection is plain text.
    PlainText,
    /// Nothing, inside TLS: the peer showed no certificate.
    Anonymous,
    /// The peer has the key of a certificate with this subject and this end, from an authority of clients.
    Certificate(Subject, Option<SystemTime>),
}

/// A use of a connection; ends when the value is dropped.
#[derive(Debug)]
pub struct Occupied(ConnectionGuard);

#[derive(Debug)]
struct Shared {
    limiter: Arc<ConnectionLimiter>,
    number: u64,
    peer: SocketAddr,
    /// Set before the first request. A connection for which nothing is recorded proves nothing.
    identity: OnceLock<TransportIdentity>,
    state: Mutex<State>,
    /// Waker of the task that reads and writes.
    task: AtomicWaker,
    /// Notifies that the descriptor has been given back.
    gone: Notify,
}

#[derive(Clone, Copy, Debug)]
struct State {
    uses: usize,
    /// One of the uses lasts as long as the connection.
    kept: bool,
    waiting_since: Instant,
    dismissed: bool,
}

// === impl Occupancy ===

impl ConnectionGuard {
    pub(super) fn new(limiter: Arc<ConnectionLimiter>, number: u64, peer: SocketAddr) -> Self {
        let state = State {
            uses: 0,
            kept: false,
            waiting_since: Instant::now(),
            dismissed: false,
        };
        Self(Arc::new(Shared {
            limiter,
            number,
            peer,
            identity: OnceLock::new(),
            state: Mutex::new(state),
            task: AtomicWaker::new(),
            gone: Notify::new(),
        }))
    }

    /// Creates the state of a connection that does not exist, for tests.
    pub fn of(identity: TransportIdentity) -> Self {
        let limiter = ConnectionLimiter::new("tests", super::Limits::STATUS);
        let guard = Self::new(limiter, 1, ([192, 0, 2, 1], 1).into());
        guard.identify(identity);
        guard
    }

    /// Returns the peer's address.
    pub fn peer(&self) -> SocketAddr {
        self.0.peer
    }

    /// Returns what the transport proves about the peer.
    pub fn identity(&self) -> &TransportIdentity {
        self.0.identity.get().unwrap_or(&TransportIdentity::Anonymous)
    }

    /// Records what the transport proves.
    pub(super) fn identify(&self, identity: TransportIdentity) {
        // This happens once for each connection.
        let _ = self.0.identity.set(identity);
    }

    /// Marks the connection as in use until the value is dropped; then it waits again.
    pub fn occupy(&self) -> Occupied {
        self.begin_use(&mut self.state());
        Occupied(self.clone())
    }

    /// Marks the connection as in use until its end, because it was useful once.
    pub fn keep(&self) {
        let mut state = self.state();
        if !std::mem::replace(&mut state.kept, true) {
            self.begin_use(&mut state);
        }
    }

    /// Registers a use. The state stays locked while the book changes, so that both change
    /// together.
    fn begin_use(&self, state: &mut State) {
        state.uses += 1;
        if state.uses == 1 {
            self.0.limiter.book().is_used(self.0.number);
        }
    }

    /// Ends the connection as soon as its task runs.
    pub(super) fn dismiss(&self) {
        self.state().dismissed = true;
        self.0.task.wake();
    }

    /// Waits until a dismissed connection has given its descriptor back.
    pub(super) async fn gone(&self) {
        self.0.gone.notified().await;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The fields are written one by one, so a panic elsewhere leaves them usable.
        self.0.state.lock()
    }
}

impl Drop for Occupied {
    fn drop(&mut self) {
        let shared = &self.0.0;
        let mut state = self.0.state();
        state.uses -= 1;
        if state.uses == 0 {
            state.waiting_since = Instant::now();
            shared.limiter.book().waits(shared.number, &self.0);
            drop(state);
            shared.task.wake();
        }
    }
}

// === impl Connection ===

impl Connection {
    pub(super) fn new(stream: TcpStream, guard: ConnectionGuard) -> Self {
        let deadline = sleep_until(guard.state().waiting_since + PATIENCE);
        Self {
            stream,
            deadline: Box::pin(deadline),
            spoken: false,
            entry: Entry(guard),
        }
    }

    pub(super) fn guard(&self) -> &ConnectionGuard {
        &self.entry.0
    }

    /// Fails once the connection has to end. Both reading and writing call this, because a peer may
    /// do only one of them.
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        self.guard().0.task.register(cx.waker());
        let state = *self.guard().state();
        if state.dismissed {
            return Err(io::Error::other(
                "closed to make room for a newer connection",
            ));
        }
        if state.uses > 0 {
            return Ok(());
        }
        let until = state.waiting_since + PATIENCE;
        if self.deadline.deadline() != until {
            self.deadline.as_mut().reset(until);
        }
        if self.deadline.as_mut().poll(cx).is_pending() {
            return Ok(());
        }
        let limiter = &self.guard().0.limiter;
        limiter.expired.fetch_add(1, Ordering::Relaxed);
        Err(io::ErrorKind::TimedOut.into())
    }
}

/// The entry in the limiter's book. It is dropped after the stream.
#[derive(Debug)]
struct Entry(ConnectionGuard);

impl Drop for Entry {
    fn drop(&mut self) {
        let shared = &self.0.0;
        shared.limiter.book().leave(shared.number);
        shared.gone.notify_one();
    }
}

impl Connected for Connection {
    type ConnectInfo = ConnectionGuard;

    fn connect_info(&self) -> ConnectionGuard {
        self.guard().clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(cx)?;
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if !self.spoken && buffer.filled().len() > before {
            self.spoken = true;
            let shared = &self.guard().0;
            shared.limiter.book().speaks(shared.number);
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
