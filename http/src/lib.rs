//! A small HTTP server for health checks and metrics, made for hostile clients.
//!
//! Each connection carries one request, answered from memory, and ends after `CONNECTION` at the
//! latest. A group of servers limits its connections, in total and from one address. At the limit,
//! a new connection replaces the oldest one, so that clients that hold connections open cannot lock
//! out others.

// Bytes and texts from outside must not end the program.
#![deny(clippy::indexing_slicing)]

mod accept;
mod files;
mod port;

pub mod client;
pub mod metrics;
pub mod panics;

#[cfg(test)]
mod tests;

pub use accept::Acceptor;
pub use files::{file_limit, raise_file_limit};
use parking_lot::Mutex;
pub use port::{BindError, Port, REBIND, holder};

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::ready;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

/// Longest time that a client may take to send its request's head.
const HEAD: Duration = Duration::from_secs(5);

/// Longest life of a connection: from its beginning to the last byte of the answer.
const CONNECTION: Duration = Duration::from_secs(10);

/// Largest head of a request in bytes, which is also the least that hyper allows.
const MAX_HEAD_BYTES: usize = 8 * 1024;

/// Largest number of header fields of a request.
const MAX_HEADERS: usize = 64;

/// The response type of a server.
pub type Answer = Response<Full<Bytes>>;

/// Builds an answer. Its content type is final: browsers must not guess another one.
pub fn answer(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

/// Returns the answer for every path that is not served.
pub fn not_found() -> Answer {
    answer(StatusCode::NOT_FOUND, TEXT, "404 page not found\n")
}

/// Content type of plain text.
pub const TEXT: &str = "text/plain; charset=utf-8";

/// Content type of JSON.
pub const JSON: &str = "application/json";

/// The connections of a group of servers, oldest first.
#[derive(Debug)]
pub struct Guests {
    capacity: usize,
    connections: Mutex<VecDeque<(IpAddr, AbortHandle)>>,
    displaced: AtomicU64,
    failures: AtomicU64,
}

impl Guests {
    /// Creates a group with at most `capacity` connections at a time, and at most half of them from
    /// one address.
    pub fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self {
            capacity,
            connections: Mutex::default(),
            displaced: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        })
    }

    /// Returns the number of open connections.
    pub fn open(&self) -> usize {
        let mut connections = self.connections.lock();
        connections.retain(|(_, connection)| !connection.is_finished());
        connections.len()
    }

    /// Returns how many connections were closed to make room for newer ones.
    pub fn displaced(&self) -> u64 {
        self.displaced.load(Ordering::Relaxed)
    }

    /// Returns how many connections could not be accepted.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Makes room for one more connection and starts it.
    fn admit(&self, from: IpAddr, connection: impl Future<Output = ()> + Send + 'static) {
        let mut connections = self.connections.lock();
        // Below half of the capacity, no single address can exceed its half.
        if connections.len() >= self.capacity / 2 {
            connections.retain(|(_, connection)| !connection.is_finished());
            let its = connections.iter().filter(|(address, _)| *address == from);
            let oldest = if its.count() >= self.capacity.div_ceil(2) {
                connections.iter().position(|(address, _)| *address == from)
            } else {
                (connections.len() >= self.capacity).then_some(0)
            };
            if let Some((_, oldest)) = oldest.and_then(|at| connections.remove(at)) {
                self.displaced.fetch_add(1, Ordering::Relaxed);
                oldest.abort();
            }
        }
        connections.push_back((from, tokio::spawn(connection).abort_handle()));
    }
}

impl Drop for Guests {
    fn drop(&mut self) {
        let connections = self.connections.get_mut();
        connections.iter().for_each(|(_, one)| one.abort());
    }
}

/// Answers the requests that come to a listener, forever. Dropping the future closes the listener;
/// answers in progress are finished while the group of servers lives.
pub async fn serve<R>(listener: TcpListener, guests: &Guests, respond: R)
where
    R: Fn(&Request<Incoming>) -> Answer + Clone + Send + Sync + 'static,
{
    serve_inside(listener, guests, |stream| ready(Ok(stream)), respond).await;
}

/// Answers requests as [`serve`] does, inside what `greet` makes of a connection: a session of TLS.
pub async fn serve_inside<G, F, S, R>(listener: TcpListener, guests: &Guests, greet: G, respond: R)
where
    G: Fn(TcpStream) -> F,
    F: Future<Output = io::Result<S>> + Send + 'static,
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    R: Fn(&Request<Incoming>) -> Answer + Clone + Send + Sync + 'static,
{
    let mut acceptor = Acceptor::new(listener, "health checks and metrics");
    loop {
        let (stream, from) = acceptor.accept(&guests.failures).await;
        guests.admit(from.ip(), connection(greet(stream), respond.clone()));
    }
}

async fn connection<S, R>(greeted: impl Future<Output = io::Result<S>>, respond: R)
where
    S: AsyncRead + AsyncWrite + Unpin,
    R: Fn(&Request<Incoming>) -> Answer,
{
    let answered = async {
        let stream = greeted.await?;
        answer_one(stream, respond).await.map_err(io::Error::other)
    };
    match tokio::time::timeout(CONNECTION, answered).await {
        Ok(Ok(())) => {}
        // The client caused the failure, so a debug message is enough.
        Ok(Err(error)) => tracing::debug!(%error, "a client of the HTTP server"),
        Err(_) => tracing::debug!("a client of the HTTP server took too long"),
    }
}

/// Answers the one request of a connection.
async fn answer_one<S, R>(stream: S, respond: R) -> hyper::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
    R: Fn(&Request<Incoming>) -> Answer,
{
    let service = service_fn(move |request| {
        let answer = respond(&request);
        ready(Ok::<_, Infallible>(answer))
    });
    let mut protocol = http1::Builder::new();
    protocol
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(MAX_HEAD_BYTES)
        .max_headers(MAX_HEADERS)
        // Header names are written as Go writes them, for load balancers that compare bytes.
        .title_case_headers(true)
        .keep_alive(false);
    protocol.serve_connection(TokioIo::new(stream), service).await
}
