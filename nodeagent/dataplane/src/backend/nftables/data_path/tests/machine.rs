//! What packets meet, and what happens between transactions: through the backend, on a machine in memory.

use std::net::Ipv4Addr;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kplane_model::{LocalPod, PodName, PolicyKey, PolicyName, PolicyObject};

use super::super::super::affinity_id::{AffinityId, Scope};
use super::super::super::element::{Destination, Key};
use super::super::super::schema::Balancer;
use super::*;
use crate::backend::nftables::memory::{
    Disturbance, PacketFate, PacketFlow, ProcessDied, TestPacket,
};
use crate::backend::{Backend, PolicyTables};
use crate::policy::{Enforcer, PolicyChange};

const NODE: [u8; 4] = [172, 16, 0, 1];
const CLIENT: [u8; 4] = [192, 0, 2, 9];
const POD: [u8; 4] = [10, 0, 0, 2];
const WEB: [u8; 4] = [10, 96, 0, 1];
const REFUSED: PacketFate = PacketFate::Refused(TableKind::Services);
const DROPPED: PacketFate = PacketFate::Dropped(TableKind::Services);

type Places = BTreeMap<FrontendAddr, [BTreeSet<PacketFate>; 2]>;

fn machine() -> MemoryKernel {
    MemoryKernel::new([IpAddr::from(NODE)])
}

fn apply(backend: &mut Backend, plans: &[ServicePlan]) -> Result<(), String> {
    let ranges = |text: &str| vec![text.parse().unwrap()];
    let node = NodePlan {
        pod_sources: ranges("10.0.0.0/16"),
        unmasqueraded_sources: ranges("10.0.0.0/16"),
        nodeport_ips: ranges("0.0.0.0/0"),
        service_cidrs: ranges("10.96.0.0/16"),
        ..NodePlan::default()
    };
    let services = set(plans.to_vec());
    let applied = backend.side(Family::V4).apply(change(&services, &node, true));
    match &applied.map_err(|error| error.to_string())?.failures[..] {
        [] => Ok(()),
        failures => Err(format!("{failures:?}")),
    }
}

fn packet(source: [u8; 4], to: [u8; 4], port: u16) -> TestPacket {
    TestPacket::new(source.into(), to.into(), Some((Protocol::Tcp, port)))
}

fn passes(octets: &[u8], masqueraded: bool) -> BTreeSet<PacketFate> {
    let to = octets.iter().map(|octet| endpoint(*octet));
    to.map(|to| PacketFate::Passes { to, masqueraded }).collect()
}

