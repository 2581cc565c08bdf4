//! Requests to the HTTP port over loopback; the tests supply the control plane's state.

use kplane_agents::connection_limits::Limits;
use kplane_agents::fleet::Session;
use kplane_agents::identity;
use kplane_desired_state::admission::Admission;
use kplane_desired_state::k8s::Kind;
use kplane_desired_state::source::upstream::Trouble;
use kplane_desired_state::source::{Batch, Event, Located};
use kplane_http::client::get;
use kplane_model::{Issue, ObjectRef, Severity};
use kplane_proto::v1 as pb;
use tokio::sync::mpsc;

use super::*;

/// A control plane without agents, whose readiness and metrics are served.
async fn served() -> (mpsc::Sender<Batch>, Arc<Hub>, std::net::SocketAddr) {
    let limiters =
        ["agents", "the status API"].map(|what| ConnectionLimiter::new(what, Limits::STATUS));
    served_with(limiters).await
}

async fn served_with(
    limiters: [Arc<ConnectionLimiter>; 2],
) -> (mpsc::Sender<Batch>, Arc<Hub>, std::net::SocketAddr) {
    kplane_http::panics::install();
    let (hub, sink) = Hub::sample_with_index("test", Admission::default());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let authenticator = Authenticator::open(
        &identity::AuthenticatorConfig::default(),
        Arc::clone(&hub),
        None,
    )
    .unwrap();
    tokio::spawn(
        Admin::new(Arc::clone(&hub), authenticator, limiters, Own::default()).serve(listener, None),
    );
    (sink, hub, address)
}

#[tokio::test]
async fn ready_once_every_kind_is_listed_and_for_ever_after() {
    let (sink, hub, address) = served().await;

    hub.upstream().begin(Kind::Service);
    hub.upstream().update(Kind::Service, |state| {
        state.trouble = Some(Trouble {
            since: std::time::SystemTime::now(),
            issue: Issue {
                severity: Severity::Error,
                code: kplane_model::Reason::InvalidField,
                location: String::new(),
                object: ObjectRef::new("API server", "", "https://192.0.2.1"),
                reason: "is on holiday".to_owned(),
            },
        });
    });
    let reply = get(address, "/livez").await.unwrap();
    assert_eq!(reply.status, 200);
    let reply = get(address, "/readyz").await.unwrap();
    assert_eq!(reply.status, 503);
    assert_eq!(
        reply.body,
        "Service: not listed for 0 s: API server https://192.0.2.1: is on holiday\nnot ready\n"
    );

    list_nothing(&sink, &hub).await;
    hub.upstream().update(Kind::Service, |state| state.synced = true);
    let reply = get(address, "/readyz").await.unwrap();
    assert_eq!((reply.status, reply.body.as_str()), (200, "ok\n"));
    let reply = get(address, "/readyz?verbose").await.unwrap();
    assert_eq!(reply.status, 200);
    assert!(reply.body.starts_with("Service: synced, current 0 s ago: API server"));

    let metrics = get(address, "/metrics").await.unwrap().body;
    for line in [
        "kplane_controlplane_synced 1",
        "kplane_controlplane_services 0",
        "kplane_controlplane_held_services 0",
        "kplane_controlplane_held_without_endpoints 0",
        "kplane_controlplane_picture_partial 0",
        "kplane_controlplane_nodes{state=\"in_sync\"} 0",
        "kplane_controlplane_node_findings{code=\"ForwardingOff\"} 0",
        "kplane_controlplane_change_programmed_duration_seconds_count 0",
        "kplane_controlplane_change_hop_duration_seconds_bucket{le=\"0.001\",hop=\"kernel\"} 0",
        "kplane_controlplane_source_synced{kind=\"Service\"} 1",
        "kplane_controlplane_source_lists_total{kind=\"Service\"} 0",
        "# TYPE kplane_controlplane_source_failures_total counter",
        "# TYPE kplane_controlplane_upstream_age_seconds gauge",
        "kplane_controlplane_connections{port=\"http\"} 1",
        "kplane_controlplane_connections_closed_total{port=\"agents\",reason=\"refused\"} 0",
        "kplane_controlplane_accept_failures_total{port=\"status\"} 0",
        "# TYPE kplane_controlplane_panics_total counter",
        "# TYPE process_resident_memory_bytes gauge",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line}\n{metrics}");
    }
    // Prometheus computes no quantile of a histogram without that bucket.
    for name in metrics.lines().filter_map(histogram) {
        let with = |start: String| metrics.lines().filter(|l| l.starts_with(&start)).count();
        let open = with(format!("{name}_bucket{{le=\"+Inf\""));
        assert_eq!(open, with(format!("{name}_count")), "{name}");
        assert!(open > 0, "{name}");
    }
    assert_eq!(get(address, "/other").await.unwrap().status, 404);
}

/// Returns the name in the TYPE line of a histogram.
fn histogram(line: &str) -> Option<&str> {
    line.strip_prefix("# TYPE ")?.strip_suffix(" histogram")
}

