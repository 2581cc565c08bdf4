//! The PEM files of a server and of a client, and the configurations that they make.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::ResolvesClientCert;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

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
    fn read(&self) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), FileError> {
        let chain = certificates(&read(&self.certificate)?, &self.certificate)?;
        let bytes = read(&self.key)?;
        let key = PrivateKeyDer::from_pem_slice(&bytes).map_err(|source| FileError::Pem {
            file: self.key.clone(),
            wanted: "private key",
            source,
        })?;
        Ok((chain, key))
    }

    fn mismatch(&self, source: rustls::Error) -> FileError {
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
        let all = own.into_iter().chain(&self.client_authorities);
        all.map(PathBuf::as_path).collect()
    }

    fn load(&self) -> Result<Arc<ServerConfig>, FileError> {
        let builder = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(FileError::Protocol)?;
        let builder = match &self.client_authorities {
            None => builder.with_no_client_auth(),
            Some(file) => {
                let roots = Arc::new(Authorities::read(file)?.roots()?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
                    .allow_unauthenticated()
                    .build();
                builder.with_client_cert_verifier(verifier.map_err(|source| {
                    FileError::Clients {
                        file: file.clone(),
                        source,
                    }
                })?)
            }
        };
        let (chain, key) = self.pair.read()?;
        let config = builder.with_single_cert(chain, key);
        let mut config = config.map_err(|source| self.pair.mismatch(source))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        Ok(Arc::new(config))
    }
}

/// The files of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientFiles {
    /// File of the authorities of servers. No other authority counts, not even those of the system.
    pub authorities: PathBuf,
    /// The client's own certificate and key, if it has one.
    pub pair: Option<KeyPair>,
}

impl ClientFiles {
    /// Returns the files that options name; `None` without authorities.
    #[must_use]
    pub fn of_options(
        authorities: Option<&PathBuf>,
        certificate: Option<&PathBuf>,
        key: Option<&PathBuf>,
    ) -> Option<Self> {
        let pair = certificate.cloned().zip(key.cloned());
        let pair = pair.map(|(certificate, key)| KeyPair { certificate, key });
        Some(Self {
            authorities: authorities?.clone(),
            pair,
        })
    }
}

impl Files for ClientFiles {
    type Config = ClientConfig;

    fn paths(&self) -> Vec<&Path> {
        let pair = self
            .pair
            .iter()
            .flat_map(|pair| [&pair.certificate, &pair.key]);
        let all = [&self.authorities].into_iter().chain(pair);
        all.map(PathBuf::as_path).collect()
    }

    fn load(&self) -> Result<Arc<ClientConfig>, FileError> {
        let identity = match &self.pair {
            None => Identity::Anonymous,
            Some(pair) => Identity::Pair(pair.clone()),
        };
        client_config(&Authorities::read(&self.authorities)?, &identity)
    }
}

/// The authorities that a peer's certificate may come from, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authorities {
    text: Vec<u8>,
    /// The place of the text, for errors: a file, or another name.
    origin: PathBuf,
}

impl Authorities {
    /// Reads a file.
    ///
    /// # Errors
    /// [`FileError`] when the file cannot be read or is too large.
    pub fn read(file: &Path) -> Result<Self, FileError> {
        Ok(Self {
            text: read(file)?,
            origin: file.to_owned(),
        })
    }

    /// Takes text that is not in a file. `origin` names its place in errors.
    pub fn of_text(text: impl Into<Vec<u8>>, origin: impl Into<PathBuf>) -> Self {
        Self {
            text: text.into(),
            origin: origin.into(),
        }
    }

    /// Returns the authorities; at least one.
    fn roots(&self) -> Result<RootCertStore, FileError> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.text, &self.origin)? {
            roots
                .add(certificate)
                .map_err(|source| FileError::Authority {
                    file: self.origin.clone(),
                    source,
                })?;
        }
        Ok(roots)
    }
}

/// The certificate by which a client proves its name.
#[derive(Clone, Debug)]
pub enum Identity {
    /// None.
    Anonymous,
    /// A certificate and its key in files.
    Pair(KeyPair),
    /// A certificate that another library has loaded.
    Loaded(Arc<dyn ResolvesClientCert>),
}

/// Returns a client's configuration. No other authority counts than the given ones, not even those of the system.
///
/// # Errors
/// [`FileError`] names the file or the origin of the text.
pub fn client_config(
    authorities: &Authorities,
    identity: &Identity,
) -> Result<Arc<ClientConfig>, FileError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(FileError::Protocol)?
        .with_root_certificates(authorities.roots()?);
    let mut config = match identity {
        Identity::Anonymous => builder.with_no_client_auth(),
        Identity::Pair(pair) => {
            let (chain, key) = pair.read()?;
            let config = builder.with_client_auth_cert(chain, key);
            config.map_err(|source| pair.mismatch(source))?
        }
        Identity::Loaded(resolver) => builder.with_client_cert_resolver(Arc::clone(resolver)),
    };
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Arc::new(config))
}

/// Returns the certificates of a text; at least one. `origin` names its place in errors.
fn certificates(text: &[u8], origin: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let found = found.map_err(|source| FileError::Pem {
        file: origin.to_owned(),
        wanted: "valid certificate",
        source,
    })?;
    if found.is_empty() {
        return Err(FileError::NoCertificate {
            file: origin.to_owned(),
        });
    }
    Ok(found)
}

/// Reads a file of limited size.
pub(crate) fn read(file: &Path) -> Result<Vec<u8>, FileError> {
    let failed = |source| FileError::Read {
        file: file.to_owned(),
        source,
    };
    let bytes = fs::metadata(file).map_err(failed)?.len();
    if bytes > MAX_BYTES {
        return Err(FileError::Large {
            file: file.to_owned(),
        });
    }
    fs::read(file).map_err(failed)
}
