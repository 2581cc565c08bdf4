//! The flags about other replicas, and what they mean.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use clap::Args;
use http::Uri;
use kplane_tls::{ClientFiles, KeyPair, ServerFiles, bare};

/// Port of the status API, where a place names none.
const STATUS_PORT: u16 = 7466;

/// Flags about other replicas.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Other replicas")]
pub struct PeerFlags {
    /// Replicas of this control plane, separated by commas: addresses of their status ports, or a name with all these
    /// addresses, such as that of a headless Service. This replica may be among them. Whichever replica kpctl asks then
    /// answers for all agents.
    #[arg(long, value_name = "HOST[:PORT]", value_delimiter = ',')]
    pub peers: Vec<ReplicaAddress>,

    /// Name that the certificates of the other replicas must have [default: the host in --peers; with certificates of the
    /// control plane's own, kplane-controlplane.NAMESPACE.svc].
    #[arg(long, value_name = "NAME", requires = "peers")]
    pub peer_server_name: Option<String>,

    /// Authorities that issue the certificates of the other replicas [default: --client-ca-file].
    #[arg(long, value_name = "FILE", requires = "peers")]
    pub peer_certificate_authority: Option<PathBuf>,

    /// Certificate by which this replica proves to the others that it is one (O=kplane:controlplanes) [default:
    /// --tls-cert-file].
    #[arg(
        long,
        value_name = "FILE",
        requires = "peers",
        requires = "peer_client_key"
    )]
    pub peer_client_certificate: Option<PathBuf>,

    /// Private key of --peer-client-certificate.
    #[arg(long, value_name = "FILE", requires = "peer_client_certificate")]
    pub peer_client_key: Option<PathBuf>,
}

impl PeerFlags {
    /// Returns the configuration, with the packet mark of the connections; 0 = none.
    pub fn config(self, mark: u32) -> Config {
        Config { flags: self, mark }
    }
}

/// The place of one replica, or of several: a host and the port of the status API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaAddress {
    /// A name or an address, without brackets.
    host: Arc<str>,
    port: u16,
}

impl ReplicaAddress {
    /// Returns the host, without brackets.
    pub(super) fn host(&self) -> &Arc<str> {
        &self.host
    }

    /// Returns the port of the status API.
    pub(super) fn port(&self) -> u16 {
        self.port
    }
}

impl fmt::Display for ReplicaAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl FromStr for ReplicaAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "expected HOST, HOST:PORT or [IPv6]:PORT".to_owned();
        let uri: Uri = format!("http://{text}/").parse().map_err(|_| wrong())?;
        let is_plain = uri.path() == "/" && uri.query().is_none() && !text.contains(['@', '/']);
        let host = uri.host().filter(|host| is_plain && !host.is_empty());
        let has_colon = host.is_some_and(|host| text.len() > host.len());
        if has_colon && uri.port_u16().is_none() {
            return Err(wrong());
        }
        Ok(Self {
            host: bare(host.ok_or_else(wrong)?).into(),
            port: uri.port_u16().unwrap_or(STATUS_PORT),
        })
    }
}

/// Configuration of the questions to other replicas.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// The flags.
    pub flags: PeerFlags,
    /// Packet mark of the connections; 0 = none.
    pub mark: u32,
}

impl Config {
    /// Returns the files of the connections to other replicas, where the control plane's own certificate is in files;
    /// `None` without authorities.
    pub fn files(&self, own: &ServerFiles) -> Option<ClientFiles> {
        let flags = &self.flags;
        let authorities = flags.peer_certificate_authority.clone();
        let pair = flags
            .peer_client_certificate
            .clone()
            .zip(flags.peer_client_key.clone())
            .map(|(certificate, key)| KeyPair { certificate, key });
        Some(ClientFiles {
            authorities: authorities.or_else(|| own.client_authorities.clone())?,
            pair: Some(pair.unwrap_or_else(|| own.pair.clone())),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places() {
        for (text, place) in [
            ("10.0.0.1", Some("10.0.0.1:7466")),
            ("10.0.0.1:70", Some("10.0.0.1:70")),
            ("[::1]:70", Some("[::1]:70")),
            ("[::1]", Some("[::1]:7466")),
            ("plane.kplane.svc:7466", Some("plane.kplane.svc:7466")),
            ("", None),
            ("::1", None),
            ("a:", None),
            ("a:b", None),
            ("a:70000", None),
            ("https://a:70", None),
            ("a/b", None),
            ("me@a", None),
        ] {
            let parsed = text.parse::<ReplicaAddress>().ok().map(|place| place.to_string());
            assert_eq!(parsed.as_deref(), place, "{text}");
        }
    }
}
