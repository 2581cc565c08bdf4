//! A port with a server. When the port is taken, the program tries again until it is free (G6).

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use tokio::net::TcpListener;

use super::{Answer, Guests, serve};

/// Pause between two attempts to open a port that is taken (G6).
pub const REBIND: Duration = Duration::from_secs(5);

/// Largest number of connections of one port.
const MAX_CONNECTIONS: usize = 64;

/// Returns the command that shows which program has a port, after a space; nothing for any other error.
#[must_use]
pub fn holder(error: &io::Error, address: SocketAddr) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            format!(
                " `ss -ltnp 'sport = :{}'` names the program;",
                address.port()
            )
        }
        _ => String::new(),
    }
}

/// The error for a port that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot listen on {address} for {what}: {source}; is another proxy (kube-proxy?) running on \
     this node?{} --{flag} chooses another address",
    holder(source, *address)
)]
pub struct BindError {
    /// The kind of content that would be served.
    what: &'static str,
    address: SocketAddr,
    /// The flag that chooses the address.
    flag: &'static str,
    /// The kernel's error.
    source: io::Error,
}

/// An address on which something is served.
#[derive(Clone, Copy, Debug)]
pub struct Port {
    /// The kind of content that is served, human-readable.
    pub what: &'static str,
    /// The flag that chooses the address, without dashes.
    pub flag: &'static str,
    /// The address; `[::]` takes IPv4 as well.
    pub address: SocketAddr,
}

impl Port {
    /// Opens the port.
    ///
    /// # Errors
    /// [`BindError`]: usually another program uses the port.
    pub async fn bind(&self) -> Result<TcpListener, BindError> {
        let listener = TcpListener::bind(self.address).await;
        listener.map_err(|source| BindError {
            what: self.what,
            address: self.address,
            flag: self.flag,
            source,
        })
    }

    /// Answers requests forever. Without a listener, the port is opened as soon as it is free.
    pub async fn serve<R>(self, mut listener: Option<TcpListener>, respond: R)
    where
        R: Fn(&Request<Incoming>) -> Answer + Clone + Send + Sync + 'static,
    {
        let guests = Guests::new(MAX_CONNECTIONS);
        loop {
            if let Some(listener) = listener.take() {
                serve(listener, &guests, respond.clone()).await;
            }
            tokio::time::sleep(REBIND).await;
            match self.bind().await {
                Ok(free) => {
                    tracing::info!(address = %self.address, "now listening for {}", self.what);
                    listener = Some(free);
                }
                Err(error) => tracing::debug!("{error}"),
            }
        }
    }
}
