//! Streams to agents, through the real gRPC stack, without TCP.

use std::collections::HashMap;
use std::time::Duration;

use kp_controlplane::app::Bound;
use kplane_desired_state::publish::{Publication, Published};
use kplane_desired_state::trust::Trust;
use kplane_model::{
    DesiredKey, Digest, Endpoint, EndpointAddr, ObjectHash, ServiceKey, ServicePort,
};
use kplane_proto::convert::decode_object;
use kplane_proto::v1::agent_service_client::AgentServiceClient;
use kplane_proto::v1::{
    self as pb, AgentMessage, Hello, ResumeToken, ServerMessage, agent_message, server_message,
};
use prost::bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::support::{self, message, sync};

/// A deadline far above any step of these tests.
const DEADLINE: Duration = Duration::from_secs(30);

async fn control_plane() -> (Bound, tempfile::TempDir) {
    support::empty(|_| {}).await
}

fn key(n: usize) -> ServiceKey {
    ServiceKey::sample("shop", &format!("svc-{n}"))
}

/// Returns Service `n` with one endpoint.
fn published(n: usize, octet: u8) -> (ServiceKey, Option<Published>) {
    let addr = EndpointAddr::new([10, 0, 0, octet], 8080);
    let published = Published::new(ServicePort::sample(key(n)), &[Endpoint::ready(addr)]);
    (key(n), Some(published))
}

fn publish(bound: &Bound, services: Vec<(ServiceKey, Option<Published>)>) -> u64 {
    let publication = Publication::sample(services, vec![]);
    bound.hub().store().publish(publication)
}

/// An agent that keeps objects as the protocol requires.
struct Agent {
    send: mpsc::Sender<AgentMessage>,
    receive: Streaming<ServerMessage>,
    objects: HashMap<DesiredKey, Bytes>,
    epoch: u64,
    revision: u64,
    /// Number of objects in the last update, and whether it was a snapshot.
    last: (usize, bool),
    /// Confidence of the last update, and the doubt.
    trust: (pb::Confidence, String),
}

fn hello(node: &str, resume: Option<ResumeToken>) -> Hello {
    Hello {
        instance: 1,
        resume,
        ..support::hello(node)
    }
}

impl Agent {
    async fn connect(bound: &Bound, hello: Hello) -> Self {
        Self::new(support::open(bound, hello).await)
    }

    /// Connects as an agent of another process does.
    async fn over_tcp(bound: &Bound, hello: Hello) -> Self {
        let url = format!("http://{}", bound.agent_addr.unwrap());
        let endpoint = tonic::transport::Endpoint::from_shared(url)
            .unwrap()
            .initial_stream_window_size(256 * 1024);
        let mut client = AgentServiceClient::new(endpoint.connect().await.unwrap());
        Self::new(sync(&mut client, hello).await.unwrap())
    }

    fn new((send, receive): support::Ends) -> Self {
        Self {
            send,
            receive,
            objects: HashMap::new(),
            epoch: 0,
            revision: 0,
            last: (0, false),
            trust: (pb::Confidence::Unspecified, String::new()),
        }
    }

    async fn next(&mut self) -> Result<server_message::Kind, Status> {
        let message = timeout(DEADLINE, self.receive.message()).await.expect("an answer in time");
        Ok(message?.expect("the stream goes on").kind.unwrap())
    }

    /// Says what has arrived, as agents do: a control plane waits for it before it sends much more.
    async fn received(&self) {
        let report = pb::Report {
            epoch: self.epoch,
            received_revision: self.revision,
            ..pb::Report::default()
        };
        let report = message(agent_message::Kind::Report(report));
        // The stream may have ended meanwhile: then reading fails.
        let _ = self.send.send(report).await;
    }

    /// Reads until an update is complete.
    async fn update(&mut self) {
        self.last = (0, false);
        loop {
            match self.next().await.unwrap() {
                server_message::Kind::Welcome(welcome) => self.epoch = welcome.epoch,
                server_message::Kind::Update(update) => {
                    self.last.0 += update.objects.len();
                    if update.snapshot {
                        self.last.1 = true;
                        self.objects.clear();
                    }
                    for bytes in update.objects {
                        let object = decode_object(bytes.clone()).unwrap().unwrap();
                        self.objects.insert(object.key(), bytes);
                    }
                    for key in update.deleted {
                        self.objects.remove(&DesiredKey::try_from(key).unwrap());
                    }
                    if let Some(end) = update.end {
                        assert_eq!(end.digest, self.digest().to_bytes());
                        self.trust = (end.confidence(), end.doubt);
                        self.revision = end.revision;
                        self.received().await;
                        return;
                    }
                }
                _ => {}
            }
        }
    }

