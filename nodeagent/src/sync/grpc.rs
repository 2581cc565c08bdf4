//! The production transport: gRPC over TCP, or to a service in the same process.

use std::future::ready;
use std::net::{IpAddr, SocketAddr};
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::stream::BoxStream;
use futures_util::{FutureExt as _, StreamExt as _};
use http::Uri;
use http::header::AUTHORIZATION;
use kplane_desired_state::inside::InProcess;
use kplane_proto::v1::agent_service_client::AgentServiceClient;
use kplane_proto::v1::{AgentMessage, ServerMessage};
use kplane_tls::{ClientConfig, Follower, Token};
use kplane_util::dial::{AGENT_PORT, Dialer, MAX_ADDRESSES, literal, resolve};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::transport::{self, Channel, Endpoint};
use tonic::{Request, Status};
use tower::ServiceExt as _;
use tower::util::BoxCloneSyncService;

use super::transport::{Found, Link, OUTBOX, OpenError, Presented, Replica, Transport};
use crate::peer_probe;
use kplane_dataplane::chain;

/// Longest wait for a TCP connection to one address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval of HTTP/2 pings, and longest wait for an answer. They detect a dead peer in 15 s, below the
/// stream.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));

/// Most bytes in flight to an agent that does not read: two of the largest messages. Everything beyond
/// waits at the control plane, where newer state replaces older.
const WINDOW: u32 = 2 * 256 * 1024;

/// URL of connections to replicas that a file names: gRPC wants one.
const LISTED: &str = "https://kplane-controlplane";

/// A service of either kind.
type ReplicaService =
    BoxCloneSyncService<http::Request<Body>, http::Response<Body>, transport::Error>;

/// The way to a control plane.
#[derive(Clone, Debug)]
enum Connector {
    /// A URL. Each stream has a connection of its own: a dead one is never reused.
    Remote(Box<Endpoint>),
    /// The replicas that a file names, and a URL without meaning for their connections.
    Listed(Box<Endpoint>, PathBuf),
    /// A control plane in the same process.
    InProcess(InProcess),
}

/// gRPC to the replicas of a control plane.
pub struct Grpc {
    targets: Vec<Connector>,
    dialer: Dialer,
    credentials: Credentials,
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
    /// Creates a transport to the replicas to which these URLs lead, over kplane's own connections.
    pub fn remote(endpoints: Vec<Endpoint>, dialer: Dialer, credentials: Credentials) -> Self {
        let targets = endpoints.into_iter().map(tuned).map(Connector::Remote);
        Self {
            targets: targets.collect(),
            dialer,
            credentials,
        }
    }

    /// Adds the replicas that a file names. Their certificates must have the name of the credentials.
    #[must_use]
    pub fn with_list(mut self, file: Option<PathBuf>) -> Self {
        let endpoint = tuned(Endpoint::from_static(LISTED));
        let target = file.map(|file| Connector::Listed(endpoint, file));
        self.targets.extend(target);
        self
    }

    /// Creates a transport to a control plane in the same process.
    pub fn in_process(service: InProcess) -> Self {
        Self {
            targets: vec![Connector::InProcess(service)],
            dialer: Dialer::new(0),
            credentials: Credentials::default(),
        }
    }

    /// Connects to a replica.
    async fn connect(&self, endpoint: &Endpoint, replica: Replica) -> Result<Channel, OpenError> {
        let tls = self.credentials.tls.as_ref().map(Follower::current);
        let server_name = self.credentials.server_name.clone();
        let places = replica.place.into_iter().collect();
        let connected =
            endpoint.connect_with_connector(self.dialer.to(places, tls, server_name)).await;
        connected.map_err(|error| cannot_connect(&self.address(replica), &chain(&error)))
    }

    /// Returns a replica's URL, and its address if the URL does not show it.
    fn address(&self, replica: Replica) -> String {
        match self.targets.get(replica.url) {
            Some(Connector::Remote(endpoint)) if literal(endpoint.uri()).is_some() => {
                endpoint.uri().to_string()
            }
            Some(Connector::Remote(endpoint)) => format!("{} ({replica})", endpoint.uri()),
            Some(Connector::Listed(..) | Connector::InProcess(_)) | None => replica.to_string(),
        }
    }
}

/// Sets what all connections of agents have in common.
fn tuned(endpoint: Endpoint) -> Box<Endpoint> {
    let endpoint = endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEP_ALIVE.0)
        .keep_alive_timeout(KEEP_ALIVE.1)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .tcp_nodelay(true);
    Box::new(endpoint)
}

fn cannot_connect(address: &impl ToString, reason: &str) -> OpenError {
    OpenError::Connect {
        address: address.to_string(),
        reason: reason.to_owned(),
    }
}

/// Opens a stream. A control plane in the same process runs as a part of this call and of the stream, so its panics end
/// them, and not the agent.
async fn opened(
    service: ReplicaService,
    request: Request<ReceiverStream<AgentMessage>>,
) -> Result<BoxStream<'static, Result<ServerMessage, Status>>, Status> {
    let panicked = |_| Status::internal("the control plane has panicked; its log says where");
    let mut client = AgentServiceClient::new(service);
    let answer = AssertUnwindSafe(client.sync(request)).catch_unwind().await;
    let stream = answer.map_err(panicked)??.into_inner();
    let stream = AssertUnwindSafe(stream).catch_unwind();
    Ok(stream.map(move |message| message.map_err(panicked).flatten()).boxed())
}

