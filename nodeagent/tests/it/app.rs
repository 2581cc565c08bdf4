//! Whole agents, with a real control plane, over real sockets. Only the kernel is missing.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kp_controlplane::app as control_plane;
use kp_nodeagent::app;
use kp_nodeagent::config::{Config, Source};
use kp_nodeagent::report::Report;
use kplane_dataplane::backend::noop::{self, Noop};
use kplane_dataplane::backend::{Applied, ApplyError, Change, Side, Verification};
use kplane_desired_state::admission::Proxying;
use kplane_desired_state::convert::ExternalIps;
use kplane_http::client;
use kplane_proto::v1 as pb;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use kplane_proto::v1::status_service_server::StatusService as _;
use kplane_rig::loopback::unused;
use kplane_status_api::server::StatusServer;
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

use crate::support::plane::Plane;
use crate::support::{WEB, config_of, manifests};

/// Longest that anything may take on a busy machine.
const DEADLINE: Duration = Duration::from_secs(30);

/// A free port.
const ANY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// A Node, leaving when `taint` says so.
fn node(name: &str, taint: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\nspec: {{taints: [{taint}]}}\n\
         status: {{addresses: [{{type: InternalIP, address: 192.168.0.1}}]}}\n"
    )
}

const LEAVING: &str = "{key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}";

fn config(node: &str, source: Source) -> Config {
    let line = format!("kp-nodeagent --insecure --control-plane replaced --node-name {node}");
    Config {
        source,
        inside: Some(control_plane::inside),
        healthz: Some(ANY),
        metrics: Some(ANY),
        ..config_of(line.split(' '))
    }
}

/// One process for a folder, with a status API where `status` says.
fn standalone(folder: &TempDir, status: Option<SocketAddr>) -> Source {
    Source::Standalone {
        origin: control_plane::Origin::Manifests(folder.path().to_owned()),
        status,
        external_ips: ExternalIps::All,
        reserved: Vec::new(),
        excepted: Vec::new(),
        proxying: Proxying::default(),
        network_policies: None,
    }
}

/// Control planes at addresses.
fn dialling(addresses: &[SocketAddr]) -> Source {
    let endpoint = |at| Endpoint::from_shared(format!("http://{at}")).unwrap();
    Source::ControlPlane {
        list: None,
        endpoints: addresses.iter().map(endpoint).collect(),
        tls: None,
        server_name: None,
        token: None,
    }
}

async fn control_plane(folder: &Path) -> control_plane::Bound {
    let origin = control_plane::Origin::Manifests(folder.to_owned());
    let config = control_plane::Config::new(origin);
    control_plane::build(config).await.unwrap()
}

/// Waits for a report.
async fn reported(agent: &app::Bound, wanted: impl FnMut(&Report) -> bool) -> Report {
    let mut reports = agent.reports();
    let report = tokio::time::timeout(DEADLINE, reports.wait_for(wanted)).await;
    report.expect("no such report in time").unwrap().clone()
}

/// A client of a standalone agent's status API.
async fn status_client(agent: &app::Bound) -> StatusServiceClient<Channel> {
    let status = format!("http://{}", agent.status_addr.unwrap());
    StatusServiceClient::connect(status).await.unwrap()
}

/// Follows the fleet of a standalone agent until it tells what is wanted.
async fn announced<T>(agent: &app::Bound, mut wanted: impl FnMut(pb::Fleet) -> Option<T>) -> T {
    let mut client = status_client(agent).await;
    let mut watch = client.watch_fleet(pb::GetFleetRequest::default()).await.unwrap().into_inner();
    let announced = async {
        loop {
            let fleet = watch.message().await.unwrap();
            if let Some(announced) = wanted(fleet.expect("the watch ended")) {
                return announced;
            }
        }
    };
    tokio::time::timeout(DEADLINE, announced).await.unwrap()
}

fn shop(name: &str) -> pb::DescribeServiceRequest {
    pb::DescribeServiceRequest {
        namespace: "shop".to_owned(),
        name: name.to_owned(),
    }
}

fn in_sync(report: &Report) -> bool {
    report.held.is_some() && report.applied == report.held
}

/// Status code and body.
async fn get(address: SocketAddr, path: &str) -> (u16, serde_json::Value) {
    let (status, body) = text(address, path).await;
    (status, serde_json::from_str(&body).unwrap())
}

/// Status code and body, whatever that is.
async fn text(address: SocketAddr, path: &str) -> (u16, String) {
    let reply = client::get(address, path).await.unwrap();
    (reply.status, reply.body)
}

