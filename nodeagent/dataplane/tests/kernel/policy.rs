//! NetworkPolicies in the kernel: the table compared with that of `nft`, and what happens to packets.

mod bridged;
mod denied;
mod world;

use std::io::{Read as _, Write as _};
use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use kplane_dataplane::backend::Verification;
use kplane_dataplane::backend::nftables::{
    POLICY_TABLE, PolicyTables, StructureState, TableLayout, push_structure, read_structure,
};
use kplane_dataplane::policy::Enforcer;
use kplane_model::{Family, PeerId, PolicyObject, PolicyPort, Protocol};
use kplane_netlink::NfSocket;
use kplane_rig::client::{Outcome, Probe};
use kplane_rig::kernel::{in_netns, nft};
use kplane_rig::wait::eventually;

use self::world::{World, block, group, id, policy, rule};
use crate::commit;

const POLICIES: TableLayout = TableLayout::Policies {
    owned: false,
    output: false,
    log: true,
};
const OUTPUT: TableLayout = TableLayout::Policies {
    owned: false,
    output: true,
    log: true,
};
const SECOND: Duration = Duration::from_secs(1);

/// Returns the proven table in nft's syntax.
fn text(family: Family) -> String {
    let (name, address, neighbour) = match family {
        Family::V4 => ("ip", "ipv4_addr", ""),
        Family::V6 => (
            "ip6",
            "ipv6_addr",
            "ip6 hoplimit 255 icmpv6 type >= nd-router-solicit icmpv6 type <= nd-redirect icmpv6 code 0 accept
                ip6 daddr ff02::/16 icmpv6 type >= mld-listener-query icmpv6 type <= mld-listener-done accept
                ip6 daddr ff02::/16 icmpv6 type mld2-listener-report accept",
        ),
    };
    // A range has at most as many around it as an address has bits, and a chain makes 16 steps.
    let climb = |direction| format!("jump {direction}-climb\n").repeat(family.pick(2, 8));
    include_str!("policy.nft")
        .replace("FAMADDR", address)
        .replace("FAM", name)
        .replace("NEIGHBOUR", neighbour)
        .replace("CLIMB-ingress", &climb("ingress"))
        .replace("CLIMB-egress", &climb("egress"))
}

#[test]
fn the_table_is_the_proven_one() {
    let list = |family: Family| {
        let name = match family {
            Family::V4 => "ip",
            Family::V6 => "ip6",
        };
        nft(&["list", "table", name, POLICY_TABLE], "")
    };
    let (mut ours, mut proven) = (Vec::new(), Vec::new());
    in_netns(|| {
        let mut socket = NfSocket::open().unwrap();
        for family in Family::ALL {
            commit(&mut socket, |batch| push_structure(batch, family, POLICIES));
            let state = read_structure(&mut socket, family, POLICIES).unwrap();
            assert_eq!(state, StructureState::Ours(Vec::new()));
            ours.push(list(family));
            let output = OUTPUT;
            let state = read_structure(&mut socket, family, output).unwrap();
            assert!(matches!(state, StructureState::Different(_)), "{state:?}");
        }
        nft(&["-j", "list", "ruleset"], "");
    });
    in_netns(|| {
        let mut socket = NfSocket::open().unwrap();
        for family in Family::ALL {
            let output = OUTPUT;
            commit(&mut socket, |batch| push_structure(batch, family, output));
            let state = read_structure(&mut socket, family, output).unwrap();
            assert_eq!(state, StructureState::Ours(Vec::new()));
            assert!(list(family).contains("fib saddr type local accept"));
        }
    });
    in_netns(|| {
        let mut socket = NfSocket::open().unwrap();
        for family in Family::ALL {
            nft(&["-f", "-"], &text(family));
            proven.push(list(family));
            // nft 1.0.6 swaps the bytes of the one-byte protocol in front of a look-up among ranges, which changes
            // nothing. All else is byte for byte the same.
            let state = read_structure(&mut socket, family, POLICIES).unwrap();
            let reason = "rule 3 of chain egress-match differs".to_owned();
            assert_eq!(state, StructureState::Different(reason));
        }
    });
    assert_eq!(ours, proven);
    // What nft prints loads again.
    in_netns(|| {
        for text in &ours {
            nft(&["-f", "-"], text);
        }
    });
}

