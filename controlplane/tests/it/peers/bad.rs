//! Replicas that are none, and answers that no replica gives. Nothing of them is in an answer but their name.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kplane_proto::v1::collected::Kind;
use kplane_proto::v1::peer_service_server::{PeerService, PeerServiceServer};
use kplane_proto::v1::{self as pb};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::{DEADLINE, Replica, addresses, flags};

/// The messages that a false replica sends, one after the other.
type Says = dyn Fn(&pb::CollectRequest) -> Vec<Kind> + Send + Sync;
/// The reason that must be in the answer, whether the last message comes again and again, and the messages.
type Case = (&'static str, bool, fn() -> Vec<Kind>);

/// A replica that says what a test wants.
#[derive(Clone)]
struct Liar {
    says: Arc<Says>,
    /// Whether it says the last message again and again.
    endless: bool,
    asked: Arc<AtomicUsize>,
}

type Said<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl PeerService for Liar {
    type CollectStream = Said<pb::Collected>;

    async fn collect(
        &self,
        request: Request<pb::CollectRequest>,
    ) -> Result<Response<Self::CollectStream>, Status> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let messages: Vec<_> = (self.says)(&request.into_inner())
            .into_iter()
            .map(|kind| pb::Collected { kind: Some(kind) })
            .collect();
        let last = if self.endless { messages.last().cloned() } else { None };
        let more = std::iter::from_fn(move || last.clone());
        let all = tokio_stream::iter(messages.into_iter().chain(more)).map(Ok);
        Ok(Response::new(Box::pin(all)))
    }

    async fn approve(
        &self,
        _: Request<pb::ApproveRequest>,
    ) -> Result<Response<pb::ApproveResponse>, Status> {
        Err(Status::failed_precondition("more is held"))
    }

    async fn suspect(
        &self,
        _: Request<pb::SuspectRequest>,
    ) -> Result<Response<pb::SuspectResponse>, Status> {
        Err(Status::unimplemented("never asked"))
    }

    async fn recorded(
        &self,
        _: Request<pb::ServiceHistoryRequest>,
    ) -> Result<Response<pb::ServiceHistory>, Status> {
        Err(Status::unimplemented("never asked"))
    }

    type InspectStream = Said<pb::InspectedNode>;

    async fn inspect(
        &self,
        _: Request<pb::InspectServiceRequest>,
    ) -> Result<Response<Self::InspectStream>, Status> {
        Err(Status::unimplemented("never asked"))
    }

    type AskStream = Said<pb::AskedNode>;

    async fn ask(&self, _: Request<pb::AskRequest>) -> Result<Response<Self::AskStream>, Status> {
        Err(Status::unimplemented("never asked"))
    }
}

