//! The transport for use: gRPC over TCP, or over a channel that somebody made.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::StreamExt;
use kp_controlplane::dial::{Dialer, literal, resolve};
use kplane_proto::v1::AgentMessage;
use kplane_proto::v1::agent_service_client::AgentServiceClient;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};

use super::transport::{Link, OUTBOX, OpenError, Transport};
use kplane_dataplane::chain;

/// Longest wait for a TCP connection to one address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// HTTP/2 pings, and how long an answer may take: finds a dead peer below the stream in 15 s.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));

/// Bytes that may be under way to an agent that does not read: two of the largest messages. What
/// is beyond waits at the control plane, where newer state replaces older.
const WINDOW: u32 = 2 * 256 * 1024;

/// Where a control plane is.
#[derive(Clone, Debug)]
enum Target {
    /// Connected anew each time: names are resolved again, a dead connection is never used twice.
    Remote(Box<Remote>),
    /// In the same process.
    Memory(Channel),
}

/// A replica of a control plane.
#[derive(Clone, Debug)]
struct Remote {
    endpoint: Endpoint,
    /// Where it is, as far as that is known: as its name was last resolved.
    places: BTreeSet<SocketAddr>,
}

/// Hears of where the control planes are, before one of them is connected to.
type Peers = Box<dyn Fn(BTreeSet<SocketAddr>) + Send>;

/// gRPC to one of several control planes.
pub struct Grpc {
    targets: Vec<Target>,
    /// Index of the target in use.
    current: usize,
    dialer: Dialer,
    peers: Peers,
}

impl Grpc {
    /// To replicas of a control plane, by connections of our own. Agents begin at a random one, so that
    /// they spread. `peers` is told of all addresses that are known, before each attempt.
    #[must_use]
    pub fn remote(
        endpoints: Vec<Endpoint>,
        dialer: Dialer,
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
            peers: Box::new(peers),
        }
    }

    /// To a control plane in the same process.
    #[must_use]
    pub fn memory(channel: Channel) -> Self {
        Self {
            targets: vec![Target::Memory(channel)],
            current: 0,
            dialer: Dialer::new(0),
            peers: Box::new(drop),
        }
    }

    /// Where all control planes are, as far as that is known.
    fn places(&self) -> BTreeSet<SocketAddr> {
        let remotes = self.targets.iter().filter_map(|target| match target {
            Target::Remote(remote) => Some(&remote.places),
            Target::Memory(_) => None,
        });
        remotes.flatten().copied().collect()
    }

    /// Resolves the current target's name, and connects to it.
    async fn connect(&mut self) -> (String, Result<Channel, String>) {
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
        let connected = endpoint.connect_with_connector(dialer.to(places)).await;
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
        // There is room: nothing was sent before.
        let _ = outbox.try_send(hello);
        let answer = AgentServiceClient::new(channel)
            .sync(ReceiverStream::new(messages))
            .await;
        match answer {
            Ok(stream) => Ok(Link {
                outbox,
                inbox: stream.into_inner().boxed(),
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
