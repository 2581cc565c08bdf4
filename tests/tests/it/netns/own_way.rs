//! The agents' own way to their control plane, whatever a Service claims.

use std::fs;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use kp_controlplane::app as control_plane;
use kp_nodeagent::app;
use kplane_agents::hub::Hub;
use kplane_desired_state::admission::{Admission, Reserved};
use kplane_model::OWN_MARK;
use kplane_model::{Family, Protocol};
use kplane_tests::netns::NetNs;
use kplane_tests::wait::eventually;
use kplane_util::dial::Dialer;
use tokio::io::AsyncReadExt as _;
use tokio::runtime::Runtime;

use crate::netns::alone::agent_config;
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{At, Client, Seen, Setup, World, ask, ep, svc};

const DEADLINE: Duration = Duration::from_secs(30);

/// The host of control planes, and their port.
pub(crate) const CONTROL: [&str; 2] = ["172.30.0.2", "fd30::2"];
pub(crate) const CONTROL_PORT: u16 = 7465;

const WEB: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.20, clusterIPs: [10.96.0.20], ports: [{name: http, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-x, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [10.244.1.9]}]
";

/// A Service at the control plane's address and port, with an endpoint that answers.
const HIJACKER: &str = "
apiVersion: v1
kind: Service
metadata: {name: hijacker, namespace: shop}
spec:
  clusterIP: 10.96.0.21
  clusterIPs: [10.96.0.21]
  externalIPs: [172.30.0.2]
  ports: [{name: http, port: 7465}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: hijacker-1, namespace: shop, labels: {kubernetes.io/service-name: hijacker}}
addressType: IPv4
endpoints: [{addresses: [10.244.1.1], nodeName: node-1}]
ports: [{name: http, port: 8080}]
";

/// Connections with our mark reach what listens there, and ClusterIPs reach Services all the same.
pub(crate) fn what_is_marked_as_ours_is_no_services_to_take() -> Result<()> {
    let [v4, v6] = CONTROL.map(str::parse::<IpAddr>);
    let ips = [v4?, v6?];
    let claims = |endpoints: &[&str]| {
        let claims = svc(1).external_ips(ips).on_port(CONTROL_PORT);
        let endpoints = endpoints.iter().map(|name| ep(name));
        claims.only(Protocol::Tcp).endpoints(endpoints)
    };
    let claimed = claims(&["a"]);
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&claimed))?;
    let control = world.topology.host("control")?.ns().clone();
    let listener = control.run(|| Ok(TcpListener::bind(("::", CONTROL_PORT))?))?;
    let _server = std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut stream = stream;
            // Whoever hangs up early is told by the test.
            let _ = stream.write_all(b"control");
        }
    });
    let node = world.node(1)?.clone();
    for family in Family::ALL {
        let to = claimed.address(At::ExternalIp, family, 1);
        let seen = ask(&world.net, Client::Node, Protocol::Tcp, to)?;
        ensure!(matches!(seen, Seen::Hit { .. }), "{to}: {seen}");
        spared(&node, to)?;
        // Who is not marked as ours is not spared, and one bit in common is not enough.
        let said = says(&node, OWN_MARK | 1, to)?;
        ensure!(said.starts_with("a "), "{to} says {said:?} to others");
        let cluster_ip = claimed.address(At::ClusterIp, family, 1);
        let said = says(&node, OWN_MARK, cluster_ip)?;
        ensure!(said.starts_with("a "), "{cluster_ip} says {said:?}");
    }
    world.first()?.update(&[claims(&[])])?;
    for family in Family::ALL {
        let to = claimed.address(At::ExternalIp, family, 1);
        // Mode iptables refuses what others send only, as kube-proxy does.
        if UnderTest::current()? == UnderTest::Nftables {
            let seen = ask(&world.net, Client::Node, Protocol::Tcp, to)?;
            ensure!(seen == Seen::Refused, "{to}: {seen}");
        }
        spared(&node, to)?;
    }
    Ok(())
}

fn spared(node: &NetNs, to: SocketAddr) -> Result<()> {
    let said = says(node, OWN_MARK, to)?;
    ensure!(said == "control", "{to} says {said:?}");
    Ok(())
}

