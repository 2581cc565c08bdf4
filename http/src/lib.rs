//! A small HTTP server for health checks and metrics, made for hostile clients.
//!
//! One request a connection, answered from memory; every connection ends after `CONNECTION`;
//! the number of connections of a group of servers is bounded, in all and from one address, and when
//! there are too many the oldest one goes: whoever holds connections open shuts nobody out.

mod accept;
mod files;
mod port;

pub mod client;
pub mod metrics;

#[cfg(test)]
mod tests;

pub use accept::Acceptor;
pub use files::{file_limit, raise_file_limit};
pub use port::{BindError, Port, REBIND};

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

/// Longest that a client may take to send its request's head.
const HEAD: Duration = Duration::from_secs(5);

/// Longest life of a connection: from its beginning to the last byte of the answer.
const CONNECTION: Duration = Duration::from_secs(10);

/// Most bytes of a request's head, which is also the least that hyper allows.
const MAX_HEAD_BYTES: usize = 8 * 1024;

/// Most header fields of a request.
const MAX_HEADERS: usize = 64;

/// What a server answers.
pub type Answer = Response<Full<Bytes>>;

/// Builds an answer; its type is final, a browser guesses nothing.
pub fn answer(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

/// The answer to everything that is not served.
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
    /// At most `capacity` connections at a time, half of them from one address.
    pub fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self {
            capacity,
            connections: Mutex::default(),
            displaced: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        })
    }

    /// Connections at the moment.
    pub fn open(&self) -> usize {
        let mut connections = self.lock();
        connections.retain(|(_, connection)| !connection.is_finished());
        connections.len()
    }

    /// Connections that had to go for newer ones so far.
    pub fn displaced(&self) -> u64 {
        self.displaced.load(Ordering::Relaxed)
    }

    /// Connections that could not be accepted so far.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Makes room for one more and lets it in.
    fn admit(&self, from: IpAddr, connection: impl Future<Output = ()> + Send + 'static) {
        let mut connections = self.lock();
        // Less than half of all are no more than half from anywhere.
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

    fn lock(&self) -> MutexGuard<'_, VecDeque<(IpAddr, AbortHandle)>> {
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Guests {
    fn drop(&mut self) {
        let connections = self.connections.get_mut();
        let connections = connections.unwrap_or_else(PoisonError::into_inner);
        connections.iter().for_each(|(_, one)| one.abort());
    }
}

/// Answers the requests that come to a listener, for ever. Dropping the future closes the
/// listener; answers on their way are finished while the group of servers lives.
pub async fn serve<R>(listener: TcpListener, guests: &Guests, respond: R)
where
    R: Fn(&Request<Incoming>) -> Answer + Clone + Send + Sync + 'static,
{
    let mut acceptor = Acceptor::new(listener, "health checks and metrics");
    loop {
        let (stream, from) = acceptor.accept(&guests.failures).await;
        guests.admit(from.ip(), connection(stream, respond.clone()));
    }
}

async fn connection<R>(stream: TcpStream, respond: R)
where
    R: Fn(&Request<Incoming>) -> Answer + Send + 'static,
{
    let service = service_fn(move |request| {
        let answer = respond(&request);
        std::future::ready(Ok::<_, Infallible>(answer))
    });
    let mut protocol = http1::Builder::new();
    protocol
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(MAX_HEAD_BYTES)
        .max_headers(MAX_HEADERS)
        // Names as Go writes them, for load balancers that compare bytes.
        .title_case_headers(true)
        .keep_alive(false);
    let served = protocol.serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(CONNECTION, served).await {
        Ok(Ok(())) => {}
        // The client's problem, and not worth more than this.
        Ok(Err(error)) => tracing::debug!(%error, "a client of the HTTP server"),
        Err(_) => tracing::debug!("a client of the HTTP server took too long"),
    }
}
