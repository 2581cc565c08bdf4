//! TLS 1.3 between the parts of kplane: configurations from PEM files that may change, and the subject of a
//! peer's certificate.
//!
//! ```text
//! files --read, again every few seconds--> Follower --current()--> one handshake
//! peer's certificate --> Subject --> the node that it names
//! ```
//!
//! Streams that are open keep the configuration with which they began. All cryptography is ring's.

mod client;
mod connect;
mod explained;
mod files;
mod follow;
mod subject;
mod token;

#[cfg(test)]
mod tests;

pub use client::{Authorities, ClientFiles, Identity, client_config};
pub use connect::{Wire, bare, greet, is_this_machine};
pub use explained::explain;
pub use files::{FileError, Files, KeyPair, ServerFiles, ServerPems, der, read};
pub use follow::{Follower, INTERVAL, Publisher, published};
pub use subject::{Subject, ends_at};
pub use token::{Token, TokenFile};

pub use rustls::client::ResolvesClientCert;
pub use rustls::{ClientConfig, ServerConfig};

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

/// The protocol that both ends speak inside TLS: HTTP/2, as gRPC does (RFC 9113, section 3.2).
pub const ALPN: &[u8] = b"h2";

/// Returns the cryptography of every configuration.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}