/// Asks until the answer has a status code.
async fn becomes(address: SocketAddr, path: &str, status: u16) -> serde_json::Value {
    let reply = client::becomes(address, path, status).await;
    serde_json::from_str(&reply.body).unwrap()
}

/// A backend that waits for a permit before its first change.
struct Gated(Option<mpsc::Receiver<()>>, Noop);

impl Side for Gated {
    fn apply(&mut self, change: Change<'_>) -> Result<Applied, ApplyError> {
        if let Some(gate) = self.0.take() {
            gate.recv_timeout(DEADLINE).unwrap();
        }
        self.1.apply(change)
    }

    fn verify(&mut self) -> Result<Verification, ApplyError> {
        self.1.verify()
    }
}

#[tokio::test]
async fn health_begins_when_the_kernel_holds_the_first_snapshot() {
    let folder = manifests();
    let plane = control_plane(folder.path()).await;
    let (open, gate) = mpsc::channel();
    let source = Source::InProcess(plane.in_process());
    let mut gate = Some(gate);
    let side = move |_| Box::new(Gated(gate.take(), Noop::default())) as Box<dyn Side>;
    let backend = move || Ok(noop::open_with(side));
    let agent = app::build_with(config("n1", source), backend).await.unwrap();
    let address = agent.healthz_addr.unwrap();
    reported(&agent, |report| report.held.is_some()).await;
    let (status, body) = get(address, "/healthz").await;
    assert_eq!((status, &body["healthy"]), (503, &false.into()));
    assert_eq!(body["lastUpdated"], "0001-01-01T00:00:00Z");
    // A probe that starts the agent again would be no help.
    assert_eq!(get(address, "/livez").await.0, 200);
    open.send(()).unwrap();
    let body = becomes(address, "/healthz?verbose", 200).await;
    assert_eq!(body["healthy"], true);
    assert_eq!(body["status"]["IPv4"]["healthy"], true);
    assert_eq!(body["controlPlane"]["connected"], true);
    // Nobody knows this node, which is no reason to take it out.
    assert_eq!(
        (&body["nodeEligible"], &body["nodeKnown"]),
        (&true.into(), &false.into())
    );
}

#[tokio::test]
async fn a_node_that_leaves_is_healthy_only_for_livez() {
    let folder = manifests();
    let file = folder.path().join("node.yaml");
    std::fs::write(&file, node("n1", "")).unwrap();
    let source = standalone(&folder, None);
    let agent = app::build(config("n1", source)).await.unwrap();
    let address = agent.healthz_addr.unwrap();
    let body = becomes(address, "/healthz?verbose", 200).await;
    assert_eq!(body["nodeKnown"], true);
    std::fs::write(&file, node("n1", LEAVING)).unwrap();
    let body = becomes(address, "/healthz", 503).await;
    assert_eq!(
        (&body["healthy"], &body["nodeEligible"]),
        (&true.into(), &false.into())
    );
    let (status, body) = get(address, "/livez").await;
    assert_eq!((status, body.get("nodeEligible")), (200, None));
}

/// One process is a complete proxy with a status of its own.
#[tokio::test]
async fn a_standalone_agent_is_in_sync_and_says_so() {
    let folder = manifests();
    std::fs::write(folder.path().join("node.yaml"), node("n1", "")).unwrap();
    let source = standalone(&folder, Some(ANY));
    let agent = app::build(config("n1", source)).await.unwrap();
    let report = reported(&agent, in_sync).await;
    assert_eq!((report.counts.services, report.counts.endpoints), (1, 2));
    announced(&agent, |fleet| {
        fleet
            .nodes
            .iter()
            .find(|node| node.name == "n1" && node.state() == pb::NodeState::InSync)?;
        Some(())
    })
    .await;
    let reports = agent.reports();
    ended(agent).await;
    assert!(
        reports.has_changed().is_err(),
        "the engine has ended as well"
    );
}

