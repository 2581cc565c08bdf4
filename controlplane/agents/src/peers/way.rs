//! The way to other replicas: names, connections, and the proof of being a replica.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, join_all};
use hyper_util::rt::TokioIo;
use kplane_proto::v1 as pb;
use kplane_proto::v1::peer_service_client::PeerServiceClient;
use kplane_tls::{ClientConfig, Follower, Wire, greet};
use kplane_util::dial::Dialer;
use parking_lot::Mutex;
use tokio::net::lookup_host;
use tokio::time::{Instant, timeout};
use tonic::transport::{Channel, Endpoint};

use super::config::{Config, ReplicaAddress};
use super::listed::Listed;

/// Maximum number of replicas that are asked; further ones are named as missing.
const MAX_REPLICAS: usize = 64;
/// Time for which the addresses of names count.
const FRESH: Duration = Duration::from_secs(5);
/// Maximum time to resolve a name. A question has a second for everything.
const RESOLVE: Duration = Duration::from_millis(500);
/// Largest message of a replica, in bytes: the status of a node with the largest report, which may be one text that
/// appears twice.
const MAX_MESSAGE: usize = 1 << 20;

/// Maximum number of bytes in flight on a connection: most answers, so that a distant replica needs few round trips.
const WINDOW: u32 = 4 << 20;

/// A client of another replica.
pub(super) type Client = PeerServiceClient<Channel>;

/// The configuration of TLS to other replicas, as soon as there is one.
pub type ClientTls = Shared<BoxFuture<'static, Option<Follower<ClientConfig>>>>;

/// The protection of connections to other replicas.
#[derive(Clone)]
pub enum PeerCover {
    /// Plain text.
    PlainText {
        /// Whether plain text is allowed to other machines.
        exposed: bool,
    },
    /// TLS, in which both sides prove that they are replicas.
    Tls {
        /// The configuration.
        config: ClientTls,
        /// Name that all certificates must have, in place of the host.
        server_name: Option<Arc<str>>,
    },
}

impl fmt::Debug for PeerCover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PlainText { .. } => "PlainText",
            Self::Tls { .. } => "Tls",
        })
    }
}

/// A replica that can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Target {
    pub(super) address: SocketAddr,
    /// The host that led to it.
    host: Arc<str>,
}

/// The way to all replicas.
#[derive(Debug)]
pub(super) struct Way {
    places: Vec<ReplicaAddress>,
    dialer: Dialer,
    cover: PeerCover,
    listed: Option<Listed>,
    found: tokio::sync::Mutex<Found>,
    channels: Mutex<HashMap<Target, Channel>>,
}

/// The addresses to which the places led when they were last resolved.
#[derive(Debug, Default)]
struct Found {
    at: Option<Instant>,
    /// The last known addresses of each place.
    targets: Vec<Vec<Target>>,
    missing: Vec<pb::MissingReplica>,
}

impl Way {
    pub(super) fn new(config: &Config, cover: PeerCover, listed: Option<Listed>) -> Self {
        Self {
            places: config.flags.peers.clone(),
            dialer: Dialer::new(config.mark),
            cover,
            listed,
            found: tokio::sync::Mutex::default(),
            channels: Mutex::default(),
        }
    }

    /// Returns the replicas, and the names without any address.
    pub(super) async fn targets(&self) -> (Vec<Target>, Vec<pb::MissingReplica>) {
        let mut found = self.found.lock().await;
        if found.at.is_none_or(|at| at.elapsed() >= FRESH) {
            self.resolve(&mut found).await;
            found.at = Some(Instant::now());
        }
        let mut targets: Vec<_> = found.targets.iter().flatten().cloned().collect();
        targets.sort();
        targets.dedup_by_key(|target| target.address);
        let mut missing = found.missing.clone();
        let more = targets.len().saturating_sub(MAX_REPLICAS);
        targets.truncate(MAX_REPLICAS);
        if more > 0 {
            missing.push(pb::MissingReplica {
                address: format!("{more} more"),
                reason: format!("a control plane asks {MAX_REPLICAS} replicas at most"),
            });
        }
        self.channels.lock().retain(|target, _| targets.contains(target));
        (targets, missing)
    }

    /// Resolves all addresses. A name that no longer resolves keeps its last addresses.
    async fn resolve(&self, found: &mut Found) {
        let places = self.places.iter();
        let answers = join_all(places.map(|place| self.resolve_one(place))).await;
        found.targets.resize(self.places.len(), Vec::new());
        found.missing.clear();
        let places = self.places.iter().zip(&mut found.targets);
        for ((place, known), answer) in places.zip(answers) {
            match answer {
                Ok(targets) if !targets.is_empty() => *known = targets,
                _ if !known.is_empty() => {}
                Ok(_) => found.missing.push(nowhere(place, "the name has no address")),
                Err(error) => found.missing.push(nowhere(place, &error.to_string())),
            }
        }
    }

