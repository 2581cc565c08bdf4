//! Traffic and rules that are not ours stay as they are; what others do to ours is found and
//! repaired.

use std::net::SocketAddr;
use std::slice;

use anyhow::{Context as _, Result, ensure};
use kp_nodeagent::backend::Verification;
use kplane_model::{Cidr, Family, Protocol};
use kplane_tests::client::{self, Outcome, Probe};
use kplane_tests::privilege::require_tool;

use crate::addresses::{cases, cluster_policies, on_both_nodes};
use crate::support::nft::{nft, run};
use crate::support::{
    At, Client, PATIENCE, Question, Seen, Setup, TARGET, World, answers, ask, ep, node_ip, svc,
};

/// A port that others use.
const OTHER_PORT: u16 = 7777;

pub(crate) fn traffic_that_is_no_services_keeps_its_addresses() -> Result<()> {
    let world = World::serving(Setup::MasqueradeAll, &[on_both_nodes()])?;
    let (client, node) = (
        world.topology.host("client")?,
        world.topology.node("node-1")?,
    );
    let echo = world.topology.echo();
    for (family, protocol) in cases() {
        // Pod to pod, from outside to a pod, from the node to a pod.
        let pod = ep("c").address(family);
        client.route(Cidr::single(pod.ip()), world.topology.node("node-2")?)?;
        for from in Client::ALL {
            let seen = ask(&world.net, from, protocol, pod)?;
            let wanted = Seen::Hit {
                endpoint: pod,
                source: from.source(family),
            };
            ensure!(seen == wanted, "{from:?} to {protocol} {pod}: {seen}");
        }
        // Pods and nodes to outside, and everybody to a server of the node.
        let protocol = match protocol {
            Protocol::Tcp => client::Protocol::Tcp,
            Protocol::Udp => client::Protocol::Udp,
            Protocol::Sctp => continue,
        };
        for host in [client, node] {
            let at = SocketAddr::new(host.ip(family)?, OTHER_PORT);
            let _server = echo.serve(host.ns(), "other", protocol, at)?;
            client.route(World::pod_range(family)?, node)?;
            let from = world.net.ns(Client::PodHere)?;
            let reply = Probe::new(protocol, at).reply(from)?;
            let source = Client::PodHere.source(family);
            ensure!(reply.peer.ip() == source, "{at}: {reply:?}");
        }
    }
    Ok(())
}

/// Another's table with an address translation and a filter of its own, before and after ours.
const FOREIGN: &str = "table inet foreign {
    counter kept { }
    counter lost { }
    chain first { type filter hook prerouting priority -150;
        iifname eth0 meta mark set 0xabc00001
    }
    chain translate { type nat hook prerouting priority -100;
        tcp dport 7777 dnat ip to 10.244.1.1:8080
        tcp dport 7777 dnat ip6 to [fd44:0:0:1::1]:8080
    }
    chain last { type filter hook postrouting priority 150;
        tcp dport 8080 oifname pod* meta mark 0xabc00001 counter name kept
        tcp dport 8080 oifname pod* meta mark != 0xabc00001 counter name lost
    }
}";

pub(crate) fn a_foreign_table_keeps_working_and_no_other_mark_is_touched() -> Result<()> {
    if !require_tool("nft")? {
        return Ok(());
    }
    let service = svc(1).everywhere().endpoints(["a", "b"].map(ep));
    for foreign_first in [true, false] {
        let mut world = World::new(Setup::PodRanges)?;
        let node = world.node(1)?.clone();
        if foreign_first {
            nft(&node, FOREIGN)?;
        }
        world.replace(slice::from_ref(&service))?;
        if !foreign_first {
            nft(&node, FOREIGN)?;
        }
        for family in Family::ALL {
            for at in At::ALL {
                let to = service.address(at, family, 1);
                for client in [Client::Outside, Client::PodThere] {
                    answers(&world.net, client, to)?;
                }
            }
            let own = SocketAddr::new(node_ip(1, family), OTHER_PORT);
            let seen = ask(&world.net, Client::Outside, Protocol::Tcp, own)?;
            let wanted = Seen::Hit {
                endpoint: ep("a").address(family),
                source: Client::Outside.source(family),
            };
            ensure!(seen == wanted, "translated by others: {seen}");
        }
        let packets = |counter: &str| -> Result<u64> {
            let text = nft(&node, &format!("list counter inet foreign {counter}"))?;
            let mut words = text
                .split_whitespace()
                .skip_while(|word| *word != "packets");
            let count = words.nth(1).context("no counter")?;
            Ok(count.parse()?)
        };
        let (kept, lost) = (packets("kept")?, packets("lost")?);
        ensure!(kept > 20, "{kept} packets with the others' mark");
        ensure!(lost == 0, "{lost} packets without the others' mark");

        let before = nft(&node, "reset counters; list table inet foreign")?;
        world.first()?.cleanup()?;
        let after = nft(&node, "list table inet foreign")?;
        ensure!(before.contains("dnat"), "{before}");
        ensure!(
            after == nft(&node, "list ruleset")?,
            "only the others' is left"
        );
    }
    Ok(())
}

