//! Whole agents, with a real control plane, over real sockets. Only the kernel is missing.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::Parser;
use kp_controlplane::app as control_plane;
use kp_controlplane::convert::ExternalIps;
use kp_nodeagent::app;
use kp_nodeagent::backend::noop::Noop;
use kp_nodeagent::backend::{Applied, ApplyError, Backend, Change, Kind, Verification};
use kp_nodeagent::config::{Config, Flags, Source, Task};
use kp_nodeagent::report::Report;
use kplane_model::Family;
use kplane_proto::v1 as pb;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tonic::transport::Endpoint;

/// Longest that anything may take on a busy machine.
const DEADLINE: Duration = Duration::from_secs(30);

const WEB: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10]
  ports: [{port: 80, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: '', port: 8080, protocol: TCP}]
endpoints:
- {addresses: [10.0.0.1], conditions: {ready: true}}
- {addresses: [10.0.0.2], conditions: {ready: true}}
";

/// A Node, leaving when `taint` says so.
fn node(name: &str, taint: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\nspec: {{taints: [{taint}]}}\n\
         status: {{addresses: [{{type: InternalIP, address: 192.168.0.1}}]}}\n"
    )
}

const LEAVING: &str = "{key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}";

fn manifests() -> TempDir {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("web.yaml"), WEB).unwrap();
    folder
}

fn config(node: &str, source: Source) -> Config {
    let line = [
        "kp-nodeagent",
        "--control-plane",
        "replaced",
        "--node-name",
        node,
    ];
    let checked = Flags::try_parse_from(line).unwrap().check().unwrap();
    let Task::Run(config) = checked.task else {
        panic!("not an agent");
    };
    Config {
        source,
        backend: Kind::Noop,
        healthz: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        ..*config
    }
}

async fn control_plane(folder: &Path, agents: Option<SocketAddr>) -> control_plane::Bound {
    let config = control_plane::Config {
        manifests: folder.to_owned(),
        agent_listen: agents,
        status_listen: None,
        external_ips: ExternalIps::All,
    };
    control_plane::build(config).await.unwrap()
}

/// A control plane over TCP whose death takes its connections along, as that of a process does.
struct Mortal {
    runtime: Runtime,
    address: SocketAddr,
}

impl Mortal {
    /// Builds one on a thread of its own, since a runtime may not start within another.
    fn start(folder: &Path, address: SocketAddr) -> Self {
        let start = || {
            let runtime = Runtime::new().unwrap();
            let bound = runtime.block_on(control_plane(folder, Some(address)));
            let address = bound.agent_addr.unwrap();
            runtime.spawn(bound.wait());
            Self { runtime, address }
        };
        std::thread::scope(|scope| scope.spawn(start).join().unwrap())
    }

    fn kill(self) {
        std::thread::scope(|scope| scope.spawn(|| drop(self.runtime)).join().unwrap());
    }
}

/// Waits for a report.
async fn reported(agent: &app::Bound, wanted: impl FnMut(&Report) -> bool) -> Report {
    let mut reports = agent.reports();
    let report = tokio::time::timeout(DEADLINE, reports.wait_for(wanted)).await;
    report.expect("no such report in time").unwrap().clone()
}

fn in_sync(report: &Report) -> bool {
    report.held.is_some() && report.applied == report.held
}

/// Status code and body.
async fn get(address: SocketAddr, path: &str) -> (u16, serde_json::Value) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap())
}

