//! Traffic and rules that are not ours stay as they are; what others do to ours is found and
//! repaired.

use std::net::SocketAddr;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context as _, Result, anyhow, ensure};
use kplane_dataplane::backend::Verification;
use kplane_model::{Cidr, Family, Protocol};
use kplane_netlink::{Batch, Label, NfSocket, Operation};
use kplane_tests::client::{self, Outcome, Probe};
use kplane_tests::privilege::need_tools;
use kplane_tests::wait::{DEADLINE, eventually};

use crate::netns::addresses::{cases, cluster_policies, on_both_nodes};
use crate::netns::combined::cluster;
use crate::netns::tampering::{Tampering, tamperings};
use kplane_tests::support::cluster::Cluster;
use kplane_tests::support::nft::{nft, run};
use kplane_tests::support::objects::{load_balancer, with_pods};
use kplane_tests::support::{
    At, Client, PATIENCE, Seen, Setup, TARGET, World, answers, ask, ep, hit, node_ip, svc,
};

/// linux/netfilter/nf_tables.h, with the subsystem in the upper byte.
const NFT_MSG_NEWTABLE: u16 = 10 << 8;
const NFT_MSG_DELTABLE: u16 = NFT_MSG_NEWTABLE | 2;
const NFTA_TABLE_NAME: u16 = 1;

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
    need_tools(&["nft"])?;
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
            let mut words = text.split_whitespace().skip_while(|word| *word != "packets");
            let count = words.nth(1).context("no counter")?;
            Ok(count.parse()?)
        };
        let (kept, lost) = (packets("kept")?, packets("lost")?);
        ensure!(kept > 20, "{kept} packets with the others' mark");
        ensure!(lost == 0, "{lost} packets without the others' mark");

        // nft 1.0.6 crashes if it resets the counters of two tables, and then lists one.
        let reset = "reset counters table inet foreign; list table inet foreign";
        let before = nft(&node, reset)?;
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
    need_tools(&["nft"])?;
    let mut world = World::serving(Setup::PodRanges, &[on_both_nodes()])?;
    let node = world.node(1)?.clone();
    nft(
        &node,
        "add table inet foreign\nadd set inet foreign s { type inet_service; }",
    )?;
    let first = world.first()?;
    for port in 1..=20 {
        nft(&node, &format!("add element inet foreign s {{ {port} }}"))?;
        let endpoints = if port % 2 == 0 { ["a", "b"] } else { ["b", "c"] };
        let done = first.update(&[svc(2).endpoints(endpoints.map(ep))])?;
        ensure!(done.operations < 60, "{done:?}");
        first.ensure_equal()?;
    }
    cluster_policies().observe(&world.net)
}

/// Once as the kernel tells of it, and once when everything is read back.
pub(crate) fn what_others_do_to_our_table_is_found_and_repaired() -> Result<()> {
    need_tools(&["nft"])?;
    let services = [on_both_nodes()];
    let mut world = World::serving(Setup::PodRanges, &services)?;
    let node = world.node(1)?.clone();
    for Tampering { what, commands, .. } in tamperings("nftables")? {
        let command = &*commands.join("\n");
        for reported in [true, false] {
            nft(&node, command).context(what)?;
            let first = world.first()?;
            let seen = if reported {
                first.repair()?
            } else {
                vec![first.verify(Family::V4)?, first.verify(Family::V6)?]
            };
            let repair = |v: &Verification| match v {
                Verification::Repaired(what) => Some(what.clone()),
                _ => None,
            };
            let text = seen.iter().find_map(repair).with_context(|| format!("{what}: {seen:?}"))?;
            ensure!(text.contains("by nft (process "), "{what}: {text}");
            let first = world.first()?;
            first.ensure_equal().context(what)?;
            ensure!(
                first.repair()?.is_empty(),
                "{what}: our own repair was taken for others'"
            );
        }
        repaired(&world).context(what)?;
    }
    Ok(())
}

/// Nothing changes, nobody asks: the engine hears of it, puts it right, and says so.
pub(crate) fn an_engine_at_rest_puts_right_what_others_do() -> Result<()> {
    need_tools(&["nft"])?;
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    cluster.apply(&with_pods(load_balancer(1), &["a"]))?;
    let node = world.topology.node("node-1")?.ns().clone();
    let count = |cluster: &Cluster| -> u64 {
        let families = &cluster.reports()[0].families;
        families.iter().map(|family| family.repairs.count).sum()
    };
    for Tampering { what, commands, .. } in tamperings("nftables")? {
        let command = &*commands.join("\n");
        eventually(DEADLINE, "at rest", || {
            let report = &cluster.reports()[0];
            let rest = report.verified.is_some() && report.applied == report.held;
            ensure!(rest, "{report:?}");
            Ok(())
        })?;
        let before = count(&cluster);
        nft(&node, command).context(what)?;
        // One family after the other. A look at everything that comes first does not know who it was.
        eventually(DEADLINE, what, || {
            let report = &cluster.reports()[0];
            let right = count(&cluster) > before && report.applied == report.held;
            ensure!(right, "not put right: {report:?}");
            Ok(())
        })?;
    }
    for family in Family::ALL {
        let to = svc(1).address(At::ClusterIp, family, 1);
        hit(&world.net, Client::PodHere, Protocol::Tcp, to)?;
    }
    Ok(())
}