#[test]
fn packets_go_where_policies_let_them() {
    let Some(mut world) = World::new() else {
        return;
    };
    for family in Family::ALL {
        world.start();
        check(
            &world,
            family,
            &["b", "c", "d", "client"],
            "without a policy",
        );
        world.set_policy(policy("p", Some(vec![]), None));
        check(&world, family, &[], "default deny");
        assert!(world.tcp(family, "a", "c", 80), "egress is open");
        assert!(world.tcp(family, "node-1", "a", 80), "the own node");
        assert!(!world.tcp(family, "node-2", "a", 80), "another node");
        assert!(!world.udp(family, "c", "a", 80));
        members_and_ports(&mut world, family);
        blocks_and_names(&mut world, family);
        comings_and_goings(&mut world, family);
        world.reset();
    }
}

fn check(world: &World, family: Family, allowed: &[&str], what: &str) {
    for from in ["c", "d", "client", "b"] {
        let got = world.tcp(family, from, "a", 80);
        assert_eq!(got, allowed.contains(&from), "{family} {from} {what}");
    }
}

fn named() -> Option<Vec<PolicyPort>> {
    Some(vec![PolicyPort::Named(Protocol::Tcp, "web".into())])
}

/// c is of class 1 in namespace 10, d of class 2 in namespace 11, b of class 3 in namespace 10.
fn members_and_ports(world: &mut World, family: Family) {
    world.set(group(&[id(1)]));
    world.set_policy(policy("p", Some(vec![rule(true, &[], None)]), None));
    assert!(world.tcp(family, "c", "a", 81));
    check(world, family, &["c"], "a class");
    assert!(world.udp(family, "c", "a", 80) && !world.udp(family, "d", "a", 80));
    world.set(group(&[id(10)]));
    check(world, family, &["b", "c"], "a namespace");
    world.set(group(&[PeerId::ALL_PODS]));
    check(world, family, &["b", "c", "d"], "all pods");
    let port = |first, last| Some(vec![PolicyPort::Range(Protocol::Tcp, first, last)]);
    let mut set = |ports| {
        world.set_policy(policy("p", Some(vec![rule(true, &[], ports)]), None));
        let tcp = [80, 81].map(|port| world.tcp(family, "c", "a", port));
        (tcp, world.udp(family, "c", "a", 80))
    };
    assert_eq!(set(port(80, 80)), ([true, false], false));
    assert_eq!(set(port(81, 90)), ([false, true], false));
    assert_eq!(set(port(79, 90)), ([true, true], false));
    let all = Some(vec![PolicyPort::All(Protocol::Udp)]);
    assert_eq!(set(all), ([false, false], true));
    assert_eq!(set(named()), ([false, true], false));
}

fn blocks_and_names(world: &mut World, family: Family) {
    // A block holds c and d, and excepts d.
    let (range, except) = match family {
        Family::V4 => ("10.244.2.0/24", "10.244.2.11/32"),
        Family::V6 => ("fd44:0:0:2::/64", "fd44:0:0:2::11/128"),
    };
    let blocks = [block(range, &[except])];
    world.set_policy(policy("p", Some(vec![rule(false, &blocks, None)]), None));
    check(world, family, &["c"], "a block");
    // Egress of a Pod here, by a named port that differs between c and d.
    world.set_policy(policy("p", None, Some(vec![rule(true, &[], named())])));
    let reached = ["c", "d"].map(|to| [80, 81].map(|port| world.tcp(family, "a", to, port)));
    assert_eq!(reached, [[false, true], [true, false]]);
    check(world, family, &["b", "c", "d", "client"], "ingress is open");
}

fn comings_and_goings(world: &mut World, family: Family) {
    world.set(group(&[id(1)]));
    world.set_policy(policy("p", Some(vec![rule(true, &[], None)]), None));
    check(world, family, &["c"], "a class again");
    world.set_peer("c", 2);
    world.set_peer("d", 1);
    check(world, family, &["d"], "relabelled");
    world.set_policy(policy("other", Some(vec![]), None));
    world.unset_policy("p");
    let what = "a policy that is not known allows nothing";
    assert!(!world.tcp(family, "d", "a", 80), "{what}");
    world.set_pod("a", &[]);
    check(
        world,
        family,
        &["b", "c", "d", "client"],
        "isolated no more",
    );
    world.unset_pod("a");
    check(world, family, &[], "an unknown Pod of this node");
    world.unset_policy("other");
    check(world, family, &["b", "c", "d", "client"], "no policy");
    let listing = world.listing();
    assert!(listing.is_empty(), "the table goes with the last policy");
}

