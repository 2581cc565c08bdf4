//! The servers over TCP; the tests supply the control plane's state.

mod findings;
mod policies;
mod services;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kplane_agents::connection_limits::{ConnectionLimiter, Limits};
use kplane_agents::fleet::Session;
use kplane_agents::hub::Hub;
use kplane_agents::identity::{self, Authenticator};
use kplane_agents::peers::Collected;
use kplane_agents::streams::AgentServer;
use kplane_desired_state::admission::Admission;
use kplane_desired_state::k8s::Kind;
use kplane_desired_state::publish::Publication;
use kplane_desired_state::source::{Batch, Event, kubernetes};
use kplane_model::{Issue, NodeFacts, ObjectRef, ServiceName, Severity};
use kplane_proto::shared::AgentServiceServer;
use kplane_proto::v1::agent_service_client::AgentServiceClient;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_proto::v1::status_service_server::{StatusService as _, StatusServiceServer};
use kplane_proto::v1::{self as pb, AgentMessage, Hello, agent_message};
use kplane_util::clock::millis;
use prost::Message as _;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Status};

use super::StatusServer;
use super::request::{WATCH_PAUSE, WATCH_REFRESH};
use super::views::{self, UNVERIFIED_AFTER, node_state};

/// A deadline far above any step of these tests.
const DEADLINE: Duration = Duration::from_secs(30);

/// Default size limit of gRPC clients, in bytes.
const USUAL_LIMIT: usize = 4 << 20;

/// Both services of a hub on one port.
async fn serve(hub: &Arc<Hub>) -> Channel {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let limiter = ConnectionLimiter::new("tests", Limits::STATUS);
    let authenticator = Authenticator::open(
        &identity::AuthenticatorConfig::default(),
        Arc::clone(hub),
        None,
    )
    .unwrap();
    let router = Server::builder()
        .add_service(AgentServiceServer::new(AgentServer::new(
            Arc::clone(hub),
            authenticator,
        )))
        .add_service(StatusServiceServer::new(StatusServer::new(Arc::clone(hub))));
    tokio::spawn(router.serve_with_incoming(limiter.incoming(listener, None)));
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    endpoint.connect().await.unwrap()
}

fn publish_node(hub: &Hub, name: &str) {
    let publication = Publication::sample(vec![], vec![NodeFacts::sample(name)]);
    hub.store().publish(publication);
}

fn hello(node: &str) -> Hello {
    Hello {
        protocol_version: 1,
        node_name: node.to_owned(),
        ..Hello::default()
    }
}

/// Returns the first message to an agent of this name after its Hello.
async fn first_update(channel: &Channel, node: &str) -> Result<pb::Update, Status> {
    let (send, outbound) = mpsc::channel(1);
    let kind = Some(agent_message::Kind::Hello(hello(node)));
    send.send(AgentMessage { kind }).await.unwrap();
    let mut client = AgentServiceClient::new(channel.clone());
    let mut stream = client.sync(ReceiverStream::new(outbound)).await?.into_inner();
    loop {
        let message = timeout(DEADLINE, stream.message()).await.unwrap()?;
        if let Some(pb::server_message::Kind::Update(update)) = message.unwrap().kind {
            return Ok(update);
        }
    }
}

#[tokio::test]
async fn a_name_that_is_no_node_of_the_cluster_is_refused() {
    let hub = Hub::sample(1, kubernetes::NAME);
    let channel = serve(&hub).await;
    // Before the first list no Node is known: agents wait, and unknown ones are refused afterwards.
    let early = tokio::spawn({
        let channel = channel.clone();
        async move { first_update(&channel, "laptop").await }
    });
    let mut changes = hub.agents().changes();
    let came = changes.wait_for(|_| hub.agents().record("laptop").is_some());
    timeout(DEADLINE, came).await.unwrap().unwrap();
    publish_node(&hub, "n1");
    hub.store().set_synced();
    let early = timeout(DEADLINE, early).await.unwrap().unwrap();
    let late = first_update(&channel, "laptop").await;
    for refused in [early, late] {
        let status = refused.unwrap_err();
        assert_eq!(status.code(), Code::NotFound);
        assert!(status.message().contains("no Node \"laptop\""), "{status}");
    }
    assert!(first_update(&channel, "n1").await.unwrap().snapshot);
    // The name becomes a Node a moment later.
    publish_node(&hub, "laptop");
    assert!(first_update(&channel, "laptop").await.unwrap().snapshot);
}

