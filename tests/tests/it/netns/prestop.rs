//! preStop hooks: a server may stop as soon as its hook is answered, and no connection fails.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use kp_nodeagent::config::Config;
use kplane_agents::fleet::Session;
use kplane_model::Family;
use kplane_proto::v1::{Hello, LeavingOutcome};
use kplane_tests::client::{Probe, Protocol};
use kplane_tests::cluster::objects;
use kplane_tests::load::{Load, Pace};
use kplane_tests::netns::NetNs;
use kplane_tests::support::cluster::node;
use kplane_tests::support::nft::nft;
use kplane_tests::support::{Client, TARGET, World, node_name, pod_ips};
use kplane_tests::wait::{DEADLINE, eventually};
use serde_json::json;

use crate::netns::whole::{self, CONTROL, CONTROL_PORT, ControlPlane, NodeAgent, agent_config};

const HOOK: u16 = 7468;
/// The Service's addresses.
const SERVICE: [&str; 2] = ["10.96.7.1", "fd96::701"];
/// Name, node and number of the Pods behind the Service.
const PODS: [(&str, u8, u8); 3] = [("a", 1, 1), ("b", 1, 2), ("c", 2, 1)];
/// How often each Pod is replaced.
const ROUNDS: usize = 4;

/// What a Pod is for its Service.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Is {
    Ready,
    Terminating,
    /// It is no endpoint.
    Gone,
}

/// Writes the Nodes and the Service in one step.
fn write(folder: &Path, pods: [Is; 3]) -> Result<()> {
    let spec =
        json!({"clusterIP": SERVICE[0], "clusterIPs": SERVICE, "ipFamilies": ["IPv4", "IPv6"]});
    let mut all = vec![node(1), node(2), objects::service("shop", "web", spec)];
    for family in Family::ALL {
        let there = PODS.iter().zip(pods).filter(|(_, is)| *is != Is::Gone);
        let endpoints = there.map(|((name, node, number), is)| {
            let ready = is == Is::Ready;
            json!({
                "addresses": [pod_ips(*node, *number)[family as usize]], "nodeName": node_name(*node),
                "targetRef": {"kind": "Pod", "namespace": "shop", "name": format!("web-{name}")},
                "conditions": {"ready": ready, "serving": true, "terminating": !ready},
            })
        });
        let mut slice = objects::slice(
            "shop",
            &format!("web-{}", family as usize),
            "web",
            endpoints,
        );
        slice["addressType"] = json!(family.to_string());
        all.push(slice);
    }
    whole::write(folder, "all", &all)
}

/// Asks as kubelet does.
fn ask(node: &NetNs, pod: IpAddr, path: &str) -> Result<TcpStream> {
    node.run(|| {
        let mut stream = TcpStream::connect_timeout(&(pod, HOOK).into(), DEADLINE)?;
        stream.set_read_timeout(Some(DEADLINE))?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: {pod}\r\nUser-Agent: kube-lifecycle/1\r\n\r\n"
        )?;
        Ok(stream)
    })
}

/// Returns the answer's status line and body.
fn answer(mut stream: TcpStream) -> Result<(String, String)> {
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").context("no answer")?;
    let status = head.lines().next().unwrap_or_default();
    Ok((status.to_owned(), body.trim().to_owned()))
}

/// Asks as kubelet does; returns the answer's status line and body.
fn hook(node: &NetNs, pod: IpAddr, path: &str) -> Result<(String, String)> {
    answer(ask(node, pod, path)?)
}

/// Wants the outcome of a hook.
fn outcome(node: &NetNs, pod: IpAddr, path: &str, wanted: &str) -> Result<()> {
    let (status, body) = hook(node, pod, path)?;
    ensure!(
        status == "HTTP/1.1 200 OK" && body == wanted,
        "{pod}{path}: {status}, {body:?} and not {wanted:?}"
    );
    Ok(())
}

