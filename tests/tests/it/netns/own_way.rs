//! The agents' own way to their control plane, whatever a Service claims.

use std::fs;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;
use std::slice;

use anyhow::{Result, ensure};
use kplane_desired_state::admission::{Admission, Reserved};
use kplane_model::OWN_MARK;
use kplane_model::{Family, Protocol};
use kplane_tests::cluster::objects;
use kplane_tests::netns::NetNs;
use kplane_tests::wait::{DEADLINE, eventually};
use kplane_util::dial::Dialer;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;
use tokio::runtime::Runtime;

use crate::netns::whole::{
    CONTROL, CONTROL_PORT, ControlPlane, NodeAgent, applied, numbered, usual, write,
};
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{At, Client, Seen, Setup, World, ask, ep, hit, pod_ips, svc};

/// A Service at the control plane's address and port, with an endpoint that answers.
fn hijacker() -> Vec<Value> {
    let spec = json!({
        "clusterIP": "10.96.0.21", "clusterIPs": ["10.96.0.21"], "externalIPs": [CONTROL[0]],
        "ports": [{"name": "http", "port": CONTROL_PORT}],
    });
    let endpoint = objects::endpoint("10.244.1.1", "node-1");
    vec![
        objects::service("shop", "hijacker", spec),
        objects::slice("shop", "hijacker-1", "hijacker", [endpoint]),
    ]
}

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
        hit(&world.net, Client::Node, Protocol::Tcp, to)?;
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
        // A Node at whose address the control plane may be.
        let node = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": "control"},
            "status": objects::node_status(&[CONTROL[0].parse()?]),
        });
        write(folder.path(), "node", &[node])?;
        write(folder.path(), "web", &numbered(20, &pod_ips(1, 9)[..1]))?;
        let plane = || {
            let admission = admission.clone();
            ControlPlane::start_with(&control, folder.path(), |config| {
                config.admission = admission;
            })
        };
        let first = plane()?;
        let agent = NodeAgent::start(world.node(1)?, &usual(1, Path::new(""))?)?;
        let connection = agent.bound.connection();
        let holds = |services: u64, failing: bool| {
            agent.reports(|report| {
                let mut reported = report.failures.iter().map(|failure| &failure.reason);
                report.counts.services == services
                    && applied(report)
                    && reported.any(|why| why.contains("kplane's control plane")) == failing
            })
        };
        holds(1, false)?;
        write(folder.path(), "hijacker", &hijacker())?;
        holds(2, refused_by_agent)?;
        // All streams break: the way back must not lead to the Service.
        drop(first);
        let gone = || (!connection.borrow().live).then_some(()).ok_or("still there");
        eventually(DEADLINE, "the agent has noticed", gone)?;
        let _plane = eventually(DEADLINE, "a control plane again", plane)?;
        let back = || connection.borrow().live.then_some(()).ok_or("not there");
        eventually(DEADLINE, "the agent is back", back)?;
        fs::remove_file(folder.path().join("hijacker.yaml"))?;
        holds(1, false)?;
        agent.stop()?;
    }
    Ok(())
}
