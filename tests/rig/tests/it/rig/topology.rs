//! Who reaches whom.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use anyhow::{Result, ensure};
use kplane_model::{Cidr, Family};
use kplane_rig::client::{Outcome, Probe, Protocol};
use kplane_rig::kernel::nft;
use kplane_rig::topology::{LINK, NodeSpec, Topology};

use crate::rig::{DEADLINE, FAMILIES, SHORT, add_pod, cases, nobody, two_nodes};

pub(crate) fn pods_reach_each_other() -> Result<()> {
    let topology = two_nodes()?;
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "c"), ("a", "a")] {
        for (family, protocol) in cases() {
            let (from, to) = (topology.pod(from)?, topology.pod(to)?);
            let address = to.address(family, 80)?;
            let reply = Probe::new(protocol, address).reply(from.ns())?;
            ensure!(reply.name == to.name(), "{reply:?}");
            ensure!(reply.local == address, "{reply:?}");
            ensure!(from.ips().contains(&reply.peer.ip()), "{reply:?}");
        }
    }
    Ok(())
}

pub(crate) fn outside_reaches_a_pod_through_a_node() -> Result<()> {
    let topology = two_nodes()?;
    let client = topology.host("client")?;
    let second = |family| match family {
        Family::V4 => IpAddr::from([172, 30, 0, 99]),
        Family::V6 => IpAddr::from([0xfd30, 0, 0, 0, 0, 0, 0, 0x99]),
    };
    for (family, prefix_len) in [(Family::V4, 16), (Family::V6, 64)] {
        let netlink = client.netlink();
        netlink.add_address(LINK, second(family), prefix_len)?;
    }
    for (family, protocol) in cases() {
        let pod = topology.pod("b")?;
        let probe = Probe::new(protocol, pod.address(family, 80)?);
        let before = probe.once(client.ns())?;
        ensure!(matches!(before, Outcome::Unreachable), "{before}");

        let pods = Cidr::single(probe.to.ip());
        for node in ["node-1", "node-2"] {
            client.route(pods, topology.node(node)?)?;
            for source in [client.ip(family)?, second(family)] {
                let reply = probe.source(source).reply(client.ns())?;
                ensure!(reply.peer.ip() == source, "{reply:?}");
            }
        }
        client.unroute(pods)?;
    }
    Ok(())
}

pub(crate) fn outcomes_are_told_apart() -> Result<()> {
    let topology = two_nodes()?;
    let (client, pod) = (topology.host("client")?, topology.pod("a")?);
    for (family, protocol) in cases() {
        let closed = Probe::new(protocol, topology.pod("b")?.address(family, 81)?);
        let outcome = closed.once(pod.ns())?;
        ensure!(matches!(outcome, Outcome::Refused), "{closed}: {outcome}");
        let refused = BTreeMap::from([("!refused".to_owned(), 3)]);
        ensure!(closed.spread(pod.ns(), 3)? == refused);

        let nobody = Probe::new(protocol, nobody(family)?).timeout(SHORT);
        let outcome = nobody.once(pod.ns())?;
        ensure!(matches!(outcome, Outcome::TimedOut), "{nobody}: {outcome}");
        let outcome = nobody.once(client.ns())?;
        ensure!(
            matches!(outcome, Outcome::Unreachable),
            "{nobody}: {outcome}"
        );
    }
    Ok(())
}

/// A connection whose first packet is lost is one that timed out, although the kernel sends it again.
pub(crate) fn a_lost_packet_is_a_failure() -> Result<()> {
    let topology = two_nodes()?;
    let (from, to) = (topology.pod("a")?, topology.pod("b")?);
    let probe = Probe::new(Protocol::Tcp, to.address(Family::V4, 80)?).timeout(DEADLINE);
    probe.reply(from.ns())?;
    // The first packet fits into the quota, and is dropped.
    let table = "add table ip lost; add chain ip lost input { type filter hook input priority 0; }; \
                 add rule ip lost input tcp dport 80 quota until 100 bytes drop";
    to.ns().run(|| Ok(nft(&["-f", "-"], table)))?;
    let outcome = probe.once(from.ns())?;
    ensure!(matches!(outcome, Outcome::TimedOut), "{outcome}");
    probe.reply(from.ns())?;
    Ok(())
}