/// Others commit between our changes all the time: ours go on as small changes.
pub(crate) fn foreign_commits_between_ours_are_no_drift() -> Result<()> {
    if !require_tool("nft")? {
        return Ok(());
    }
    let mut world = World::serving(Setup::PodRanges, &[on_both_nodes()])?;
    let node = world.node(1)?.clone();
    nft(
        &node,
        "add table inet foreign\nadd set inet foreign s { type inet_service; }",
    )?;
    let first = world.first()?;
    for port in 1..=20 {
        nft(&node, &format!("add element inet foreign s {{ {port} }}"))?;
        let endpoints = if port % 2 == 0 {
            ["a", "b"]
        } else {
            ["b", "c"]
        };
        let done = first.update(&[svc(2).endpoints(endpoints.map(ep))])?;
        ensure!(done.operations < 60, "{done:?}");
        first.ensure_equal()?;
    }
    cluster_policies().observe(&world.net)
}

/// What others may do to our table: what is wrong afterwards, and the command.
const TAMPERINGS: [(&str, &str); 14] = [
    ("everything is gone", "flush ruleset"),
    ("the table is gone", "delete table ip kplane"),
    ("the other table is gone", "delete table ip6 kplane"),
    ("a chain is empty", "flush chain ip kplane postrouting"),
    (
        "a chain is gone",
        "flush chain ip6 kplane postrouting\ndelete chain ip6 kplane postrouting",
    ),
    ("a rule is new", "insert rule ip kplane services return"),
    (
        "a rule is new at the end",
        "add rule ip6 kplane forward drop",
    ),
    ("a chain is new", "add chain ip kplane foreign"),
    (
        "a set is new",
        "add set ip kplane foreign { type ipv4_addr; }",
    ),
    (
        "a policy is another",
        "chain ip kplane forward { policy drop; }",
    ),
    ("the table sleeps", "add table ip kplane { flags dormant; }"),
    (
        "an element is gone",
        "delete element ip kplane services { 10.96.0.1 . tcp . 80 }",
    ),
    (
        "an element is new",
        "add element ip6 kplane cluster-ips { fd96::77 }",
    ),
    ("a map is empty", "flush map ip6 kplane service-endpoints"),
];

pub(crate) fn what_others_do_to_our_table_is_found_and_repaired() -> Result<()> {
    if !require_tool("nft")? {
        return Ok(());
    }
    let services = [on_both_nodes()];
    let mut world = World::serving(Setup::PodRanges, &services)?;
    let node = world.node(1)?.clone();
    for (what, command) in TAMPERINGS {
        nft(&node, command).context(what)?;
        let first = world.first()?;
        let seen = [first.verify(Family::V4)?, first.verify(Family::V6)?];
        let drifted = |v: &Verification| matches!(v, Verification::Drifted(_));
        ensure!(seen.iter().any(drifted), "{what}: {seen:?}");
        first.replace(&services).context(what)?;
        first.ensure_equal().context(what)?;
        repaired(&world).context(what)?;
    }
    Ok(())
}

/// A single rule is deleted: the one that only a hairpin needs.
pub(crate) fn a_deleted_rule_is_found_and_repaired() -> Result<()> {
    if !require_tool("nft")? {
        return Ok(());
    }
    let services = [on_both_nodes()];
    let mut world = World::serving(Setup::PodRanges, &services)?;
    let node = world.node(1)?.clone();
    let listing = run(
        &node,
        &["-a", "list", "chain", "ip", "kplane", "postrouting"],
    )?;
    let rule = listing.lines().find(|line| line.contains("@hairpin"));
    let (_, handle) = rule
        .and_then(|rule| rule.rsplit_once(' '))
        .with_context(|| listing.clone())?;
    nft(
        &node,
        &format!("delete rule ip kplane postrouting handle {handle}"),
    )?;
    let first = world.first()?;
    let seen = first.verify(Family::V4)?;
    ensure!(seen != Verification::Equal, "{seen:?}");
    first.replace(&services)?;
    first.ensure_equal()?;
    let to = services[0].address(At::ClusterIp, Family::V4, 1);
    for _ in 0..20 {
        let question = Question::new(Client::Endpoint, Protocol::Tcp, to);
        let seen = question.ask(&world.net)?;
        ensure!(matches!(seen, Seen::Hit { .. }), "{seen}");
    }
    Ok(())
}

/// Without anybody looking, a change onto a table that others changed is refused, never applied to
/// something else than what it was worked out for.
pub(crate) fn a_change_onto_a_tampered_table_is_refused_and_then_repairs() -> Result<()> {
    if !require_tool("nft")? {
        return Ok(());
    }
    let services = [on_both_nodes(), svc(2).endpoints([ep("b")])];
    let mut world = World::serving(Setup::PodRanges, &services)?;
    let node = world.node(1)?.clone();
    for (what, command) in TAMPERINGS {
        nft(&node, command).context(what)?;
        let first = world.first()?;
        let change = [svc(2).endpoints([ep("c")])];
        let refused = first.update(&change).err();
        let refused = refused.with_context(|| format!("{what}: applied all the same"))?;
        ensure!(refused.to_string().contains("IP"), "{what}: {refused:#}");
        first.replace(&services).context(what)?;
        first.ensure_equal().context(what)?;
        repaired(&world).context(what)?;
    }
    Ok(())
}

fn repaired(world: &World) -> Result<()> {
    for family in Family::ALL {
        let to = on_both_nodes().address(At::ClusterIp, family, 1);
        for client in [
            Client::Outside,
            Client::PodHere,
            Client::Endpoint,
            Client::Node,
        ] {
            answers(&world.net, client, to)?;
        }
        let other = SocketAddr::new(ep("b").address(family).ip(), TARGET);
        let probe = Probe::tcp(other).timeout(PATIENCE);
        let outcome = probe.once(world.net.ns(Client::PodHere)?)?;
        ensure!(matches!(outcome, Outcome::Reply(_)), "{other}: {outcome}");
    }
    Ok(())
}
