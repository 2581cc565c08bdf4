//! What the table is to others: where it hooks in, what it does not touch, how it grows (E).

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use kplane_model::{Family, Protocol};
use kplane_tests::netns::NetNs;
use kplane_tests::privilege::need_tools;
use serde_json::Value;

use crate::netns::addresses::on_both_nodes;
use crate::netns::listing::read_counts;
use crate::netns::restart::every_kind;
use kplane_tests::support::nft::{nft, run};
use kplane_tests::support::{At, Client, Question, SILENCE, Seen, Setup, World, ep, hit, svc};

/// A table in each of two families, and nothing else is there.
pub(crate) fn e1_one_table_in_each_family_and_nothing_else() -> Result<()> {
    need_tools(&["nft"])?;
    let world = World::serving(Setup::PodRanges, &every_kind()?)?;
    let tables = nft(world.node(1)?, "list tables")?;
    ensure!(tables == "table ip kplane\ntable ip6 kplane\n", "{tables}");
    Ok(())
}

/// Where kube-proxy's base chains are: what others place before or after those stays there.
pub(crate) fn e2_base_chains_have_the_priorities_that_others_count_on() -> Result<()> {
    need_tools(&["nft"])?;
    let world = World::serving(Setup::PodRanges, &[])?;
    let wanted = [
        ("filter", "prerouting", -110),
        ("filter", "output", -110),
        ("nat", "prerouting", -100),
        ("nat", "output", -100),
        ("filter", "prerouting", -99),
        ("filter", "output", -99),
        ("filter", "input", 0),
        ("filter", "forward", 0),
        ("filter", "output", 0),
        ("nat", "postrouting", 100),
    ];
    for table in ["ip", "ip6"] {
        let objects = listing(world.node(1)?, table)?;
        for (kind, hook, priority) in wanted {
            let count = objects.iter().filter(|object| {
                let chain = &object["chain"];
                chain["type"] == kind && chain["hook"] == hook && chain["prio"] == priority
            });
            ensure!(count.count() == 1, "{table}: {kind} {hook} {priority}");
        }
        // Whoever is before the first or behind the last of these is so for good.
        let hooked = objects.iter().filter_map(|o| o["chain"]["prio"].as_i64());
        let outside: Vec<_> = hooked.filter(|at| !(-110..=100).contains(at)).collect();
        ensure!(outside.is_empty(), "{table}: base chains at {outside:?}");
    }
    Ok(())
}

fn listing(node: &NetNs, table: &str) -> Result<Vec<Value>> {
    let text = run(node, &["-j", "list", "table", table, "kplane"])?;
    let listing: Value = serde_json::from_str(&text)?;
    let objects = listing["nftables"].as_array().context("no objects")?;
    Ok(objects.clone())
}

/// Each node knows hairpins of its own endpoints only.
pub(crate) fn e4_hairpins_are_known_of_local_endpoints_only() -> Result<()> {
    need_tools(&["nft"])?;
    let world = World::serving(Setup::PodRanges, &[on_both_nodes()])?;
    for (number, here, there) in [(1, ["a", "b"].as_slice(), "c"), (2, &["c"], "a")] {
        for (family, table) in Family::ALL.into_iter().zip(["ip", "ip6"]) {
            let set = nft(
                world.node(number)?,
                &format!("list set {table} kplane hairpin"),
            )?;
            let has = |pod: &str| set.contains(&ep(pod).address(family).ip().to_string());
            ensure!(
                here.iter().all(|pod| has(pod)) && !has(there),
                "node-{number}: {set}"
            );
        }
    }
    Ok(())
}