#[test]
fn packets_meet_what_was_planned() {
    let machine = machine();
    let mut local = frontend(node_port(1), &[2]);
    (local.inside, local.masquerade) = (Some(vec![endpoint(2), endpoint(7)]), false);
    let mut dropped = frontend(cluster_ip(3), &[]);
    dropped.unserved = Some(Unserved::Drop);
    let mut guarded = frontend(cluster_ip(4), &[1]);
    guarded.source_ranges = vec!["10.0.0.0/24".parse().unwrap()];
    let web = ServicePlan {
        local: vec![endpoint(2)],
        ..plan(1, vec![frontend(cluster_ip(1), &[1, 2, 3, 4, 5]), local])
    };
    let others = [
        service(2, &[]),
        plan(3, vec![dropped]),
        plan(4, vec![guarded]),
    ];
    let mut backend = machine.open();
    apply(&mut backend, &[&[web][..], &others].concat()).unwrap();
    // The class has six indices, and a draw beyond the last endpoint is repeated.
    let from_pod = &passes(&[1, 3, 4, 5], false) | &passes(&[2], true);
    for (source, to, port, fates) in [
        (CLIENT, WEB, 80, passes(&[1, 2, 3, 4, 5], true)),
        (POD, WEB, 80, from_pod),
        (CLIENT, NODE, 30_001, passes(&[2], false)),
        (NODE, NODE, 30_001, passes(&[2, 7], true)),
        (POD, [10, 96, 0, 4], 80, passes(&[1], false)),
        (CLIENT, [10, 96, 0, 4], 80, [DROPPED].into()),
        (CLIENT, [10, 96, 0, 2], 80, [REFUSED].into()),
        (CLIENT, [10, 96, 0, 3], 80, [DROPPED].into()),
        // A port and an address that no Service has, and a node port on loopback.
        (CLIENT, WEB, 81, [REFUSED].into()),
        (CLIENT, [10, 96, 0, 9], 80, [DROPPED].into()),
        (NODE, Ipv4Addr::LOCALHOST.octets(), 30_001, [REFUSED].into()),
    ] {
        assert_eq!(
            machine.fates(&packet(source, to, port)),
            fates,
            "{source:?} {to:?} {port}"
        );
    }
    let unanswered = |source| TestPacket {
        flow: PacketFlow::Unanswered,
        ..packet(source, [10, 96, 0, 4], 80)
    };
    assert_eq!(machine.fates(&unanswered(CLIENT)), [DROPPED].into());
    let places = machine.frontends(Family::V4);
    assert_eq!(places.len(), 5);
    assert_eq!(
        places[&node_port(1)],
        [passes(&[2], false), passes(&[2, 7], true)]
    );
    // Without the table, nothing takes a packet.
    machine.reboot();
    let (to, masqueraded) = (EndpointAddr::new(WEB, 80), false);
    let untouched = [PacketFate::Passes { to, masqueraded }].into();
    assert_eq!(machine.fates(&packet(CLIENT, WEB, 80)), untouched);
}

/// Kinds of new connections: the name, source, destination and port.
const NEW_CONNECTIONS: [(&str, [u8; 4], [u8; 4], u16); 13] = [
    ("ClusterIP, 2 endpoints", POD, [10, 96, 0, 1], 80),
    ("ClusterIP, 100 endpoints", POD, [10, 96, 0, 2], 80),
    (
        "ClusterIP, session affinity, client is new",
        POD,
        [10, 96, 0, 6],
        80,
    ),
    ("load-balancer address", CLIENT, [198, 51, 100, 3], 80),
    (
        "load-balancer address with source ranges",
        CLIENT,
        [198, 51, 100, 4],
        80,
    ),
    ("node port", CLIENT, NODE, 30_003),
    (
        "node port, policy Local, from outside",
        CLIENT,
        NODE,
        30_005,
    ),
    ("node port, policy Local, from a pod", POD, NODE, 30_005),
    ("ClusterIP without endpoints", POD, [10, 96, 0, 7], 80),
    (
        "ClusterIP, a port that no Service has",
        POD,
        [10, 96, 0, 1],
        81,
    ),
    ("directly to a pod", POD, [10, 0, 0, 1], 8080),
    ("to this node", CLIENT, NODE, 22),
    ("from this node to elsewhere", NODE, CLIENT, 443),
];

