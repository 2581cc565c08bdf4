//! Several control planes and several agents, over real sockets. Only the kernel is missing.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use kp_nodeagent::app;
use kp_nodeagent::report::Report;
use kplane_agents::overrides::{Scope, Wish};
use kplane_rig::loopback::unused;
use tempfile::TempDir;

use crate::support::plane::Plane;
use crate::support::{WEB, agent_with_cache, manifests};

/// Longest that anything may take on a busy machine.
const DEADLINE: Duration = Duration::from_secs(30);

/// Starts an agent that knows control planes at these addresses.
async fn agent(node: &str, addresses: &[SocketAddr]) -> app::Bound {
    agent_with(node, addresses, None).await
}

/// Starts an agent with a cache file in this folder.
async fn agent_with(node: &str, addresses: &[SocketAddr], cache: Option<&Path>) -> app::Bound {
    let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    let list = addresses.join(",");
    let line = [
        "kp-nodeagent",
        "--control-plane",
        &list,
        "--node-name",
        node,
    ];
    agent_with_cache(line.map(str::to_owned).into(), cache).await
}

/// Waits until the agent is in sync with one of these control planes; returns its report.
async fn follows(agent: &app::Bound, epochs: &BTreeSet<u64>) -> Report {
    let mut reports = agent.reports();
    let follows = |report: &Report| {
        let held = report.held.filter(|held| epochs.contains(&held.epoch));
        held.is_some() && report.applied == held
    };
    let report = tokio::time::timeout(DEADLINE, reports.wait_for(follows)).await;
    report.expect("no such report in time").unwrap().clone()
}

/// One of three is killed, and a fourth appears: only the agents move that must, and none of them
/// needs a snapshot.
#[tokio::test]
async fn agents_spread_over_control_planes_and_leave_a_dead_one_without_a_snapshot() {
    let folder = manifests();
    let later = unused();
    let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
    let mut planes: Vec<_> = (0..3).map(|_| Plane::start(folder.path(), anywhere)).collect();
    let mut addresses: Vec<_> = planes.iter().map(|plane| plane.address).collect();
    addresses.push(later);
    let epochs = |planes: &[Plane]| -> BTreeSet<u64> { planes.iter().map(|p| p.epoch).collect() };
    let mut agents = BTreeMap::new();
    for number in 0..24 {
        let node = format!("node-{number}");
        let agent = agent(&node, &addresses).await;
        let report = follows(&agent, &epochs(&planes)).await;
        agents.insert(node, (report.held.unwrap().epoch, agent));
    }
    let used: BTreeSet<_> = agents.values().map(|(epoch, _)| *epoch).collect();
    assert_eq!(used, epochs(&planes), "every control plane has agents");

    let victim = planes.remove(0);
    let dead = victim.epoch;
    victim.kill();
    for (node, (epoch, agent)) in &mut agents {
        let report = follows(agent, &epochs(&planes)).await;
        let now = report.held.unwrap().epoch;
        assert!(now == *epoch || *epoch == dead, "{node} moved without need");
        assert_eq!(report.snapshots, 1, "{node}");
        *epoch = now;
    }

    // A fourth comes at an address that did not answer until now, and then the other two go.
    let fourth = Plane::start(folder.path(), later);
    planes.into_iter().for_each(Plane::kill);
    for (node, (_, agent)) in &agents {
        let report = follows(agent, &BTreeSet::from([fourth.epoch])).await;
        assert_eq!(report.snapshots, 1, "{node}");
    }
    drop(agents);
    fourth.kill();
}

/// Control planes are replaced one after the other: their agents go to the others before they end.
#[tokio::test]
async fn agents_leave_a_control_plane_that_drains_before_it_ends() {
    let folder = manifests();
    let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
    let (one, other) = (
        Plane::start(folder.path(), anywhere),
        Plane::start(folder.path(), anywhere),
    );
    let addresses = [one.address, other.address];
    let both = BTreeSet::from([one.epoch, other.epoch]);
    let mut agents = Vec::new();
    for number in 0..8 {
        let agent = agent(&format!("node-{number}"), &addresses).await;
        follows(&agent, &both).await;
        agents.push(agent);
    }
    let started = Instant::now();
    one.hub.streams().draining.begin(DEADLINE).await;
    assert!(
        started.elapsed() < DEADLINE / 2,
        "it ends when all have left"
    );
    for agent in &agents {
        let report = follows(agent, &BTreeSet::from([other.epoch])).await;
        assert_eq!(report.snapshots, 1);
    }
    one.kill();
    other.kill();
}

