//! The control plane's ports against peers that flood, dawdle and do not read: real sockets on loopback.

use std::net::SocketAddr;
use std::time::Duration;

use kp_controlplane::app::Bound;
use kplane_agents::connection_limits::{Limits, PATIENCE};
use kplane_http::client::get;
use kplane_proto::v1::agent_service_client::AgentServiceClient;
use kplane_proto::v1::{self as pb, server_message};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;

use crate::support::{DEADLINE, Peer, closed, empty, hello, status};

/// The connection preface of an HTTP/2 client.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

async fn control_plane(agent_limits: Limits) -> (Bound, tempfile::TempDir) {
    empty(|config| config.agent_limits = agent_limits).await
}

/// Waits until the metrics have a line. Where the clock is paused, only the pauses between two looks let it advance: they are
/// long enough that few looks see the end of the limiter's patience.
async fn metric(http: SocketAddr, line: &str) {
    let deadline = std::time::Instant::now() + DEADLINE;
    loop {
        let reply = get(http, "/metrics").await;
        let has = |body: &str| body.lines().any(|other| other == line);
        if reply.as_ref().is_some_and(|reply| has(&reply.body)) {
            return;
        }
        assert!(
            std::time::Instant::now() < deadline,
            "no {line} in {reply:?}"
        );
        sleep(Duration::from_millis(100)).await;
    }
}

/// The paused clock advances only when all tasks wait; then the limiter's patience ends.
#[tokio::test(start_paused = true)]
async fn who_brings_nothing_is_closed() {
    let (bound, _folder) = control_plane(Limits::AGENTS).await;
    for port in [bound.agent_addr, bound.status_addr] {
        let address = port.unwrap();
        for first in [&b""[..], &PREFACE[..9], PREFACE] {
            let since = Instant::now();
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(first).await.unwrap();
            closed(&mut stream).await;
            assert!(since.elapsed() < PATIENCE + Duration::from_secs(2));
        }
    }
    metric(
        bound.http_addr.unwrap(),
        "kplane_controlplane_connections_closed_total{port=\"agents\",reason=\"expired\"} 3",
    )
    .await;
}

