//! What changes while packets flow, other than Services: addresses of the node, ServiceCIDRs, the
//! agent's own configuration, transactions that fail.

use std::net::{IpAddr, SocketAddr};
use std::slice;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_dataplane::backend::Settings;
use kplane_dataplane::plan::NodeSettings;
use kplane_model::{Family, Protocol, Reason};
use kplane_tests::capture::Capture;
use kplane_tests::client::{self, Outcome, Probe, Session};
use kplane_tests::privilege::need_tools;
use kplane_tests::topology::LINK;
use kplane_tests::wait::{DEADLINE, eventually};
use serde_json::{Value, json};

use crate::netns::addresses::on_both_nodes;
use crate::netns::combined::{cluster, reaches};
use kplane_tests::support::cluster::{Cluster, apply, delete, node, node_in, service_cidr};
use kplane_tests::support::nft::nft;
use kplane_tests::support::objects::{load_balancer, service, slices, with_endpoints, with_pods};
use kplane_tests::support::{
    ALL, ALL_MASQUERADED, At, Client, HERE, PATIENCE, PORT, Question, Row, SILENCE, Scenario, Seen,
    Setup, World, answers, ask, cidrs, ep, pairs, refused, second_ip, silent, svc,
};

/// How soon a new address of the node must serve node ports.
const FOLLOWED: Duration = Duration::from_secs(1);

/// Addresses that the node gets and loses, inside the ranges of `nodePortAddresses` and outside.
const INSIDE: [&str; 2] = ["172.30.9.7", "fd30::9:7"];
const OUTSIDE: [&str; 2] = ["172.30.8.7", "fd30::8:7"];

/// Ranges of `nodePortAddresses`: addresses inside are served as soon as the node has them, and no
/// longer than that; others never, and loopback not even when a range holds it.
pub(crate) fn a21_node_port_addresses_by_range_follow_the_node() -> Result<()> {
    let service = on_both_nodes();
    let mut world = World::new(Setup::PodRanges)?;
    let ranges = ["172.30.9.0/24", "fd30::9:0/112", "127.0.0.0/8", "::1/128"];
    let first = world.first()?;
    first.settings.nodeport_addresses = cidrs(&ranges)?;
    first.replace(slice::from_ref(&service))?;
    let at = |ip: IpAddr| SocketAddr::new(ip, service.node_port());
    let node = world.topology.node("node-1")?;
    for round in 0..2 {
        for ((inside, outside), family) in INSIDE.iter().zip(OUTSIDE).zip(Family::ALL) {
            let (inside, outside): (IpAddr, IpAddr) = (inside.parse()?, outside.parse()?);
            let prefix_len = if inside.is_ipv4() { 16 } else { 64 };
            answers(&world.net, Client::PodHere, at(second_ip(family)))?;
            for ip in [inside, outside] {
                node.netlink().add_address(LINK, ip, prefix_len)?;
            }
            for client in [Client::Outside, Client::PodHere, Client::Node] {
                eventually(FOLLOWED, "served at a new address", || {
                    answers(&world.net, client, at(inside))
                })?;
                refused(&world.net, client, Protocol::Tcp, at(outside))?;
            }
            let loopback: IpAddr = ["127.0.0.1", "::1"][family as usize].parse()?;
            let probe = Probe::tcp(at(loopback)).timeout(PATIENCE);
            let outcome = probe.once(node.ns())?;
            ensure!(matches!(outcome, Outcome::Refused), "{loopback}: {outcome}");
            for ip in [inside, outside] {
                node.netlink().delete_address(LINK, ip, prefix_len)?;
            }
            let question = Question::new(Client::PodHere, Protocol::Tcp, at(inside));
            eventually(FOLLOWED, "no longer served", || {
                match question.timeout(SILENCE).ask(&world.net) {
                    Ok(Seen::Hit { .. }) => Err(format!("{inside} answers in round {round}")),
                    _ => Ok(()),
                }
            })?;
        }
    }
    Ok(())
}