/// Asks until the answer has a status code.
async fn becomes(address: SocketAddr, path: &str, status: u16) -> serde_json::Value {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let (got, body) = get(address, path).await;
        if got == status {
            return body;
        }
        assert!(Instant::now() < deadline, "{path} stays {got}: {body}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A backend that waits for a permit before its first change.
struct Gated(Option<mpsc::Receiver<()>>, Noop);

impl Backend for Gated {
    fn name(&self) -> &'static str {
        "gated"
    }

    fn apply(&mut self, change: Change<'_>) -> Result<Applied, ApplyError> {
        if let Some(gate) = self.0.take() {
            gate.recv_timeout(DEADLINE).unwrap();
        }
        self.1.apply(change)
    }

    fn verify(&mut self, family: Family) -> Result<Verification, ApplyError> {
        self.1.verify(family)
    }

    fn cleanup(&mut self) -> Result<(), Vec<ApplyError>> {
        Ok(())
    }
}

#[tokio::test]
async fn health_begins_when_the_kernel_holds_the_first_snapshot() {
    let folder = manifests();
    let plane = control_plane(folder.path(), None).await;
    let (open, gate) = mpsc::channel();
    let source = Source::InProcess(plane.connect_in_memory());
    let backend = move || Ok(Box::new(Gated(Some(gate), Noop::default())) as Box<dyn Backend>);
    let agent = app::build_with(config("n1", source), backend)
        .await
        .unwrap();
    let address = agent.healthz_addr.unwrap();
    reported(&agent, |report| report.held.is_some()).await;
    for path in ["/healthz", "/livez"] {
        let (status, body) = get(address, path).await;
        assert_eq!((status, &body["healthy"]), (503, &false.into()), "{path}");
        assert_eq!(body["lastUpdated"], "1970-01-01T00:00:00Z");
    }
    open.send(()).unwrap();
    let body = becomes(address, "/healthz", 200).await;
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
    let source = Source::Standalone {
        manifests: folder.path().to_owned(),
        status: None,
        external_ips: ExternalIps::All,
    };
    let agent = app::build(config("n1", source)).await.unwrap();
    let address = agent.healthz_addr.unwrap();
    let body = becomes(address, "/healthz", 200).await;
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
    let source = Source::Standalone {
        manifests: folder.path().to_owned(),
        status: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        external_ips: ExternalIps::All,
    };
    let agent = app::build(config("n1", source)).await.unwrap();
    let report = reported(&agent, in_sync).await;
    assert_eq!((report.counts.services, report.counts.endpoints), (1, 2));
    let status = format!("http://{}", agent.status_addr.unwrap());
    let mut client = StatusServiceClient::connect(status).await.unwrap();
    let watch = client.watch_fleet(pb::GetFleetRequest {}).await.unwrap();
    let mut watch = watch.into_inner();
    let in_sync = async {
        while let Some(fleet) = watch.message().await.unwrap() {
            let node = fleet.nodes.iter().find(|node| node.name == "n1");
            if node.is_some_and(|node| node.state() == pb::NodeState::InSync) {
                return;
            }
        }
    };
    tokio::time::timeout(DEADLINE, in_sync).await.unwrap();
    let reports = agent.reports();
    agent.shutdown_token().cancel();
    tokio::time::timeout(DEADLINE, agent.wait())
        .await
        .unwrap()
        .unwrap();
    assert!(
        reports.has_changed().is_err(),
        "the engine has ended as well"
    );
}

/// Over TCP: the control plane dies, the agent serves on; another one comes at the same address
/// and nothing changes in the kernel.
#[tokio::test]
async fn a_control_plane_may_come_and_go() {
    let folder = manifests();
    let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
    let plane = Mortal::start(folder.path(), anywhere);
    let address = plane.address;
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let source = Source::ControlPlane(vec![endpoint]);
    let agent = app::build(config("n1", source)).await.unwrap();
    let before = reported(&agent, in_sync).await;
    let mut connection = agent.connection();

    plane.kill();
    let lost = tokio::time::timeout(DEADLINE, connection.wait_for(|c| !c.live)).await;
    lost.unwrap().unwrap();
    let (status, body) = get(agent.healthz_addr.unwrap(), "/healthz").await;
    assert_eq!(
        (status, &body["controlPlane"]["connected"]),
        (200, &false.into())
    );

    let plane = Mortal::start(folder.path(), address);
    let after = reported(&agent, |report| {
        in_sync(report) && report.held.map(|p| p.epoch) != before.held.map(|p| p.epoch)
    });
    let after = after.await;
    assert_eq!(after.counts, before.counts);
    assert_eq!(after.resume.unwrap().digest, before.resume.unwrap().digest);
    assert_eq!(after.last_sync.unwrap().operations, 0);
    plane.kill();
}

#[tokio::test]
async fn several_agents_live_in_one_process() {
    let folder = manifests();
    let plane = control_plane(folder.path(), None).await;
    let names = ["n1", "n2", "n3"];
    let mut agents = Vec::new();
    for name in names {
        let source = Source::InProcess(plane.connect_in_memory());
        agents.push(app::build(config(name, source)).await.unwrap());
    }
    let mut addresses = BTreeSet::new();
    for agent in &agents {
        reported(agent, in_sync).await;
        addresses.insert(agent.healthz_addr.unwrap());
    }
    assert_eq!(addresses.len(), names.len());
}