/// Bytes that come one by one buy no time.
#[tokio::test(start_paused = true)]
async fn who_trickles_is_closed() {
    let (bound, _folder) = control_plane(Limits::AGENTS).await;
    for port in [bound.agent_addr, bound.status_addr] {
        let since = Instant::now();
        let stream = TcpStream::connect(port.unwrap()).await.unwrap();
        let (mut reader, mut writer) = stream.into_split();
        let mut answer = Vec::new();
        let trickle = async {
            for byte in PREFACE {
                // Its end shows in the other direction, too.
                let _ = writer.write_all(&[*byte]).await;
                sleep(Duration::from_secs(1)).await;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = trickle => {}
            // A reset is an end as well.
            _ = reader.read_to_end(&mut answer) => {}
        }
        assert!(since.elapsed() < PATIENCE + Duration::from_secs(2));
    }
}

#[tokio::test(start_paused = true)]
async fn who_never_says_hello_is_told_and_closed() {
    let (bound, _folder) = control_plane(Limits::AGENTS).await;
    let address = format!("http://{}", bound.agent_addr.unwrap());
    let channel = Endpoint::from_shared(address).unwrap();
    let mut client = AgentServiceClient::new(channel.connect().await.unwrap());
    let (_silent, outbound) = mpsc::channel(1);
    let mut stream = client.sync(ReceiverStream::new(outbound)).await.unwrap().into_inner();
    let status = timeout(DEADLINE, stream.message()).await.unwrap().unwrap_err();
    assert_eq!(status.message(), "no Hello within 10 s");
    let gone = "kplane_controlplane_connections{port=\"agents\"} 0";
    metric(bound.http_addr.unwrap(), gone).await;
}

/// The stream of an agent that was superseded ends; its connection goes as well, though the agent neither
/// reads that nor leaves.
#[tokio::test(start_paused = true)]
async fn what_ended_gives_its_descriptor_back() {
    let (bound, _folder) = control_plane(Limits::AGENTS).await;
    let address = bound.agent_addr.unwrap();
    let _first = Peer::connect(address, hello("n1")).await.unwrap();
    let mut second = Peer::connect(address, hello("n1")).await.unwrap();
    let http = bound.http_addr.unwrap();
    let line = "kplane_controlplane_connections_closed_total{port=\"agents\",reason=\"expired\"} 1";
    let (metric, _) = tokio::join!(metric(http, line), second.lives_for(PATIENCE * 2));
    let () = metric;
    let open = "kplane_controlplane_connections{port=\"agents\"} 1";
    assert!(get(http, "/metrics").await.unwrap().body.contains(open));
}

/// A tool may be silent between its requests.
#[tokio::test(start_paused = true)]
async fn who_has_asked_something_may_stay() {
    let (bound, _folder) = control_plane(Limits::AGENTS).await;
    let mut client = status(&bound).await;
    for _ in 0..2 {
        client.get_fleet(pb::GetFleetRequest::default()).await.unwrap();
        sleep(PATIENCE * 2).await;
    }
    let line = "kplane_controlplane_connections{port=\"status\"} 1";
    metric(bound.http_addr.unwrap(), line).await;
}

#[tokio::test]
async fn silent_connections_make_room_for_agents_and_agents_for_nobody() {
    let limits = Limits {
        handshakes_per_second: 500,
        snapshots_per_second: 500,
        connections: 32,
        per_address: 24,
        waiting: 16,
        waiting_per_address: 8,
    };
    let (bound, _folder) = control_plane(limits).await;
    let address = bound.agent_addr.unwrap();
    let mut silent = Vec::new();
    let mut agents = Vec::new();
    for n in 0..limits.per_address {
        for _ in 0..10 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        agents.push(Peer::connect(address, hello(&format!("n{n}"))).await.unwrap());
    }
    // From this address no more are accepted, from another one some are.
    assert!(Peer::connect(address, hello("one-more")).await.is_err());
    let elsewhere = TcpSocket::new_v4().unwrap();
    elsewhere.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let elsewhere = elsewhere.connect(address).await.unwrap();
    agents.push(Peer::over(elsewhere, hello("elsewhere")).await.unwrap());
    for stream in &mut silent {
        closed(stream).await;
    }
    let http = bound.http_addr.unwrap();
    metric(http, "kplane_controlplane_connections{port=\"agents\"} 25").await;
    for agent in &mut agents {
        agent.is_answered().await;
    }
}

/// 10,000 agents that connect would otherwise cause 10^8 messages.
#[tokio::test]
async fn names_that_are_no_nodes_wake_nobody() {
    let (bound, _folder) = control_plane(Limits::AGENTS).await;
    let address = bound.agent_addr.unwrap();
    let mut bystander = Peer::connect(address, hello("bystander")).await.unwrap();
    let before = bystander.update().await;
    let mut others = Vec::new();
    for n in 0..600 {
        let mut other = Peer::connect(address, hello(&format!("unknown-{n}"))).await.unwrap();
        assert_eq!(other.update().await.objects.len(), 1, "its configuration");
        others.push(other);
        // An agent that answers no ping for long is sent away.
        if n % 50 == 0 {
            bystander.is_answered().await;
        }
    }
    assert_eq!(bystander.updates, 1, "{before:?}");
    let head = bound.hub().store().head().borrow().revision;
    assert_eq!(Some(head), before.end.map(|end| end.revision));
    bystander.is_answered().await;
    assert_eq!(bystander.updates, 1);
}

impl Peer {
    /// Answers the control plane for a while.
    async fn lives_for(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while let Ok(message) = tokio::time::timeout_at(end, self.next()).await {
            message.unwrap();
        }
    }

    async fn update(&mut self) -> pb::Update {
        loop {
            if let server_message::Kind::Update(update) = self.next().await.unwrap() {
                return update;
            }
        }
    }
}