    fn digest(&self) -> Digest {
        let mut digest = Digest::default();
        self.objects.values().for_each(|bytes| digest.add(ObjectHash::of(bytes)));
        digest
    }

    fn token(&self) -> ResumeToken {
        ResumeToken {
            schema: 1,
            epoch: self.epoch,
            revision: self.revision,
            digest: self.digest().to_bytes().to_vec(),
        }
    }

    async fn report(&self, applied: u64) {
        self.tell(pb::Report {
            applied_revision: applied,
            ..pb::Report::default()
        })
        .await;
    }

    async fn tell(&self, report: pb::Report) {
        let report = pb::Report {
            epoch: self.epoch,
            received_revision: self.revision,
            ..report
        };
        self.send.send(message(agent_message::Kind::Report(report))).await.unwrap();
    }
}

#[tokio::test]
async fn an_agent_that_comes_back_gets_no_more_than_it_lacks() {
    let (bound, _folder) = control_plane().await;
    publish(&bound, (0..100).map(|n| published(n, 1)).collect());
    let mut agent = Agent::connect(&bound, hello("n1", None)).await;
    agent.update().await;
    let (token, objects) = (agent.token(), std::mem::take(&mut agent.objects));
    drop(agent);

    let reconnect = async |token: ResumeToken| {
        let mut agent = Agent::connect(&bound, hello("n1", Some(token))).await;
        agent.objects = objects.clone();
        agent.update().await;
        agent.last
    };
    // Nothing changed. An equal digest counts in any epoch, because any replica may answer.
    assert_eq!(reconnect(token.clone()).await, (0, false));
    assert_eq!(
        reconnect(ResumeToken {
            epoch: 1,
            ..token.clone()
        })
        .await,
        (0, false)
    );
    publish(&bound, vec![published(7, 2)]);
    // The revision says what changed since; in another epoch, or if it is ahead, the digest does.
    let (epoch, ahead) = (token.epoch + 1, token.revision + 1_000);
    for (epoch, revision) in [
        (token.epoch, token.revision),
        (epoch, 1),
        (token.epoch, ahead),
    ] {
        let token = ResumeToken {
            epoch,
            revision,
            ..token.clone()
        };
        assert_eq!(reconnect(token).await, (1, false));
    }
    // Another schema, or a digest that says nothing: the agent gets a snapshot.
    for token in [
        ResumeToken {
            schema: 2,
            ..token.clone()
        },
        ResumeToken {
            epoch,
            digest: vec![1; 16],
            ..token.clone()
        },
        ResumeToken {
            digest: vec![1],
            ..token
        },
    ] {
        // The object that changed since the first agent's snapshot was encoded comes twice.
        assert_eq!(reconnect(token).await, (102, true));
    }
}

