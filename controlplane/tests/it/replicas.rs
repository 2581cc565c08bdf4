//! What a replica of the control plane tells its agents about itself: how fresh it is, when they are
//! to leave, and when they may have a snapshot. Through the real gRPC stack, without TCP.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use kp_controlplane::app::Bound;
use kplane_agents::peers::Listed;
use kplane_desired_state::freshness::{Freshness, Versions};
use kplane_desired_state::k8s::Kind;
use kplane_desired_state::publish::{Publication, Published};
use kplane_http::client::{Reply, get};
use kplane_model::{ServiceKey, ServicePort};
use kplane_proto::v1::agent_service_client::AgentServiceClient;
use kplane_proto::v1::{self as pb, AgentMessage, Hello, ServerMessage, server_message};
use kplane_rig::loopback::unused;
use kplane_rig::process::Process;
use nix::sys::signal::Signal;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tonic::Streaming;
use tonic::body::Body;
use tonic::client::GrpcService;

use crate::support::{empty, hello, sync};

/// A deadline far above any step of these tests.
const DEADLINE: Duration = Duration::from_secs(30);

async fn control_plane(snapshots_per_second: u32) -> (Bound, tempfile::TempDir) {
    empty(|config| config.agent_limits.snapshots_per_second = snapshots_per_second).await
}

fn publication(service: &str) -> Publication {
    let port = ServicePort::sample(ServiceKey::sample("shop", service));
    let published = Published::new(port.clone(), &[]);
    Publication::sample(vec![(port.key, Some(published))], vec![])
}

struct Stream {
    _send: mpsc::Sender<AgentMessage>,
    receive: Streaming<ServerMessage>,
}

impl Stream {
    async fn open(bound: &Bound, node: &str, resume: Option<pb::ResumeToken>) -> Self {
        let mut client = AgentServiceClient::new(bound.in_process());
        Self::over(&mut client, node, resume).await
    }

    async fn over(
        client: &mut AgentServiceClient<impl GrpcService<Body, ResponseBody = Body>>,
        node: &str,
        resume: Option<pb::ResumeToken>,
    ) -> Self {
        let hello = Hello {
            instance: 1,
            resume,
            ..hello(node)
        };
        let (_send, receive) = sync(client, hello).await.unwrap();
        Self { _send, receive }
    }

    /// The next message; `None` at the end of the stream.
    async fn next(&mut self) -> Option<server_message::Kind> {
        let message = timeout(DEADLINE, self.receive.message()).await;
        message.unwrap().unwrap()?.kind
    }

    async fn end(&mut self) -> pb::UpdateEnd {
        loop {
            match self.next().await.unwrap() {
                server_message::Kind::Update(pb::Update { end: Some(end), .. }) => return end,
                server_message::Kind::ComeBackLater(later) => panic!("{later:?}"),
                _ => {}
            }
        }
    }

    async fn beat(&mut self) -> pb::Heartbeat {
        loop {
            if let server_message::Kind::Heartbeat(beat) = self.next().await.unwrap() {
                return beat;
            }
        }
    }

    async fn sent_away(&mut self) -> pb::ComeBackLater {
        loop {
            if let server_message::Kind::ComeBackLater(later) = self.next().await.unwrap() {
                assert!(self.next().await.is_none(), "the stream ends");
                return later;
            }
        }
    }
}

fn announced(versions: &[pb::KindVersion]) -> Vec<(&str, &str, &str)> {
    versions.iter().map(|one| (&*one.kind, &*one.version, &*one.changed)).collect()
}

#[tokio::test]
async fn a_stream_tells_the_freshness_of_each_update_and_nothing_twice() {
    let (bound, _folder) = control_plane(500).await;
    let store = bound.hub().store();
    let mut freshness = Freshness::default();
    let versions = |seen, changed| Versions { seen, changed };
    freshness.set(Kind::Service, versions(10, 7));
    freshness.set(Kind::EndpointSlice, versions(10, 10));
    store.publish_as_of(publication("a"), &freshness);
    let mut stream = Stream::open(&bound, "n1", None).await;
    let Some(server_message::Kind::Welcome(welcome)) = stream.next().await else {
        panic!("no Welcome");
    };
    let all = [("Service", "10", "7"), ("EndpointSlice", "10", "")];
    assert_eq!(announced(&welcome.freshness), all);
    // The agent learns how fresh the replica is before it gets any data.
    let Some(server_message::Kind::Heartbeat(beat)) = stream.next().await else {
        panic!("no Heartbeat");
    };
    assert_eq!(announced(&beat.freshness), []);
    assert_eq!(announced(&stream.end().await.freshness), []);
    freshness.set(Kind::Service, versions(12, 12));
    store.publish_as_of(publication("b"), &freshness);
    assert_eq!(
        announced(&stream.end().await.freshness),
        [("Service", "12", "")]
    );
    freshness.set(Kind::EndpointSlice, versions(20, 10));
    store.set_freshness(&freshness);
    store.publish(publication("c"));
    let end = stream.end().await;
    assert_eq!(announced(&end.freshness), [("EndpointSlice", "20", "10")]);
}

