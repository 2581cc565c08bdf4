//! Random objects: what is left after changes equals what the objects give afresh, phases lead there by steps that the
//! kernel takes, and the elements decide as the objects say.

mod oracle;
mod refused;
mod searched;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use kplane_model::{
    Block, Cidr, DecisionRow, Decisions, Direction, Family, GroupPart, LocalPod, NamedPort, Peer,
    PeerClass, PeerId, Peers, Policy, PolicyKey, PolicyName, PolicyObject, PolicyPort, PolicyRule,
    PortActions, Protocol, Tier, TierAction, TierSpan,
};
use proptest::prelude::*;
use proptest::sample::select;

use self::oracle::Oracle;
use self::table::Model;
use super::PolicyChange;
use super::content::Content;
use super::judge::Packet;
use super::numbers::highest;
use super::phases::phases;
use super::suspects::Suspects;
use crate::backend::nftables::{Contents as _, Element, Key, PolicySet, Set, everything};

type World = BTreeMap<PolicyKey, PolicyObject>;
type Step = (PolicyKey, Option<PolicyObject>);

fn id(number: u8) -> PeerId {
    PeerId([number; 16])
}

fn name(number: usize) -> PolicyName {
    PolicyName::new("ns", &format!("n{number}"))
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Local Pods have the first two.
const IPS: [&str; 5] = ["10.0.0.1", "10.0.0.2", "10.0.1.1", "10.0.1.2", "192.0.2.9"];
const BLOCKS: [(&str, &[&str]); 6] = [
    ("10.0.0.0/8", &["10.0.1.0/24"]),
    ("10.0.1.0/24", &["10.0.1.2/32", "10.0.1.2/31"]),
    ("0.0.0.0/0", &[]),
    ("10.0.0.0/30", &["10.0.0.1/32", "10.0.0.0/32"]),
    ("192.0.2.0/24", &["192.0.2.0/29"]),
    ("fd00::/64", &[]),
];
const NAMES: [&str; 2] = ["web", "dns"];

fn named() -> impl Strategy<Value = NamedPort> {
    let port = (select(&NAMES[..]), protocols(), select(vec![80, 81, 443]));
    port.prop_map(|(name, protocol, port)| NamedPort {
        name: name.into(),
        protocol,
        port,
    })
}

fn protocols() -> impl Strategy<Value = Protocol> {
    select(vec![Protocol::Tcp, Protocol::Udp])
}

fn ports() -> impl Strategy<Value = Option<Vec<PolicyPort>>> {
    let port = prop_oneof![
        protocols().prop_map(PolicyPort::All),
        (protocols(), 79_u16..83, 0_u16..3).prop_map(|(p, first, n)| PolicyPort::Range(
            p,
            first,
            first + n
        )),
        (protocols(), select(&NAMES[..])).prop_map(|(p, name)| PolicyPort::Named(p, name.into())),
    ];
    prop::option::of(prop::collection::vec(port, 1..3))
}

fn block() -> impl Strategy<Value = Block> {
    let cidr = |text: &&str| text.parse::<Cidr>().unwrap();
    select(&BLOCKS[..]).prop_map(move |(range, except)| Block {
        range: cidr(&range),
        except: except.iter().map(cidr).collect(),
    })
}

fn rules() -> impl Strategy<Value = Option<Vec<PolicyRule>>> {
    let groups = prop::collection::vec((20_u8..23).prop_map(id), 0..3);
    let blocks = prop::collection::vec(block(), 0..3);
    let peers = (groups, blocks).prop_map(|(groups, blocks)| Peers { groups, blocks });
    let rule = (prop::option::weighted(0.8, peers), ports())
        .prop_map(|(peers, ports)| PolicyRule { peers, ports });
    prop::option::of(prop::collection::vec(rule, 0..3))
}

fn sorted<T: Ord>(mut items: Vec<T>) -> Vec<T> {
    items.sort_unstable();
    items.dedup();
    items
}

/// What tiers take addresses for.
fn tier_ids() -> impl Strategy<Value = PeerId> {
    (30_u8..33).prop_map(id)
}

fn subjects() -> impl Strategy<Value = PeerId> {
    (40_u8..42).prop_map(id)
}

fn actions() -> impl Strategy<Value = PortActions> {
    let action = || select(vec![TierAction::Deny, TierAction::Pass, TierAction::Accept]);
    let range = prop::option::of((protocols(), 79_u16..83, 0_u16..3, action()));
    (action(), range).prop_map(|(rest, range)| {
        let range =
            range.map(|(protocol, first, more, action)| (protocol, first, first + more, action));
        let ranges = range.into_iter().filter(|(.., action)| *action != rest).collect();
        PortActions { rest, ranges }
    })
}

fn decisions() -> impl Strategy<Value = PolicyObject> {
    let rows = prop::array::uniform4(prop::option::of(actions()));
    (subjects(), 30_u8..33, rows).prop_map(|(subject, part, rows)| {
        let places = Direction::ALL.into_iter().flat_map(|d| Tier::ALL.map(|t| (d, t)));
        let rows = places.zip(rows).filter_map(|((direction, tier), actions)| {
            let (actions, peers) = (actions?, vec![id(part)]);
            Some(DecisionRow {
                direction,
                tier,
                actions,
                peers,
            })
        });
        PolicyObject::Decisions(Decisions {
            subject,
            part,
            rows: rows.collect(),
        })
    })
}

fn tier_object() -> impl Strategy<Value = PolicyObject> {
    const SPANS: [(&str, &str); 5] = [
        ("10.0.1.0", "10.0.1.1"),
        ("10.0.1.1", "10.0.1.3"),
        ("10.0.1.2", "10.0.1.255"),
        ("192.0.2.0", "192.0.2.255"),
        ("192.0.2.9", "255.255.255.255"),
    ];
    prop_oneof![
        (select(&SPANS[..]), tier_ids()).prop_map(|((first, last), tier)| {
            let (first, last) = (ip(first), ip(last));
            PolicyObject::Span(TierSpan { first, last, tier })
        }),
        decisions(),
        decisions(),
    ]
}

fn tiered_peer() -> impl Strategy<Value = PolicyObject> {
    (select(&IPS[..4]), 1_u8..4, prop::option::of(tier_ids())).prop_map(|(at, class, tier)| {
        PolicyObject::Peer(Peer {
            address: ip(at),
            class: id(class),
            tier,
        })
    })
}

fn object() -> impl Strategy<Value = PolicyObject> {
    let members = select(vec![id(1), id(2), id(3), id(10), id(11), PeerId::ALL_PODS]);
    let pod = (
        0_usize..3,
        prop::collection::vec(select(&IPS[..2]), 1..3),
        prop::collection::vec(named(), 0..3),
        prop::collection::vec((0_usize..4).prop_map(name), 0..3),
        prop::option::of(subjects()),
    );
    prop_oneof![
        tier_object(),
        tiered_peer(),
        Just(PolicyObject::Cluster("some".into())),
        Just(PolicyObject::Namespace("shop".into())),
        (1_u8..4, prop::collection::vec(named(), 0..2)).prop_map(|(class, ports)| {
            PolicyObject::Class(PeerClass {
                id: id(class),
                parent: id(10 + class % 2),
                namespace: "ns".into(),
                ports: sorted(ports),
            })
        }),
        (20_u8..23, 0_u8..2, prop::collection::vec(members, 1..3)).prop_map(
            |(group, part, members)| {
                PolicyObject::Group(GroupPart {
                    group: id(group),
                    part,
                    members: sorted(members),
                })
            }
        ),
        (0_usize..4, rules(), rules()).prop_map(|(number, ingress, egress)| {
            PolicyObject::Policy(Policy {
                name: name(number),
                ingress,
                egress,
            })
        }),
        pod.prop_map(
            |(number, ips, ports, policies, tier)| PolicyObject::Pod(LocalPod {
                name: name(number),
                addresses: sorted(ips.into_iter().map(ip).collect()),
                ports: sorted(ports),
                policies: sorted(policies),
                tier,
            })
        ),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    (object(), prop::bool::weighted(0.75))
        .prop_map(|(object, there)| (object.key(), there.then_some(object)))
}

fn ranges() -> [Cidr; 1] {
    ["10.0.0.0/29".parse().unwrap()]
}

/// Hands a change of objects to whoever takes it.
fn with_change<T>(
    steps: &[Step],
    complete: bool,
    pod_ranges: &[Cidr],
    take: impl FnOnce(PolicyChange<'_>) -> T,
) -> T {
    let objects: Vec<_> =
        steps.iter().map(|(key, object)| (key.clone(), object.as_ref())).collect();
    take(PolicyChange {
        objects: &objects,
        complete,
        closed: false,
        pod_ranges,
    })
}

fn apply(content: &mut Content, objects: &[Step], complete: bool) {
    apply_in(content, objects, complete, &ranges());
}

fn apply_in(content: &mut Content, objects: &[Step], complete: bool, pod_ranges: &[Cidr]) {
    with_change(objects, complete, pod_ranges, |change| {
        content.apply(change, &mut Suspects::default());
    });
}

fn whole(world: &World) -> Vec<Step> {
    world.iter().map(|(key, object)| (key.clone(), Some(object.clone()))).collect()
}

/// While nobody knows which policies there are, the table is there and closes the node's ranges (NP19).
#[test]
fn np19_unknown_pods_are_closed_while_policies_are_not_known() {
    let mut content = Content::new(Family::V4);
    for closed in [false, true, false] {
        content.apply(
            PolicyChange {
                objects: &[],
                complete: true,
                closed,
                pod_ranges: &ranges(),
            },
            &mut Suspects::default(),
        );
        assert_eq!(content.has_policies(), closed);
    }
}

fn packets() -> Vec<Packet> {
    let mut packets = Vec::new();
    for source in IPS.iter().chain(&["10.0.0.3"]).map(|at| ip(at)) {
        for destination in IPS.iter().map(|at| ip(at)) {
            let ports = [Protocol::Tcp, Protocol::Udp]
                .into_iter()
                .flat_map(|protocol| [79, 80, 81, 84, 443].map(|port| Some((protocol, port))));
            packets.extend(ports.chain([None]).map(|port| Packet {
                source,
                destination,
                port,
            }));
        }
    }
    packets
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// A content that begins again, as after an error, is among the changes. A number never means something else later.
    #[test]
    fn changes_lead_where_the_objects_lead(
        start in prop::collection::vec(object(), 0..25),
        changes in prop::collection::vec(
            (prop::collection::vec(step(), 1..5), prop::bool::weighted(0.2)),
            1..8,
        ),
        limit in select(vec![5_u64, 100_000]),
        complete in any::<bool>(),
    ) {
        let mut world: World = start.into_iter().map(|object| (object.key(), object)).collect();
        let new = || {
            let mut content = Content::new(Family::V4);
            content.limits.pod = limit;
            content.limits.namespace = limit.saturating_mul(2);
            content.limits.node = limit.saturating_mul(2);
            content
        };
        let mut content = new();
        apply(&mut content, &whole(&world), true);
        let mut kernel = Model::of(&content);
        let mut meanings = BTreeMap::new();
        for (steps, anew) in changes {
            for (id, number) in content.numbers.all() {
                prop_assert_eq!(*meanings.entry(number).or_insert(id), id);
            }
            for (key, object) in &steps {
                match object {
                    Some(object) => world.insert(key.clone(), object.clone()),
                    None => world.remove(key),
                };
            }
            if anew {
                content.clear();
            } else {
                content.held.record();
            }
            if complete || anew {
                apply(&mut content, &whole(&world), true);
            } else {
                apply(&mut content, &steps, false);
            }
            let changes = if anew {
                content.held.changes_from(&kernel.elements())
            } else {
                content.held.changes()
            };
            let stays = |ip| content.held.has(PolicySet::LocalPods, Key::Ip(ip));
            kernel.change(&phases(&changes, stays, content.is_early(&changes)));
            prop_assert_eq!(&kernel, &Model::of(&content));
        }
        let mut fresh = new();
        apply(&mut fresh, &whole(&world), true);
        prop_assert_eq!(table::described(&content), table::described(&fresh));
        prop_assert_eq!(content.failures(), fresh.failures());
        // Of two Pods with one address, one may be cut off, and its denials as well.
        let shared = IPS.iter().any(|at| content.objects.pods.values().filter(|pod| pod.addresses.contains(&ip(at))).count() > 1);
        let is_cut_off = !content.cut_off.is_empty() || !content.grants.beyond.is_empty();
        let oracle = Oracle { world: &world };
        for packet in packets() {
            let by_elements = kernel.allows(&packet);
            prop_assert_eq!(content.allows(&packet), by_elements, "{:?}", packet);
            let by_objects = oracle.allows(&packet);
            // Pods that are cut off may do less.
            if !is_cut_off || by_elements && !shared {
                prop_assert_eq!(by_objects, by_elements, "{:?}", packet);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    /// Changes of tiers alone: between two transactions nothing is open that was closed before and is closed after.
    #[test]
    fn what_is_denied_before_and_after_stays_denied(
        start in prop::collection::vec(prop_oneof![tier_object(), tiered_peer()], 0..25),
        changes in prop::collection::vec(
            prop::collection::vec((prop_oneof![tier_object(), tiered_peer()], prop::bool::weighted(0.8)), 1..8),
            1..4,
        ),
        policies in prop::collection::vec((0_usize..2, rules(), rules()), 0..3),
    ) {
        let mut world: World = start.into_iter().map(|object| (object.key(), object)).collect();
        for (number, ingress, egress) in policies {
            let policy = PolicyObject::Policy(Policy { name: name(number), ingress, egress });
            world.insert(policy.key(), policy);
        }
        for (number, at) in IPS[..2].iter().enumerate() {
            let pod = PolicyObject::Pod(LocalPod {
                name: name(number),
                addresses: vec![ip(at)],
                ports: Vec::new(),
                policies: world.contains_key(&PolicyKey::Policy(name(number))).then(|| name(number)).into_iter().collect(),
                tier: Some(id(40)),
            });
            world.insert(pod.key(), pod);
        }
        let known = Decisions { subject: id(40), part: 0, rows: Vec::new() };
        world.insert(PolicyKey::Decisions(id(40), 0), PolicyObject::Decisions(known));
        let mut content = Content::new(Family::V4);
        apply(&mut content, &whole(&world), true);
        let mut kernel = Model::of(&content);
        for objects in changes {
            let steps: Vec<Step> = objects
                .into_iter()
                .map(|(object, there)| (object.key(), there.then_some(object)))
                .collect();
            let before = kernel.clone();
            content.held.record();
            apply(&mut content, &steps, false);
            let changes = content.held.changes();
            // A decision that is stricter and less strict at once is not for this test.
            prop_assume!(!content.is_mixed(&changes));
            let after = Model::of(&content);
            let stays = |ip| content.held.has(PolicySet::LocalPods, Key::Ip(ip));
            let mut closed = packets();
            closed.retain(|packet| !before.allows(packet) && !after.allows(packet));
            for phase in phases(&changes, stays, content.is_early(&changes)) {
                kernel.step(&phase);
                for packet in &closed {
                    prop_assert!(!kernel.allows(packet), "{:?}", packet);
                }
            }
            prop_assert_eq!(&kernel, &after);
        }
    }
}

/// A packet between two of the addresses.
fn packet(source: usize, destination: usize, port: u16) -> Packet {
    Packet {
        source: ip(IPS[source]),
        destination: ip(IPS[destination]),
        port: Some((Protocol::Tcp, port)),
    }
}

/// A Pod of this node that no tier is for.
fn local_pod(number: usize, policies: &[usize]) -> PolicyObject {
    PolicyObject::Pod(LocalPod {
        name: name(number),
        addresses: vec![ip(IPS[number])],
        ports: Vec::new(),
        policies: policies.iter().map(|number| name(*number)).collect(),
        tier: None,
    })
}

/// A policy that allows anybody so many ports.
fn of_ports(number: usize, last: u16) -> PolicyObject {
    let ports = (1..=last).map(|port| PolicyPort::Range(Protocol::Tcp, port, port));
    let rule = PolicyRule {
        peers: None,
        ports: Some(ports.collect()),
    };
    PolicyObject::Policy(Policy {
        name: name(number),
        ingress: Some(vec![rule]),
        egress: None,
    })
}

/// A Pod is known once all that isolates it is there, and as long as it is there.
#[test]
fn a_pod_that_comes_or_goes_is_never_open() {
    let mut content = Content::new(Family::V4);
    apply(
        &mut content,
        &[(of_ports(0, 3).key(), Some(of_ports(0, 3)))],
        true,
    );
    let mut kernel = Model::of(&content);
    let denied = packet(4, 0, 9);
    for there in [true, false] {
        let pod = local_pod(0, &[0]);
        content.held.record();
        apply(&mut content, &[(pod.key(), there.then_some(pod))], false);
        let changes = content.held.changes();
        let stays = |ip| content.held.has(PolicySet::LocalPods, Key::Ip(ip));
        for phase in phases(&changes, stays, content.is_early(&changes)) {
            kernel.step(&phase);
            assert!(!kernel.allows(&denied), "{there}: {phase:?}");
        }
        assert_eq!(kernel.allows(&packet(4, 0, 3)), there);
    }
}

/// A policy at which the agent died twice isolates its Pod and allows nothing, by name, until it changes.
#[test]
fn a_policy_at_which_the_agent_died_is_set_aside() {
    let left = Arc::new(Mutex::new(String::new()));
    let start = || {
        let (before, left) = (left.lock().unwrap().clone(), Arc::clone(&left));
        Suspects::new(&before, Box::new(move |text| *left.lock().unwrap() = text))
    };
    let (old, new) = (of_ports(0, 3), of_ports(0, 4));
    let PolicyObject::Policy(policy) = &old else {
        unreachable!()
    };
    for _ in 0..2 {
        assert!(!start().works_on(&policy.name, policy));
    }
    let (mut content, mut suspects) = (Content::new(Family::V4), start());
    let pod = local_pod(0, &[0]);
    for (policy, aside) in [(&old, true), (&new, false)] {
        let objects = [policy, &pod].map(|object| (object.key(), Some(object)));
        let change = PolicyChange {
            objects: &objects,
            complete: true,
            closed: false,
            pod_ranges: &ranges(),
        };
        content.apply(change, &mut suspects);
        let ports = [3, 4].map(|port| content.allows(&packet(4, 0, port)));
        assert_eq!(ports, [!aside; 2]);
        let failures: Vec<_> =
            content.failures().iter().map(|failure| failure.reason.as_str()).collect();
        assert_eq!(failures.len(), usize::from(aside), "{failures:?}");
        assert!(failures.iter().all(|reason| reason.contains("died twice")));
    }
}

/// What tiers decide about some other end for the subject 40, to which the Pod `number` belongs.
fn tiered(number: usize, actions: PortActions, peers: Vec<PeerId>) -> [PolicyObject; 2] {
    let PolicyObject::Pod(pod) = local_pod(number, &[0]) else {
        unreachable!()
    };
    let row = DecisionRow {
        direction: Direction::Ingress,
        tier: Tier::Admin,
        actions,
        peers,
    };
    let decisions = Decisions {
        subject: id(40),
        part: 0,
        rows: vec![row],
    };
    let tier = Some(id(40));
    [
        PolicyObject::Pod(LocalPod { tier, ..pod }),
        PolicyObject::Decisions(decisions),
    ]
}

/// What tiers deny a Pod that is cut off is not in the kernel, so policies allow it nothing either.
#[test]
fn too_many_decisions_cut_a_pod_off() {
    for (of_pod, of_node, open) in [
        (3, 6, [true, true]),
        (2, 6, [false, false]),
        (3, 5, [true, false]),
    ] {
        let mut content = Content::new(Family::V4);
        (content.limits.pod, content.limits.node) = (of_pod, of_node);
        let peers: Vec<PeerId> = (50..53).map(id).collect();
        let objects = [0, 1]
            .map(|number| tiered(number, PortActions::PASS, peers.clone()))
            .into_iter()
            .flatten()
            .chain([of_ports(0, 1)]);
        let steps: Vec<Step> = objects.map(|object| (object.key(), Some(object))).collect();
        apply(&mut content, &steps, true);
        for (pod, open) in (0..).zip(open) {
            let both = [packet(4, pod, 1), packet(pod, 4, 1)];
            assert_eq!(
                both.map(|packet| content.allows(&packet)),
                [open; 2],
                "{pod}"
            );
        }
    }
}

/// A change has the connections judged of each address that it may take something from.
#[test]
fn whoever_may_lose_something_is_searched() {
    let peer = |class| {
        PolicyObject::Peer(Peer {
            address: ip(IPS[4]),
            class: id(class),
            tier: None,
        })
    };
    let span = |last| {
        PolicyObject::Span(TierSpan {
            first: ip("198.51.100.0"),
            last: ip(last),
            tier: id(30),
        })
    };
    let [pod, pass] = tiered(1, PortActions::PASS, vec![id(30)]);
    let [_, deny] = tiered(1, PortActions::DENY, vec![id(30)]);
    let before = [
        of_ports(0, 4),
        local_pod(0, &[0]),
        pod,
        pass,
        local_pod(2, &[]),
        peer(1),
        span("198.51.100.255"),
    ]
    .map(|object| (object.key(), Some(object)));
    let cases: [(_, &[usize]); 6] = [
        (of_ports(0, 5), &[]),
        (of_ports(0, 3), &[0, 1]),
        (local_pod(2, &[0]), &[2]),
        (peer(2), &[4]),
        (deny, &[1]),
        (span("198.51.100.127"), &[1]),
    ];
    for (change, searched) in cases {
        let mut content = Content::new(Family::V4);
        apply(&mut content, &before, true);
        content.held.record();
        apply(&mut content, &[(change.key(), Some(change.clone()))], false);
        let changes = content.held.changes();
        let expected = searched.iter().map(|number| ip(IPS[*number])).collect();
        assert_eq!(content.lost(&changes), expected, "{change:?}");
    }
}

/// Only the largest policy of a namespace that needs too many elements allows nothing, and other namespaces notice nothing.
#[test]
fn too_many_elements_cost_the_largest_policy_of_the_namespace() {
    let mut content = Content::new(Family::V4);
    content.limits.namespace = 10;
    let other = PolicyName::new("other", "small");
    let PolicyObject::Policy(small) = of_ports(3, 3) else {
        unreachable!()
    };
    let small = PolicyObject::Policy(Policy {
        name: other.clone(),
        ..small
    });
    let PolicyObject::Pod(of_other) = local_pod(1, &[]) else {
        unreachable!()
    };
    let of_other = PolicyObject::Pod(LocalPod {
        policies: vec![other],
        ..of_other
    });
    let objects = [
        of_ports(0, 4),
        of_ports(1, 7),
        small,
        local_pod(0, &[0, 1]),
        of_other,
    ];
    let steps = objects.map(|object| (object.key(), Some(object)));
    apply(&mut content, &steps, true);
    let allows = |content: &Content, to: usize, port| {
        content.allows(&Packet {
            source: ip(IPS[4]),
            destination: ip(IPS[to]),
            port: Some((Protocol::Tcp, port)),
        })
    };
    let ports = |content: &Content, to| (1..9).filter(|port| allows(content, to, *port)).count();
    assert_eq!([ports(&content, 0), ports(&content, 1)], [4, 3]);
    let [failure] = content.failures() else {
        panic!("{:?}", content.failures())
    };
    assert_eq!(failure.key, of_ports(1, 7).key());
    assert!(failure.reason.contains("need 7 elements"), "{failure:?}");
    // It fits once it is smaller, or once others are gone.
    let smaller = (of_ports(1, 6).key(), Some(of_ports(1, 6)));
    apply(&mut content, &[smaller], false);
    assert_eq!((ports(&content, 0), content.failures()), (6, &[][..]));
    let larger = (of_ports(1, 8).key(), Some(of_ports(1, 8)));
    apply(&mut content, &[larger], false);
    assert_eq!((ports(&content, 0), content.failures().len()), (4, 1));
    apply(&mut content, &[(of_ports(0, 4).key(), None)], false);
    assert_eq!((ports(&content, 0), content.failures().len()), (8, 1));
}

/// Neither a product of blocks and ports nor one of a group's members and ports is made before it is known to fit.
#[test]
fn a_product_that_is_too_large_is_never_made() {
    let ports = || (1..=6_000).map(|port| PolicyPort::Range(Protocol::Tcp, port, port));
    let block = |n: u32| Block {
        range: Cidr::single(IpAddr::from((0x0a00_0000 + 2 * n).to_be_bytes())),
        except: Vec::new(),
    };
    let policy = |blocks, groups| {
        let peers = Some(Peers { groups, blocks });
        let rule = PolicyRule {
            peers,
            ports: Some(ports().collect()),
        };
        PolicyObject::Policy(Policy {
            name: name(0),
            ingress: Some(vec![rule]),
            egress: None,
        })
    };
    let group = |members: Vec<PeerId>| {
        PolicyObject::Group(GroupPart {
            group: id(20),
            part: 0,
            members,
        })
    };
    let mut content = Content::new(Family::V4);
    let blocks = policy((0..2_500).map(block).collect(), Vec::new());
    let steps = [blocks, local_pod(0, &[0])].map(|object| (object.key(), Some(object)));
    apply(&mut content, &steps, true);
    assert!(content.failures()[0].reason.contains("need 15000000 elements"));
    let isolated = PolicySet::Isolated(Direction::Ingress);
    assert!(content.held.len() < 100 && content.held.has(isolated, Key::Ip(ip(IPS[0]))));
    // The same with a group that grows.
    let few = [policy(Vec::new(), vec![id(20)]), group(vec![id(1)])];
    apply(
        &mut content,
        &few.map(|object| (object.key(), Some(object))),
        false,
    );
    assert!(content.failures().is_empty() && content.held.len() > 6_000);
    let members = (0..=255).flat_map(|a| {
        (0..40).map(move |b| PeerId([a, b, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]))
    });
    let many = group(members.collect());
    content.held.record();
    apply(&mut content, &[(many.key(), Some(many))], false);
    let changed = content.held.changes().len();
    assert!(changed < 20_000 && content.held.len() < 100, "{changed}");
    assert_eq!(content.failures().len(), 1);
}

/// Ports with names cost a search each, of the Pod's ports or of other Pods': it ends long before it takes seconds.
#[test]
fn a_search_for_ports_with_names_is_bounded() {
    let rules = || {
        let ports = Some(vec![PolicyPort::Named(Protocol::Tcp, "p0".into()); 2_000]);
        Some(vec![PolicyRule { peers: None, ports }])
    };
    let port = |n: usize| NamedPort {
        name: format!("p{n}").into(),
        protocol: Protocol::Tcp,
        port: 80,
    };
    let PolicyObject::Pod(pod) = local_pod(0, &[0]) else {
        unreachable!()
    };
    let pod = PolicyObject::Pod(LocalPod {
        ports: sorted((0..1_000).map(port).collect()),
        ..pod
    });
    // A class for each of 600 Pods, which all have the port.
    let classes: Vec<Step> = (0..600_u16)
        .map(|n| {
            let mut of = [0; 16];
            of[..2].copy_from_slice(&n.to_be_bytes());
            PolicyObject::Class(PeerClass {
                id: PeerId(of),
                parent: id(11),
                namespace: "ns".into(),
                ports: vec![port(0)],
            })
        })
        .map(|class| (class.key(), Some(class)))
        .collect();
    for (ingress, egress) in [(rules(), None), (None, rules())] {
        let policy = PolicyObject::Policy(Policy {
            name: name(0),
            ingress,
            egress,
        });
        let mut content = Content::new(Family::V4);
        let mut steps = classes.clone();
        steps.extend([policy, pod.clone()].map(|object| (object.key(), Some(object))));
        apply(&mut content, &steps, true);
        let reason = &content.failures()[0].reason;
        assert!(
            reason.contains("need more elements than are counted"),
            "{reason}"
        );
    }
}

/// What a block costs does not depend on the blocks of others.
#[test]
fn borders_of_other_policies_cost_nothing() {
    let policy = |number, blocks| {
        let peers = Some(Peers {
            groups: Vec::new(),
            blocks,
        });
        let rule = PolicyRule { peers, ports: None };
        PolicyObject::Policy(Policy {
            name: name(number),
            ingress: Some(vec![rule]),
            egress: None,
        })
    };
    let all = Block {
        range: Cidr::everything(Family::V4),
        except: Vec::new(),
    };
    let single = |n: u32| Block {
        range: Cidr::single(IpAddr::from((0xc000_0200 + 2 * n).to_be_bytes())),
        except: Vec::new(),
    };
    let mut content = Content::new(Family::V4);
    let objects = [
        policy(0, vec![all]),
        local_pod(0, &[0]),
        policy(1, (0..1_000).map(single).collect()),
        local_pod(1, &[1]),
    ];
    apply(
        &mut content,
        &objects.map(|object| (object.key(), Some(object))),
        true,
    );
    assert_eq!(content.grants.price(&name(0)), 1);
    let victims = content
        .held
        .all()
        .filter(|((_, key), _)| matches!(key, Key::Grant(pod, _) if *pod == ip(IPS[0])));
    assert_eq!(victims.count(), 1);
    let packet = |to: usize| Packet {
        source: ip("192.0.2.8"),
        destination: ip(IPS[to]),
        port: Some((Protocol::Tcp, 80)),
    };
    assert!(content.allows(&packet(0)) && content.allows(&packet(1)));
}

/// A Pod whose policy allows what one class may do.
fn isolated() -> Content {
    let peers = Some(Peers {
        groups: vec![id(20)],
        blocks: Vec::new(),
    });
    let rule = PolicyRule { peers, ports: None };
    let policy = PolicyObject::Policy(Policy {
        name: name(0),
        ingress: Some(vec![rule]),
        egress: None,
    });
    let class = PolicyObject::Class(PeerClass {
        id: id(1),
        parent: id(11),
        namespace: "ns".into(),
        ports: Vec::new(),
    });
    let group = PolicyObject::Group(GroupPart {
        group: id(20),
        part: 0,
        members: vec![id(1)],
    });
    let mut content = Content::new(Family::V4);
    let steps =
        [class, group, policy, local_pod(0, &[0])].map(|object| (object.key(), Some(object)));
    apply(&mut content, &steps, true);
    content
}

#[test]
fn an_empty_table_is_closed_before_it_is_opened() {
    let content = isolated();
    let all = content.by_set();
    let last = |of: &dyn Fn(PolicySet) -> bool| {
        let place = all
            .iter()
            .rposition(|element| matches!(element.set, Set::Policy(set) if of(set)));
        place.unwrap()
    };
    let ranges = last(&|set| set == PolicySet::LocalRanges);
    let isolated = last(&|set| matches!(set, PolicySet::Isolated(_)));
    let allowed = last(&|set| matches!(set, PolicySet::All(_)));
    let known = last(&|set| set == PolicySet::LocalPods);
    assert!(ranges < allowed && isolated < allowed && allowed < known);
    assert_eq!(known, all.len() - 1);
    assert_eq!(BTreeSet::from_iter(all), content.elements());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// However small transactions are, nothing is open on the way that is closed at the end.
    #[test]
    fn a_table_that_is_filled_in_parts_is_closed_meanwhile(
        objects in prop::collection::vec(prop_oneof![object(), tier_object(), tiered_peer()], 0..30),
        known in any::<bool>(),
    ) {
        let world: World = objects.into_iter().map(|object| (object.key(), object)).collect();
        let (mut content, ranges) = (Content::new(Family::V4), ranges());
        apply_in(&mut content, &whole(&world), true, if known { &ranges } else { &[] });
        let after = Model::of(&content);
        let mut closed = packets();
        closed.retain(|packet| !after.allows(packet));
        let closes = |element: &Element| matches!(element.set, Set::Policy(set) if set.closes());
        let mut kernel = Model::default();
        for (number, ops) in everything(&content, 0).into_iter().flatten().enumerate() {
            let (first, rest): (Vec<Element>, _) = ops.add.into_iter().partition(closes);
            prop_assert!(number == 0 || first.is_empty(), "all that closes is one group");
            kernel.add(&first);
            for element in rest {
                kernel.add([&element]);
                for packet in &closed {
                    prop_assert!(!kernel.allows(packet), "{:?}", packet);
                }
            }
            kernel.delete(&ops.delete);
        }
        prop_assert_eq!(kernel, after);
    }
}

/// Only this node's Pods say that its ranges are not the CNI plugin's; no claim of another node does.
#[test]
fn a_pod_of_another_node_may_have_an_address_in_ranges_that_the_cni_does_not_use() {
    let mut content = isolated();
    let stranger = PolicyObject::Peer(Peer {
        address: ip("10.0.0.5"),
        class: id(1),
        tier: None,
    });
    let pod = |name_of: usize, at: &str, policies: &[usize]| {
        let PolicyObject::Pod(pod) = local_pod(name_of, policies) else {
            unreachable!("a Pod")
        };
        let addresses = vec![ip(at)];
        PolicyObject::Pod(LocalPod { addresses, ..pod })
    };
    let set = |object: PolicyObject| (object.key(), Some(object));
    let packet = Packet {
        source: ip("10.0.0.5"),
        destination: ip(IPS[0]),
        port: Some((Protocol::Tcp, 80)),
    };
    apply(&mut content, &[set(stranger.clone())], false);
    assert!(!content.allows(&packet));
    let outside = pod(1, "192.0.2.1", &[]);
    apply(&mut content, &[set(outside.clone())], false);
    assert!(content.allows(&packet));
    // It is a Pod of this node now, whose policy does not exist yet.
    let here = pod(2, "10.0.0.5", &[7]);
    apply(&mut content, &[set(here.clone())], false);
    assert!(!content.allows(&packet));
    apply(&mut content, &[(here.key(), None)], false);
    assert!(content.allows(&packet));
    apply(&mut content, &[(stranger.key(), None)], false);
    assert!(!content.allows(&packet));
    apply(&mut content, &[set(stranger), (outside.key(), None)], false);
    assert!(!content.allows(&packet));
}

/// An earlier process may have used a number for something else.
#[test]
fn numbers_in_the_kernel_are_not_given_again() {
    let content = isolated();
    let given: Vec<u32> = content.numbers.all().map(|(_, number)| number).collect();
    let highest = highest(&content.elements());
    assert_eq!(Some(&highest), given.iter().max());
    let mut next = Content::new(Family::V4).numbers;
    next.begin_above(highest);
    assert!(given.iter().all(|number| *number < next.give(id(1))));
}