/// What the first packet of a connection costs. docs/nftables.md quotes this table.
#[test]
fn look_ups_of_each_kind_of_new_connection() {
    let machine = machine();
    let some: Vec<u8> = (1..=100).collect();
    let mut local = frontend(node_port(5), &[2]);
    (local.inside, local.masquerade) = (Some(vec![endpoint(2), endpoint(7)]), false);
    let mut guarded = frontend(load_balancer(4), &[1]);
    guarded.source_ranges = vec!["192.0.2.0/24".parse().unwrap()];
    let sticky = ServicePlan {
        affinity_timeout_s: Some(60),
        ..service(6, &[1, 2])
    };
    let plans = [
        service(1, &[1, 2]),
        service(2, &some),
        plan(
            3,
            vec![
                frontend(load_balancer(3), &[1, 2]),
                frontend(node_port(3), &[1, 2]),
            ],
        ),
        plan(4, vec![guarded]),
        plan(5, vec![local]),
        sticky,
        service(7, &[]),
    ];
    apply(&mut machine.open(), &plans).unwrap();
    let mut table = String::new();
    for (kind, source, to, port) in NEW_CONNECTIONS {
        writeln!(
            table,
            "{:>2}  {kind}",
            machine.look_ups(&packet(source, to, port))
        )
        .unwrap();
    }
    expect![[r#"
         6  ClusterIP, 2 endpoints
         6  ClusterIP, 100 endpoints
        10  ClusterIP, session affinity, client is new
         5  load-balancer address
         6  load-balancer address with source ranges
         6  node port
         8  node port, policy Local, from outside
         8  node port, policy Local, from a pod
         3  ClusterIP without endpoints
         5  ClusterIP, a port that no Service has
         4  directly to a pod
         4  to this node
         4  from this node to elsewhere
    "#]]
    .assert_eq(&table);
}

#[test]
fn a11_a_client_keeps_its_endpoint() {
    let machine = machine();
    let sticky = |octets: &[u8]| ServicePlan {
        affinity_timeout_s: Some(60),
        ..service(1, octets)
    };
    let mut backend = machine.open();
    apply(&mut backend, &[sticky(&[1, 2, 3])]).unwrap();
    let client = packet(CLIENT, WEB, 80);
    let fate = machine.connect(&client, 1);
    assert_eq!(machine.connect(&client, 2), fate);
    assert_eq!(machine.fates(&client), [fate].into());
    assert_eq!(machine.fates(&packet(NODE, WEB, 80)).len(), 3);
    let left: Vec<u8> = (1..=3).filter(|octet| !passes(&[*octet], true).contains(&fate)).collect();
    apply(&mut backend, &[sticky(&left)]).unwrap();
    assert_eq!(machine.fates(&client), passes(&left, true));
}

/// Returns the endpoints of a place.
fn reached(fates: &[BTreeSet<PacketFate>; 2]) -> BTreeSet<EndpointAddr> {
    let endpoint = |fate: &PacketFate| match fate {
        PacketFate::Passes { to, .. } => Some(*to),
        PacketFate::Refused(_) | PacketFate::Dropped(_) => None,
    };
    fates.iter().flatten().filter_map(endpoint).collect()
}

/// However small transactions are, no place is half done between two. Wherever a process dies, and whatever another
/// program does then, the next process ends its work.
#[test]
fn a_process_may_die_with_any_transaction() {
    let before: Vec<_> = (0..20).map(|n| service(n, &[1, 2])).collect();
    let after: Vec<_> = (10..30).map(|n| service(n, &[2, 4, 5])).collect();
    let start = || {
        let machine = machine();
        machine.set_capacity(9);
        apply(&mut machine.open(), &before).unwrap();
        machine
    };
    let whole = start();
    let (first, began) = (whole.transactions(), whole.frontends(Family::V4));
    apply(&mut whole.open(), &after).unwrap();
    let (count, ended) = (whole.transactions() - first, whole.frontends(Family::V4));
    assert!(count > 5, "{count}");
    for n in 1..=count {
        let machine = start();
        let mut backend = machine.open();
        machine.crash_with(n);
        for _ in 0..2 {
            let died = catch_unwind(AssertUnwindSafe(|| apply(&mut backend, &after)));
            assert!(died.unwrap_err().is::<ProcessDied>() && machine.has_died());
        }
        assert_eq!(machine.transactions(), first + n);
        for (at, fates) in machine.frontends(Family::V4) {
            let is_whole = |places: &Places| places.get(&at).map(reached) == Some(reached(&fates));
            assert!(is_whole(&began) || is_whole(&ended), "{n}: {at} {fates:?}");
        }
        let thin = Disturbance::Thin(TableKind::Services, Family::V4, 7);
        machine.disturb(0, thin);
        let mut backend = machine.open();
        apply(&mut backend, &after).unwrap();
        assert_eq!(
            Verification::of_all(|| backend.side(Family::V4).verify()).unwrap(),
            Verification::Equal
        );
        assert_eq!(machine.frontends(Family::V4), ended);
        // The other program comes between two transactions. The change fails, or the kernel's reports lead to a repair.
        let machine = start();
        let mut backend = machine.open();
        machine.disturb(n, thin);
        let result = apply(&mut backend, &after);
        assert!(machine.frontends(Family::V4) != ended, "{n}: {result:?}");
        let repaired = backend.side(Family::V4).repair();
        apply(&mut backend, &after).unwrap();
        assert!(
            machine.frontends(Family::V4) == ended,
            "{n}: {result:?} {repaired:?}"
        );
    }
}

#[test]
fn changes_by_another_program_are_reported_and_repaired() {
    let plans: Vec<_> = (0..5).map(|n| service(n, &[1, 2])).collect();
    let machine = machine();
    let mut backend = machine.open();
    let mut reports = backend.notifications.take().unwrap();
    apply(&mut backend, &plans).unwrap();
    let whole = machine.frontends(Family::V4);
    machine.disturb(0, Disturbance::Elsewhere);
    assert_eq!(reports.read(), [false, false]);
    let (kind, family) = TABLE;
    for disturbance in [
        Disturbance::RemoveFrontend(cluster_ip(3), family),
        Disturbance::Thin(kind, family, 2),
        Disturbance::Thin(kind, family, 1),
        Disturbance::DeleteTable(kind, family),
    ] {
        machine.disturb(0, disturbance);
        assert_ne!(machine.frontends(family), whole, "{disturbance:?}");
        assert_eq!(reports.read(), [true, false]);
        let repaired = backend.side(family).repair().unwrap();
        assert!(
            matches!(repaired, Verification::Repaired(_)),
            "{repaired:?}"
        );
        assert_eq!(machine.frontends(family), whole);
        // A change finds it by itself.
        machine.disturb(0, disturbance);
        apply(&mut backend, &plans[..4]).unwrap();
        assert_eq!(machine.frontends(family).len(), 4);
        apply(&mut backend, &plans).unwrap();
        assert_eq!(machine.frontends(family), whole);
    }
    machine.disturb(0, Disturbance::RemoveFrontend(cluster_ip(3), family));
    machine.lose_reports();
    assert_eq!(reports.read(), [true, true]);
    backend.side(family).repair().unwrap();
    assert_eq!(machine.frontends(family), whole);
}

/// What goes wrong during a step.
fn trouble() -> impl Strategy<Value = (TableFaults, Option<(u64, Disturbance)>, Option<u64>)> {
    let (kind, family) = TABLE;
    let faults =
        (0_u32..2, 0_u32..2, 0_u32..2, 0_u32..3).prop_map(|(reads, commits, answers, others)| {
            TableFaults {
                failing_reads: reads,
                failing_commits: commits,
                lost_answers: answers,
                contended: others,
                ..TableFaults::default()
            }
        });
    let disturbance = prop_oneof![
        (1_usize..9).prop_map(move |n| Disturbance::Thin(kind, family, n)),
        (0_u8..5).prop_map(move |n| Disturbance::RemoveFrontend(cluster_ip(n), family)),
        Just(Disturbance::DeleteTable(kind, family)),
        Just(Disturbance::Elsewhere),
    ];
    (
        faults,
        prop::option::of((0_u64..6, disturbance)),
        prop::option::of(1_u64..6),
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Whatever goes wrong, an agent that does what the engine does ends where a fresh start does.
    #[test]
    fn trouble_passes(
        steps in prop::collection::vec((prop::collection::vec(any_plan(), 0..4), trouble()), 1..8),
        capacity in prop_oneof![Just(usize::MAX), 4_usize..40],
    ) {
        let machine = machine();
        machine.set_capacity(capacity);
        let (mut backend, mut wanted) = (machine.open(), Vec::new());
        for (plans, (faults, disturbance, crash)) in steps {
            wanted = plans;
            let mut places = BTreeSet::new();
            wanted.retain(|plan| plan.frontends.iter().all(|f| places.insert(f.at)));
            let mut keys = BTreeSet::new();
            wanted.retain(|plan| keys.insert(plan.key.clone()));
            machine.set_faults(TABLE.0, TABLE.1, faults);
            if let Some((n, disturbance)) = disturbance {
                machine.disturb(n, disturbance);
            }
            if let Some(n) = crash {
                machine.crash_with(n);
            }
            let died = catch_unwind(AssertUnwindSafe(|| drop(apply(&mut backend, &wanted))));
            if died.is_err() || machine.has_died() {
                backend = machine.open();
            }
        }
        machine.set_faults(TABLE.0, TABLE.1, TableFaults::default());
        let mut attempts = 0..10;
        let settles = |backend: &mut Backend| {
            let repaired = apply(backend, &wanted).map(|()| backend.side(TABLE.1).repair());
            matches!(repaired, Ok(Ok(Verification::Equal)))
        };
        loop {
            prop_assert!(attempts.next().is_some());
            match catch_unwind(AssertUnwindSafe(|| settles(&mut backend))) {
                Ok(true) => break,
                Ok(false) => {}
                Err(_) => backend = machine.open(),
            }
        }
        let fresh = self::machine();
        apply(&mut fresh.open(), &wanted).unwrap();
        prop_assert_eq!(machine.frontends(TABLE.1), fresh.frontends(TABLE.1));
        prop_assert_eq!(Verification::of_all(|| backend.side(TABLE.1).verify()).unwrap(), Verification::Equal);
    }
}

#[test]
fn a_fault_ends_the_attempt_and_the_next_one_succeeds() {
    let none = TableFaults::default;
    for (faults, is_applied) in [
        (
            TableFaults {
                broken: true,
                ..none()
            },
            false,
        ),
        (
            TableFaults {
                failing_reads: 1,
                ..none()
            },
            false,
        ),
        (
            TableFaults {
                failing_commits: 9,
                ..none()
            },
            false,
        ),
        (
            TableFaults {
                lost_answers: 1,
                ..none()
            },
            true,
        ),
    ] {
        let machine = machine();
        machine.set_faults(TableKind::Services, Family::V4, faults);
        let mut backend = machine.open();
        assert!(
            apply(&mut backend, &[service(1, &[1])]).is_err(),
            "{faults:?}"
        );
        assert_eq!(
            machine.has_table(TableKind::Services, Family::V4),
            is_applied
        );
        machine.set_faults(TableKind::Services, Family::V4, none());
        apply(&mut backend, &[service(1, &[1])]).unwrap();
        assert_eq!(
            machine.frontends(Family::V4)[&cluster_ip(1)][0],
            passes(&[1], true)
        );
    }
}

/// A transaction that the kernel refuses leaves nothing behind.
#[test]
fn the_kernel_refuses_what_does_not_fit() {
    let machine = machine();
    let mut table = machine.start().table(Family::V4, TableSettings::default().into());
    let element = |set, key, data| Element { set, key, data };
    let range = |text: &str| element(Set::PodCidrs, Key::Range(text.parse().unwrap()), None);
    let ip = |octet| element(Set::ClusterIps, Key::Ip([10, 96, 0, octet].into()), None);
    let missing = Some(Data::Pick(AffinityId::new(&key(1), Scope::Cluster)));
    let at = Destination {
        ip: [10, 96, 0, 1].into(),
        protocol: Protocol::Tcp,
        port: 80,
    };
    let mut commit = |rebuild, delete: &[Element], add: &[Element]| {
        let (delete, add) = (delete.to_vec(), add.to_vec());
        let ops = Ops {
            delete,
            add,
            ..Ops::default()
        };
        table.commit(rebuild, Guard::None, &[ops]).is_ok()
    };
    assert!(!commit(false, &[], &[ip(1)]), "there is no table");
    assert!(commit(true, &[], &[ip(1), range("10.0.0.0/16")]));
    let held = elements_in(&machine);
    assert!(commit(false, &[ip(1)], &[ip(1)]));
    assert!(
        !commit(false, &[ip(2)], &[ip(3)]),
        "there is no such element"
    );
    for refused in [
        ip(1),
        range("10.0.0.0/8"),
        range("10.0.0.0/16"),
        range("10.0.3.0/24"),
        element(Set::FirewallServices, Key::Ip(at.ip), None),
        element(Set::Sticky(Balancer::Service), Key::Service(at), None),
        element(Set::Sticky(Balancer::Service), Key::Service(at), missing),
    ] {
        assert!(!commit(false, &[], &[ip(4), refused]), "{refused:?}");
    }
    assert_eq!(elements_in(&machine), held);
}

#[test]
fn policies_judge_packets_that_are_forwarded() {
    let (machine, pod6) = (machine(), "fd00::2".parse().unwrap());
    let mut backend = machine.open();
    let mut enforcer = Enforcer::new(std::mem::replace(
        &mut backend.policies,
        PolicyTables::own(false),
    ));
    let name = PodName::new("shop", "web");
    let pod = PolicyObject::Pod(LocalPod {
        name: name.clone(),
        addresses: vec![POD.into(), pod6],
        ports: Vec::new(),
        // Nobody knows this policy yet, so nothing is allowed.
        policies: vec![PolicyName::new("shop", "none")],
        tier: None,
    });
    let policies = PolicyChange {
        objects: &[(PolicyKey::Pod(name), Some(&pod))],
        complete: true,
        closed: true,
        pod_ranges: &["10.0.0.0/24".parse().unwrap(), "fd00::/64".parse().unwrap()],
    };
    for family in Family::ALL {
        enforcer.apply(family, policies).unwrap();
    }
    let dropped = PacketFate::Dropped(TableKind::Policies);
    let (to, masqueraded) = (endpoint(2), false);
    let passes = PacketFate::Passes { to, masqueraded };
    for (source, flow, fate) in [
        (CLIENT, PacketFlow::New, dropped),
        (CLIENT, PacketFlow::Known, passes),
        (CLIENT, PacketFlow::Cut, dropped),
        (CLIENT, PacketFlow::CutReply, dropped),
        (
            CLIENT,
            PacketFlow::Midstream,
            PacketFate::Refused(TableKind::Policies),
        ),
        (NODE, PacketFlow::New, passes),
        (POD, PacketFlow::New, passes),
    ] {
        let packet = TestPacket {
            flow,
            ..packet(source, POD, 8080)
        };
        assert_eq!(machine.fates(&packet), [fate].into(), "{packet:?}");
    }
    // Policies judge the Pod to which a Service leads.
    let (ip, protocol, port) = (
        IpAddr::from([0xfd96, 0, 0, 0, 0, 0, 0, 1]),
        Protocol::Tcp,
        80,
    );
    let to = [pod6, "fd01::2".parse().unwrap()].map(|ip| EndpointAddr { ip, port: 8080 });
    let at = FrontendAddr::Address { ip, protocol, port };
    let web = Frontend {
        endpoints: to.to_vec(),
        unserved: None,
        ..frontend(at, &[])
    };
    let services = set([plan(1, vec![web])]);
    let node = NodePlan::default();
    let of_v6 = Change {
        family: Family::V6,
        ..change(&services, &node, true)
    };
    backend.side(Family::V6).apply(of_v6).unwrap();
    let client = TestPacket::new("2001:db8::9".parse().unwrap(), ip, Some((protocol, port)));
    let (to, masqueraded) = (to[1], true);
    let passes = PacketFate::Passes { to, masqueraded };
    assert_eq!(machine.fates(&client), [passes, dropped].into());
}