/// A control plane whose ports wait for certificates serves nobody.
#[tokio::test]
async fn not_ready_without_certificates() {
    let limiters =
        ["agents", "the status API"].map(|what| ConnectionLimiter::new(what, Limits::STATUS));
    let (_sink, hub, address) = served_with(limiters.clone()).await;
    hub.store().set_synced();
    for (cover, status, line) in [
        (
            Cover::Waiting,
            503,
            "port for agents: waiting for certificates",
        ),
        (Cover::PlainText, 200, "port for agents: plain text"),
        (Cover::Tls, 200, "port for agents: TLS"),
    ] {
        limiters[0].set_cover(cover);
        let reply = get(address, "/readyz?verbose").await.unwrap();
        assert_eq!(reply.status, status, "{cover:?}");
        assert!(reply.body.contains(line), "{}", reply.body);
    }
}

/// Doubts and held objects are reported and do not change readiness: see the top of `admin`.
#[tokio::test]
async fn ready_while_something_is_held() {
    let (sink, hub, address) = served().await;
    let service = |n: u8| {
        Located::sample(&serde_json::json!({
            "kind": "Service",
            "metadata": {"name": format!("s{n:02}")},
            "spec": {"clusterIP": format!("10.96.0.{n}"), "ports": [{"port": 80}]},
        }))
    };
    let services: Vec<_> = (1..=10).map(service).collect();
    let ids = services.iter().map(|located| located.object.id()).collect();
    let events = Batch::sample(&Kind::ALL, services).events;
    let observed_at = std::time::SystemTime::now();
    let vanished = vec![
        Event::Vanished(ids),
        Event::Doubts(vec!["shop.yaml is empty".to_owned()]),
    ];
    for events in [events, vanished] {
        sink.send(Batch {
            events,
            observed_at,
        })
        .await
        .unwrap();
    }
    let mut summary = hub.index().summary();
    summary.wait_for(|now| now.held.is_some()).await.unwrap();

    let reply = get(address, "/readyz?verbose").await.unwrap();
    assert_eq!(reply.status, 200);
    assert_eq!(
        reply.body,
        "data: incomplete: shop.yaml is empty; fix that, or run `kpctl approve` if nothing is \
         missing\nheld: 10 Services are kept: they are missing from the source, and 10 of 10 \
         Services would be removed; restore them in the source, or run `kpctl approve` to remove \
         them\nok\n"
    );
    let metrics = get(address, "/metrics").await.unwrap().body;
    for line in [
        "kplane_controlplane_services 10",
        "kplane_controlplane_held_services 10",
        "kplane_controlplane_picture_partial 1",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line}\n{metrics}");
    }
}

/// Returns the value of a series without labels.
async fn value(address: std::net::SocketAddr, name: &str) -> f64 {
    let metrics = get(address, "/metrics").await.unwrap().body;
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name}")).parse().unwrap()
}

#[tokio::test]
async fn an_agent_lags_until_its_kernel_holds_what_it_must_hold() {
    let (sink, hub, address) = served().await;
    list_nothing(&sink, &hub).await;
    let nodes = || value(address, "kplane_controlplane_applied_lag_seconds_count");
    let lag = || value(address, "kplane_controlplane_applied_lag_seconds_sum");
    assert_eq!((nodes().await, lag().await), (0.0, 0.0));

    let session = Session::sample(&hub, "n1");
    assert_eq!(value(address, "kplane_controlplane_streams").await, 1.0);
    assert_eq!(nodes().await, 1.0);
    assert!(lag().await > 0.0, "it has reported nothing");
    let revision = hub.store().head().borrow().revision;
    session.report(pb::Report {
        epoch: hub.store().epoch(),
        applied_revision: revision,
        ..pb::Report::default()
    });
    assert_eq!((nodes().await, lag().await), (1.0, 0.0));
    drop(session);
    assert_eq!(value(address, "kplane_controlplane_streams").await, 0.0);
    assert_eq!(nodes().await, 0.0, "nobody knows what its kernel holds");
}

#[tokio::test]
async fn metrics_of_work_are_there_before_any_work() {
    let (_sink, _hub, address) = served().await;
    let metrics = get(address, "/metrics").await.unwrap().body;
    let version = env!("CARGO_PKG_VERSION");
    let build =
        format!("kplane_controlplane_build_info{{version=\"{version}\",source=\"test\"}} 1");
    for line in [
        "kplane_controlplane_sent_messages_total{kind=\"update\"} 0",
        "kplane_controlplane_sent_bytes_total{kind=\"snapshot\"} 0",
        "kplane_controlplane_events_total{result=\"written\"} 0",
        &build,
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line}\n{metrics}");
    }
}

/// Lists all kinds without an object, and waits until the store knows.
async fn list_nothing(sink: &mpsc::Sender<Batch>, hub: &Hub) {
    sink.send(Batch::sample(&Kind::ALL, [])).await.unwrap();
    let mut head = hub.store().head();
    head.wait_for(|head| head.synced).await.unwrap();
}
