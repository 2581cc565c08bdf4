//! One proxy takes the other's place on a node that serves (I4).

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_model::Cidr;
use kplane_tests::client::{Outcome, Probe, Session};
use kplane_tests::load::{Load, Pace};
use kplane_tests::netns::NetNs;
use kplane_tests::support::ipvs::{everything, servers, weights};
use kplane_tests::support::proxy::Proxy;
use kplane_tests::topology::NodeSpec;
use kplane_tests::wait::eventually;
use serde_json::json;

use crate::vm::node::{Node, PATIENCE, service, slice};

/// Light, for everything is slow here.
const PACE: Pace = Pace {
    threads: 1,
    think: Duration::from_millis(10),
};
/// How long silence is listened to.
const SILENCE: Duration = Duration::from_secs(2);
/// Address of a load balancer.
const BALANCER: &str = "198.18.0.9";
/// Where the Service is reached, and from which pod or host.
const PLACES: [(&str, &str); 4] = [
    ("asks", "10.96.1.1:80"),
    ("asks", "[fd96::1:1]:80"),
    ("client", "172.30.1.1:30080"),
    ("asks", "172.30.1.1:30080"),
];

/// What the one has programmed the other adopts: connections stay, new ones never fail, and real
/// servers that were draining go on draining.
pub(crate) fn i4_kplane_takes_kube_proxys_place_and_back_without_a_failed_connection() -> Result<()>
{
    let node = Node::new()?;
    node.register()?;
    let spec = [
        ("type", json!("NodePort")),
        (
            "ports",
            json!([
                {"name": "tcp", "port": 80, "targetPort": 8080, "protocol": "TCP", "nodePort": 30080},
                {"name": "udp", "port": 80, "targetPort": 8080, "protocol": "UDP", "nodePort": 30080},
            ]),
        ),
    ];
    node.api.apply(&service("web", 1, &spec))?;
    endpoints(&node, &["a", "b"])?;
    let sticky = [
        ("sessionAffinity", json!("ClientIP")),
        ("externalIPs", json!(["198.18.0.7"])),
    ];
    node.api.apply(&service("sticky", 2, &sticky))?;
    node.api.apply(&slice("sticky", 4, &["10.244.1.1", "10.244.1.2"]))?;
    balanced(&node)?;
    let process = node.start(Proxy::KubeProxy)?;
    node.serves("sentinel-1", 101)?;
    let by_kube_proxy = everything(node.ns()?)?;
    source_ranges_count(&node).context("kube-proxy")?;
    let loads = start(&node)?;
    let mut session = open(&node)?;
    progress(&loads, 5)?;

    process.terminate(PATIENCE)?;
    let mut process = node.start(Proxy::Kplane)?;
    node.serves("sentinel-2", 102)?;
    session.echo(PATIENCE).context("kplane is there")?;
    progress(&loads, 5)?;
    same(&by_kube_proxy, &everything(node.ns()?)?)?;
    source_ranges_count(&node).context("kplane")?;

    // Of the two that serve the connection's leaves.
    let (leaves, stays) = match session.reply().name.as_str() {
        "a" => ("a", "b"),
        _ => ("b", "a"),
    };
    endpoints(&node, &[stays])?;
    drains(&node, leaves)?;
    session.echo(PATIENCE).context("its endpoint is leaving")?;

    process.kill()?;
    process.wait()?;
    let process = node.start(Proxy::KubeProxy)?;
    node.serves("sentinel-3", 103)?;
    session.echo(PATIENCE).context("kube-proxy is back")?;
    endpoints(&node, &["a", "b"])?;
    progress(&loads, 5)?;
    process.terminate(PATIENCE)?;

    loads.into_iter().try_for_each(|(name, load)| load.unharmed().context(name))?;
    node.clean_up()
}

/// All that the one wrote the other needs too. It has more: chains and rules for sets that are empty,
/// and a Service that came meanwhile.
fn same(by_kube_proxy: &[String], by_kplane: &[String]) -> Result<()> {
    let only = |these: &[String], others: &[String]| -> Vec<String> {
        these.iter().filter(|line| !others.contains(line)).cloned().collect()
    };
    let gone = only(by_kube_proxy, by_kplane);
    ensure!(gone.is_empty(), "only kube-proxy has {gone:#?}");
    let mut new = only(by_kplane, by_kube_proxy);
    let expected = [":KUBE-", "-A KUBE-", "10.96.1.102", "fd96::1:66"];
    new.retain(|line| !expected.iter().any(|part| line.contains(part)));
    ensure!(new.is_empty(), "only kplane has {new:#?}");
    Ok(())
}