pub(crate) fn pods_come_and_go() -> Result<()> {
    let mut topology = two_nodes()?;
    let ips = topology.pod("b")?.ips().to_vec();
    let probe = Probe::tcp(SocketAddr::new(ips[0], 80)).timeout(SHORT);
    topology.remove_pod("b")?;
    ensure!(topology.pod("b").is_err());
    let outcome = probe.once(topology.pod("a")?.ns())?;
    ensure!(!matches!(outcome, Outcome::Reply(_)), "{outcome}");

    let pod = topology.add_pod("node-1", "d", &ips)?;
    pod.serve(Protocol::Tcp, 80)?;
    // The addresses are in the prefix of the node it left: everybody must have learnt better.
    for node in topology.nodes() {
        let reply = probe.timeout(DEADLINE).reply(node.ns())?;
        ensure!(reply.name == "d", "{reply:?}");
    }
    ensure!(topology.add_pod("node-1", "d", &ips).is_err());
    ensure!(topology.remove_pod("b").is_err());
    Ok(())
}

pub(crate) fn a_pod_may_have_any_address() -> Result<()> {
    let mut topology = two_nodes()?;
    let ips = ["192.0.2.77".parse()?, "2001:db8::77".parse()?];
    let pod = topology.add_pod("node-2", "far", &ips)?;
    pod.serve(Protocol::Tcp, 443)?;
    for ip in ips {
        let probe = Probe::tcp(SocketAddr::new(ip, 443));
        ensure!(probe.reply(topology.pod("a")?.ns())?.name == "far");
        ensure!(probe.reply(topology.node("node-1")?.ns())?.name == "far");
    }
    topology.remove_pod("far")?;
    let probe = Probe::tcp(SocketAddr::new(ips[0], 443)).timeout(SHORT);
    let outcome = probe.once(topology.pod("a")?.ns())?;
    ensure!(matches!(outcome, Outcome::TimedOut), "{outcome}");
    Ok(())
}

pub(crate) fn nodes_come_late() -> Result<()> {
    let mut topology = two_nodes()?;
    let ip: IpAddr = "192.0.2.77".parse()?;
    topology.add_pod("node-2", "far", &[ip])?.serve(Protocol::Tcp, 80)?;
    topology.add_node(NodeSpec::standard(3)?)?;
    topology
        .add_pod("node-3", "late", &["10.244.3.9".parse()?])?
        .serve(Protocol::Tcp, 80)?;
    let (far, late) = (topology.pod("far")?, topology.pod("late")?);
    for (from, to) in [(far, late), (late, far)] {
        let probe = Probe::tcp(to.address(Family::V4, 80)?);
        ensure!(probe.reply(from.ns())?.name == to.name());
    }
    Ok(())
}

pub(crate) fn host_pods_have_the_nodes_addresses() -> Result<()> {
    let mut topology = two_nodes()?;
    topology.add_host_pod("node-2", "proxy")?.serve(Protocol::Tcp, 8080)?;
    let proxy = topology.pod("proxy")?;
    for family in FAMILIES {
        let probe = Probe::tcp(proxy.address(family, 8080)?);
        for ns in [topology.pod("a")?.ns(), topology.host("client")?.ns()] {
            ensure!(probe.reply(ns)?.name == "proxy");
        }
    }
    topology.remove_pod("proxy")?;
    topology.node("node-2")?.netlink().index("eth0")?;
    Ok(())
}

/// Prints how long a large topology takes; a busy machine takes several times as long as a quiet one.
pub(crate) fn many_pods_are_built() -> Result<()> {
    const NODES: u8 = 6;
    const PODS_PER_NODE: u8 = 10;
    let start = Instant::now();
    let mut topology = Topology::standard(NODES)?;
    let nodes = start.elapsed();
    for (node, pod) in (1..=NODES).flat_map(|n| (1..=PODS_PER_NODE).map(move |p| (n, p))) {
        add_pod(&mut topology, &format!("{node}-{pod}"), node, pod)?;
    }
    let built = start.elapsed();
    drop(topology);
    let dropped = start.elapsed() - built;
    println!("6 nodes {nodes:?}, with 60 pods {built:?}, dropped in {dropped:?}");
    Ok(())
}