#[test]
fn connections_are_cut_when_they_are_asked_to_be() {
    let Some(mut world) = World::new() else {
        return;
    };
    for family in Family::ALL {
        for cut in [false, true] {
            world.reset();
            if cut {
                world.cut_connections();
            }
            world.start();
            world.set(group(&[id(1)]));
            world.set_policy(policy("p", Some(vec![rule(true, &[], None)]), None));
            let open = |from: &str| {
                let to = world.address(family, "a", 80);
                Probe::tcp(to).open(world.ns(from)).unwrap()
            };
            let (mut allowed, mut other) = (open("c"), open("node-1"));
            allowed.echo(10 * SECOND).unwrap();
            let (mut client, mut server) = world.streams(family, "c", "a");
            world.set(group(&[id(2)]));
            assert!(!world.tcp(family, "c", "a", 80));
            if cut {
                eventually(20 * SECOND, "the connection is cut", || {
                    world.judge();
                    match allowed.echo(SECOND) {
                        Ok(()) => Err("it goes on"),
                        Err(_) => Ok(()),
                    }
                })
                .unwrap();
                // Segments begin nothing new, not even those of the side that may begin connections.
                server.write_all(b"push").unwrap();
                assert!(client.read(&mut [0; 4]).is_err());
                assert!(allowed.echo(SECOND / 2).is_err());
            } else {
                server.write_all(b"push").unwrap();
                client.read_exact(&mut [0; 4]).unwrap();
                allowed.echo(10 * SECOND).unwrap();
            }
            other.echo(10 * SECOND).unwrap();
        }
    }
}

#[test]
fn what_others_change_is_repaired() {
    let Some(mut world) = World::new() else {
        return;
    };
    world.start();
    world.set(group(&[id(1)]));
    world.set_policy(policy("p", Some(vec![rule(true, &[], None)]), None));
    let before = world.listing();
    let table = format!("ip {POLICY_TABLE}");
    let scripts = [
        format!("flush set {table} isolated-ingress"),
        format!("flush set {table} local-ranges"),
        format!("add element {table} ingress-all {{ 10.244.1.10 . 77 }}"),
        format!("delete table {table}"),
        "flush ruleset".to_owned(),
    ];
    for script in scripts {
        world.on_node(|| nft(&["-f", "-"], &script));
        let enforcer = &mut world.enforcer;
        assert!(enforcer.drifted()[0], "{script}");
        for family in Family::ALL {
            let repaired = enforcer.repair(family).unwrap();
            let is_hit = family == Family::V4 || script.starts_with("flush ruleset");
            assert_eq!(
                matches!(repaired, Verification::Repaired(_)),
                is_hit,
                "{repaired:?} {script}"
            );
            assert_eq!(
                Verification::of_all(|| enforcer.verify(family)).unwrap(),
                Verification::Equal
            );
        }
        assert_eq!(world.listing(), before, "{script}");
        assert_eq!(world.enforcer.drifted(), [false; 2]);
    }
    // A change meets what another program did, and repairs it first.
    world.on_node(|| nft(&["-f", "-"], &format!("flush map {table} peers")));
    let applied = world.set_peer("c", 2);
    assert!(applied[0].repaired.is_some(), "{applied:?}");
    world.set_peer("c", 1);
    assert_eq!(world.listing(), before);
}