/// A name with a typing error: what it serves is nobody's node.
#[tokio::test]
async fn an_agent_of_no_node_is_not_in_sync() {
    let folder = manifests();
    let source = standalone(&folder, Some(ANY));
    let agent = app::build(config("n1x", source)).await.unwrap();
    let until = async |state: pb::NodeState| {
        announced(&agent, |fleet| {
            let node = fleet
                .nodes
                .into_iter()
                .find(|node| node.name == "n1x" && node.state() == state)?;
            Some(node.last_error)
        })
        .await
    };
    // Manifests need not name nodes.
    until(pb::NodeState::InSync).await;
    let file = folder.path().join("node.yaml");
    std::fs::write(&file, node("n1", "")).unwrap();
    let error = until(pb::NodeState::Failing).await;
    assert_eq!(
        error,
        "no Node object has this name; check --node-name of its agent. Known Nodes: n1"
    );
    std::fs::write(&file, node("n1x", "")).unwrap();
    until(pb::NodeState::InSync).await;
}

/// What a node holds whose agent is gone was true once.
#[tokio::test]
async fn a_dead_agent_holds_nothing_for_sure() {
    let folder = manifests();
    let plane = control_plane(folder.path()).await;
    let mut agents = Vec::new();
    for name in ["n1", "n2"] {
        let source = Source::InProcess(plane.in_process());
        let agent = app::build(config(name, source)).await.unwrap();
        reported(&agent, in_sync).await;
        agents.push(agent);
    }
    let server = StatusServer::new(Arc::clone(plane.hub()));
    let described = async |done: fn(&[pb::NodeServiceStatus]) -> bool| {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let request = tonic::Request::new(shop("web"));
            let answer = server.describe_service(request).await;
            let nodes = answer.unwrap().into_inner().nodes;
            if done(&nodes) {
                return nodes;
            }
            assert!(Instant::now() < deadline, "{nodes:#?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    described(|nodes| nodes.len() == 2 && nodes.iter().all(|node| node.programmed)).await;
    let gone = agents.pop().unwrap();
    gone.shutdown_token().cancel();
    gone.wait().await.unwrap();
    let nodes = described(|nodes| nodes.iter().any(|node| !node.programmed)).await;
    assert!(nodes[0].programmed, "{nodes:#?}");
    assert_eq!((&*nodes[1].node, nodes[1].programmed), ("n2", false));
    assert!(
        nodes[1].reason.starts_with("unknown: the agent is not connected"),
        "{nodes:#?}"
    );
}

/// Section (h), all the way: from the annotation of a slice to the metric and to the status API.
#[tokio::test]
async fn h_the_latency_of_a_change_is_measured_and_told() {
    let folder = manifests();
    std::fs::write(folder.path().join("node.yaml"), node("n1", "")).unwrap();
    let source = standalone(&folder, Some(ANY));
    let agent = app::build(config("n1", source)).await.unwrap();
    reported(&agent, in_sync).await;
    let trigger = jiff::Timestamp::now();
    let slice = format!(
        "metadata: {{name: web-1, namespace: shop, labels: {{kubernetes.io/service-name: web}}, \
         annotations: {{endpoints.kubernetes.io/last-change-trigger-time: '{trigger}'}}}}"
    );
    let changed = WEB
        .replace(
            "metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}",
            &slice,
        )
        .replace("10.0.0.2", "10.0.0.3");
    std::fs::write(folder.path().join("web.yaml"), changed).unwrap();
    let report = reported(&agent, |report| !report.triggers.is_empty()).await;
    let measured = report.triggers.back().unwrap().latency_ms;
    assert!(u128::from(measured) <= DEADLINE.as_millis(), "{measured}");

    let metrics = text(agent.metrics_addr.unwrap(), "/metrics").await.1;
    let count = "kubeproxy_network_programming_duration_seconds_count{ip_family=\"IPv4\"} 1\n";
    assert!(metrics.contains(count), "{metrics}");

    let announced = announced(&agent, |mut fleet| {
        fleet.nodes.remove(0).network_programming
    })
    .await;
    assert_eq!(
        (announced.count, announced.last_ms, announced.max_ms),
        (1, measured, measured)
    );
    let mut client = status_client(&agent).await;
    let description = client.describe_service(shop("web")).await.unwrap().into_inner();
    let change = description.nodes[0].last_change.unwrap();
    assert_eq!(change.latency_ms, measured);
    assert!(change.at_ms > 0 && change.at_ms <= description.now_ms);
}

/// Over TCP: the control plane dies, the agent serves on; another one comes at the same address
/// and nothing changes in the kernel.
#[tokio::test]
async fn a_control_plane_may_come_and_go() {
    let folder = manifests();
    let address = unused();
    let plane = Plane::start(folder.path(), address);
    let source = dialling(&[address]);
    let agent = app::build(config("n1", source)).await.unwrap();
    let before = reported(&agent, in_sync).await;
    let mut connection = agent.connection();

    plane.kill();
    let lost = tokio::time::timeout(DEADLINE, connection.wait_for(|c| !c.live)).await;
    lost.unwrap().unwrap();
    let (status, body) = get(agent.healthz_addr.unwrap(), "/healthz?verbose").await;
    assert_eq!(
        (status, &body["controlPlane"]["connected"]),
        (200, &false.into())
    );

    let plane = Plane::start(folder.path(), address);
    let after = reported(&agent, |report| {
        in_sync(report) && report.held.map(|p| p.epoch) != before.held.map(|p| p.epoch)
    })
    .await;
    assert_eq!(after.counts, before.counts);
    assert_eq!(after.resume.unwrap().digest, before.resume.unwrap().digest);
    assert_eq!(after.last_sync.unwrap().operations, 0);
    plane.kill();
}

/// Services with one endpoint each.
fn services(numbers: std::ops::Range<usize>) -> String {
    let service = |number: usize| {
        let (name, ip) = (
            format!("s{number}"),
            format!("10.96.{}.{}", number / 250, number % 250),
        );
        WEB.replace("web", &name).replace("10.96.0.10", &ip)
    };
    numbers.map(service).collect::<Vec<_>>().join("---")
}

async fn ended(agent: app::Bound) {
    agent.shutdown_token().cancel();
    tokio::time::timeout(DEADLINE, agent.wait()).await.unwrap().unwrap();
}

/// Seen: a standalone agent that began anew beside a folder with one syntax error, a half-written
/// file or nothing served 0, 500 or 0 of 1,000 Services, and called that in sync.
#[tokio::test]
async fn a_restart_beside_a_broken_folder_keeps_everything_and_says_so() {
    const ALL: usize = 300;
    let (folder, cache) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let file = folder.path().join("shop.yaml");
    let whole = services(0..ALL - 2);
    std::fs::write(folder.path().join("node.yaml"), node("n1", "")).unwrap();
    // Far from a cliff: that a part of the folder cannot be read is reason enough.
    let small = folder.path().join("small.yaml");
    std::fs::write(&small, services(ALL - 2..ALL)).unwrap();
    let start = async || {
        let source = standalone(&folder, Some(ANY));
        let mut config = config("n1", source);
        config.cache_dir = Some(cache.path().to_owned());
        app::build(config).await.unwrap()
    };
    std::fs::write(&file, &whole).unwrap();
    // When nothing has changed, the file is all that the next one needs.
    for snapshots in [1, 0] {
        let agent = start().await;
        let served = |report: &Report| in_sync(report) && report.counts.services == ALL as u64;
        assert_eq!(reported(&agent, served).await.snapshots, snapshots);
        ended(agent).await;
    }

    let wrong = |text: &str| text.replace("ports: [{port: 80", "ports: [[{port: 80");
    let broken = [
        (&small, Some(wrong(&services(ALL - 2..ALL))), 2),
        (&file, Some(wrong(&whole)), ALL),
        (&file, Some(whole[..whole.len() / 2].to_owned()), ALL / 3),
        (&file, None, ALL),
    ];
    for (file, text, least) in broken {
        match text {
            Some(text) => std::fs::write(file, text).unwrap(),
            None => std::fs::remove_file(file).unwrap(),
        }
        let agent = start().await;
        let report = reported(&agent, in_sync).await;
        let held = report.keeps.unwrap();
        assert_eq!(
            (report.counts.services, report.counts.endpoints),
            (300, 600),
            "{held:?}"
        );
        assert!(held.services >= least, "{held:?}");
        let node = becomes_held(&agent).await;
        assert!(node.last_error.starts_with("keeps "), "{node:?}");
        assert!(
            node.last_error.ends_with("fix the source, or run `kpctl approve`"),
            "{node:?}"
        );
        let (_, health) = get(agent.healthz_addr.unwrap(), "/healthz?verbose").await;
        assert_eq!(health["keeps"]["services"], held.services);
        ended(agent).await;
    }

    let agent = start().await;
    reported(&agent, |report| in_sync(report) && report.keeps.is_some()).await;
    std::fs::write(&file, &whole).unwrap();
    std::fs::write(&small, services(ALL - 2..ALL)).unwrap();
    let report = reported(&agent, |report| in_sync(report) && report.keeps.is_none()).await;
    assert_eq!(
        (report.counts.services, report.counts.endpoints),
        (300, 600)
    );
    ended(agent).await;
}

/// The only node of a standalone agent, once it says that it keeps something.
async fn becomes_held(agent: &app::Bound) -> pb::NodeStatus {
    announced(agent, |mut fleet| {
        let node = fleet.nodes.remove(0);
        (node.state() == pb::NodeState::Holding).then_some(node)
    })
    .await
}

/// Seen: two control planes with different folders; failing over deleted 991 of 1,001 Services.
#[tokio::test]
async fn failing_over_to_a_control_plane_with_another_folder_deletes_nothing() {
    let [one, other] = [services(0..100), services(98..110)].map(|text| {
        let folder = TempDir::new().unwrap();
        std::fs::write(folder.path().join("shop.yaml"), text).unwrap();
        folder
    });
    let first = Plane::start(one.path(), ANY);
    // Nobody listens there until the agent has found the first.
    let address = unused();
    let source = dialling(&[first.address, address]);
    let agent = app::build(config("n1", source)).await.unwrap();
    let report = reported(&agent, in_sync).await;
    assert_eq!((report.counts.services, report.keeps), (100, None));
    let second = Plane::start(other.path(), address);
    first.kill();
    let epoch = report.held.unwrap().epoch;
    let failed_over = |report: &Report| in_sync(report) && report.held.unwrap().epoch != epoch;
    let report = reported(&agent, failed_over).await;
    let held = report.keeps.unwrap();
    assert_eq!((report.counts.services, held.services), (110, 98));
    assert_eq!(held.reason, "98 of 100 Services would be removed at once");
    second.kill();
}

#[tokio::test]
async fn several_agents_live_in_one_process() {
    let folder = manifests();
    let plane = control_plane(folder.path()).await;
    let names = ["n1", "n2", "n3"];
    let mut agents = Vec::new();
    for name in names {
        let source = Source::InProcess(plane.in_process());
        agents.push(app::build(config(name, source)).await.unwrap());
    }
    let mut addresses = BTreeSet::new();
    for agent in &agents {
        reported(agent, in_sync).await;
        addresses.insert(agent.healthz_addr.unwrap());
    }
    assert_eq!(addresses.len(), names.len());
}

/// A Service that load balancers ask for, with an endpoint on n1 that may be ready.
fn checked(port: u16, ready: bool) -> String {
    format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: lb, namespace: shop}}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  healthCheckNodePort: {port}
  clusterIP: 10.96.0.20
  clusterIPs: [10.96.0.20]
  ports: [{{port: 80, protocol: TCP}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: lb-1, namespace: shop, labels: {{kubernetes.io/service-name: lb}}}}
addressType: IPv4
ports: [{{name: '', port: 8080, protocol: TCP}}]
endpoints:
- {{addresses: [10.0.0.1], nodeName: n1, conditions: {{ready: {ready}, serving: true, terminating: true}}}}
"
    )
}

