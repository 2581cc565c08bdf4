//! The protection of the gRPC ports: plain text, or TLS with certificates from files or of the control plane's own.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use kplane_agents::authority::Authority;
use kplane_agents::connection_limits::ServerTls;
use kplane_agents::peers;
use kplane_desired_state::kubernetes::Api;
use kplane_tls::{FileError, Follower, ServerFiles, published};
use tokio::net::TcpListener;

use super::BuildError;

/// Protection of the ports of agents and of the status API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Plain text.
    PlainText {
        /// Whether plain text is allowed on addresses that other machines reach.
        exposed: bool,
    },
    /// TLS with certificates from files.
    Files(ServerFiles),
    /// TLS with certificates that the control plane makes and keeps in a Secret of the cluster.
    Own {
        /// Namespace of the Secret.
        namespace: String,
        /// File of further authorities of clients.
        client_ca: Option<PathBuf>,
        /// Interval at which the Secret is read again.
        interval: Duration,
    },
}

/// The protection of ports and connections, in use.
pub(super) struct Started {
    /// The configuration of TLS on the ports; `None` = plain text.
    pub(super) serving: Option<ServerTls>,
    /// The way to prove itself to other replicas.
    pub(super) peers: peers::PeerCover,
    /// The addresses of all replicas, where the API server lists them.
    pub(super) listed: Option<peers::Listed>,
    /// A task that keeps certificates of the control plane's own.
    pub(super) keeper: Option<BoxFuture<'static, ()>>,
}

impl Protection {
    /// Refuses plain text on an address that other machines reach.
    pub(super) fn check(
        &self,
        address: Option<SocketAddr>,
        purpose: &'static str,
    ) -> Result<(), BuildError> {
        if *self != (Self::PlainText { exposed: false }) {
            return Ok(());
        }
        match address.filter(is_exposed) {
            None => Ok(()),
            Some(address) => Err(BuildError::PlainText { address, purpose }),
        }
    }

    /// Returns the ports that other machines reach in plain text, human-readable.
    pub(super) fn plain_text<const N: usize>(
        &self,
        ports: [(&str, &Option<TcpListener>); N],
    ) -> Vec<String> {
        if !matches!(self, Self::PlainText { .. }) {
            return Vec::new();
        }
        ports
            .into_iter()
            .filter_map(|(what, listener)| {
                let address = listener.as_ref()?.local_addr().ok()?;
                is_exposed(&address).then(|| format!("{what} on {address}"))
            })
            .collect()
    }

    /// Returns whether clients may come with certificates.
    pub(super) fn takes_certificates(&self) -> bool {
        match self {
            Self::PlainText { .. } => false,
            Self::Files(files) => files.client_authorities.is_some(),
            Self::Own { .. } => true,
        }
    }

    /// Starts to follow the certificates.
    pub(super) fn start(
        self,
        api: Option<Arc<Api>>,
        peers: &peers::Config,
    ) -> Result<Started, BuildError> {
        let server_name = peers.flags.peer_server_name.as_deref().map(Arc::from);
        match self {
            Self::PlainText { exposed } => Ok(Started {
                serving: None,
                peers: peers::PeerCover::PlainText { exposed },
                listed: None,
                keeper: None,
            }),
            Self::Files(files) => {
                let peers = if peers.flags.peers.is_empty() {
                    peers::PeerCover::PlainText { exposed: false }
                } else {
                    let files = peers.files(&files).ok_or(BuildError::NoPeerAuthority)?;
                    let follower =
                        Follower::start(files, "other replicas").map_err(BuildError::Tls)?;
                    let config = std::future::ready(Some(follower)).boxed().shared();
                    peers::PeerCover::Tls {
                        config,
                        server_name,
                    }
                };
                let follower = Follower::start(files, "serving")
                    .map_err(|error: FileError| BuildError::Tls(error))?;
                let ready = std::future::ready(Some(follower));
                Ok(Started {
                    serving: Some(ready.boxed().shared()),
                    peers,
                    listed: None,
                    keeper: None,
                })
            }
            Self::Own {
                namespace,
                client_ca,
                interval,
            } => {
                let api = api.ok_or(BuildError::NoApi)?;
                let (publisher, first) = published();
                let (peer_publisher, peer_first) = published();
                let authority = Authority::new(api, &namespace, client_ca, interval);
                let service_name = authority.service_name().into();
                let listed = Some(authority.listed());
                Ok(Started {
                    serving: Some(first.map(Result::ok).boxed().shared()),
                    peers: peers::PeerCover::Tls {
                        config: peer_first.map(Result::ok).boxed().shared(),
                        server_name: Some(server_name.unwrap_or(service_name)),
                    },
                    listed,
                    keeper: Some(authority.keep(publisher, peer_publisher).boxed()),
                })
            }
        }
    }
}

/// Returns whether other machines reach an address.
pub(super) fn is_exposed(address: &SocketAddr) -> bool {
    !address.ip().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn plain_text_is_named_where_other_machines_reach_it() {
        let outside = Some(TcpListener::bind("0.0.0.0:0").await.unwrap());
        let inside = Some(TcpListener::bind("127.0.0.1:0").await.unwrap());
        let address = outside.as_ref().unwrap().local_addr().unwrap();
        let ports = [("agents", &outside), ("pages", &inside), ("none", &None)];
        let named = Protection::PlainText { exposed: true }.plain_text(ports);
        assert_eq!(named, [format!("agents on {address}")]);
        let own = Protection::Own {
            namespace: "kplane".to_owned(),
            client_ca: None,
            interval: Duration::MAX,
        };
        assert!(own.plain_text(ports).is_empty());
    }
}
