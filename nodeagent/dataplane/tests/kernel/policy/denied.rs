//! Denied packets: counted by Pod and direction, and logged for a follower.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use kplane_dataplane::backend::Verification;
use kplane_dataplane::backend::nftables::{POLICY_TABLE, denied_packets, denied_pods};
use kplane_dataplane::policy::{Enforcer, Followed, Logged, PacketLog, open_log};
use kplane_model::{Direction, Family, Protocol};
use kplane_rig::kernel::nft;
use kplane_rig::wait::eventually;

use super::world::{self, World, policy};

const SECOND: Duration = Duration::from_secs(1);

/// Returns the counts of Pods by address and direction, and those of the node by family and direction.
fn counts(world: &World) -> (BTreeMap<(IpAddr, Direction), u64>, [u64; 4]) {
    let (pods, all) = world.on_node(|| (denied_pods().unwrap(), denied_packets()));
    let pods = pods.iter().map(|of| ((of.address, of.direction), of.packets));
    let all: Vec<u64> = all.iter().map(|(.., packets)| *packets).collect();
    (pods.collect(), all.try_into().unwrap())
}

fn follow(world: &mut World, pods: &[(&str, &str)]) {
    let pods = pods.iter().map(|(namespace, name)| (namespace.to_string(), name.to_string()));
    world.enforcer.follow(&Followed(pods.collect()));
    for family in Family::ALL {
        world::apply(&mut world.enforcer, family, &[], false);
    }
}

fn sampled(world: &World) -> bool {
    let list =
        |family: &str| world.on_node(|| nft(&["list", "set", family, POLICY_TABLE, "sampled"], ""));
    ["ip", "ip6"].map(list).iter().any(|text| text.contains("elements"))
}

fn logged(log: &mut PacketLog) -> Vec<Logged> {
    let mut packets = Vec::new();
    assert!(log.read(100, |packet| packets.push(packet)), "lost");
    packets
}

fn denied_world() -> Option<World> {
    let mut world = World::new()?;
    world.start();
    world.set_policy(policy("p", Some(vec![]), Some(vec![])));
    Some(world)
}

#[test]
fn denied_packets_are_counted_and_nothing_that_repairs_the_table_forgets_them() {
    let Some(mut world) = denied_world() else {
        return;
    };
    assert_eq!(counts(&world), (BTreeMap::new(), [0; 4]));
    for family in Family::ALL {
        let a = world.address(family, "a", 0).ip();
        assert!(!world.udp(family, "c", "a", 80));
        assert!(!world.udp(family, "b", "a", 80));
        assert!(!world.udp(family, "a", "c", 80));
        // What is allowed does not count.
        assert!(world.udp(family, "c", "b", 80));
        let (pods, all) = counts(&world);
        let of_family: Vec<_> =
            pods.iter().filter(|((ip, _), _)| Family::of(*ip) == family).collect();
        let [((one, ingress), to), ((other, egress), from)] = of_family[..] else {
            panic!("{pods:?}");
        };
        assert_eq!(
            (*one, *other, *ingress, *egress),
            (a, a, Direction::Ingress, Direction::Egress)
        );
        // Pod b reaches Pod a through the node, too; a client may send again.
        assert!(*to >= 2 && *from >= 1, "{pods:?}");
        let at = 2 * family as usize;
        assert_eq!(all[at..at + 2], [*to, *from]);
        assert_eq!(
            Verification::of_all(|| world.enforcer.verify(family)).unwrap(),
            Verification::Equal
        );
    }
    let before = counts(&world);
    let flush = format!("flush set ip {POLICY_TABLE} isolated-ingress");
    world.on_node(|| nft(&["-f", "-"], &flush));
    assert!(world.enforcer.drifted()[0]);
    assert!(matches!(
        world.enforcer.repair(Family::V4),
        Ok(Verification::Repaired(_))
    ));
    world.set_peer("c", 2);
    // Another process takes over.
    world.enforcer = Enforcer::new(world.tables());
    world.whole();
    assert_eq!(counts(&world), before);
    // A Pod that goes takes its counts with it.
    world.unset_pod("a");
    let (pods, all) = counts(&world);
    assert_eq!((pods, all), (BTreeMap::new(), before.1));
}

#[test]
fn denied_packets_of_followed_pods_are_logged_as_long_as_somebody_follows() {
    let Some(mut world) = denied_world() else {
        return;
    };
    let mut log = world.on_node(open_log).unwrap();
    let error = world.on_node(open_log).unwrap_err();
    assert!(error.contains("another program"), "{error}");
    for family in Family::ALL {
        let [a, c] = ["a", "c"].map(|pod| world.address(family, pod, 0).ip());
        let expect = |log: &mut PacketLog, direction, source, destination| {
            let mut all = Vec::new();
            let arrived = eventually(SECOND, "a packet is logged", || {
                all.extend(logged(log));
                if all.is_empty() { Err("nothing") } else { Ok(()) }
            });
            arrived.unwrap();
            let packet = all[0];
            assert_eq!(
                (packet.direction, packet.source, packet.destination),
                (direction, source, destination)
            );
            assert_eq!(packet.protocol, Protocol::Tcp.number());
            assert_eq!(packet.ports.unwrap().1, 80);
        };
        assert!(!world.tcp(family, "c", "a", 80));
        assert_eq!(logged(&mut log), [], "nobody follows");
        follow(&mut world, &[("other", ""), ("ns", "b")]);
        assert!(!world.tcp(family, "c", "a", 80));
        assert_eq!(logged(&mut log), [], "others are followed");
        follow(&mut world, &[("ns", "a")]);
        assert!(!world.tcp(family, "c", "a", 80));
        expect(&mut log, Direction::Ingress, c, a);
        follow(&mut world, &[("", "")]);
        assert!(!world.tcp(family, "a", "c", 80));
        expect(&mut log, Direction::Egress, a, c);
        assert_eq!(
            Verification::of_all(|| world.enforcer.verify(family)).unwrap(),
            Verification::Equal
        );
        follow(&mut world, &[]);
        assert!(!sampled(&world));
    }
    // A process that ends leaves the kernel logging, and the next one ends that.
    follow(&mut world, &[("", "")]);
    assert!(sampled(&world));
    world.enforcer = Enforcer::new(world.tables());
    world.whole();
    assert!(!sampled(&world));
    // The group is free again once its reader has gone.
    drop(log);
    world.on_node(open_log).unwrap();
}

/// A Pod that sends faster than the limit is logged up to it.
#[test]
fn a_flood_is_logged_up_to_the_limit_and_counted_whole() {
    let Some(mut world) = denied_world() else {
        return;
    };
    let mut log = world.on_node(open_log).unwrap();
    follow(&mut world, &[("", "")]);
    let to = world.address(Family::V4, "a", 80);
    let flood = || {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
        for _ in 0..2_000 {
            socket.send_to(b"x", to)?;
        }
        Ok(())
    };
    world.ns("c").run(flood).unwrap();
    let (pods, _) = counts(&world);
    assert_eq!(pods[&(to.ip(), Direction::Ingress)], 2_000);
    let mut number = 0;
    log.read(5_000, |_| number += 1);
    assert!((50..1_000).contains(&number), "{number}");
}