/// How a server greets a connection with a mark; pods say their names.
fn says(ns: &NetNs, mark: u32, to: SocketAddr) -> Result<String> {
    ns.run(|| {
        Runtime::new()?.block_on(async {
            let mut stream = Dialer::new(mark).connect(&[to]).await?;
            let mut text = [0; 7];
            tokio::time::timeout(DEADLINE, stream.read_exact(&mut text)).await??;
            Ok(String::from_utf8_lossy(&text).into_owned())
        })
    })
}

/// With a control plane that refuses such a Service, and with an old one that does not: the agent
/// hears of the Service's end, and of a control plane that was restarted.
pub(crate) fn a_service_at_the_control_planes_place_locks_no_agent_out() -> Result<()> {
    let old = Admission {
        reserved: Reserved::new(&[], &[]),
        ..Admission::default()
    };
    for (admission, refused_by_agent) in [(old, true), (Admission::default(), false)] {
        let world = World::without_agents()?;
        let control = world.topology.host("control")?.ns().clone();
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("web.yaml"), WEB)?;
        let hijacker = folder.path().join("hijacker.yaml");
        fs::write(folder.path().join("node.yaml"), node_object())?;
        let plane = plane(&control, folder.path(), &admission)?;
        let address = format!("--control-plane=http://{}:{CONTROL_PORT}", CONTROL[0]);
        let config = agent_config(&["--insecure", &address, "--node-name=node-1", "--cache-dir="])?;
        world.node(1)?.run(|| {
            let runtime = Runtime::new()?;
            let agent = runtime.block_on(app::build(config))?;
            let reports = agent.reports();
            let connection = agent.connection();
            let holds = |services: u64, failing: bool| {
                eventually(DEADLINE, "the agent holds what it must", || {
                    let report = reports.borrow();
                    let reported = report.failures.iter().map(|failure| failure.reason.clone());
                    let reported: Vec<_> = reported.collect();
                    let right = report.counts.services == services
                        && report.applied.is_some()
                        && report.applied == report.held
                        && reported.iter().any(|why| why.contains("kplane's control plane"))
                            == failing;
                    ensure!(right, "{:?} {reported:?}", report.counts);
                    Ok(())
                })
            };
            holds(1, false)?;
            fs::write(&hijacker, HIJACKER)?;
            holds(2, refused_by_agent)?;
            // All streams break: the way back must not lead to the Service.
            drop(plane);
            let gone = || (!connection.borrow().live).then_some(()).ok_or("still there");
            eventually(DEADLINE, "the agent has noticed", gone)?;
            let again = || self::plane(&control, folder.path(), &admission);
            let plane = eventually(DEADLINE, "a control plane again", again)?;
            let back = || connection.borrow().live.then_some(()).ok_or("not there");
            eventually(DEADLINE, "the agent is back", back)?;
            fs::remove_file(&hijacker)?;
            holds(1, false)?;
            drop(plane);
            Ok(())
        })?;
    }
    Ok(())
}

/// A Node at whose address the control plane may be.
fn node_object() -> String {
    let [control, _] = CONTROL;
    format!(
        "apiVersion: v1\nkind: Node\nmetadata: {{name: control}}\n\
         status: {{addresses: [{{type: InternalIP, address: {control}}}]}}\n"
    )
}

/// A control plane; its streams break when it is dropped.
pub(crate) fn plane(control: &NetNs, folder: &Path, admission: &Admission) -> Result<Runtime> {
    Ok(plane_at(control, folder, admission, CONTROL_PORT)?.0)
}

/// A control plane at a port, and its state.
pub(crate) fn plane_at(
    control: &NetNs,
    folder: &Path,
    admission: &Admission,
    port: u16,
) -> Result<(Runtime, Arc<Hub>)> {
    let config = control_plane::Config {
        agent_listen: Some(SocketAddr::from(([0, 0, 0, 0], port))),
        protection: control_plane::Protection::PlainText { exposed: true },
        admission: admission.clone(),
        ..control_plane::Config::new(control_plane::Origin::Manifests(folder.to_owned()))
    };
    let _inside = control.enter()?;
    let runtime = Runtime::new()?;
    let bound = runtime.block_on(control_plane::build(config))?;
    let hub = Arc::clone(bound.hub());
    runtime.spawn(bound.wait());
    Ok((runtime, hub))
}