/// Services' changes have their turn between the parts of a large change, and nothing is open meanwhile.
#[test]
fn a_large_change_comes_in_parts() {
    let Some(mut world) = World::new() else {
        return;
    };
    world.start();
    world.set(group(&[id(1)]));
    world.set_policy(policy("p", Some(vec![]), None));
    let ports = (80..20_080).map(|port| PolicyPort::Range(Protocol::Tcp, port, port));
    let rules = vec![rule(true, &[], Some(ports.collect()))];
    let large = || PolicyObject::Policy(policy("p", Some(rules.clone()), None));
    let none = || PolicyObject::Policy(policy("p", Some(vec![]), None));
    for (object, is_open) in [(large(), true), (none(), false), (large(), true)] {
        let mut applied = world.begin(&object);
        let mut parts = 1;
        while applied.rest > 0 {
            assert!(!world.tcp(Family::V4, "d", "a", 80));
            world.go_on(&mut applied);
            parts += 1;
        }
        assert!(parts > 3 && applied.operations > 19_000, "{applied:?}");
        assert_eq!(world.tcp(Family::V4, "c", "a", 80), is_open);
        assert_eq!(
            Verification::of_all(|| world.enforcer.verify(Family::V4)).unwrap(),
            Verification::Equal
        );
    }
    // Whatever else comes finishes it first.
    let begun = world.begin(&none());
    assert!(begun.rest > 0);
    assert_eq!(
        Verification::of_all(|| world.enforcer.verify(Family::V4)).unwrap(),
        Verification::Equal
    );
    assert!(world.begin(&large()).rest > 0);
    world.set_peer("c", 2);
    assert!(!world.tcp(Family::V4, "c", "a", 80));
    assert!(world.begin(&none()).rest > 0);
    world.whole();
    assert_eq!(
        Verification::of_all(|| world.enforcer.verify(Family::V4)).unwrap(),
        Verification::Equal
    );
}

/// Has nft do something that the kernel may refuse.
fn try_nft(world: &World, script: &str) -> bool {
    let mut nft = Command::new("nft");
    nft.arg(script).stderr(Stdio::null());
    world.on_node(|| nft.status().unwrap().success())
}

/// While an agent lives, only it changes its tables, which outlive it.
#[test]
fn a_table_with_an_owner_is_nobody_elses() {
    let Some(mut world) = World::new() else {
        return;
    };
    world.succeed(PolicyTables::own(false));
    world.start();
    world.set_policy(policy("p", Some(vec![]), None));
    if !world.listing().iter().any(|line| line.contains("owner")) {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split('.').map(|number| number.parse().unwrap_or(0_u32));
        let version = (numbers.next(), numbers.next());
        assert!(version < (Some(6), Some(9)), "{release}");
        return;
    }
    let unowned = |world: &World| {
        world
            .listing()
            .into_iter()
            .filter(|line| !line.contains("flags"))
            .map(|line| line.split(" #").next().unwrap_or_default().to_owned())
            .collect::<Vec<String>>()
    };
    let before = unowned(&world);
    for action in ["flush set", "flush chain", "delete table"] {
        let part = match action {
            "flush set" => "isolated-ingress",
            "flush chain" => "forward",
            _ => "",
        };
        assert!(!try_nft(
            &world,
            &format!("{action} ip {POLICY_TABLE} {part}")
        ));
    }
    assert!(try_nft(&world, "flush ruleset"));
    assert_eq!(unowned(&world), before);
    let mut second = Enforcer::new(PolicyTables::own(false));
    let refusal = world.refusal(&mut second);
    assert!(
        refusal.contains("another process owns table ip kplane-policy"),
        "{refusal}"
    );
    // The next agent takes over what the last one left.
    world.enforcer = second;
    assert_eq!(unowned(&world), before);
    assert!(!world.tcp(Family::V4, "b", "a", 80));
    let handles = |world: &World| world.on_node(|| nft(&["-a", "list", "tables"], ""));
    let left = handles(&world);
    world.succeed(PolicyTables::own(false));
    assert_eq!(handles(&world), left);
    assert!(!try_nft(&world, &format!("delete table ip {POLICY_TABLE}")));
    assert!(world.listing().iter().any(|line| line.contains("owner")));
    // So it does with the table of an agent that knew no owners.
    world.unset_policy("p");
    assert!(world.listing().is_empty());
    world.succeed(world::own_tables());
    world.set_policy(policy("p", Some(vec![]), None));
    assert!(!world.listing().iter().any(|line| line.contains("owner")));
    world.succeed(PolicyTables::own(false));
    assert!(!try_nft(&world, &format!("delete table ip {POLICY_TABLE}")));
    assert!(!world.tcp(Family::V4, "b", "a", 80));
}