/// A backend whose kernel refuses everything while it is told to.
struct Breakable(Arc<AtomicBool>, Noop);

impl Side for Breakable {
    fn apply(&mut self, change: Change<'_>) -> Result<Applied, ApplyError> {
        if self.0.load(Ordering::SeqCst) {
            return Err(ApplyError {
                family: change.family,
                source: "no buffer space".into(),
            });
        }
        self.1.apply(change)
    }

    fn verify(&mut self) -> Result<Verification, ApplyError> {
        self.1.verify()
    }
}

/// A25: a health check says what the kernel holds, not what is desired.
#[tokio::test]
async fn a25_health_checks_change_after_the_kernel() {
    let port = unused().port();
    let folder = manifests();
    let file = folder.path().join("lb.yaml");
    std::fs::write(&file, checked(port, true)).unwrap();
    let source = standalone(&folder, None);
    let broken = Arc::new(AtomicBool::new(false));
    let asked = broken.clone();
    let side = move |_| Box::new(Breakable(asked.clone(), Noop::default())) as Box<dyn Side>;
    let backend = move || Ok(noop::open_with(side));
    let mut config = config("n1", source);
    config.node_settings.nodeport_addresses = vec!["127.0.0.1/32".parse().unwrap()];
    let agent = app::build_with(config, backend).await.unwrap();
    reported(&agent, in_sync).await;
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let ready = becomes(address, "/healthz", 200).await;
    assert_eq!(ready["localEndpoints"], 1);

    broken.store(true, Ordering::SeqCst);
    std::fs::write(&file, checked(port, false)).unwrap();
    reported(&agent, |report| report.families[0].error.is_some()).await;
    let (status, body) = get(address, "/").await;
    assert_eq!((status, &body["localEndpoints"]), (200, &1.into()));

    broken.store(false, Ordering::SeqCst);
    let body = becomes(address, "/", 503).await;
    assert_eq!(
        (&body["localEndpoints"], &body["serviceProxyHealthy"]),
        (&0.into(), &true.into())
    );
}