    /// Returns the addresses of a place.
    async fn resolve_one(&self, place: &ReplicaAddress) -> io::Result<Vec<Target>> {
        let target = |ip: IpAddr| Target {
            address: SocketAddr::new(ip.to_canonical(), place.port()),
            host: Arc::clone(place.host()),
        };
        if let Ok(ip) = place.host().parse() {
            return Ok(vec![target(ip)]);
        }
        let listed = self.listed.as_ref().map(|listed| listed.of(place.host()));
        let mut ips = listed.unwrap_or_default();
        if ips.is_empty() {
            let found = timeout(RESOLVE, lookup_host((&**place.host(), place.port())))
                .await
                .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
            ips = found.map(|at| at.ip()).collect();
        }
        // One more than are asked, so that the rest is noticed.
        Ok(ips.into_iter().take(MAX_REPLICAS + 1).map(target).collect())
    }

    /// Returns a client of a replica, on the connection that is open or on a new one.
    pub(super) fn client(&self, target: &Target) -> Client {
        let mut channels = self.channels.lock();
        let channel = channels.entry(target.clone()).or_insert_with(|| {
            let (dialer, cover) = (self.dialer, self.cover.clone());
            let to = target.clone();
            let connector = tower::service_fn(move |_| {
                let connected = connect(dialer, cover.clone(), to.clone());
                connected.map(|wire| wire.map(TokioIo::new))
            });
            // The connector ignores the address.
            let endpoint = Endpoint::from_static("http://replica")
                .initial_stream_window_size(WINDOW)
                .initial_connection_window_size(WINDOW);
            endpoint.connect_with_connector_lazy(connector)
        });
        let client = PeerServiceClient::new(channel.clone());
        client.max_decoding_message_size(MAX_MESSAGE)
    }

    /// Returns the number of replicas with a connection.
    pub(super) fn known(&self) -> usize {
        self.channels.lock().len()
    }

    /// Forgets the connection to a replica, which may be dead.
    pub(super) fn hang_up(&self, target: &Target) {
        self.channels.lock().remove(target);
    }
}

/// Connects to a control plane.
async fn connect(dialer: Dialer, cover: PeerCover, to: Target) -> io::Result<Box<dyn Wire>> {
    let (config, name) = match cover {
        PeerCover::PlainText { exposed } => {
            if !exposed && !to.address.ip().is_loopback() {
                return Err(io::Error::other(
                    "it is on another machine, and this replica has no certificate; give --tls-cert-file, or --insecure",
                ));
            }
            (None, to.host)
        }
        PeerCover::Tls {
            config,
            server_name,
        } => {
            let follower = config
                .await
                .ok_or_else(|| io::Error::other("this replica has no certificate yet"))?;
            (Some(follower.current()), server_name.unwrap_or(to.host))
        }
    };
    let stream = dialer.connect(&[to.address]).await?;
    greet(stream, config, &name).await
}

fn nowhere(place: &ReplicaAddress, reason: &str) -> pb::MissingReplica {
    pb::MissingReplica {
        address: place.to_string(),
        reason: format!("cannot resolve its name: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tokio::sync::watch;

    use super::super::config::PeerFlags;
    use super::*;

    /// No DNS server of the cluster is asked for the control plane's own Service.
    #[tokio::test]
    async fn the_own_service_is_what_the_api_server_lists() {
        let service = "kplane-controlplane.kplane.svc";
        let places: BTreeSet<SocketAddr> = ["192.0.2.1:17443", "[2001:db8::1]:17443"]
            .map(|place| place.parse().unwrap())
            .into();
        let (sender, places) = watch::channel(places);
        let flags = PeerFlags {
            peers: vec![service.parse().unwrap()],
            ..PeerFlags::default()
        };
        let cover = PeerCover::PlainText { exposed: false };
        let listed = Listed::new(service, places);
        let way = Way::new(&flags.config(0), cover, Some(listed));
        let (targets, missing) = way.targets().await;
        let found: Vec<String> = targets.iter().map(|to| to.address.to_string()).collect();
        assert_eq!(found, ["192.0.2.1:7466", "[2001:db8::1]:7466"]);
        assert!(missing.is_empty() && targets.iter().all(|to| &*to.host == service));
        drop(sender);
    }
}
