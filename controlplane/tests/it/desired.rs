//! `DesiredStateService`, through the real gRPC stack where the transport matters.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use kp_controlplane::app::Bound;
use kplane_agents::hub::Hub;
use kplane_desired_state::admission::Admission;
use kplane_desired_state::publish::{Publication, Published, Store};
use kplane_desired_state::trust::Trust;
use kplane_model::select::merge;
use kplane_model::{Endpoint, EndpointAddr, NodeFacts, ServiceKey, ServicePort};
use kplane_proto::v1::desired_state_service_client::DesiredStateServiceClient;
use kplane_proto::v1::desired_state_service_server::DesiredStateService as _;
use kplane_proto::v1::object::Kind;
use kplane_proto::v1::{self as pb, Confidence, DesiredState};
use kplane_status_api::server::DesiredServer;
use tokio::time::{Instant, timeout};
use tokio_stream::StreamExt as _;
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

use crate::support::start::start;

/// A deadline far above any step of these tests.
const DEADLINE: Duration = Duration::from_secs(60);

async fn control_plane(watches: usize) -> (Bound, tempfile::TempDir) {
    start(|config| config.identity.watches = watches).await
}

async fn client(bound: &Bound) -> DesiredStateServiceClient<Channel> {
    let address = format!("http://{}", bound.status_addr.unwrap());
    DesiredStateServiceClient::connect(address).await.unwrap()
}

fn key(n: usize) -> ServiceKey {
    ServiceKey::sample("shop", &format!("svc-{n}"))
}

fn endpoint(octet: u8, node: &str) -> Endpoint {
    let ip = IpAddr::from([10, 0, 0, octet]);
    Endpoint {
        node: Some(node.into()),
        ..Endpoint::ready(EndpointAddr { ip, port: 8080 })
    }
}

type Service = (ServiceKey, Option<Published>);

fn service(n: usize, endpoints: Vec<Endpoint>) -> Service {
    let published = Published::new(ServicePort::sample(key(n)), &merge(endpoints));
    (key(n), Some(published))
}

fn node(name: &str, zone: &str) -> NodeFacts {
    NodeFacts {
        zone: Some(zone.into()),
        eligible: true,
        ..NodeFacts::sample(name)
    }
}

fn publish(store: &Store, services: Vec<Service>, nodes: Vec<NodeFacts>) -> u64 {
    store.publish(Publication::sample(services, nodes))
}

fn of_node(name: &str) -> pb::WatchNodeRequest {
    pb::WatchNodeRequest {
        node_name: name.to_owned(),
        resume: None,
    }
}

/// Awaits something that happens in time.
async fn within<T>(future: impl Future<Output = T>) -> T {
    timeout(DEADLINE, future).await.expect("in time")
}

async fn next<T>(stream: &mut Streaming<T>) -> T {
    within(stream.message()).await.unwrap().unwrap()
}

/// The kinds of new objects in a message, and the number of deleted ones.
fn changes(state: &DesiredState) -> (Vec<&'static str>, usize) {
    let kinds = state.objects.iter().map(|object| match object.kind {
        Some(Kind::Service(_)) => "service",
        Some(Kind::Local(_)) => "local",
        Some(Kind::Node(_)) => "node",
        Some(Kind::Policy(_)) => "policy",
        None => "unknown",
    });
    (kinds.collect(), state.deleted.len())
}