/// A25: the administrator sees which Service's health check cannot be opened.
#[tokio::test]
async fn a25_a_taken_port_is_in_the_status_of_the_node() {
    let other = std::net::TcpListener::bind(unused()).unwrap();
    let port = other.local_addr().unwrap().port();
    let folder = manifests();
    std::fs::write(folder.path().join("lb.yaml"), checked(port, true)).unwrap();
    std::fs::write(folder.path().join("node.yaml"), node("n1", "")).unwrap();
    let source = standalone(&folder, Some(ANY));
    let mut config = config("n1", source);
    config.node_settings.nodeport_addresses = vec!["127.0.0.1/32".parse().unwrap()];
    let agent = app::build(config).await.unwrap();
    let report = reported(&agent, |report| !report.failures.is_empty()).await;
    assert!(in_sync(&report), "the Service itself is served");
    let failure = announced(&agent, |fleet| {
        fleet
            .nodes
            .into_iter()
            .filter_map(|node| node.report)
            .flat_map(|report| report.failures)
            .next()
    })
    .await;
    assert_eq!(failure.key.unwrap().name, "lb");
    let reason = format!("health check node port {port}: cannot listen on 127.0.0.1");
    assert!(failure.degraded && failure.reason.starts_with(&reason));
    let mut client = status_client(&agent).await;
    let described = client.describe_service(shop("lb"));
    let nodes = described.await.unwrap().into_inner().nodes;
    assert!(nodes[0].programmed, "{nodes:?}");
    let degraded = format!("degraded: {}", failure.reason);
    assert_eq!(nodes[0].reason, degraded);
    drop(other);
    reported(&agent, |report| report.failures.is_empty()).await;
}

