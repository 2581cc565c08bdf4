//! Helpers of several tests, and an agent at the level of wire messages.

pub(crate) mod alone;
pub(crate) mod loopback;
pub(crate) mod manifests;
pub(crate) mod replica;
pub(crate) mod reporter;
pub(crate) mod secure;
pub(crate) mod start;
pub(crate) mod watch;

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use kp_controlplane::app::{Bound, Config, Origin, build};
use kplane_proto::v1::agent_service_client::AgentServiceClient;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_proto::v1::{
    self as pb, AgentMessage, Hello, ServerMessage, agent_message, server_message,
};
use kplane_tls::Wire;
use tempfile::TempDir;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

/// A deadline far above any step of these tests.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Starts a control plane of a folder with these manifests, which knows them when this returns.
pub(crate) async fn control_plane(manifests: &str) -> (Bound, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("all.yaml"), manifests).unwrap();
    let config = Config::new(Origin::Manifests(folder.path().to_owned()));
    (synced(config).await, folder)
}

/// Returns the configuration of a control plane on a folder, with free ports of 127.0.0.1.
pub(crate) fn with_ports(folder: &Path) -> Config {
    let any = Some("127.0.0.1:0".parse().unwrap());
    Config {
        agent_listen: any,
        status_listen: any,
        http_listen: any,
        ..Config::new(Origin::Manifests(folder.to_owned()))
    }
}

/// Starts a control plane with ports on an empty folder, after a change of its configuration: tests publish themselves.
pub(crate) async fn empty(change: impl FnOnce(&mut Config)) -> (Bound, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let mut config = with_ports(folder.path());
    change(&mut config);
    (synced(config).await, folder)
}

/// Connects to the status API.
pub(crate) async fn status(bound: &Bound) -> StatusServiceClient<Channel> {
    let address = format!("http://{}", bound.status_addr.unwrap());
    StatusServiceClient::connect(address).await.unwrap()
}

/// Starts a control plane, and waits until it knows all objects of its source.
pub(crate) async fn synced(config: Config) -> Bound {
    let bound = build(config).await.unwrap();
    let mut head = bound.hub().store().head();
    let synced = head.wait_for(|head| head.synced);
    timeout(DEADLINE, synced).await.unwrap().unwrap();
    bound
}

pub(crate) fn hello(node: &str) -> Hello {
    Hello {
        protocol_version: 1,
        node_name: node.to_owned(),
        agent_version: "test".to_owned(),
        backend: "noop".to_owned(),
        ..Hello::default()
    }
}

/// Reads until the other side closes.
pub(crate) async fn closed(stream: &mut (impl Wire + ?Sized)) {
    let mut rest = Vec::new();
    // A reset is an end as well.
    let _ = timeout(DEADLINE, stream.read_to_end(&mut rest))
        .await
        .expect("the connection is closed");
}

pub(crate) fn message(kind: agent_message::Kind) -> AgentMessage {
    AgentMessage { kind: Some(kind) }
}

/// What an agent says, and what it is told.
pub(crate) type Ends = (mpsc::Sender<AgentMessage>, Streaming<ServerMessage>);

/// Opens an agent's stream within this process.
pub(crate) async fn open(bound: &Bound, hello: Hello) -> Ends {
    let mut client = AgentServiceClient::new(bound.in_process());
    sync(&mut client, hello).await.unwrap()
}

/// Opens an agent's stream.
pub(crate) async fn sync(
    client: &mut AgentServiceClient<impl GrpcService<Body, ResponseBody = Body>>,
    hello: Hello,
) -> Result<Ends, Status> {
    let (send, outbound) = mpsc::channel(4);
    let hello = message(agent_message::Kind::Hello(hello));
    send.send(hello).await.unwrap();
    let receive = timeout(DEADLINE, client.sync(ReceiverStream::new(outbound)))
        .await
        .expect("an answer in time")?
        .into_inner();
    Ok((send, receive))
}

/// An agent that was accepted. Answers pings while the test reads its messages.
pub(crate) struct Peer {
    pub(crate) send: mpsc::Sender<AgentMessage>,
    receive: Streaming<ServerMessage>,
    /// The connection; it ends with the agent.
    _channel: Channel,
    /// Number of updates so far.
    pub(crate) updates: usize,
}

impl Peer {
    /// Connects; fails if the control plane does not accept the agent.
    pub(crate) async fn connect(address: SocketAddr, hello: Hello) -> Result<Self, Status> {
        let stream = TcpStream::connect(address).await?;
        Self::over(stream, hello).await
    }

    /// Sends Hello over a connection.
    pub(crate) async fn over(stream: impl Wire + 'static, hello: Hello) -> Result<Self, Status> {
        let mut stream = Some(stream);
        let connector = tower::service_fn(move |_| {
            let stream = stream.take().ok_or(std::io::ErrorKind::NotConnected);
            std::future::ready(stream.map(TokioIo::new).map_err(std::io::Error::from))
        });
        let endpoint = Endpoint::from_static("http://control-plane");
        let channel = endpoint
            .connect_with_connector(connector)
            .await
            .map_err(|error| Status::unavailable(error.to_string()))?;
        let mut client = AgentServiceClient::new(channel.clone());
        let (send, receive) = sync(&mut client, hello).await?;
        let mut peer = Self {
            send,
            receive,
            _channel: channel,
            updates: 0,
        };
        match peer.next().await? {
            server_message::Kind::Welcome(_) => Ok(peer),
            other => panic!("{other:?}"),
        }
    }

    /// Checks that the stream is alive: reads all messages in transit, and then the answer to a
    /// ping.
    pub(crate) async fn is_answered(&mut self) {
        let token = 4711;
        let ping = message(agent_message::Kind::Ping(pb::Ping { token }));
        self.send.send(ping).await.unwrap();
        let pong = server_message::Kind::Pong(pb::Pong { token });
        while self.next().await.unwrap() != pong {}
    }

    /// Reads until an update is complete up to a revision.
    pub(crate) async fn reach(&mut self, revision: u64) {
        loop {
            if let server_message::Kind::Update(update) = self.next().await.unwrap()
                && update.end.is_some_and(|end| end.revision >= revision)
            {
                return;
            }
        }
    }

    /// Returns the next message that is not a ping.
    pub(crate) async fn next(&mut self) -> Result<server_message::Kind, Status> {
        loop {
            let received =
                timeout(DEADLINE, self.receive.message()).await.expect("a message in time")?;
            let ended = || Status::cancelled("the stream ended");
            match received.and_then(|m| m.kind).ok_or_else(ended)? {
                server_message::Kind::Ping(ping) => {
                    let token = ping.token;
                    let pong = message(agent_message::Kind::Pong(pb::Pong { token }));
                    // The stream may have ended meanwhile: then reading fails.
                    let _ = self.send.send(pong).await;
                }
                kind => {
                    self.updates += usize::from(matches!(kind, server_message::Kind::Update(_)));
                    return Ok(kind);
                }
            }
        }
    }
}