/// A Service with a load balancer that only the client may use.
fn balanced(node: &Node) -> Result<()> {
    let spec = [
        ("type", json!("LoadBalancer")),
        ("allocateLoadBalancerNodePorts", json!(false)),
        ("loadBalancerSourceRanges", json!(["172.30.0.3/32"])),
    ];
    node.api.apply(&service("balanced", 3, &spec))?;
    node.api.apply(&slice("balanced", 4, &["10.244.1.1", "10.244.1.2"]))?;
    let status = json!({"loadBalancer": {"ingress": [{"ip": BALANCER}]}});
    node.api.patch_status("Service", "default/balanced", &status)?;
    let client = node.topology.host("client")?;
    client.route(
        Cidr::single(BALANCER.parse()?),
        node.topology.node("node-1")?,
    )
}

/// A8: the client is let in, a pod is not. The node is not either, by the source that it has there of
/// itself; from another of its addresses it is.
fn source_ranges_count(node: &Node) -> Result<()> {
    let to = SocketAddr::new(BALANCER.parse()?, 80);
    let ask = |who: &str, ns: &NetNs, source: Option<IpAddr>, is_let_in: bool| {
        let timeout = if is_let_in { PATIENCE } else { SILENCE };
        let probe = Probe::tcp(to).timeout(timeout);
        let probe = source.map_or(probe, |ip| probe.source(ip));
        let outcome = probe.once(ns)?;
        let as_wanted = match outcome {
            Outcome::Reply(_) => is_let_in,
            Outcome::TimedOut => !is_let_in,
            _ => false,
        };
        ensure!(as_wanted, "{who} from {source:?}: {outcome}");
        Ok(())
    };
    ask("the client", node.topology.host("client")?.ns(), None, true)?;
    ask("a pod", node.pod("asks")?, None, false)?;
    ask("the node", node.ns()?, None, false)?;
    let own = NodeSpec::standard(1)?.ips.first().copied();
    ask("the node", node.ns()?, own, true)
}

fn endpoints(node: &Node, pods: &[&str]) -> Result<()> {
    let number = |pod: &&str| if *pod == "a" { 1 } else { 2 };
    let v4: Vec<String> = pods.iter().map(|pod| format!("10.244.1.{}", number(pod))).collect();
    let v6: Vec<String> = pods.iter().map(|pod| format!("fd44:0:0:1::{}", number(pod))).collect();
    let refs = |ips: &[String]| ips.iter().map(|ip| (*ip).clone()).collect::<Vec<_>>();
    for (family, ips) in [(4, refs(&v4)), (6, refs(&v6))] {
        let ips: Vec<&str> = ips.iter().map(String::as_str).collect();
        node.api.apply(&slice("web", family, &ips))?;
    }
    Ok(())
}

fn drains(node: &Node, pod: &str) -> Result<()> {
    let real = if pod == "a" { "10.244.1.1:8080" } else { "10.244.1.2:8080" };
    let ns = node.ns()?;
    eventually(PATIENCE, "the endpoint drains", || {
        let lines = servers(ns)?;
        let mine = format!("-a -t 10.96.1.1:80 -r {real} -m -w 0");
        ensure!(
            lines.contains(&mine),
            "{:?} of {lines:#?}",
            weights(ns, real)?
        );
        Ok::<_, anyhow::Error>(())
    })
}

fn start(node: &Node) -> Result<Vec<(String, Load)>> {
    let load = |(from, to): &(&str, &str)| {
        let ns = match *from {
            "client" => node.topology.host("client")?.ns(),
            pod => node.pod(pod)?,
        };
        // A second may pass here without anything being done.
        let probe = Probe::tcp(to.parse()?).timeout(Duration::from_secs(5));
        Ok((format!("{from} to {to}"), Load::start(ns, probe, PACE)?))
    };
    PLACES.iter().map(load).collect()
}

fn progress(loads: &[(String, Load)], more: u64) -> Result<()> {
    loads
        .iter()
        .try_for_each(|(name, load)| load.goes_on(more, PATIENCE).context(name.clone()))
}

fn open(node: &Node) -> Result<Session> {
    let probe = Probe::tcp("10.96.1.1:80".parse()?).timeout(PATIENCE);
    probe.open(node.pod("asks")?)
}