/// Returns the replicas at all addresses of a URL.
async fn look_up(url: usize, uri: Uri) -> Found {
    let places = resolve(&uri).await.map_err(|error| cannot_connect(&uri, &chain(&error)))?;
    Ok(places
        .into_iter()
        .map(|place| Replica {
            place: Some(place),
            url,
        })
        .collect())
}

/// Returns the replicas that a file names.
async fn read_list(url: usize, file: PathBuf) -> Found {
    let place = file.display().to_string();
    let wrong = |reason: String| cannot_connect(&place, &reason);
    let text = tokio::fs::read_to_string(&file)
        .await
        .map_err(|error| wrong(format!("cannot read the list of replicas: {error}")))?;
    let mut replicas = Vec::new();
    for listed in text.split([',', ' ', '\t', '\r', '\n']) {
        if listed.is_empty() {
            continue;
        }
        let place = listed_place(listed)
            .ok_or_else(|| wrong(format!("{listed:?} is no address such as 192.0.2.1:7465")))?;
        replicas.push(Replica {
            place: Some(place),
            url,
        });
        if replicas.len() > MAX_ADDRESSES {
            return Err(wrong(format!("more than {MAX_ADDRESSES} replicas")));
        }
    }
    Ok(replicas)
}

/// Parses an address of a list; its port is 7465 unless it names one.
fn listed_place(text: &str) -> Option<SocketAddr> {
    let with_port = text.parse::<SocketAddr>().ok();
    with_port.or_else(|| {
        let ip: IpAddr = text.parse().ok()?;
        Some(SocketAddr::new(ip, AGENT_PORT))
    })
}

impl Transport for Grpc {
    fn find(&self) -> impl Future<Output = Vec<Found>> + Send + 'static {
        let found = self.targets.iter().enumerate().map(|(url, target)| match target {
            Connector::Remote(endpoint) => look_up(url, endpoint.uri().clone()).boxed(),
            Connector::Listed(_, file) => read_list(url, file.clone()).boxed(),
            Connector::InProcess(_) => ready(Ok(vec![Replica { place: None, url }])).boxed(),
        });
        join_all(found.collect::<Vec<_>>())
    }

    async fn open(&mut self, replica: Replica, hello: AgentMessage) -> Result<Link, OpenError> {
        let service = match self.targets.get(replica.url) {
            Some(Connector::Remote(endpoint) | Connector::Listed(endpoint, _)) => {
                let channel = self.connect(endpoint, replica).await?;
                ReplicaService::new(channel)
            }
            Some(Connector::InProcess(service)) => {
                ReplicaService::new(service.clone().map_err(|error| match error {}))
            }
            None => return Err(cannot_connect(&replica, "no control plane is configured")),
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
        let answer = opened(service, request).await;
        match answer {
            Ok(inbox) => Ok(Link {
                outbox,
                inbox,
                token,
                peer_probe: Arc::new(peer_probe::peer_probe),
            }),
            Err(status) => Err(OpenError::Refused {
                address: self.address(replica),
                status: Box::new(status),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Poll;

    use bytes::Bytes;
    use http_body::Frame;

    use super::*;

    #[tokio::test]
    async fn a_list_of_replicas_is_read_again_each_time() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("addresses");
        let dialer = Dialer::new(0);
        let grpc =
            Grpc::remote(Vec::new(), dialer, Credentials::default()).with_list(Some(file.clone()));
        let find = async || {
            let found = grpc.find().await.pop().unwrap().map_err(|error| error.to_string());
            let text = |replica: Replica| replica.place.unwrap().to_string();
            found.map(|replicas| replicas.into_iter().map(text).collect::<Vec<_>>())
        };
        assert!(find().await.unwrap_err().contains("cannot read the list"));
        for (content, expected) in [
            (
                "192.0.2.1:7000\n192.0.2.2\n",
                vec!["192.0.2.1:7000", "192.0.2.2:7465"],
            ),
            (
                "2001:db8::1, [2001:db8::2]:1",
                vec!["[2001:db8::1]:7465", "[2001:db8::2]:1"],
            ),
            ("\n", vec![]),
        ] {
            std::fs::write(&file, content).unwrap();
            assert_eq!(find().await.unwrap(), expected, "{content}");
        }
        std::fs::write(&file, "kplane.example").unwrap();
        assert!(find().await.unwrap_err().contains("is no address"));
    }

    #[tokio::test]
    async fn a_control_plane_in_this_process_that_panics_ends_a_stream_only() {
        let calls = Arc::new(AtomicUsize::new(0));
        let service = tower::service_fn(move |_| {
            let first = calls.fetch_add(1, Ordering::Relaxed) == 0;
            async move {
                assert!(!first, "a deliberate panic of the call");
                let frames = futures_util::stream::poll_fn(
                    |_| -> Poll<Option<Result<Frame<Bytes>, Status>>> {
                        panic!("a deliberate panic of the stream")
                    },
                );
                let body = Body::new(http_body_util::StreamBody::new(frames));
                Ok::<_, Infallible>(http::Response::new(body))
            }
        });
        let mut grpc = Grpc::in_process(InProcess::new(service));
        let found = grpc.find().await.pop().unwrap().unwrap();
        let refused = grpc.open(found[0], AgentMessage::default()).await;
        assert!(refused.is_err_and(|error| error.to_string().contains("panicked")));
        let link = grpc.open(found[0], AgentMessage::default()).await;
        let said = link.unwrap().inbox.next().await.unwrap();
        assert!(said.unwrap_err().message().contains("panicked"));
    }
}