/// `primary`: the address of the Node object, as it is now and not as it was.
pub(crate) fn a21_e10_node_ports_follow_the_primary_address_of_the_node() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    cluster.apply(&with_pods(load_balancer(1), &["a"]))?;
    let mut moved = node(1);
    let seconds = Family::ALL.map(second_ip);
    moved["status"]["addresses"] =
        json!(seconds.map(|ip| json!({"type": "InternalIP", "address": ip.to_string()})));
    for (object, at_second) in [(node(1), false), (moved, true), (node(1), false)] {
        cluster.apply(&[object])?;
        for family in Family::ALL {
            let primary = svc(1).address(At::NodePort, family, 1);
            let second = SocketAddr::new(second_ip(family), primary.port());
            for (to, served) in [(primary, !at_second), (second, at_second)] {
                let seen = ask(&world.net, Client::PodHere, Protocol::Tcp, to)?;
                let right = matches!(seen, Seen::Hit { .. }) == served;
                ensure!(right, "{to}: {seen}, served: {served}");
            }
        }
    }
    Ok(())
}

/// Where node ports are served, of the two addresses of the node in each family.
fn at_first_and_second(world: &World) -> Result<[[bool; 2]; 2]> {
    let mut served = [[false; 2]; 2];
    for family in Family::ALL {
        let first = svc(1).address(At::NodePort, family, 1);
        let second = SocketAddr::new(second_ip(family), first.port());
        for (place, to) in [first, second].into_iter().enumerate() {
            let seen = ask(&world.net, Client::PodHere, Protocol::Tcp, to)?;
            served[family as usize][place] = matches!(seen, Seen::Hit { .. });
        }
    }
    Ok(served)
}

/// `primary` is no address less restricted when the Node object goes, or names no address: the last known one serves,
/// also after a restart; without any, none does. All addresses serve only if the source never had a Node.
pub(crate) fn a21_node_ports_stay_restricted_when_the_node_goes() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let silent = NodeSettings {
        nodeport_addresses: Vec::new(),
        ..Setup::PodRanges.settings()?
    };
    let primary = NodeSettings {
        nodeport_primary: true,
        ..silent.clone()
    };
    let mut bare = node(1);
    bare["status"]["addresses"] = json!([]);
    let served = |cluster: &Cluster, first, second, what: &str| -> Result<()> {
        let at = at_first_and_second(&world)?;
        ensure!(at == [[first, second]; 2], "{what}: {at:?}");
        let report = cluster.reports().swap_remove(0);
        let reported =
            report.findings.iter().any(|finding| finding.code == Reason::NodeAddressUnknown);
        ensure!(
            reported != (what == "named"),
            "{what}: {:?}",
            report.findings
        );
        Ok(())
    };
    cluster.apply(&with_pods(load_balancer(1), &["a"]))?;
    cluster.restart_with_memory(&primary)?;
    served(&cluster, true, false, "named")?;
    cluster.change(vec![delete(&node(1))?])?;
    served(&cluster, true, false, "the Node went")?;
    cluster.restart_with_memory(&primary)?;
    served(&cluster, true, false, "a restart while it is away")?;
    cluster.apply(&[node(1)])?;
    served(&cluster, true, false, "named")?;
    cluster.apply(slice::from_ref(&bare))?;
    served(&cluster, true, false, "its addresses went")?;
    cluster.restart_with_memory(&silent)?;
    served(&cluster, true, false, "a restart without addresses")?;
    let backend = Settings::default();
    cluster.restart(&silent, &backend)?;
    served(&cluster, false, false, "never known")?;
    cluster.change(vec![delete(&bare)?])?;
    served(&cluster, false, false, "other Nodes are there")?;
    cluster.change(vec![delete(&node(2))?])?;
    served(&cluster, true, true, "no Node at all, and no setting")?;
    cluster.restart(&primary, &backend)?;
    served(&cluster, false, false, "no Node at all, and primary")?;
    cluster.apply(&[node(1)])?;
    served(&cluster, true, false, "named")
}

