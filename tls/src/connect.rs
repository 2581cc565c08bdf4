//! The client's side of a handshake.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;

use crate::explained::{Explained, explain, validity};

/// A stream in both directions.
pub trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Wire for S {}

/// Returns a URL's host without the brackets of an IPv6 address.
pub fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

/// Returns whether a URL's host is this machine, so that plain text to it leaves no machine.
pub fn is_this_machine(host: &str) -> bool {
    let ip = bare(host).parse::<IpAddr>();
    host == "localhost" || ip.is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// Returns the stream itself without a configuration, or else TLS inside it. `host` is the server's name or IP
/// address, in brackets or not, and must be in the server's certificate.
///
/// # Errors
/// The handshake failed; the text names the reason.
pub async fn greet(
    stream: impl Wire + 'static,
    config: Option<Arc<ClientConfig>>,
    host: &str,
) -> io::Result<Box<dyn Wire>> {
    let Some(config) = config else {
        return Ok(Box::new(stream));
    };
    let host = bare(host);
    let name = ServerName::try_from(host.to_owned())
        .map_err(|error| io::Error::other(format!("{host:?}: {error}")))?;
    let own = validity(&*config.client_auth_cert_resolver);
    let secured = TlsConnector::from(config).connect(name, stream).await;
    let stream = secured.map_err(explain)?;
    Ok(Box::new(Explained { stream, own }))
}
