//! The client's side of a handshake.

use std::io;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;

/// A stream in both directions.
pub trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Wire for S {}

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
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let name = ServerName::try_from(host.to_owned());
    let name = name.map_err(|error| io::Error::other(format!("{host:?}: {error}")))?;
    let secured = TlsConnector::from(config).connect(name, stream).await?;
    Ok(Box::new(secured))
}