#[tokio::test]
async fn a_node_comes_whole_and_then_in_changes_that_concern_it() {
    let (bound, _folder) = control_plane(8).await;
    let store = bound.hub().store();
    let both = vec![node("n1", "x"), node("n2", "y")];
    publish(store, vec![service(1, vec![endpoint(1, "n1")])], both);
    let mut client = client(&bound).await;
    let unknown = client.watch_node(of_node("n3")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    let nameless = client.watch_node(of_node("")).await.unwrap_err();
    assert_eq!(nameless.code(), Code::InvalidArgument);

    let mut watch = client.watch_node(of_node("n1")).await.unwrap().into_inner();
    let first = next(&mut watch).await;
    let mut kinds = changes(&first);
    kinds.0.sort_unstable();
    assert_eq!(kinds, (vec!["local", "node", "service"], 0));
    assert!(first.snapshot && first.complete && first.revision > 0);
    let source = first.source.unwrap();
    assert!(source.read && source.epoch == store.epoch() && source.doubt.is_empty());

    // The change of another node is no news.
    publish(store, Vec::new(), vec![node("n2", "z")]);
    let revision = publish(store, vec![service(2, vec![])], Vec::new());
    let second = next(&mut watch).await;
    assert_eq!(changes(&second), (vec!["service"], 0));
    assert!(!second.snapshot && second.complete && second.changed_at_ms > 0);
    assert_eq!(second.revision, revision);

    publish(store, vec![(key(1), None)], Vec::new());
    let third = next(&mut watch).await;
    assert_eq!(changes(&third), (vec![], 2));
}

#[tokio::test]
async fn a_node_is_resumed_on_any_replica() {
    let (bound, _folder) = control_plane(8).await;
    let (other, _other_folder) = control_plane(8).await;
    for store in [bound.hub().store(), other.hub().store()] {
        publish(store, vec![service(1, vec![])], vec![node("n1", "x")]);
        publish(store, vec![service(2, vec![])], Vec::new());
    }
    let mut client = client(&bound).await;
    let first = client.watch_node(of_node("n1")).await.unwrap();
    let token = next(&mut first.into_inner()).await.resume;
    assert!(token.is_some());
    let resumed = |resume| pb::WatchNodeRequest {
        resume,
        ..of_node("n1")
    };

    // An equal state, here and on a replica of another epoch.
    for bound in [&bound, &other] {
        let mut client = self::client(bound).await;
        let watch = client.watch_node(resumed(token.clone())).await.unwrap();
        let message = next(&mut watch.into_inner()).await;
        assert!(message.complete && !message.snapshot);
        assert_eq!(changes(&message), (vec![], 0));
    }
    // A deletion that happened meanwhile. The other replica knows by the digest what the client lacks.
    for bound in [&bound, &other] {
        publish(bound.hub().store(), vec![(key(2), None)], Vec::new());
        let mut client = self::client(bound).await;
        let watch = client.watch_node(resumed(token.clone())).await.unwrap();
        let message = next(&mut watch.into_inner()).await;
        assert!(message.complete && !message.snapshot);
        assert_eq!(changes(&message), (vec![], 1));
    }
    let nonsense = pb::ResumeToken {
        digest: vec![1; 40],
        revision: u64::MAX,
        ..token.unwrap()
    };
    let watch = client.watch_node(resumed(Some(nonsense))).await.unwrap();
    assert!(next(&mut watch.into_inner()).await.snapshot);
}

/// A client that does not read costs a message. When it reads again, it gets the latest state, whatever happened.
#[tokio::test]
async fn a_slow_reader_gets_the_latest_state_and_no_queue() {
    const MANY: u32 = 2_000;
    let (bound, _folder) = control_plane(8).await;
    let store = bound.hub().store();
    // 12 kB each, so that a queue of them would show.
    let large = |octet: u8| {
        let ip = |n: u32| {
            let [.., high, low] = n.to_be_bytes();
            IpAddr::from([10, octet, high, low])
        };
        let addr = |n| EndpointAddr::new(ip(n), 80);
        service(1, (0..MANY).map(|n| Endpoint::ready(addr(n))).collect())
    };
    publish(store, vec![large(0)], vec![node("n1", "x")]);
    let mut client = client(&bound).await;
    let mut node = client.watch_node(of_node("n1")).await.unwrap().into_inner();
    let mut revision = 0;
    for change in 0..200 {
        revision = publish(store, vec![large(change)], Vec::new());
    }
    let mut messages = 0;
    while next(&mut node).await.revision < revision {
        messages += 1;
    }
    assert!(messages <= 20, "{messages} messages were on their way");
}

#[tokio::test]
async fn a_slow_reader_that_misses_too_many_deletions_begins_anew() {
    const MANY: usize = 16_500;
    let (bound, _folder) = control_plane(8).await;
    let store = bound.hub().store();
    publish(store, Vec::new(), vec![node("n1", "x")]);
    let mut client = client(&bound).await;
    let mut watch = client.watch_node(of_node("n1")).await.unwrap().into_inner();
    let services = (0..MANY).map(|n| service(n, vec![])).collect();
    publish(store, services, Vec::new());
    // It reads some, and is then in the middle of it.
    let mut held = BTreeMap::new();
    let mut take = |state: DesiredState| {
        if state.snapshot {
            held.clear();
        }
        for object in state.objects {
            if let Some(Kind::Service(program)) = object.kind {
                held.insert(format!("{:?}", program.key), ());
            }
        }
        for key in state.deleted {
            if let Some(pb::object_key::Kind::Service(key)) = key.kind {
                held.remove(&format!("{:?}", Some(key)));
            }
        }
        (state.snapshot, state.revision, held.len())
    };
    while take(next(&mut watch).await).2 == 0 {}
    let none = (1..MANY).map(|n| (key(n), None)).collect();
    let revision = publish(store, none, Vec::new());
    let mut snapshots = 0;
    let left = loop {
        let (snapshot, at, left) = take(next(&mut watch).await);
        snapshots += usize::from(snapshot);
        if at == revision {
            break left;
        }
    };
    assert_eq!((left, snapshots), (1, 1));
}

#[tokio::test]
async fn a_doubt_reaches_a_watch_although_no_object_changes() {
    let (bound, _folder) = control_plane(8).await;
    let store = bound.hub().store();
    publish(store, Vec::new(), vec![node("n1", "x")]);
    let mut client = client(&bound).await;
    let mut node = client.watch_node(of_node("n1")).await.unwrap().into_inner();
    let source = next(&mut node).await.source.unwrap();
    assert_eq!(source.confidence(), Confidence::Unspecified);
    store.set_trust(Trust::Partial("web.yaml is broken".into()));
    let message = next(&mut node).await;
    assert!(message.complete && message.changed_at_ms == 0);
    let source = message.source.unwrap();
    assert_eq!(source.confidence(), Confidence::Partial);
    assert_eq!(source.doubt, "web.yaml is broken");
}

#[tokio::test]
async fn one_caller_cannot_have_all_watches() {
    let (bound, _folder) = control_plane(4).await;
    let store = bound.hub().store();
    publish(store, Vec::new(), vec![node("n1", "x")]);
    let mut client = client(&bound).await;
    let _node = client.watch_node(of_node("n1")).await.unwrap();
    let _again = client.watch_node(of_node("n1")).await.unwrap();
    let refused = client.watch_node(of_node("n1")).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(
        refused.message().contains("half of all watches"),
        "{refused}"
    );
}

/// The clock is stopped: it advances when all tasks wait.
#[tokio::test(start_paused = true)]
async fn a_quiet_stream_shows_that_it_is_alive_also_before_the_source_was_read() {
    let (hub, _batches) = Hub::sample_with_index("tests", Admission::default());
    let server = DesiredServer::new(Arc::clone(&hub));
    let request = Request::new(of_node("n1"));
    let mut watch = server.watch_node(request).await.unwrap().into_inner();
    let began = Instant::now();
    for n in 1..=3 {
        let state = within(watch.next()).await.unwrap().unwrap();
        assert_eq!(began.elapsed().as_secs(), n * 5);
        assert!(!state.complete && !state.snapshot && state.objects.is_empty());
        assert!(!state.source.unwrap().read);
    }
    publish(hub.store(), Vec::new(), vec![node("n1", "x")]);
    hub.store().set_synced();
    let state = within(watch.next()).await.unwrap().unwrap();
    assert!(state.complete && state.snapshot && began.elapsed().as_secs() == 15);
    // What does not concern the node does not end the quiet; the revision shows that it was seen.
    let revision = publish(hub.store(), Vec::new(), vec![node("n2", "x")]);
    let state = within(watch.next()).await.unwrap().unwrap();
    assert_eq!((began.elapsed().as_secs(), state.revision), (20, revision));
    assert!(state.complete && !state.snapshot && state.changed_at_ms == 0);
    assert_eq!(changes(&state), (vec![], 0));
    hub.shutdown().cancel();
    assert!(within(watch.next()).await.is_none());
}

/// A name that is unknown when the source has been read ends the watch, although it began before.
#[tokio::test(start_paused = true)]
async fn an_unknown_node_is_refused_when_the_nodes_are_known() {
    let (hub, _batches) = Hub::sample_with_index("tests", Admission::default());
    let server = DesiredServer::new(Arc::clone(&hub));
    let request = Request::new(of_node("n1"));
    let mut watch = server.watch_node(request).await.unwrap().into_inner();
    hub.store().set_synced();
    let refused: Status = within(watch.next()).await.unwrap().unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    assert!(within(watch.next()).await.is_none());
}