/// A family of which `nodePortAddresses` has no range is served on all addresses, as by kube-proxy.
pub(crate) fn a21_ranges_of_one_family_leave_the_other_open() -> Result<()> {
    let service = on_both_nodes();
    let mut world = World::new(Setup::PodRanges)?;
    for (family, range) in Family::ALL.into_iter().zip(["172.30.9.0/24", "fd30::9:0/112"]) {
        let first = world.first()?;
        first.settings.nodeport_addresses = cidrs(&[range])?;
        first.replace(slice::from_ref(&service))?;
        for other in Family::ALL {
            let first = service.address(At::NodePort, other, 1);
            // The second address is in the range of its family.
            for (ip, served) in [(first.ip(), family != other), (second_ip(other), true)] {
                let to = SocketAddr::new(ip, first.port());
                let seen = ask(&world.net, Client::PodHere, Protocol::Tcp, to)?;
                let right = matches!(seen, Seen::Hit { .. }) == served;
                ensure!(right, "{to} with {range}: {seen}");
            }
        }
    }
    Ok(())
}

/// Addresses in a new ServiceCIDR are dropped at once, and those of one that is gone go their way.
pub(crate) fn a20_e10_a_change_of_service_cidrs_counts_at_once() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let old = ["10.96.77.77:80".parse()?, "[fd96::77]:80".parse()?];
    let new = ["10.97.77.77:80".parse()?, "[fd97::77]:80".parse()?];
    for ranges in [["10.96.0.0/16", "fd96::/64"], ["10.97.0.0/16", "fd97::/64"]]
        .iter()
        .cycle()
        .take(4)
    {
        cluster.apply(&[service_cidr(ranges)])?;
        let moved = ranges[0].starts_with("10.97");
        for (to, dropped) in [(old, !moved), (new, moved)] {
            for to in to {
                let left = leaves(&world, to)?;
                ensure!(left != dropped, "{to} with {ranges:?}: left node-1: {left}");
            }
        }
    }
    // A second ServiceCIDR adds to the first.
    let mut second = service_cidr(&["10.96.0.0/16", "fd96::/64"]);
    second["metadata"]["name"] = json!("more");
    cluster.apply(slice::from_ref(&second))?;
    for to in old.into_iter().chain(new) {
        ensure!(!leaves(&world, to)?, "{to}: left node-1");
    }
    cluster.change(vec![delete(&second)?])?;
    ensure!(leaves(&world, old[0])?, "a deleted range is still dropped");
    Ok(())
}

/// Whether a packet of a pod on node-1 gets to the fabric.
fn leaves(world: &World, to: SocketAddr) -> Result<bool> {
    let capture = Capture::open(world.topology.fabric())?;
    let question = Question::new(Client::PodHere, Protocol::Udp, to).timeout(SILENCE);
    let seen = question.ask(&world.net)?;
    ensure!(!matches!(seen, Seen::Hit { .. }), "{question}: {seen}");
    Ok(capture.drain()?.iter().any(|packet| packet.dst == to))
}