/// A hub whose input has 3,000 problems of 5 kB.
async fn troubled_hub() -> Arc<Hub> {
    let (hub, sink) = Hub::sample_with_index("test", Admission::default());
    let issues = (0..3_000).map(|n| Issue {
        severity: Severity::Error,
        code: kplane_model::Reason::InvalidField,
        location: String::new(),
        object: ObjectRef {
            kind: Kind::Service.to_string(),
            namespace: "shop".to_owned(),
            name: format!("svc-{n}"),
        },
        reason: format!("{n} is wrong: {}", "because ".repeat(700)),
    });
    let batch = Batch {
        events: vec![Event::Issues(issues.collect())],
        observed_at: SystemTime::now(),
    };
    sink.send(batch).await.unwrap();
    let mut summary = hub.index().summary();
    summary.wait_for(|s| !s.issues.is_empty()).await.unwrap();
    hub
}

/// Problems of the API server are shown as soon as they are known, with the problems of the input
/// and without a batch through the index. Other changes of the source's state wake no watch.
#[tokio::test(start_paused = true)]
async fn issues_of_the_api_server_are_read_where_they_are() {
    let hub = troubled_hub().await;
    let status = StatusServer::new(Arc::clone(&hub));
    let mut watch = status
        .watch_fleet(Request::new(pb::GetFleetRequest::default()))
        .await
        .unwrap()
        .into_inner();
    // The number of errors in the next answer, and the time until it comes.
    let mut next = async || {
        let before = Instant::now();
        let fleet = watch.next().await.unwrap().unwrap();
        (fleet.control_plane.unwrap().errors, before.elapsed())
    };
    hub.upstream().begin(Kind::Service);
    while next().await.1 < WATCH_REFRESH {}
    let issue = Issue {
        severity: Severity::Error,
        code: kplane_model::Reason::InvalidField,
        location: String::new(),
        object: ObjectRef::new(Kind::Service.to_string(), "shop", "new"),
        reason: "cannot be read".to_owned(),
    };
    let issues = Arc::new(vec![issue.clone()]);
    let heard_at = hub.index().summary().borrow().heard_at;
    hub.upstream().update(Kind::Service, |state| state.unreadable = issues);
    let (errors, waited) = next().await;
    assert_eq!(errors, 3_001);
    assert!(waited <= WATCH_PAUSE, "{waited:?}");
    assert_eq!(hub.issues().len(), 3_001);
    assert!(hub.issues().is_sorted());
    let detail = hub.index().detail(ServiceName::new("shop", "new")).await.unwrap();
    assert_eq!(detail.unwrap().issues, [issue]);

    hub.upstream().update(Kind::Service, |state| state.counts.events += 1);
    let (errors, waited) = next().await;
    assert_eq!(errors, 3_001);
    assert!(waited >= WATCH_REFRESH, "{waited:?}");
    hub.upstream().update(Kind::Service, |state| state.unreadable = Arc::default());
    let (errors, waited) = next().await;
    assert_eq!(errors, 3_000);
    assert!(waited <= WATCH_PAUSE, "{waited:?}");
    assert_eq!(hub.index().summary().borrow().heard_at, heard_at);
}

/// An agent whose report has 200 kB.
fn wordy_agent(hub: &Arc<Hub>, name: &str) -> Session {
    let failure = pb::ObjectFailure {
        reason: "x".repeat(1_000),
        ..Default::default()
    };
    let report = pb::Report {
        failures: vec![failure; 200],
        ..Default::default()
    };
    let session = Session::sample(hub, name);
    session.report(report);
    session
}