fn config(number: u8, cache: &Path) -> Result<Config> {
    let planes = format!("--control-plane=http://{}:{CONTROL_PORT}", CONTROL[0]);
    let port = format!("--pre-stop-port={HOOK}");
    let mut config = agent_config(number, cache, &["--insecure", &planes, &port])?;
    config.cache_dir = None;
    // Answers of Pods on other nodes come back this way.
    config.node_settings.masquerade_all = true;
    Ok(config)
}

/// Starts the agents of both nodes, and waits until their kernels hold what the control plane has.
fn agents(world: &World, cache: &Path) -> Result<Vec<NodeAgent>> {
    let agents: Vec<_> = (1..=2)
        .map(|number| NodeAgent::start(world.node(number)?, &config(number, cache)?))
        .collect::<Result<_>>()?;
    for agent in &agents {
        agent.reports(|report| report.counts.services == 2 && report.applied == report.held)?;
    }
    Ok(agents)
}

fn stop(agents: Vec<NodeAgent>) -> Result<()> {
    agents.into_iter().try_for_each(NodeAgent::stop)
}

/// Waits until kubelet's way leads to the agent.
fn answers(node: &NetNs, pod: IpAddr) -> Result<()> {
    eventually(DEADLINE, "a hook is answered", || {
        hook(node, pod, "/gone?within=0s").map(drop)
    })
}

pub(crate) fn servers_end_right_after_their_hooks_and_no_connection_fails() -> Result<()> {
    let (folder, cache) = (tempfile::tempdir()?, tempfile::tempdir()?);
    write(folder.path(), [Is::Ready; 3])?;
    let mut world = World::without_agents()?;
    let control = world.topology.host("control")?.ns().clone();
    let plane = ControlPlane::start(&control, folder.path())?;
    let hub = &plane.hub;
    let agents = agents(&world, cache.path())?;
    let nodes = [world.node(1)?.clone(), world.node(2)?.clone()];
    let loads: Vec<_> = [
        Client::Outside,
        Client::PodHere,
        Client::PodThere,
        Client::Node,
    ]
    .into_iter()
    .zip(SERVICE.iter().cycle())
    .map(|(client, ip)| {
        let probe = Probe::tcp(SocketAddr::new(ip.parse()?, 80));
        let pace = Pace {
            threads: 1,
            ..Pace::default()
        };
        Load::start(world.net.ns(client)?, probe, pace)
    })
    .collect::<Result<_>>()?;
    for (_, node, number) in PODS {
        for pod in pod_ips(node, number) {
            answers(&nodes[usize::from(node) - 1], pod)?;
        }
    }
    let mut answered = 0;
    for round in 0..ROUNDS * PODS.len() {
        let index = round % PODS.len();
        let (name, node, number) = PODS[index];
        // kubelet asks one address only, of any family.
        let pod = pod_ips(node, number)[round % 2];
        let node = &nodes[usize::from(node) - 1];
        let mut pods = [Is::Ready; 3];
        pods[index] = Is::Terminating;
        thread::scope(|scope| {
            let asked = scope.spawn(|| outcome(node, pod, "/gone?within=20s", "gone"));
            write(folder.path(), pods)?;
            joined(asked)
        })?;
        // Connections that are established go on, and new ones are refused.
        let ended = world.topology.pod_mut(name)?;
        ended.stop(Protocol::Tcp, TARGET, Duration::from_secs(2))?;
        loads.iter().try_for_each(|load| load.goes_on(12, DEADLINE))?;
        ended.serve(Protocol::Tcp, TARGET)?;
        write(folder.path(), [Is::Ready; 3])?;
        answered += 1;
        let latest = hub.streams().departures.latest();
        let mut departures = latest.iter().filter(|(_, one)| one.pod == format!("web-{name}"));
        let last = departures.next_back().context("no record")?;
        ensure!(
            last.1.outcome() == LeavingOutcome::Gone && last.1.services == ["shop/web"],
            "{:?}",
            last.1
        );
    }
    ensure!(answered == ROUNDS * PODS.len());
    loads.into_iter().try_for_each(Load::unharmed)?;
    stop(agents)
}