/// What passed while another program's change was in effect ends: found by the repair, or by a change that meets it.
#[test]
fn connections_that_began_before_a_repair_are_cut() {
    let Some(mut world) = World::new() else {
        return;
    };
    world.cut_connections();
    world.start();
    world.set(group(&[id(1)]));
    world.set_policy(policy("p", Some(vec![rule(true, &[], None)]), None));
    let script = format!("flush set ip {POLICY_TABLE} isolated-ingress");
    for by_change in [false, true] {
        assert!(!world.tcp(Family::V4, "d", "a", 80));
        world.on_node(|| nft(&["-f", "-"], &script));
        let to = world.address(Family::V4, "a", 80);
        let mut denied = Probe::tcp(to).open(world.ns("d")).unwrap();
        denied.echo(SECOND).unwrap();
        if by_change {
            assert!(world.set_peer("c", 2)[0].repaired.is_some());
        } else {
            assert!(world.enforcer.drifted()[0]);
            let repaired = world.enforcer.repair(Family::V4).unwrap();
            assert!(
                matches!(repaired, Verification::Repaired(_)),
                "{repaired:?}"
            );
        }
        eventually(5 * SECOND, "the connection is cut", || {
            world.judge();
            match denied.echo(SECOND / 4) {
                Ok(()) => Err("it goes on"),
                Err(_) => Ok(()),
            }
        })
        .unwrap();
    }
}

/// The kernel reports no large change, so another program's change may fall into one.
#[test]
fn what_others_change_during_a_large_change_is_repaired() {
    let Some(mut world) = World::new() else {
        return;
    };
    world.start();
    world.set_policy(policy("p", Some(vec![rule(true, &[], None)]), None));
    for round in 0..20 {
        let address = |number: u32| IpAddr::V4((0x0a40_0000 + number).into());
        let class = 1 + round % 2;
        let peers: Vec<_> = (0..5_000).map(|n| world::peer(address(n), class)).collect();
        let named: Vec<_> = peers.iter().map(|peer| (peer.key(), Some(peer))).collect();
        let mut nft = Command::new("nft");
        nft.args(["flush", "map", "ip", POLICY_TABLE, "peers"]);
        let mut other = world.on_node(|| nft.spawn().unwrap());
        world::apply(&mut world.enforcer, Family::V4, &named, false);
        assert!(other.wait().unwrap().success());
        let enforcer = &mut world.enforcer;
        while enforcer.drifted()[0] {
            enforcer.repair(Family::V4).unwrap();
        }
        assert_eq!(
            Verification::of_all(|| enforcer.verify(Family::V4)).unwrap(),
            Verification::Equal
        );
    }
    // Small changes are reported again.
    world.on_node(|| nft(&["flush", "map", "ip", POLICY_TABLE, "peers"], ""));
    assert!(world.enforcer.drifted()[0]);
}

/// A process begins while clients connect: those that may do so always do, and the others never.
#[test]
fn a_restart_changes_no_verdict() {
    let Some(mut world) = World::new() else {
        return;
    };
    world.start();
    world.set(group(&[id(1)]));
    world.set_policy(policy("p", Some(vec![rule(true, &[], None)]), None));
    let done = Arc::new(AtomicBool::new(false));
    let [wrong, right] = [(); 2].map(|()| Arc::new(AtomicU32::new(0)));
    let clients = [("c", true), ("d", false)].map(|(from, allowed)| {
        let to = world.address(Family::V4, "a", 80);
        let (done, wrong, right) = (done.clone(), wrong.clone(), right.clone());
        let run = move || {
            while !done.load(Ordering::Relaxed) {
                let probe =
                    Probe::tcp(to).timeout(Duration::from_millis(if allowed { 1000 } else { 5 }));
                let outcome = probe.here();
                let got = matches!(outcome, Outcome::Reply(_));
                if got != allowed {
                    println!("{from} {outcome:?}");
                }
                let count = if got == allowed { &right } else { &wrong };
                count.fetch_add(1, Ordering::Relaxed);
            }
        };
        world.ns(from).spawn(run).unwrap()
    });
    for _ in 0..100 {
        world.enforcer = Enforcer::new(world.tables());
        let applied = world.whole();
        assert!(applied.iter().all(|applied| applied.operations > 0));
    }
    done.store(true, Ordering::Relaxed);
    for client in clients {
        client.join().unwrap();
    }
    let (wrong, right) = (wrong.load(Ordering::Relaxed), right.load(Ordering::Relaxed));
    assert!(wrong == 0 && right > 100, "{wrong} wrong, {right} right");
}