impl Liar {
    async fn start(
        at: SocketAddr,
        endless: bool,
        says: impl Fn(&pb::CollectRequest) -> Vec<Kind> + Send + Sync + 'static,
    ) -> Self {
        let liar = Self {
            says: Arc::new(says),
            endless,
            asked: Arc::default(),
        };
        let listener = TcpListener::bind(at).await.unwrap();
        let server = Server::builder().add_service(PeerServiceServer::new(liar.clone()));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        liar
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

fn replica() -> Kind {
    Kind::Replica(pb::PeerReplica {
        epoch: 4_711,
        state: 1,
        ..pb::PeerReplica::default()
    })
}

fn agent(node: &str) -> Kind {
    Kind::Agent(pb::PeerAgent {
        node: node.to_owned(),
        connected: true,
        status: Some(pb::NodeStatus::default()),
        ..pb::PeerAgent::default()
    })
}

fn end() -> Kind {
    Kind::End(pb::PeerEnd {})
}

#[tokio::test]
async fn answers_that_no_replica_gives_are_refused_and_named() {
    let cases: [Case; 8] = [
        ("none of a replica", false, || vec![agent("x")]),
        ("ends too early", false, || vec![replica(), agent("x")]),
        ("none of a replica", false, || {
            vec![replica(), agent("x"), agent("x"), end()]
        }),
        ("none of a replica", false, || {
            vec![replica(), agent(&"x".repeat(254)), end()]
        }),
        ("none of a replica", false, || {
            vec![replica(), replica(), end()]
        }),
        // A Service that nobody asked for.
        ("none of a replica", false, || {
            let agent = pb::PeerAgent {
                node: "x".to_owned(),
                services: vec![pb::PeerStanding::default(); 1_000],
                ..pb::PeerAgent::default()
            };
            vec![replica(), Kind::Agent(agent), end()]
        }),
        ("none of a replica", true, || vec![replica(), agent("x")]),
        // Nothing changed since an answer that never was.
        ("none of a replica", false, || {
            vec![Kind::Replica(pb::PeerReplica {
                epoch: 1,
                unchanged: true,
                ..pb::PeerReplica::default()
            })]
        }),
    ];
    for (part, endless, says) in cases {
        let [own, other] = addresses();
        let _liar = Liar::start(other, endless, move |_| says()).await;
        let replica = Replica::start(own, flags(&[own, other])).await;
        let names_one = |fleet: &pb::Fleet| fleet.missing_replicas.len() == 1;
        let fleet = replica.fleet_soon(names_one).await;
        assert_eq!(fleet.nodes.len(), 0, "{fleet:?}");
        let [missing] = &*fleet.missing_replicas else {
            panic!("{part}: {fleet:?}");
        };
        assert_eq!(missing.address, other.to_string());
        assert!(missing.reason.contains(part), "{missing:?}");
    }
}

#[tokio::test]
async fn no_answer_takes_more_memory_than_agents_need() {
    let [own, other] = addresses();
    let _liar = Liar::start(other, false, |_| {
        let mut agents: Vec<_> = (0..100).map(|n| agent(&format!("n{n}"))).collect();
        let Kind::Agent(first) = &mut agents[0] else {
            unreachable!()
        };
        first.status.as_mut().unwrap().report = Some(pb::Report {
            failures: vec![pb::ObjectFailure::default(); 100_000],
            ..pb::Report::default()
        });
        agents.insert(0, replica());
        agents.push(end());
        agents
    })
    .await;
    let replica = Replica::start(own, flags(&[other])).await;
    let fleet = replica.fleet_soon(|fleet| fleet.missing_replicas.is_empty()).await;
    assert_eq!(fleet.nodes.len(), 100);
    let report = fleet.nodes[0].report.as_ref().unwrap();
    assert_eq!(report.failures.len(), 512);
}

#[tokio::test]
async fn garbage_and_other_programs_are_named() {
    let [own, garbage, agents, nobody] = addresses();
    let listener = TcpListener::bind(garbage).await.unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.write_all(&[0xff; 4_096]).await;
        }
    });
    let listener = TcpListener::bind(agents).await.unwrap();
    let (_, health) = tonic_health::server::health_reporter();
    let server = Server::builder().add_service(health);
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let mut peers = flags(&[own, garbage, agents, nobody]);
    let name = "no-such-name.invalid:7466";
    peers.flags.peers.push(name.parse().unwrap());
    let replica = Replica::start(own, peers).await;
    let names_four = |fleet: &pb::Fleet| fleet.missing_replicas.len() == 4;
    let fleet = replica.fleet_soon(names_four).await;
    let missing = fleet.missing_replicas.iter();
    let reason = |at: &str| {
        let mut all = missing.clone();
        all.find(|replica| replica.address == at)
            .unwrap_or_else(|| panic!("{at}: {fleet:?}"))
            .reason
            .clone()
    };
    assert!(reason(&garbage.to_string()).contains("cannot connect"));
    assert!(reason(&agents.to_string()).contains("no replica"));
    assert!(reason(&nobody.to_string()).contains("refused"));
    assert!(reason(name).contains("resolve"));
}

/// All watches together ask once, and nothing is asked when nobody watches.
#[tokio::test]
async fn watches_share_their_questions_and_nobody_asks_without_them() {
    let [own, other] = addresses();
    let liar = Liar::start(other, false, |request| {
        let replica = pb::PeerReplica {
            epoch: 4_711,
            state: 9,
            unchanged: request.seen == 9,
            ..pb::PeerReplica::default()
        };
        vec![Kind::Replica(replica), agent("x"), end()]
    })
    .await;
    let replica = Replica::start(own, flags(&[own, other])).await;
    sleep(Duration::from_millis(300)).await;
    assert_eq!(liar.asked(), 0);
    let mut watches = Vec::new();
    for _ in 0..20 {
        let request = pb::GetFleetRequest::default();
        let mut watch = replica.status().await.watch_fleet(request).await.unwrap().into_inner();
        let first = watch.message().await.unwrap().unwrap();
        assert_eq!(first.nodes[0].name, "x");
        watches.push(watch);
    }
    let before = liar.asked();
    sleep(Duration::from_secs(1)).await;
    let asked = liar.asked() - before;
    assert!((2..=15).contains(&asked), "{asked} questions of 20 watches");
    drop(watches);
    let until = Instant::now() + DEADLINE;
    loop {
        let before = liar.asked();
        sleep(Duration::from_millis(500)).await;
        if liar.asked() == before {
            break;
        }
        assert!(Instant::now() < until, "questions without watches");
    }
}
