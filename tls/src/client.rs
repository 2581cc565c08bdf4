//! A client's configuration, from whatever place its parts come.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::{ResolvesClientCert, WantsClientCert};
use rustls::version::TLS13;
use rustls::{ClientConfig, ConfigBuilder};

use crate::files::{
    FileError, Files, KeyPair, ServerPems, authorities, certificates, private_key, read,
};
use crate::{ALPN, provider};

/// The authorities that a server's certificate may come from, in PEM.
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
    pub fn of_options(
        authorities: Option<&PathBuf>,
        certificate: Option<&PathBuf>,
        key: Option<&PathBuf>,
    ) -> Option<Self> {
        let pair = certificate
            .cloned()
            .zip(key.cloned())
            .map(|(certificate, key)| KeyPair { certificate, key });
        Some(Self {
            authorities: authorities?.clone(),
            pair,
        })
    }
}

impl Files for ClientFiles {
    type Config = ClientConfig;

    fn paths(&self) -> Vec<&Path> {
        let pair = self.pair.iter().flat_map(|pair| [&pair.certificate, &pair.key]);
        [&self.authorities].into_iter().chain(pair).map(PathBuf::as_path).collect()
    }

    fn load(&self) -> Result<Arc<ClientConfig>, FileError> {
        let identity = match &self.pair {
            None => Identity::Anonymous,
            Some(pair) => Identity::Pair(pair.clone()),
        };
        client_config(&Authorities::read(&self.authorities)?, &identity)
    }
}

impl ServerPems {
    /// Makes the configuration of connections on which the server itself is the client. No other authority counts than
    /// the given ones.
    ///
    /// # Errors
    /// [`FileError`] names the place.
    pub fn load_client(&self, trusted: &Authorities) -> Result<Arc<ClientConfig>, FileError> {
        let place = self.place.as_path();
        let (chain, key) = (
            certificates(place, &self.chain)?,
            private_key(place, &self.key)?,
        );
        let config = client(trusted)?.with_client_auth_cert(chain, key).map_err(|source| {
            FileError::Pair {
                certificate: place.to_owned(),
                key: place.to_owned(),
                source,
            }
        })?;
        Ok(with_client_protocol(config))
    }
}

/// Returns a client's configuration. No other authority counts than the given ones, not even those of the system.
///
/// # Errors
/// [`FileError`] names the file or the origin of the text.
pub fn client_config(
    trusted: &Authorities,
    identity: &Identity,
) -> Result<Arc<ClientConfig>, FileError> {
    let builder = client(trusted)?;
    let config = match identity {
        Identity::Anonymous => builder.with_no_client_auth(),
        Identity::Pair(pair) => {
            let (chain, key) = pair.read()?;
            let config = builder.with_client_auth_cert(chain, key);
            config.map_err(|source| pair.mismatch(source))?
        }
        Identity::Loaded(resolver) => builder.with_client_cert_resolver(Arc::clone(resolver)),
    };
    Ok(with_client_protocol(config))
}

/// Begins a client's configuration with the authorities of servers.
fn client(
    trusted: &Authorities,
) -> Result<ConfigBuilder<ClientConfig, WantsClientCert>, FileError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(FileError::Protocol)?;
    Ok(builder.with_root_certificates(authorities(&trusted.origin, &trusted.text)?))
}

fn with_client_protocol(mut config: ClientConfig) -> Arc<ClientConfig> {
    config.alpn_protocols = vec![ALPN.to_vec()];
    Arc::new(config)
}