/// A new process with other settings: what it holds counts for the very next packet, and nothing is
/// left of the settings before.
pub(crate) fn a15_a16_a17_a_restart_with_other_settings_leaves_nothing_stale() -> Result<()> {
    let service = on_both_nodes().external_local().only(Protocol::Tcp);
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let external = |wants| [(At::LoadBalancer, wants), (At::NodePort, wants)];
    let known = external([HERE, ALL, ALL, ALL_MASQUERADED]);
    let unknown = external([HERE, HERE, HERE, ALL_MASQUERADED]);
    let by_ranges: Row = (At::ClusterIp, [ALL_MASQUERADED, ALL, ALL, ALL_MASQUERADED]);
    let all: Row = (At::ClusterIp, [ALL_MASQUERADED; 4]);
    let steps = [
        (Setup::PodRanges, by_ranges, known),
        (Setup::MasqueradeAll, all, known),
        (Setup::MasqueradeAllNoPodRanges, all, unknown),
        (Setup::PodRanges, by_ranges, known),
        (Setup::PodInterfaces, by_ranges, known),
        (Setup::NodeRanges, by_ranges, known),
        (Setup::MasqueradeAllNoPodRanges, all, unknown),
        (Setup::MasqueradeAll, all, known),
    ];
    for (setup, internal, external) in steps {
        for agent in &mut world.agents {
            agent.settings = setup.settings()?;
            agent.backend_settings = setup.backend_settings();
            agent.restart()?;
            agent.replace(slice::from_ref(&service))?;
            agent.ensure_equal()?;
        }
        let rows = [internal].into_iter().chain(external).collect();
        let scenario = Scenario {
            setup,
            service: service.clone(),
            rows,
        };
        scenario.observe(&world.net).with_context(|| format!("{setup:?}"))?;
    }
    Ok(())
}

/// Another's mark, and what another sees of ours behind the choice of an endpoint and at the end.
fn foreign(bit: u8) -> String {
    let (foreign, marked) = (FOREIGN_MARK, FOREIGN_MARK | 1 << bit);
    format!(
        "table inet foreign {{
            counter ours {{ }}
            counter kept {{ }}
            counter lost {{ }}
            chain first {{ type filter hook prerouting priority -150;
                iifname eth0 tcp dport {PORTS} meta mark set {foreign}
            }}
            chain between {{ type filter hook forward priority 10;
                tcp dport 8080 meta mark {marked} counter name ours
            }}
            chain last {{ type filter hook postrouting priority 150;
                ct direction original tcp dport 8080 meta mark {foreign} counter name kept
                ct direction original tcp dport 8080 meta mark != {foreign} counter name lost
            }}
        }}"
    )
}

/// Uses none of the bits that are tried for ours.
const FOREIGN_MARK: u32 = 0x0ab0_0050;
/// Node ports, and the port of Services.
const PORTS: &str = "{ 80, 30001 }";

/// Any bit of the mark may be ours, and only that one is set and cleared: what others have in the
/// others stays (C5, E7). A restart with another bit leaves nothing of the old one.
pub(crate) fn c5_e7_any_bit_of_the_mark_and_no_other() -> Result<()> {
    need_tools(&["nft"])?;
    let service = svc(1).everywhere().only(Protocol::Tcp).endpoints([ep("a")]);
    let mut world = World::new(Setup::PodRanges)?;
    let node = world.node(1)?.clone();
    for bit in [14, 0, 31, 5] {
        nft(&node, &foreign(bit))?;
        for agent in &mut world.agents {
            agent.backend_settings = Settings {
                masquerade_bit: bit,
                ..Settings::default()
            };
            agent.restart()?;
            agent.replace(slice::from_ref(&service))?;
            agent.ensure_equal()?;
        }
        for (at, family) in pairs(At::ALL, Family::ALL) {
            let to = service.address(at, family, 1);
            let seen = ask(&world.net, Client::Outside, Protocol::Tcp, to)?;
            let masqueraded = |ip| Client::Outside.is_masqueraded(ip);
            let good = matches!(seen, Seen::Hit { source, .. } if masqueraded(source));
            ensure!(good, "bit {bit}: {to}: {seen}");
        }
        let [ours, kept, lost] = ["ours", "kept", "lost"].map(|counter| packets(&node, counter));
        let (ours, kept, lost) = (ours?, kept?, lost?);
        ensure!(
            ours >= 8,
            "bit {bit}: {ours} packets with our bit and the foreign mark"
        );
        ensure!(
            kept >= 8,
            "bit {bit}: {kept} packets with the foreign mark at the end"
        );
        ensure!(
            lost == 0,
            "bit {bit}: {lost} packets with another mark at the end"
        );
        nft(&node, "delete table inet foreign")?;
    }
    Ok(())
}