/// Replicas that never held the same state: the agent gets the key ranges that differ, and no snapshot.
#[tokio::test]
async fn an_agent_gets_from_another_replica_what_differs_there() {
    let (one, other) = (manifests(), manifests());
    for (folder, names) in [(&one, 0..300), (&other, 1..301)] {
        let services = names.map(|number: u32| {
            let ip = std::net::Ipv4Addr::from(0x0a61_0000 + number);
            format!(
                "---\napiVersion: v1\nkind: Service\nmetadata: {{name: s{number}, namespace: shop}}\n\
                 spec: {{clusterIP: {ip}, clusterIPs: [{ip}], ports: [{{port: 80}}]}}\n"
            )
        });
        // Without any endpoint, the snapshot would count as incomplete.
        let slice = "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n\
                     metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}\n\
                     ports: [{port: 8080}]\nendpoints: [{addresses: [10.244.0.1]}]\n";
        let text = services.collect::<String>() + slice;
        std::fs::write(folder.path().join("many.yaml"), text).unwrap();
    }
    let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
    let [first, second] = [&one, &other].map(|folder| Plane::start(folder.path(), anywhere));
    let agent = agent("node-1", &[first.address, second.address]).await;
    let mut planes = [first, second];
    let both = planes.iter().map(|plane| plane.epoch).collect();
    let report = follows(&agent, &both).await;
    if report.held.unwrap().epoch == planes[1].epoch {
        planes.reverse();
    }
    let [left, other] = planes;
    left.kill();
    let report = follows(&agent, &BTreeSet::from([other.epoch])).await;
    assert_eq!(report.counts.services, 301, "{:?}", report.keeps);
    assert_eq!(
        report.resume.unwrap().digest,
        other.hub.store().digest("node-1")
    );
    let counts = other.hub.streams().snapshots.counts();
    assert_eq!((counts.ranges, counts.begun), (1, 0));
    other.kill();
}

/// A frozen node serves what it has, also when its agent and its control plane have started anew, and says so.
#[tokio::test]
async fn a_frozen_agent_that_restarts_serves_what_its_cache_has() {
    let (folder, cache) = (manifests(), TempDir::new().unwrap());
    let address = unused();
    let plane = Plane::start(folder.path(), address);
    let frozen = agent_with("frozen", &[address], Some(cache.path())).await;
    follows(&frozen, &BTreeSet::from([plane.epoch])).await;
    let order = |frozen| Wish {
        scopes: vec![Scope::Node("frozen".to_owned())],
        frozen,
        by: "alice".to_owned(),
        at_ms: 1,
        reason: "a drill".to_owned(),
    };
    plane.hub.overrides().order(&order(true)).await.unwrap();
    reported(&frozen, true).await;
    let more = WEB.replace("name: web", "name: more").replace("0.10", "0.11");
    std::fs::write(folder.path().join("more.yaml"), more).unwrap();
    let other = agent("other", &[address]).await;
    serves(&other, 2).await;
    assert_eq!(frozen.reports().borrow().counts.services, 1);

    frozen.shutdown_token().cancel();
    tokio::time::timeout(DEADLINE, frozen.wait()).await.unwrap().unwrap();
    plane.kill();
    let plane = Plane::start(folder.path(), address);
    let frozen = agent_with("frozen", &[address], Some(cache.path())).await;
    reported(&frozen, true).await;
    let report = serves(&frozen, 1).await;
    assert!(
        report.stale_since_ms.is_some(),
        "nobody has confirmed it since"
    );
    assert_eq!(report.applied, report.held);
    serves(&other, 2).await;
    plane.hub.overrides().order(&order(false)).await.unwrap();
    reported(&frozen, false).await;
    let report = serves(&frozen, 2).await;
    assert_eq!((report.stale_since_ms, report.keeps), (None, None));
    plane.kill();
}

/// Waits until an agent knows whether its node is frozen.
async fn reported(agent: &app::Bound, frozen: bool) {
    let mut connection = agent.connection();
    let reported = connection.wait_for(|connection| connection.frozen.is_some() == frozen);
    let reported = tokio::time::timeout(DEADLINE, reported).await;
    reported.expect("not told in time").unwrap();
}

/// Waits until an agent serves so many Services; returns its report.
async fn serves(agent: &app::Bound, services: u64) -> Report {
    let mut reports = agent.reports();
    let serves =
        reports.wait_for(|report| report.applied.is_some() && report.counts.services == services);
    let report = tokio::time::timeout(DEADLINE, serves).await;
    report.expect("no such report in time").unwrap().clone()
}