#[expect(clippy::too_many_lines, reason = "one story of one node")]
pub(crate) fn hooks_are_answered_at_their_bound_at_the_latest() -> Result<()> {
    let (folder, cache) = (tempfile::tempdir()?, tempfile::tempdir()?);
    write(folder.path(), [Is::Ready; 3])?;
    let world = World::without_agents()?;
    let control = world.topology.host("control")?.ns().clone();
    let plane = ControlPlane::start(&control, folder.path())?;
    let hub = Arc::clone(&plane.hub);
    let agents = agents(&world, cache.path())?;
    let node = world.node(1)?.clone();
    let [a, b] = [pod_ips(1, 1), pod_ips(1, 2)].map(|ips| ips[0]);
    answers(&node, b)?;
    // A rule of another program, such as a policy, that keeps the node away from its Pods.
    let rules = "table ip other { chain output { type filter hook output priority 0; ip daddr 10.244.0.0/16 drop; }; }";
    nft(&node, rules)?;
    let last_reason = || {
        let latest = hub.streams().departures.latest();
        latest.last().map(|(_, one)| one.reason.clone()).unwrap_or_default()
    };
    let began = Instant::now();
    outcome(&node, b, "/gone?within=1s", "bound")?;
    ensure!(
        began.elapsed() >= Duration::from_millis(850),
        "{:?}",
        began.elapsed()
    );
    ensure!(
        last_reason().contains("still counted as ready for shop/web"),
        "{}",
        last_reason()
    );

    // An agent that is connected and does nothing any more.
    let silent = Session::begin(
        hub.agents(),
        &"node-7".into(),
        &Hello::default(),
        String::new(),
    )
    .map_err(|error| anyhow!("{error}"))?;
    write(folder.path(), [Is::Ready, Is::Terminating, Is::Ready])?;
    outcome(&node, b, "/gone?within=2s", "bound")?;
    ensure!(
        last_reason() == "node-7 did not confirm",
        "{}",
        last_reason()
    );
    drop(silent);

    write(folder.path(), [Is::Terminating, Is::Gone, Is::Gone])?;
    outcome(&node, a, "/gone?within=2s", "last-endpoint")?;
    ensure!(
        last_reason() == "the Pod was the last endpoint of shop/web",
        "{}",
        last_reason()
    );
    // A Pod that no Service has.
    outcome(&node, pod_ips(1, 9)[0], "/gone?within=20s", "gone")?;
    outcome(&node, pod_ips(1, 9)[1], "/gone?within=20s", "gone")?;
    // Many such Pods end at once.
    let many = (20..220).map(|number| pod_ips(1, number)[0]);
    let asked = many.map(|pod| ask(&node, pod, "/gone?within=20s"));
    for waiting in asked.collect::<Result<Vec<_>>>()? {
        let (_, body) = answer(waiting)?;
        ensure!(body == "gone", "{body}");
    }
    let (status, _) = hook(&node, b, "/")?;
    ensure!(status == "HTTP/1.1 404 Not Found", "{status}");
    // The node itself is no Pod, but a Pod in its network has a port.
    outcome(&node, [127, 0, 0, 1].into(), "/gone?within=20s", "no-pod")?;
    outcome(
        &node,
        [127, 0, 0, 1].into(),
        "/gone?within=20s&port=8080",
        "gone",
    )?;

    nft(&node, "delete table ip other")?;
    // Nobody else reaches the listener: other nodes, Pods, machines.
    for (from, to) in [
        (world.node(2)?, b),
        (world.net.ns(Client::PodHere)?, b),
        (world.net.ns(Client::PodHere)?, [172, 30, 1, 1].into()),
        (world.net.ns(Client::Outside)?, [172, 30, 1, 1].into()),
        (&node, [172, 30, 1, 1].into()),
    ] {
        let reached = hook(from, to, "/gone?within=0s");
        ensure!(reached.is_err(), "{to}: {reached:?}");
    }

    drop((hub, plane));
    let began = Instant::now();
    outcome(&node, a, "/gone?within=1s", "no-control-plane")?;
    ensure!(
        began.elapsed() >= Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    stop(agents)
}

/// An agent that is asked to end answers the hooks that wait. New ones wait for the next agent, and are refused when none
/// comes.
pub(crate) fn hooks_outlive_a_restart_of_their_agent() -> Result<()> {
    let (folder, cache) = (tempfile::tempdir()?, tempfile::tempdir()?);
    write(folder.path(), [Is::Ready; 3])?;
    let world = World::without_agents()?;
    let control = world.topology.host("control")?.ns().clone();
    let _plane = ControlPlane::start(&control, folder.path())?;
    let mut agents = agents(&world, cache.path())?;
    let node = world.node(1)?.clone();
    let pods = pod_ips(1, 1);
    for pod in pods {
        answers(&node, pod)?;
    }
    let waits = ask(&node, pods[0], "/gone?within=20s")?;
    let (first, next) = (agents.remove(0), config(1, cache.path())?);
    thread::scope(|scope| {
        let ends = scope.spawn(|| first.stop());
        eventually(DEADLINE, "new hooks wait", || {
            let left = left_behind(&node)?;
            ensure!(left == 2, "{left} tables");
            Ok(())
        })?;
        let comes = scope.spawn(|| outcome(&node, pods[1], "/gone?within=20s", "gone"));
        write(folder.path(), [Is::Terminating, Is::Ready, Is::Ready])?;
        let (status, body) = answer(waits)?;
        ensure!(status == "HTTP/1.1 200 OK" && body == "gone", "{body}");
        joined(ends)?;
        agents.insert(0, NodeAgent::start(&node, &next)?);
        joined(comes)
    })?;
    eventually(DEADLINE, "the next agent takes its place", || {
        let left = left_behind(&node)?;
        ensure!(left == 0, "{left} tables");
        Ok(())
    })?;
    agents.remove(0).stop()?;
    ensure!(left_behind(&node)? == 2);
    // Nobody comes.
    let refused = hook(&node, pods[0], "/gone");
    ensure!(refused.is_err(), "{refused:?}");
    stop(agents)
}

/// Without a Service the agent answers at the port of hooks, and with one the Pod's own server does.
pub(crate) fn a_pod_that_serves_at_the_port_of_hooks_is_left_alone() -> Result<()> {
    let (folder, cache) = (tempfile::tempdir()?, tempfile::tempdir()?);
    write(folder.path(), [Is::Ready; 3])?;
    let mut world = World::without_agents()?;
    let control = world.topology.host("control")?.ns().clone();
    let _plane = ControlPlane::start(&control, folder.path())?;
    world.topology.pod_mut("b")?.serve(Protocol::Tcp, HOOK)?;
    let agents = agents(&world, cache.path())?;
    let node = world.node(1)?.clone();
    let [a, b] = [pod_ips(1, 1), pod_ips(1, 2)].map(|ips| ips[0]);
    answers(&node, b)?;
    let ports = json!([{"name": "http", "port": HOOK, "protocol": "TCP"}]);
    let spec = json!({"clusterIP": "10.96.7.2", "ports": ports});
    let endpoint = objects::endpoint(b, "node-1");
    let mut slice = objects::slice("shop", "zenoh-1", "zenoh", [endpoint]);
    slice["ports"] = ports;
    let zenoh = [objects::service("shop", "zenoh", spec), slice];
    whole::write(folder.path(), "zenoh", &zenoh)?;
    eventually(DEADLINE, "the Pod's server answers", || {
        Probe::tcp(SocketAddr::new(b, HOOK)).reply(&node).map(drop)
    })?;
    eventually(DEADLINE, "the node says so", || {
        let report = agents[0].report();
        let reported = report.findings.iter().any(|one| one.text.contains(&format!("such as {b}")));
        reported.then_some(()).ok_or_else(|| format!("{:?}", report.findings))
    })?;
    answers(&node, a)?;
    stop(agents)
}

/// Returns the number of tables that an agent has left behind.
fn left_behind(node: &NetNs) -> Result<usize> {
    let tables = nft(node, "list tables")?;
    Ok(tables.matches("kplane-departed").count())
}

fn joined(thread: thread::ScopedJoinHandle<'_, Result<()>>) -> Result<()> {
    thread.join().map_err(|_| anyhow!("it panicked"))?
}