/// A single rule is deleted: the one that only a hairpin needs.
pub(crate) fn a_deleted_rule_is_found_and_repaired() -> Result<()> {
    need_tools(&["nft"])?;
    let services = [on_both_nodes()];
    let mut world = World::serving(Setup::PodRanges, &services)?;
    let node = world.node(1)?.clone();
    let listing = run(
        &node,
        &["-a", "list", "chain", "ip", "kplane", "postrouting"],
    )?;
    let rule = listing.lines().find(|line| line.contains("@hairpin"));
    let (_, handle) =
        rule.and_then(|rule| rule.rsplit_once(' ')).with_context(|| listing.clone())?;
    nft(
        &node,
        &format!("delete rule ip kplane postrouting handle {handle}"),
    )?;
    let first = world.first()?;
    let seen = first.repair()?;
    ensure!(matches!(&seen[..], [Verification::Repaired(_)]), "{seen:?}");
    first.ensure_equal()?;
    let to = services[0].address(At::ClusterIp, Family::V4, 1);
    for _ in 0..20 {
        hit(&world.net, Client::Endpoint, Protocol::Tcp, to)?;
    }
    Ok(())
}

/// Without anybody looking, a change onto a table that others changed puts it right first: it is never
/// applied to something else than what it was worked out for.
pub(crate) fn a_change_onto_a_tampered_table_repairs_it_first() -> Result<()> {
    need_tools(&["nft"])?;
    let services = [on_both_nodes(), svc(2).endpoints([ep("b")])];
    let mut world = World::serving(Setup::PodRanges, &services)?;
    let node = world.node(1)?.clone();
    for Tampering { what, commands, .. } in tamperings("nftables")? {
        let command = &*commands.join("\n");
        nft(&node, command).context(what)?;
        let first = world.first()?;
        let done = first.update(&[svc(2).endpoints([ep("c")])]).context(what)?;
        ensure!(!done.repaired.is_empty(), "{what}: not noticed");
        first.ensure_equal().context(what)?;
        first.update(&services[1..]).context(what)?;
        repaired(&world).context(what)?;
    }
    Ok(())
}

/// Somebody commits to a table of theirs without a pause: ours are small changes all the same, and reading
/// back finds what there is.
pub(crate) fn foreign_commits_without_a_pause_starve_nobody() -> Result<()> {
    let mut world = World::serving(Setup::PodRanges, &[on_both_nodes()])?;
    let node = world.node(1)?.clone();
    let over = Arc::new(AtomicBool::new(false));
    let others = {
        let over = Arc::clone(&over);
        thread::spawn(move || node.run(|| commit_until(&over)))
    };
    let mut work = || -> Result<()> {
        let first = world.first()?;
        for round in 0..100 {
            let endpoints = if round % 2 == 0 { ["a", "b"] } else { ["b", "c"] };
            let done = first.update(&[svc(2).endpoints(endpoints.map(ep))])?;
            ensure!(done.operations < 60 && done.repaired.is_empty(), "{done:?}");
        }
        for _ in 0..10 {
            first.ensure_equal()?;
        }
        Ok(())
    };
    let worked = work();
    over.store(true, Ordering::Relaxed);
    let commits = others.join().map_err(|_| anyhow!("the others' thread has panicked"))??;
    worked?;
    ensure!(commits > 100, "{commits} commits of others are no crowd");
    cluster_policies().observe(&world.net)
}

/// Makes and deletes a table of no use until it is told to stop; how many transactions that were.
fn commit_until(over: &AtomicBool) -> Result<u64> {
    let mut socket = NfSocket::open()?;
    let mut commits = 0;
    while !over.load(Ordering::Relaxed) {
        for kind in [NFT_MSG_NEWTABLE, NFT_MSG_DELTABLE] {
            let mut batch = Batch::new();
            let label = Label {
                action: "churn",
                object: "foreign",
            };
            let operation = Operation {
                label,
                kind,
                flags: 0,
                family: 2,
            };
            batch.push(operation, |w| w.str(NFTA_TABLE_NAME, "foreign"));
            socket.commit(batch.seal(None))?;
            commits += 1;
        }
    }
    Ok(commits)
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