/// What a counter of the foreign table counted.
fn packets(node: &kplane_tests::netns::NetNs, counter: &str) -> Result<u64> {
    let text = nft(node, &format!("list counter inet foreign {counter}"))?;
    Ok(text
        .split_whitespace()
        .skip_while(|word| *word != "packets")
        .nth(1)
        .context("no counter")?
        .parse()?)
}

/// A transaction fails, and before it is tried again there is another change: both are in force in
/// the end, and nothing else is lost.
pub(crate) fn e12_a_failed_transaction_is_followed_by_a_new_change() -> Result<()> {
    need_tools(&["nft"])?;
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let untouched = with_pods(service(1), &["a"]);
    let changed = load_balancer(2);
    let gone = with_pods(service(3), &["a"]);
    cluster.apply(&[untouched, with_pods(changed.clone(), &["a"]), gone.clone()].concat())?;
    for command in [
        "delete table ip kplane\ndelete table ip6 kplane",
        "flush map ip kplane places\nflush map ip6 kplane places",
        "flush chain ip kplane place\nflush chain ip6 kplane place",
    ] {
        cluster.apply(&gone)?;
        cluster.apply(&with_pods(changed.clone(), &["a"]))?;
        nft(world.node(1)?, command)?;
        let ready = |pod| slices(&changed, &[(pod, json!({}))]);
        let events = |objects: &[Value]| objects.iter().map(apply).collect::<Result<Vec<_>>>();
        cluster.offer(events(&ready("b"))?)?;
        cluster.offer(gone.iter().map(delete).collect::<Result<_>>()?)?;
        cluster.offer(events(&ready("c"))?)?;
        cluster.settle().context(command)?;
        let failures = cluster.failures();
        ensure!(failures.is_empty(), "{failures:?}");
        reaches(&world.net, Client::PodHere, 1, At::ClusterIp, &["a"])?;
        for at in [At::ClusterIp, At::LoadBalancer, At::NodePort] {
            reaches(&world.net, Client::Outside, 2, at, &["c"]).context(command)?;
        }
        for family in Family::ALL {
            let to = svc(3).address(At::ClusterIp, family, 1);
            silent(&world.net, Client::PodHere, Protocol::Tcp, to)?;
        }
    }
    Ok(())
}

/// Established connections live through every kind of change, those of endpoints that drain, that
/// are gone, and of a Service that is gone included.
pub(crate) fn f5_established_connections_live_through_every_change() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let plain = load_balancer(1);
    cluster.apply(&with_pods(plain.clone(), &["a", "b", "c"]))?;
    let mut sessions = open_everywhere(&world)?;
    let mut all_echo = |when: &str| -> Result<()> {
        for (name, session) in &mut sessions {
            let echo = session.echo(DEADLINE);
            echo.with_context(|| format!("{name}, after: {when}"))?;
        }
        Ok(())
    };
    for (what, edit) in EDITS {
        let mut service = plain.clone();
        edit(&mut service);
        cluster.apply(slice::from_ref(&service))?;
        all_echo(what)?;
    }
    let conditions = |ready, serving, terminating| json!({"conditions": {"ready": ready, "serving": serving, "terminating": terminating}});
    let zone = json!({"hints": {"forZones": [{"name": "elsewhere"}]}});
    for (what, more) in [
        ("hints", zone),
        ("draining", conditions(false, true, true)),
        ("serving only", conditions(false, true, false)),
        ("terminated", conditions(false, false, true)),
    ] {
        let all = ["a", "b", "c"].map(|pod| (pod, more.clone()));
        cluster.apply(&with_endpoints(plain.clone(), &all))?;
        all_echo(what)?;
    }
    cluster.apply(&[node_in(1, "elsewhere"), service_cidr(&["10.97.0.0/16"])])?;
    all_echo("another zone, another ServiceCIDR")?;
    for setup in Setup::ALL {
        cluster.restart(&setup.settings()?, &setup.backend_settings())?;
        all_echo("a restart with other settings")?;
    }
    cluster.restart(
        &Setup::PodRanges.settings()?,
        &Settings {
            masquerade_bit: 3,
            ..Settings::default()
        },
    )?;
    all_echo("a restart with another bit")?;
    cluster.apply(&slices(&plain, &[]))?;
    all_echo("no endpoint")?;
    cluster.change(vec![delete(&plain)?])?;
    all_echo("no Service")
}