/// G1, G5: both ports, over IPv6.
#[tokio::test]
async fn g5_metrics_and_health_are_served_over_ipv6() {
    let folder = manifests();
    let source = standalone(&folder, None);
    let loopback = SocketAddr::new("::1".parse().unwrap(), 0);
    let mut config = config("n1", source);
    (config.healthz, config.metrics) = (Some(loopback), Some(loopback));
    let agent = app::build(config).await.unwrap();
    reported(&agent, in_sync).await;
    becomes(agent.healthz_addr.unwrap(), "/livez", 200).await;
    let address = agent.metrics_addr.unwrap();
    let (status, metrics) = text(address, "/metrics").await;
    assert_eq!(status, 200);
    for line in [
        "kplane_agent_family_programmed{ip_family=\"IPv4\"} 1",
        "kplane_agent_connected 1",
        "kubeproxy_sync_proxy_rules_service_changes_total 1",
        "kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv6\"} 1",
        "kubeproxy_proxy_livez_total{code=\"200\"} 1",
        "kplane_agent_build_info{version=\"0.1.0\",backend=\"noop\"} 1",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line} in\n{metrics}");
    }
    assert_eq!(text(address, "/healthz").await, (200, "ok".into()));
    assert_eq!(text(address, "/proxyMode").await, (200, "noop".into()));
    let configz = get(address, "/configz").await.1;
    let nftables = &configz["kubeproxy.config.k8s.io"]["nftables"];
    assert_eq!(nftables["masqueradeBit"], 14);
    assert_eq!(text(address, "/debug/pprof/heap").await.0, 404);
}

/// G6: a taken port is an error only if it is to be one.
#[tokio::test]
async fn g6_bind_address_hard_fail() {
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = other.local_addr().unwrap();
    let folder = manifests();
    let plane = control_plane(folder.path()).await;
    let config = |hard| Config {
        metrics: Some(taken),
        bind_address_hard_fail: hard,
        ..config("n1", Source::InProcess(plane.in_process()))
    };
    let error = app::build(config(true)).await.unwrap_err().to_string();
    let expected = format!("cannot listen on {taken} for metrics: Address already in use");
    assert!(error.starts_with(&expected), "{error}");
    let agent = app::build(config(false)).await.unwrap();
    assert_eq!(agent.metrics_addr, None);
    reported(&agent, in_sync).await;
}
