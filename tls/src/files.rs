//! The PEM files of a server and of a client, and the configurations that they make.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{VerifierBuilderError, WantsServerCert, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ConfigBuilder, RootCertStore, ServerConfig};

use crate::subject::ends_at;
use crate::{ALPN, provider};

/// Most bytes of a file. A bundle of a hundred authorities has a tenth of that.
const MAX_BYTES: u64 = 4 << 20;

/// A file that cannot be used. The text names the file and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is larger than any real one.
    #[error("{} is larger than {MAX_BYTES} bytes: is it a PEM file?", file.display())]
    Large {
        /// The file.
        file: PathBuf,
    },
    /// The file does not contain what it should.
    #[error("{} contains no {wanted}: {source}", file.display())]
    Pem {
        /// The file.
        file: PathBuf,
        /// The missing part.
        wanted: &'static str,
        /// The parser's error.
        source: pem::Error,
    },
    /// The file contains no certificate at all.
    #[error("{} contains no certificate (-----BEGIN CERTIFICATE-----)", file.display())]
    NoCertificate {
        /// The file.
        file: PathBuf,
    },
    /// A certificate of an authority is invalid.
    #[error("{} contains an authority that cannot be used: {source}", file.display())]
    Authority {
        /// The file.
        file: PathBuf,
        /// The library's error.
        source: rustls::Error,
    },
    /// The certificate and the key do not belong together, or have an unsupported kind.
    #[error("cannot use certificate {} with key {}: {source}", certificate.display(), key.display())]
    Pair {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the key.
        key: PathBuf,
        /// The library's error.
        source: rustls::Error,
    },
    /// Clients cannot be checked against the authorities.
    #[error("cannot check clients against {}: {source}", file.display())]
    Clients {
        /// The file of the authorities.
        file: PathBuf,
        /// The library's error.
        source: VerifierBuilderError,
    },
    /// The file contains something else than it should.
    #[error("{}: {reason}", file.display())]
    Content {
        /// The file.
        file: PathBuf,
        /// The problem, and what to do about it. Never a part of the file.
        reason: String,
    },
    /// This build lacks TLS 1.3, which is a bug.
    #[error("cannot set up TLS 1.3: {0}")]
    Protocol(rustls::Error),
}

/// Files that make a configuration.
pub trait Files: Clone + Send + 'static {
    /// The configuration.
    type Config: Send + Sync + 'static;

    /// Returns the files.
    fn paths(&self) -> Vec<&Path>;

    /// Reads the files.
    ///
    /// # Errors
    /// [`FileError`] names the file.
    fn load(&self) -> Result<Arc<Self::Config>, FileError>;

    /// Returns the time at which the certificate in the files ends. `None` if they have none, or it cannot be read.
    fn ends_at(&self) -> Option<SystemTime> {
        None
    }
}

/// A certificate with its chain, and the key of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPair {
    /// File of the certificate, followed by the certificates of its issuers, if there are any in between.
    pub certificate: PathBuf,
    /// File of the private key.
    pub key: PathBuf,
}

impl KeyPair {
    /// Returns the files `NAME.crt` and `NAME.key` of a folder.
    pub fn in_folder(folder: &Path, name: &str) -> Self {
        Self {
            certificate: folder.join(format!("{name}.crt")),
            key: folder.join(format!("{name}.key")),
        }
    }

    pub(crate) fn read(
        &self,
    ) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), FileError> {
        let chain = certificates(&self.certificate, &read(&self.certificate)?)?;
        let key = private_key(&self.key, &read(&self.key)?)?;
        Ok((chain, key))
    }

    pub(crate) fn mismatch(&self, source: rustls::Error) -> FileError {
        FileError::Pair {
            certificate: self.certificate.clone(),
            key: self.key.clone(),
            source,
        }
    }
}

/// The files of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerFiles {
    /// The server's own certificate and key.
    pub pair: KeyPair,
    /// File of the authorities of clients. Clients may come without a certificate; a certificate of another
    /// authority ends the handshake. `None` asks clients for no certificate.
    pub client_authorities: Option<PathBuf>,
}

impl Files for ServerFiles {
    type Config = ServerConfig;

    fn paths(&self) -> Vec<&Path> {
        let own = [&self.pair.certificate, &self.pair.key];
        own.into_iter().chain(&self.client_authorities).map(PathBuf::as_path).collect()
    }