/// A19: connections to an address that becomes a Service's go on, though new ones are refused, or
/// dropped because of a policy.
pub(crate) fn a19_connections_from_before_a_service_has_their_address_go_on() -> Result<()> {
    let claim = svc(1).only(Protocol::Tcp).external_ips(ep("b").ips);
    let claim_local = claim.clone().external_local().endpoints([ep("c")]);
    let services = [claim.clone(), claim_local];
    let mut world = World::serving(Setup::NoPodRanges, &[])?;
    let pod = world.topology.pod_mut("b")?;
    pod.serve(client::Protocol::Tcp, PORT)?;
    let ask_all = |world: &World| -> Result<Vec<Seen>> {
        let ask = |family| {
            let to = ep("b").port(PORT).address(family);
            let question = Question::new(Client::PodHere, Protocol::Tcp, to);
            match question.timeout(SILENCE).ask(&world.net)? {
                // Refused in the end, where refusals are slow.
                Seen::Silent => question.ask(&world.net),
                seen => Ok(seen),
            }
        };
        Family::ALL.into_iter().map(ask).collect()
    };
    let mut sessions = Vec::new();
    for (client, family) in pairs(
        [Client::PodHere, Client::PodThere, Client::Node],
        Family::ALL,
    ) {
        let probe = Probe::tcp(ep("b").port(PORT).address(family));
        sessions.push(probe.open(world.net.ns(client)?)?);
    }
    for (service, seen) in services.iter().zip([Seen::Refused, Seen::Silent]) {
        world.update(slice::from_ref(service))?;
        let now = ask_all(&world)?;
        ensure!(now.iter().all(|now| *now == seen), "{now:?}, not {seen:?}");
        for session in &mut sessions {
            session.echo(DEADLINE).with_context(|| format!("{service:?}"))?;
        }
    }
    world.remove(&[claim])?;
    let hit = |seen: &Seen| matches!(seen, Seen::Hit { .. });
    let now = ask_all(&world)?;
    ensure!(now.iter().all(hit), "{now:?}, though nobody's any more");
    Ok(())
}

/// Changes of a Service that keep its endpoints.
type Edit = (&'static str, fn(&mut Value));
const EDITS: [Edit; 7] = [
    ("affinity", |s| {
        s["spec"]["sessionAffinity"] = json!("ClientIP");
    }),
    ("internal policy Local", |s| {
        s["spec"]["internalTrafficPolicy"] = json!("Local");
    }),
    ("external policy Local", |s| {
        s["spec"]["externalTrafficPolicy"] = json!("Local");
    }),
    ("source ranges", |s| {
        s["spec"]["loadBalancerSourceRanges"] = json!(["192.0.2.0/24", "2001:db8::/32"]);
    }),
    ("no node port", |s| {
        s["spec"]["ports"][0]["nodePort"] = json!(0);
    }),
    ("no load-balancer address", |s| s["status"] = json!({})),
    ("another port", |s| {
        s["spec"]["ports"][0]["port"] = json!(81);
    }),
];

/// A connection of every client to every kind of address of the first Service, in both families.
fn open_everywhere(world: &World) -> Result<Vec<(String, Session)>> {
    let mut sessions = Vec::new();
    for client in Client::ALL {
        for at in [At::ClusterIp, At::LoadBalancer, At::NodePort] {
            for family in Family::ALL {
                let to = svc(1).address(at, family, client.node());
                let probe = Probe::tcp(to).source(client.source(family));
                let session = probe.open(world.net.ns(client)?)?;
                sessions.push((format!("{client:?} to {at:?} {to}"), session));
            }
        }
    }
    Ok(sessions)
}