/// Services are elements: no number of them adds a chain, a set or a rule (better than E6), and a
/// change of one sends the same whatever the number of the others (better than E9).
pub(crate) fn e3_e5_e6_e9_services_add_elements_only() -> Result<()> {
    need_tools(&["nft"])?;
    let mut world = World::serving(Setup::PodRanges, &[])?;
    let node = world.node(1)?.clone();
    let counts = || -> Result<BTreeMap<String, usize>> {
        let mut counts = BTreeMap::new();
        for object in listing(&node, "ip")?.iter().chain(&listing(&node, "ip6")?) {
            let kind = object.as_object().and_then(|object| object.keys().next());
            *counts.entry(kind.cloned().unwrap_or_default()).or_default() += 1;
        }
        Ok(counts)
    };
    let empty = counts()?;
    let mut sent = Vec::new();
    for others in [1, 10, 200] {
        let services: Vec<_> = (2..2 + others)
            .map(|number| svc(number).everywhere().endpoints([ep("a"), ep("b")]))
            .collect();
        world.replace(&services)?;
        let full = counts()?;
        ensure!(
            full == empty,
            "{others} Services: {full:?}, none: {empty:?}"
        );
        let first = world.first()?;
        let done = first.update(&[svc(1).everywhere().endpoints([ep("a")])])?;
        sent.push((done.operations, done.bytes));
    }
    ensure!(sent.iter().all(|one| *one == sent[0]), "{sent:?}");
    Ok(())
}

/// Nothing stays in the kernel of Services that are gone, at once and not a second later.
pub(crate) fn e11_nothing_is_left_of_deleted_services() -> Result<()> {
    let mut world = World::serving(Setup::PodRanges, &[on_both_nodes()])?;
    let node = world.node(1)?.clone();
    let counts = || -> Result<Vec<_>> {
        Family::ALL.into_iter().map(|family| read_counts(&node, family)).collect()
    };
    let before = counts()?;
    let more: Vec<_> = every_kind()?.split_off(1);
    world.update(&more)?;
    ensure!(counts()? != before);
    world.remove(&more)?;
    let after = counts()?;
    ensure!(after == before, "{after:?}, before {before:?}");
    Ok(())
}

/// Another's table that filters by itself.
const STRICT: &str = "table inet strict {
    chain input { type filter hook input priority 10;
        tcp dport 32100 drop
    }
    chain forward { type filter hook forward priority 10;
        tcp dport 8080 ip saddr 172.30.0.0/16 drop
        tcp dport 8080 ip6 saddr fd30::/64 drop
    }
}";

/// No hole is punched: what another's firewall drops stays dropped, at health check ports as at node
/// ports.
pub(crate) fn a26_e8_no_hole_is_punched_into_others_firewalls() -> Result<()> {
    need_tools(&["nft"])?;
    let service = svc(1).everywhere().external_local().endpoints([ep("a")]);
    let world = World::serving(Setup::PodRanges, std::slice::from_ref(&service))?;
    let node = world.topology.node("node-1")?;
    let mut silent = Vec::new();
    let mut servers = Vec::new();
    for family in Family::ALL {
        let health = std::net::SocketAddr::new(node.ip(family)?, 32_100);
        let echo = world.topology.echo();
        let protocol = kplane_tests::client::Protocol::Tcp;
        servers.push(echo.serve(node.ns(), "health", protocol, health)?);
        silent.push(health);
        silent.extend([At::NodePort, At::LoadBalancer].map(|at| service.address(at, family, 1)));
    }
    let asked = |to| Question::new(Client::Outside, Protocol::Tcp, to).timeout(SILENCE);
    for to in &silent {
        let seen = asked(*to).ask(&world.net)?;
        ensure!(matches!(seen, Seen::Hit { .. }), "{to}: {seen}");
    }
    nft(node.ns(), STRICT)?;
    for to in silent {
        let seen = asked(to).ask(&world.net)?;
        ensure!(seen == Seen::Silent, "{to}: {seen}");
    }
    Ok(())
}

/// Packets that conntrack calls invalid are not ours to drop.
pub(crate) fn e8_no_rule_looks_for_invalid_packets() -> Result<()> {
    need_tools(&["nft"])?;
    let world = World::serving(Setup::PodRanges, &every_kind()?)?;
    let text = nft(world.node(1)?, "list ruleset")?;
    ensure!(!text.contains("invalid"), "{text}");
    let to = svc(1).address(At::ClusterIp, Family::V4, 1);
    hit(&world.net, Client::PodHere, Protocol::Tcp, to)?;
    Ok(())
}
