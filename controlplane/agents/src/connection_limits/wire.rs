//! A connection in plain text or inside TLS, and the handshake between both.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use kplane_tls::{ServerConfig, Subject, ends_at, explain};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use super::{Connection, ConnectionGuard, ConnectionLimiter, TransportIdentity, network};

/// Maximum time of a handshake. A peer on a slow link needs less than a second.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// A connection that a limiter admitted, after the handshake if the port has TLS.
#[derive(Debug)]
pub enum Wire {
    /// Plain text.
    Plain(Connection),
    /// TLS 1.3.
    Tls(Box<TlsStream<Connection>>),
}

impl ConnectionLimiter {
    /// Performs a handshake. A failure ends the connection, and is counted and logged.
    pub(super) async fn handshake(
        self: Arc<Self>,
        connection: Connection,
        config: Arc<ServerConfig>,
    ) -> Option<Wire> {
        let guard = connection.guard().clone();
        let taken = {
            let mut turns = self.turns.lock();
            turns.take(network(guard.peer().ip()), 1)
        };
        // Refused at once: connections that waited would make room for newer ones before their turn comes.
        if taken.is_err() {
            self.handshakes.fetch_add(1, Ordering::Relaxed);
            self.complain(
                guard.peer(),
                "too many TLS handshakes from this address; see --max-handshakes-per-second",
            );
            return None;
        }
        let accepted = timeout(HANDSHAKE, TlsAcceptor::from(config).accept(connection))
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        let greeted = accepted.map_err(explain).and_then(|stream| {
            let identity = identity(&stream)?;
            guard.identify(identity);
            Ok(Wire::Tls(Box::new(stream)))
        });
        greeted
            .inspect_err(|error| {
                self.handshakes.fetch_add(1, Ordering::Relaxed);
                self.complain(guard.peer(), &format!("the TLS handshake failed: {error}"));
            })
            .ok()
    }
}

/// Returns what a handshake proved about the peer.
fn identity(stream: &TlsStream<Connection>) -> io::Result<TransportIdentity> {
    let (_, session) = stream.get_ref();
    let Some(certificate) = session.peer_certificates().and_then(<[_]>::first) else {
        return Ok(TransportIdentity::Anonymous);
    };
    match Subject::of(certificate) {
        Some(subject) => Ok(TransportIdentity::Certificate(
            subject,
            ends_at(certificate),
        )),
        None => Err(io::Error::other(
            "the certificate has no single common name (CN) in its subject",
        )),
    }
}

impl Connected for Wire {
    type ConnectInfo = ConnectionGuard;

    fn connect_info(&self) -> ConnectionGuard {
        match self {
            Self::Plain(connection) => connection.connect_info(),
            Self::Tls(stream) => stream.get_ref().0.connect_info(),
        }
    }
}

/// Calls a method of the stream inside.
macro_rules! inside {
    ($wire:expr, $method:ident($($argument:expr),*)) => {
        match $wire.get_mut() {
            Wire::Plain(stream) => Pin::new(stream).$method($($argument),*),
            Wire::Tls(stream) => Pin::new(&mut **stream).$method($($argument),*),
        }
    };
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        inside!(self, poll_read(cx, buffer))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        inside!(self, poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        inside!(self, poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        inside!(self, poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        inside!(self, poll_shutdown(cx))
    }
}