#[tokio::test]
async fn a_large_fleet_and_many_problems_come_in_answers_of_bounded_size() {
    let hub = troubled_hub().await;
    let expected: Vec<String> = (0..60).map(|n| format!("n{n:02}")).collect();
    let agents: Vec<Session> = expected.iter().map(|name| wordy_agent(&hub, name)).collect();

    let mut status = StatusServiceClient::new(serve(&hub).await);
    let mut pages = Vec::new();
    let mut request = pb::GetFleetRequest::default();
    loop {
        let page = status.get_fleet(request.clone()).await.unwrap().into_inner();
        request.page_token.clone_from(&page.next_page_token);
        pages.push(page);
        if request.page_token.is_empty() {
            break;
        }
    }
    let mut watch = status.watch_fleet(pb::GetFleetRequest::default()).await.unwrap().into_inner();
    for page in &pages {
        let watched = timeout(DEADLINE, watch.message()).await.unwrap().unwrap().unwrap();
        assert_eq!(watched.next_page_token, page.next_page_token);
        assert!(watched.encoded_len() < USUAL_LIMIT);
    }
    assert!(pages.len() > 3 && pages.iter().all(|page| page.encoded_len() < USUAL_LIMIT));
    let names: Vec<&str> = pages
        .iter()
        .flat_map(|page| &page.nodes)
        .map(|node| node.name.as_str())
        .collect();
    assert_eq!(names, expected);
    let about = pages[0].control_plane.as_ref().unwrap();
    assert_eq!((about.errors, about.warnings), (3_000, 0));
    assert_eq!(about.issues.len() as u64 + about.issues_omitted, 3_000);
    assert!(pages[1..].iter().all(|page| page.control_plane.is_none()));

    let request = pb::GetFleetRequest {
        page_size: 3,
        page_token: "n10".to_owned(),
        ..pb::GetFleetRequest::default()
    };
    let page = status.get_fleet(request).await.unwrap().into_inner();
    assert_eq!(
        (page.nodes.len(), page.next_page_token.as_str()),
        (3, "n13")
    );
    drop(agents);
}

/// NP: an absent definition is a state, and no problem of the input.
#[test]
fn the_status_says_whether_cluster_network_policies_are_defined() {
    let hub = Hub::sample(1, "test");
    let others = Collected::default();
    let is_absent = || {
        let status = views::control_plane(&hub, &others);
        assert_eq!(status.errors + status.warnings, 0);
        status.cluster_policies_absent
    };
    assert!(!is_absent(), "the source asks for none");
    hub.upstream().begin(Kind::ClusterNetworkPolicy);
    assert!(!is_absent());
    for absent in [true, false] {
        let kind = Kind::ClusterNetworkPolicy;
        hub.upstream().update(kind, |state| state.absent = absent);
        assert_eq!(is_absent(), absent);
    }
}

/// The kernel of such a node may be in any state by now.
#[test]
fn an_agent_that_does_not_look_at_its_kernel_is_not_in_sync() {
    let hub = Hub::sample(1, "test");
    let session = Session::sample(&hub, "n1");
    let report = |verified_at_ms| pb::Report {
        epoch: 1,
        applied_revision: hub.store().wanted("n1"),
        families: vec![pb::FamilyStatus {
            programmed: true,
            verified_at_ms,
            ..pb::FamilyStatus::default()
        }],
        ..pb::Report::default()
    };
    let state = |age: Duration| {
        let mut record = (*hub.agents().record("n1").unwrap()).clone();
        record.verified_at -= age;
        node_state(
            &hub,
            &"n1".into(),
            Some(&record),
            hub.store().wanted("n1"),
            None,
        )
        .state
    };
    let long = UNVERIFIED_AFTER + Duration::from_secs(1);
    session.report(report(1_000));
    assert_eq!(state(Duration::ZERO), pb::NodeState::InSync);
    assert_eq!(state(UNVERIFIED_AFTER / 2), pb::NodeState::InSync);
    assert_eq!(state(long), pb::NodeState::Unverified);
    // A new comparison restarts the time, whatever the agent's clock says.
    session.report(report(900));
    assert_eq!(state(Duration::ZERO), pb::NodeState::InSync);
    // Older agents do not report comparisons.
    session.report(report(0));
    assert_eq!(state(long), pb::NodeState::InSync);
}

/// The clock of the node's machine is an hour slow. It compared its kernel three minutes before it reported, and has had a
/// problem for ten.
#[test]
fn ages_are_right_whatever_the_time_on_the_node() {
    let hub = Hub::sample(1, "test");
    let session = Session::sample(&hub, "n1");
    let now_ms = millis(SystemTime::now()) - 3_600_000;
    session.report(pb::Report {
        epoch: 1,
        families: vec![pb::FamilyStatus {
            verified_at_ms: now_ms - 180_000,
            error: "refused".into(),
            error_since_ms: now_ms - 600_000,
            ..pb::FamilyStatus::default()
        }],
        now_ms,
        ..pb::Report::default()
    });
    let record = hub.agents().record("n1").unwrap();
    let status = views::node_status(&hub, &"n1".into(), Some(&record), None, None);
    let age_s = |at| (millis(SystemTime::now()) - at) / 1_000;
    assert_eq!(status.state(), pb::NodeState::Failing);
    assert!((600..660).contains(&age_s(status.since_ms)));
    let verified = status.report.unwrap().families[0].verified_at_ms;
    assert!((180..240).contains(&age_s(verified)));
}