/// Agents hear where replicas serve them, once, when that changes, and when they are sent away.
#[tokio::test]
async fn a_stream_names_the_replicas_of_the_control_plane() {
    let (bound, _folder) = control_plane(500).await;
    let hub = bound.hub().clone();
    hub.store().publish(publication("a"));
    let place = |last: u8| SocketAddr::from(([192, 0, 2, last], 7465));
    let (places, listed) = watch::channel(BTreeSet::from([place(1)]));
    assert!(hub.replica().listed.set(Listed::new("kplane", listed)).is_ok());
    let mut stream = Stream::open(&bound, "n1", None).await;
    assert_eq!(stream.beat().await.replicas, ["192.0.2.1:7465"]);
    assert!(stream.beat().await.replicas.is_empty());
    places.send_replace([place(1), place(2)].into());
    let both = ["192.0.2.1:7465", "192.0.2.2:7465"];
    assert_eq!(stream.beat().await.replicas, both);
    let drained = tokio::spawn(async move { hub.streams().draining.begin(DEADLINE).await });
    assert_eq!(stream.sent_away().await.replicas, both);
    drop(stream);
    timeout(DEADLINE, drained).await.unwrap().unwrap();
}

async fn readiness(bound: &Bound) -> Reply {
    get(bound.http_addr.unwrap(), "/readyz").await.unwrap()
}

#[tokio::test]
async fn a_control_plane_that_drains_sends_its_agents_away_and_takes_no_new_ones() {
    let (bound, _folder) = control_plane(500).await;
    bound.hub().store().publish(publication("a"));
    let mut streams = Vec::new();
    for node in ["n1", "n2", "n3"] {
        let mut stream = Stream::open(&bound, node, None).await;
        stream.end().await;
        streams.push(stream);
    }
    assert_eq!(readiness(&bound).await.status, 200);
    let started = Instant::now();
    let hub = bound.hub().clone();
    let drained = tokio::spawn(async move { hub.streams().draining.begin(DEADLINE).await });
    for stream in &mut streams {
        let later = stream.sent_away().await;
        assert!((1_000..2_000).contains(&later.after_ms), "{later:?}");
        assert!(later.reason.contains("stop"), "{later:?}");
    }
    let late = Stream::open(&bound, "n4", None).await.next().await;
    assert!(
        matches!(late, Some(server_message::Kind::ComeBackLater(_))),
        "{late:?}"
    );
    let answer = readiness(&bound).await;
    assert_eq!(answer.status, 503);
    assert!(answer.body.contains("about to stop"), "{}", answer.body);
    // It ends as soon as all have left.
    drained.await.unwrap();
    assert!(started.elapsed() < DEADLINE / 2);
}

#[tokio::test]
async fn agents_that_need_a_snapshot_come_one_after_the_other_and_others_at_once() {
    let (bound, _folder) = control_plane(1).await;
    bound.hub().store().publish(publication("a"));
    let mut first = Stream::open(&bound, "n1", None).await;
    let digest = first.end().await.digest;
    let mut waits = Vec::new();
    for node in ["n2", "n3", "n4"] {
        let later = Stream::open(&bound, node, None).await.sent_away().await;
        assert!(later.reason.contains("snapshot"), "{later:?}");
        waits.push(later.after_ms);
    }
    assert!(
        waits.is_sorted() && waits[2] > 2_000 && waits[2] <= 3_000,
        "{waits:?}"
    );
    // An agent with all objects needs none. (Only the name of the node is part of a digest.)
    let resume = pb::ResumeToken {
        schema: 1,
        epoch: 0,
        revision: 0,
        digest,
    };
    drop(first);
    let mut again = Stream::open(&bound, "n1", Some(resume)).await;
    again.end().await;
    let counts = bound.hub().streams().snapshots.counts();
    assert_eq!((counts.begun, counts.refused), (1, 3));
}

/// SIGTERM: the agent is told to go, and the program ends well before its time is over.
#[tokio::test]
async fn the_program_ends_as_soon_as_its_agents_have_left() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(
        folder.path().join("empty.yaml"),
        "apiVersion: v1\nkind: List\nitems: []\n",
    )
    .unwrap();
    let address = unused();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kp-controlplane"));
    command
        .arg("--manifests")
        .arg(folder.path())
        .arg(format!("--agent-listen={address}"))
        .arg(format!("--status-listen={}", unused()))
        .arg(format!("--http-listen={}", unused()))
        .arg("--drain=60");
    let mut program = Process::start(command).unwrap();
    let deadline = Instant::now() + DEADLINE;
    let mut client = loop {
        match AgentServiceClient::connect(format!("http://{address}")).await {
            Ok(client) => break client,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    let mut stream = Stream::over(&mut client, "n1", None).await;
    assert!(matches!(
        stream.next().await,
        Some(server_message::Kind::Welcome(_))
    ));
    program.signal(Signal::SIGTERM).unwrap();
    stream.sent_away().await;
    loop {
        if let Some(status) = program.try_wait().unwrap() {
            assert!(status.success(), "{status}");
            break;
        }
        assert!(Instant::now() < deadline, "it does not end");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
