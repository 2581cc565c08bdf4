//! The production transport: gRPC over TCP, or over a channel of the caller.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use http::header::AUTHORIZATION;
use kp_controlplane::dial::{Dialer, literal, resolve};
use kplane_proto::v1::AgentMessage;
use kplane_proto::v1::agent_service_client::AgentServiceClient;
use kplane_tls::{ClientConfig, Follower, Token};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Request;
use tonic::transport::{Channel, Endpoint};

use super::transport::{Link, OUTBOX, OpenError, Presented, Transport};
use kplane_dataplane::chain;

/// Longest wait for a TCP connection to one address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval of HTTP/2 pings, and longest wait for an answer. They detect a dead peer in 15 s, below the
/// stream.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));

/// Most bytes in flight to an agent that does not read: two of the largest messages. Everything beyond
/// waits at the control plane, where newer state replaces older.
const WINDOW: u32 = 2 * 256 * 1024;

/// The location of a control plane.
#[derive(Clone, Debug)]
enum Target {
    /// A replica, connected anew each time: names are resolved again, and a dead connection is never
    /// reused.
    Remote(Box<Remote>),
    /// A control plane in the same process.
    Memory(Channel),
}

/// A replica of a control plane.
#[derive(Clone, Debug)]
struct Remote {
    endpoint: Endpoint,
    /// The addresses to which its name was last resolved; empty if not known.
    places: BTreeSet<SocketAddr>,
}

/// Receives the addresses of the control planes before each connection attempt.
type Peers = Box<dyn Fn(BTreeSet<SocketAddr>) + Send>;

/// gRPC to one of several control planes.
pub struct Grpc {
    targets: Vec<Target>,
    /// Index of the target in use.
    current: usize,
    dialer: Dialer,
    credentials: Credentials,
    peers: Peers,
}

/// The credentials of an agent, and the way to check those of a control plane.
#[derive(Clone, Debug, Default)]
pub struct Credentials {
    /// Configuration of connections; `None` = plain text.
    pub tls: Option<Follower<ClientConfig>>,
    /// Name that the control plane's certificate must have, in place of the host of its address.
    pub server_name: Option<Arc<str>>,
    /// The agent's token, if it has one.
    pub token: Option<Follower<Token>>,
}

impl Grpc {
    /// Creates a transport to replicas of a control plane, over kplane's own connections. Agents begin at a random replica, so that they spread. `peers` gets all known addresses before each attempt.
    #[must_use]
    pub fn remote(
        endpoints: Vec<Endpoint>,
        dialer: Dialer,
        credentials: Credentials,
        peers: impl Fn(BTreeSet<SocketAddr>) + Send + 'static,
    ) -> Self {
        let current = rand::random_range(0..endpoints.len().max(1));
        let tuned = endpoints.into_iter().map(|endpoint| {
            let endpoint = endpoint
                .connect_timeout(CONNECT_TIMEOUT)
                .http2_keep_alive_interval(KEEP_ALIVE.0)
                .keep_alive_timeout(KEEP_ALIVE.1)
                .keep_alive_while_idle(true)
                .initial_stream_window_size(WINDOW)
                .initial_connection_window_size(WINDOW)
                .tcp_nodelay(true);
            let ip = literal(endpoint.uri());
            let port = endpoint.uri().port_u16();
            let place = ip.zip(port).map(|(ip, port)| SocketAddr::new(ip, port));
            let places = place.into_iter().collect();
            Target::Remote(Box::new(Remote { endpoint, places }))
        });
        Self {
            targets: tuned.collect(),
            current,
            dialer,
            credentials,
            peers: Box::new(peers),
        }
    }

    /// Creates a transport to a control plane in the same process.
    #[must_use]
    pub fn memory(channel: Channel) -> Self {
        Self {
            targets: vec![Target::Memory(channel)],
            current: 0,
            dialer: Dialer::new(0),
            credentials: Credentials::default(),
            peers: Box::new(drop),
        }
    }

    /// Returns the known addresses of all control planes.
    fn places(&self) -> BTreeSet<SocketAddr> {
        let remotes = self.targets.iter().filter_map(|target| match target {
            Target::Remote(remote) => Some(&remote.places),
            Target::Memory(_) => None,
        });
        remotes.flatten().copied().collect()
    }

    /// Resolves the current target's name, and connects to it.
    async fn connect(&mut self) -> (String, Result<Channel, String>) {
        let tls = self.credentials.tls.as_ref().map(Follower::current);
        let dialer = self.dialer;
        let remote = match self.targets.get_mut(self.current) {
            None => {
                return (
                    String::new(),
                    Err("no control plane is configured".to_owned()),
                );
            }
            Some(Target::Memory(channel)) => {
                return ("this process".to_owned(), Ok(channel.clone()));
            }
            Some(Target::Remote(remote)) => remote,
        };
        let endpoint = remote.endpoint.clone();
        let address = endpoint.uri().to_string();
        let places = match resolve(endpoint.uri()).await {
            Ok(places) => places,
            Err(error) => return (address, Err(chain(&error))),
        };
        remote.places = places.iter().copied().collect();
        (self.peers)(self.places());
        let connected = endpoint
            .connect_with_connector(dialer.to(places, tls, self.credentials.server_name.clone()))
            .await;
        (address, connected.map_err(|error| chain(&error)))
    }
}

impl Transport for Grpc {
    async fn open(&mut self, hello: AgentMessage) -> Result<Link, OpenError> {
        let (address, channel) = self.connect().await;
        let channel = match channel {
            Ok(channel) => channel,
            Err(reason) => return Err(OpenError::Connect { address, reason }),
        };
        let (outbox, messages) = mpsc::channel(OUTBOX);
        // The channel has room, since nothing was sent before.
        let _ = outbox.try_send(hello);
        let mut request = Request::new(ReceiverStream::new(messages));
        let token = self.credentials.token.as_ref().map(Presented::of);
        let header = token.as_ref().map(|token| token.token().to_header());
        if let Some(Ok(header)) = header {
            let headers = request.metadata_mut().as_mut();
            headers.insert(AUTHORIZATION, header);
        }
        let answer = AgentServiceClient::new(channel).sync(request).await;
        match answer {
            Ok(stream) => Ok(Link {
                outbox,
                inbox: stream.into_inner().boxed(),
                token,
            }),
            Err(status) => Err(OpenError::Refused {
                address,
                status: Box::new(status),
            }),
        }
    }

    fn rotate(&mut self) {
        self.current = (self.current + 1) % self.targets.len().max(1);
    }
}