#[tokio::test]
async fn an_agent_that_does_not_read_costs_others_nothing_and_catches_up_by_keys() {
    let (bound, _folder) = control_plane().await;
    let mut slow = Agent::over_tcp(&bound, hello("slow", None)).await;
    let mut quick = Agent::over_tcp(&bound, hello("quick", None)).await;
    quick.update().await;
    // More data than all buffers between the two ends hold.
    for round in 0..30 {
        publish(
            &bound,
            (0..2_000).map(|n| published(n, round + 1)).collect(),
        );
        quick.update().await;
    }
    slow.update().await;
    let mut messages = 1;
    while slow.revision < quick.revision {
        slow.update().await;
        messages += 1;
    }
    assert_eq!(slow.objects.len(), 2_001);
    // The agent does not get one update per round. It gets the content of the transport's window,
    // then the latest state of each key at once.
    assert!(messages < 20, "{messages}");
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_falls_silent_is_let_go_within_20_seconds() {
    let (bound, _folder) = control_plane().await;
    let mut agent = Agent::connect(&bound, hello("n1", None)).await;
    agent.update().await;
    let since = tokio::time::Instant::now();
    let (mut pings, mut heartbeats) = (0, 0);
    let status = loop {
        match agent.next().await {
            Ok(server_message::Kind::Ping(_)) => pings += 1,
            Ok(server_message::Kind::Heartbeat(_)) => heartbeats += 1,
            Ok(_) => {}
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert!(pings >= 3 && heartbeats >= 3);
    assert!(
        (15..=20).contains(&since.elapsed().as_secs()),
        "{:?}",
        since.elapsed()
    );
}

#[tokio::test]
async fn the_newest_stream_speaks_for_a_node() {
    let (bound, _folder) = control_plane().await;
    let mut first = Agent::connect(&bound, hello("n1", None)).await;
    first.update().await;
    let mut second = Agent::connect(&bound, hello("n1", None)).await;
    second.update().await;
    let status = loop {
        if let Err(status) = first.next().await {
            break status;
        }
    };
    assert_eq!(status.code(), Code::Aborted);
    assert!(status.message().contains("newer stream"), "{status}");
}

#[tokio::test]
async fn what_is_no_agent_is_told_so() {
    let (bound, _folder) = control_plane().await;
    let ping = message(agent_message::Kind::Ping(pb::Ping { token: 1 }));
    let hello = |hello| message(agent_message::Kind::Hello(hello));
    let cases = [
        (
            ping,
            Code::InvalidArgument,
            "the first message must be Hello",
        ),
        (
            hello(self::hello("", None)),
            Code::InvalidArgument,
            "node_name must be",
        ),
        (
            hello(self::hello("N 1", None)),
            Code::InvalidArgument,
            "node_name must be",
        ),
        (
            hello(Hello {
                protocol_version: 2,
                ..self::hello("n1", None)
            }),
            Code::FailedPrecondition,
            "upgrade the older of the two",
        ),
    ];
    for (first, code, text) in cases {
        let (send, outbound) = mpsc::channel(1);
        send.send(first).await.unwrap();
        let mut client = AgentServiceClient::new(bound.in_process());
        let mut stream = client.sync(ReceiverStream::new(outbound)).await.unwrap().into_inner();
        let status = timeout(DEADLINE, stream.message()).await.unwrap().unwrap_err();
        assert_eq!(status.code(), code);
        assert!(status.message().contains(text), "{status}");
    }
}

#[tokio::test]
async fn the_status_api_tells_what_agents_reported() {
    let (bound, _folder) = control_plane().await;
    let revision = publish(&bound, vec![published(1, 1)]);
    let mut status = support::status(&bound).await;
    let mut watch = status.watch_fleet(pb::GetFleetRequest::default()).await.unwrap().into_inner();
    let mut agent = Agent::connect(&bound, hello("n1", None)).await;
    agent.update().await;
    assert_eq!(agent.revision, revision, "nobody else is told of the agent");
    let mut until = async |state: pb::NodeState| {
        let wait = async {
            loop {
                let fleet = watch.message().await.unwrap().unwrap();
                if let Some(node) = fleet.nodes.first().filter(|node| node.state() == state) {
                    return node.clone();
                }
            }
        };
        timeout(DEADLINE, wait).await.expect("the state is reached")
    };
    assert_eq!(
        until(pb::NodeState::Syncing).await.wanted_revision,
        agent.revision
    );
    agent.report(agent.revision).await;
    assert_eq!(until(pb::NodeState::InSync).await.last_error, "");
    publish(&bound, vec![published(1, 2)]);
    assert!(until(pb::NodeState::Syncing).await.wanted_revision > agent.revision);
    drop(agent);
    assert!(until(pb::NodeState::Disconnected).await.last_error.contains("not connected"));
}

/// An empty folder is not believed. Each update says so, and the end of this state causes an
/// update.
#[tokio::test]
async fn every_update_says_how_far_it_is_believed() {
    let (bound, folder) = control_plane().await;
    publish(&bound, vec![published(1, 1)]);
    let mut agent = Agent::connect(&bound, hello("n1", None)).await;
    agent.update().await;
    assert_eq!(
        (agent.trust.0, agent.last),
        (pb::Confidence::Partial, (2, true))
    );
    assert!(
        agent.trust.1.starts_with("there is no Service; "),
        "{:?}",
        agent.trust
    );
    publish(&bound, vec![published(2, 1)]);
    agent.update().await;
    assert_eq!(agent.trust.0, pb::Confidence::Partial);

    // Only the trust changes: an empty update with the same revision and digest.
    let before = (agent.revision, agent.digest());
    bound.hub().store().set_trust(Trust::Whole);
    agent.update().await;
    assert_eq!(agent.last, (0, false));
    assert_eq!((agent.revision, agent.digest()), before);
    assert_eq!(agent.trust, (pb::Confidence::Unspecified, String::new()));
    // A later agent gets the trust at once, even without other news.
    bound.hub().store().set_trust(Trust::Confirmed);
    agent.update().await;
    let mut second = Agent::connect(&bound, hello("n1", Some(agent.token()))).await;
    second.objects = agent.objects.clone();
    second.update().await;
    assert_eq!(
        (second.trust.0, second.last),
        (pb::Confidence::Confirmed, (0, false))
    );
    drop(folder);
}

/// An agent releases held objects when the operator approves; an approval without held objects does
/// nothing.
#[tokio::test]
async fn approval_reaches_agents() {
    let (bound, _folder) = control_plane().await;
    let mut status = support::status(&bound).await;
    bound.hub().store().set_trust(Trust::Whole);
    let mut agent = Agent::connect(&bound, hello("n1", None)).await;
    agent.update().await;
    let seen = pb::ApproveRequest::default();
    let nothing = status.approve(seen).await.unwrap().into_inner();
    assert_eq!((nothing.released, nothing.nodes), (None, Vec::new()));
    assert_eq!(bound.hub().store().trust(), Trust::Whole);

    let mut fleet = bound.hub().agents().changes();
    let mut looks = bound.hub().upstream().looks();
    agent
        .tell(pb::Report {
            held: Some(pb::Held {
                services: 12,
                ..pb::Held::default()
            }),
            ..pb::Report::default()
        })
        .await;
    while bound.hub().agents().holding().is_empty() {
        timeout(DEADLINE, fleet.changed()).await.unwrap().unwrap();
    }
    // The source is asked for another list.
    timeout(DEADLINE, looks.changed()).await.unwrap().unwrap();
    let done = status.approve(seen).await.unwrap().into_inner();
    assert_eq!(done.nodes, ["n1"]);
    agent.update().await;
    assert_eq!(agent.trust.0, pb::Confidence::Confirmed);
}

#[tokio::test]
async fn a_control_plane_that_ends_lets_its_agents_go() {
    let (bound, _folder) = control_plane().await;
    let mut agents = [
        Agent::connect(&bound, hello("n1", None)).await,
        Agent::over_tcp(&bound, hello("n2", None)).await,
    ];
    for agent in &mut agents {
        agent.update().await;
    }
    let service = bound.in_process();
    bound.shutdown_token().cancel();
    timeout(DEADLINE, bound.wait()).await.unwrap().unwrap();
    for mut agent in agents {
        let status = loop {
            if let Err(status) = agent.next().await {
                break status;
            }
        };
        assert_eq!(status.code(), Code::Unavailable, "{status}");
    }
    let late = sync(&mut AgentServiceClient::new(service), hello("n3", None)).await;
    assert_eq!(late.unwrap_err().code(), Code::Unavailable);
}

/// Returns what reflection v1alpha, which many tools still ask, says of services.
async fn older_services(channel: tonic::transport::Channel) -> String {
    use tonic_reflection::pb::v1alpha::ServerReflectionRequest;
    use tonic_reflection::pb::v1alpha::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1alpha::server_reflection_request::MessageRequest;

    let list = ServerReflectionRequest {
        message_request: Some(MessageRequest::ListServices(String::new())),
        ..Default::default()
    };
    let mut client = ServerReflectionClient::new(channel);
    let stream = client.server_reflection_info(tokio_stream::once(list)).await;
    let answer = stream.unwrap().into_inner().message().await.unwrap();
    format!("{:?}", answer.unwrap().message_response)
}

/// The services that grpcurl and load balancers rely on.
#[tokio::test]
async fn the_status_port_describes_itself_and_its_health() {
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_check_response::ServingStatus;
    use tonic_health::pb::health_client::HealthClient;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    use tonic_reflection::pb::v1::{ServerReflectionRequest, ServiceResponse};

    let (bound, _folder) = control_plane().await;
    let address = format!("http://{}", bound.status_addr.unwrap());
    let endpoint = tonic::transport::Endpoint::from_shared(address).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let mut health = HealthClient::new(channel.clone());
    let answer = health
        .check(HealthCheckRequest {
            service: String::new(),
        })
        .await
        .unwrap();
    assert_eq!(answer.into_inner().status(), ServingStatus::Serving);
    for (service, known) in [
        ("kplane.v1.StatusService", true),
        ("kplane.v1.DesiredStateService", true),
        ("kplane.v1.PeerService", true),
        ("kplane.v1.Nothing", false),
    ] {
        let service = service.to_owned();
        let answer = health.check(HealthCheckRequest { service }).await;
        let serves = answer.map(|answer| answer.into_inner().status());
        if known {
            assert_eq!(serves.unwrap(), ServingStatus::Serving);
        } else {
            assert_eq!(serves.unwrap_err().code(), Code::NotFound);
        }
    }
    let list = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let older = older_services(channel.clone()).await;
    assert!(older.contains("kplane.v1.StatusService"), "{older}");
    let mut reflection = ServerReflectionClient::new(channel);
    let stream = reflection.server_reflection_info(tokio_stream::once(list)).await.unwrap();
    let answer = stream.into_inner().message().await.unwrap().unwrap().message_response;
    let Some(MessageResponse::ListServicesResponse(list)) = answer else {
        panic!("{answer:?}");
    };
    let names: Vec<String> =
        list.service.into_iter().map(|ServiceResponse { name }| name).collect();
    for name in [
        "kplane.v1.StatusService",
        "kplane.v1.DesiredStateService",
        "grpc.health.v1.Health",
    ] {
        assert!(names.iter().any(|n| n == name), "{names:?}");
    }
}

#[tokio::test]
async fn tools_can_watch_what_a_node_should_have() {
    use kplane_proto::v1::desired_state_service_client::DesiredStateServiceClient;

    let (bound, _folder) = control_plane().await;
    publish(&bound, vec![published(1, 1)]);
    let mut agent = Agent::connect(&bound, hello("n1", None)).await;
    agent.update().await;
    let address = format!("http://{}", bound.status_addr.unwrap());
    let mut client = DesiredStateServiceClient::connect(address).await.unwrap();
    let watch = |node_name: &str| pb::WatchNodeRequest {
        node_name: node_name.to_owned(),
        ..pb::WatchNodeRequest::default()
    };
    let unknown = client.watch_node(watch("n2")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    let mut states = client.watch_node(watch("n1")).await.unwrap().into_inner();
    let first = timeout(DEADLINE, states.message()).await.unwrap().unwrap().unwrap();
    assert!(first.complete && first.objects.len() == 2);
    publish(&bound, vec![(key(1), None)]);
    let next = timeout(DEADLINE, states.message()).await.unwrap().unwrap().unwrap();
    assert_eq!((next.objects.len(), next.deleted.len()), (0, 1));
}

/// Two nodes use one name: the first agent continues, the second gets an error, and status names
/// both.
#[tokio::test]
async fn a_second_agent_of_a_node_is_refused_while_the_first_is_there() {
    let (bound, _folder) = control_plane().await;
    let revision = publish(&bound, vec![published(1, 1)]);
    let mut status = support::status(&bound).await;
    let mut first = Agent::connect(&bound, hello("n1", None)).await;
    first.update().await;
    first.report(revision).await;
    let other = Hello {
        instance: 2,
        ..hello("n1", None)
    };
    let mut second = Agent::connect(&bound, other.clone()).await;
    match second.next().await.unwrap() {
        server_message::Kind::ComeBackLater(later) => {
            assert!(later.reason.contains("--node-name"), "{}", later.reason);
            assert!(later.after_ms > 0);
        }
        other => panic!("{other:?}"),
    }
    let fleet = status.get_fleet(pb::GetFleetRequest::default()).await;
    let node = fleet.unwrap().into_inner().nodes.remove(0);
    assert_eq!(node.state(), pb::NodeState::Conflict);
    assert!(
        node.last_error.contains("two agents"),
        "{}",
        node.last_error
    );
    // The first agent gets changes as before.
    publish(&bound, vec![published(2, 1)]);
    first.update().await;
    // A newer stream of the same process is no rival, and an agent that has ended frees the name.
    let mut first = Agent::connect(&bound, hello("n1", None)).await;
    first.update().await;
    drop(first);
    let taken = async {
        loop {
            let mut second = Agent::connect(&bound, other.clone()).await;
            if let Ok(server_message::Kind::Welcome(_)) = second.next().await {
                break;
            }
        }
    };
    timeout(DEADLINE, taken).await.unwrap();
}