    fn load(&self) -> Result<Arc<ServerConfig>, FileError> {
        let clients = match &self.client_authorities {
            None => None,
            Some(file) => Some((file.as_path(), authorities(file, &read(file)?)?)),
        };
        let (chain, key) = self.pair.read()?;
        let config = server(clients)?
            .with_single_cert(chain, key)
            .map_err(|source| self.pair.mismatch(source))?;
        Ok(with_protocol(config))
    }

    fn ends_at(&self) -> Option<SystemTime> {
        let file = &self.pair.certificate;
        let chain = certificates(file, &read(file).ok()?).ok()?;
        ends_at(chain.first()?)
    }
}

/// A server's certificates and keys that are in no file.
#[derive(Debug)]
pub struct ServerPems {
    /// The place from which they come, for errors.
    pub place: PathBuf,
    /// The server's certificate, followed by those of its issuers in between.
    pub chain: Vec<u8>,
    /// The private key of it.
    pub key: Vec<u8>,
    /// The authorities of clients; empty = clients are asked for no certificate.
    pub client_authorities: Vec<u8>,
}

impl ServerPems {
    /// Returns the time at which the certificate ends. `None` if it cannot be read.
    pub fn ends_at(&self) -> Option<SystemTime> {
        let chain = certificates(&self.place, &self.chain).ok()?;
        ends_at(chain.first()?)
    }

    /// Makes the configuration.
    ///
    /// # Errors
    /// [`FileError`] names the place.
    pub fn load(&self) -> Result<Arc<ServerConfig>, FileError> {
        let place = self.place.as_path();
        let clients = if self.client_authorities.is_empty() {
            None
        } else {
            Some((place, authorities(place, &self.client_authorities)?))
        };
        let chain = certificates(place, &self.chain)?;
        let key = private_key(place, &self.key)?;
        let config =
            server(clients)?
                .with_single_cert(chain, key)
                .map_err(|source| FileError::Pair {
                    certificate: place.to_owned(),
                    key: place.to_owned(),
                    source,
                })?;
        Ok(with_protocol(config))
    }
}

/// Returns the bytes in DER of the first certificate in PEM.
pub fn der(certificate: &str) -> Option<Vec<u8>> {
    let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).ok()?;
    Some(certificate.to_vec())
}

/// Begins a server's configuration with the authorities of clients.
fn server(
    clients: Option<(&Path, RootCertStore)>,
) -> Result<ConfigBuilder<ServerConfig, WantsServerCert>, FileError> {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(FileError::Protocol)?;
    let Some((file, roots)) = clients else {
        return Ok(builder.with_no_client_auth());
    };
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider())
        .allow_unauthenticated()
        .build()
        .map_err(|source| FileError::Clients {
            file: file.to_owned(),
            source,
        })?;
    Ok(builder.with_client_cert_verifier(verifier))
}

fn with_protocol(mut config: ServerConfig) -> Arc<ServerConfig> {
    config.alpn_protocols = vec![ALPN.to_vec()];
    Arc::new(config)
}

/// Returns the authorities in PEM; at least one. `file` is for errors.
pub(crate) fn authorities(file: &Path, bytes: &[u8]) -> Result<RootCertStore, FileError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(file, bytes)? {
        roots.add(certificate).map_err(|source| FileError::Authority {
            file: file.to_owned(),
            source,
        })?;
    }
    Ok(roots)
}

/// Returns the certificates in PEM; at least one. `file` is for errors.
pub(crate) fn certificates(
    file: &Path,
    bytes: &[u8],
) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(bytes).collect();
    let found = found.map_err(|source| FileError::Pem {
        file: file.to_owned(),
        wanted: "valid certificate",
        source,
    })?;
    if found.is_empty() {
        return Err(FileError::NoCertificate {
            file: file.to_owned(),
        });
    }
    Ok(found)
}

/// Returns the private key in PEM. `file` is for errors.
pub(crate) fn private_key(file: &Path, bytes: &[u8]) -> Result<PrivateKeyDer<'static>, FileError> {
    PrivateKeyDer::from_pem_slice(bytes).map_err(|source| FileError::Pem {
        file: file.to_owned(),
        wanted: "private key",
        source,
    })
}

/// Reads a file of limited size.
///
/// # Errors
/// [`FileError::Read`] and [`FileError::Large`].
pub fn read(file: &Path) -> Result<Vec<u8>, FileError> {
    let failed = |source| FileError::Read {
        file: file.to_owned(),
        source,
    };
    let mut bytes = Vec::new();
    // A device or a pipe has no size.
    let mut limited = fs::File::open(file).map_err(failed)?.take(MAX_BYTES + 1);
    limited.read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(FileError::Large {
            file: file.to_owned(),
        });
    }
    Ok(bytes)
}
