//! What packets meet, and faults between transactions, through the real drivers.

use std::panic::{AssertUnwindSafe, catch_unwind};

use kplane_model::{
    EndpointAddr, LocalPod, PodName, PolicyKey, PolicyObject, Protocol, ServiceKey, TrafficPolicy,
};

use super::*;
use crate::backend::{Change, Verification};
use crate::plan::{Frontend, NodePlan, Origin, ServicePlan, Unserved};
use crate::policy::{Enforcer, PolicyChange};

const NODE: [u8; 4] = [172, 16, 0, 1];
const CLIENT: [u8; 4] = [192, 0, 2, 9];
const OF_SERVICES: OneTable = (TableKind::Services, Family::V4);

fn kernel() -> MemoryKernel {
    MemoryKernel::new([IpAddr::from(NODE)])
}

fn node() -> NodePlan {
    let ranges = |text: &str| vec![text.parse().unwrap()];
    NodePlan {
        pod_sources: ranges("10.0.0.0/16"),
        unmasqueraded_sources: ranges("10.0.0.0/16"),
        nodeport_ips: ranges("0.0.0.0/0"),
        service_cidrs: ranges("10.96.0.0/16"),
        ..NodePlan::default()
    }
}

fn endpoint(octet: u8) -> EndpointAddr {
    EndpointAddr::new([10, 0, 0, octet], 8080)
}

fn address(n: u8) -> FrontendAddr {
    FrontendAddr::Address {
        ip: [10, 96, 0, n].into(),
        protocol: Protocol::Tcp,
        port: 80,
    }
}

const NODE_PORT: FrontendAddr = FrontendAddr::NodePort {
    protocol: Protocol::Tcp,
    port: 30_080,
};

fn frontend(at: FrontendAddr, octets: &[u8]) -> Frontend {
    Frontend {
        at,
        origin: Origin::ClusterIp,
        endpoints: octets.iter().map(|octet| endpoint(*octet)).collect(),
        policy: TrafficPolicy::Cluster,
        inside: None,
        masquerade: false,
        unserved: octets.is_empty().then_some(Unserved::Reject),
        source_ranges: Vec::new(),
    }
}

/// Service `n`, at 10.96.0.`n`.
fn service(n: u8, frontends: Vec<Frontend>) -> ServicePlan {
    let key = ServiceKey::sample("shop", &format!("web-{n}"));
    ServicePlan {
        frontends,
        ..ServicePlan::sample(key, [10, 96, 0, n].into())
    }
}

fn apply(backend: &mut Backend, plans: &[ServicePlan]) -> Result<(), String> {
    let services: Vec<_> =
        plans.iter().map(|plan| (plan.key.clone(), Some(plan.clone()))).collect();
    let node = node();
    let change = Change {
        family: Family::V4,
        node: &node,
        services: &services,
        complete: true,
    };
    let applied = backend.side(Family::V4).apply(change).map_err(|error| error.to_string())?;
    assert_eq!(applied.failures, []);
    Ok(())
}

fn packet(source: [u8; 4], destination: [u8; 4], port: u16) -> TestPacket {
    TestPacket::new(
        source.into(),
        destination.into(),
        Some((Protocol::Tcp, port)),
    )
}

fn passes(octets: &[u8], masqueraded: bool) -> BTreeSet<PacketFate> {
    let fate = |octet: &u8| PacketFate::Passes {
        to: endpoint(*octet),
        masqueraded,
    };
    octets.iter().map(fate).collect()
}

const REFUSED: PacketFate = PacketFate::Refused(TableKind::Services);
const DROPPED: PacketFate = PacketFate::Dropped(TableKind::Services);

#[test]
fn packets_meet_what_was_planned() {
    let kernel = kernel();
    let untouched = packet(CLIENT, [10, 96, 0, 1], 80);
    let to = EndpointAddr::new([10, 96, 0, 1], 80);
    assert_eq!(
        kernel.fates(&untouched),
        BTreeSet::from([PacketFate::Passes {
            to,
            masqueraded: false
        }])
    );
    let mut local = frontend(NODE_PORT, &[2]);
    local.inside = Some(vec![endpoint(2), endpoint(7)]);
    let mut guarded = frontend(address(4), &[1]);
    guarded.source_ranges = vec!["10.0.0.0/24".parse().unwrap()];
    let mut dropped = frontend(address(3), &[]);
    dropped.unserved = Some(Unserved::Drop);
    let web = ServicePlan {
        local: vec![endpoint(2)],
        ..service(1, vec![frontend(address(1), &[1, 2, 3]), local])
    };
    let plans = [
        web,
        service(2, vec![frontend(address(2), &[])]),
        service(3, vec![dropped]),
        service(4, vec![guarded]),
    ];
    apply(&mut kernel.open(), &plans).unwrap();
    let fates = |packet| kernel.fates(&packet);
    let pod = [10, 0, 0, 2];
    // A class has four indices, and the draw beyond the last endpoint is repeated.
    assert_eq!(fates(untouched), passes(&[1, 2, 3], true));
    let from_pod = passes(&[1, 3], false).into_iter().chain(passes(&[2], true)).collect();
    assert_eq!(fates(packet(pod, [10, 96, 0, 1], 80)), from_pod);
    assert_eq!(fates(packet(CLIENT, NODE, 30_080)), passes(&[2], false));
    assert_eq!(fates(packet(NODE, NODE, 30_080)), passes(&[2, 7], true));
    assert_eq!(fates(packet(pod, [10, 96, 0, 4], 80)), passes(&[1], false));
    for (to, port, fate) in [
        ([10, 96, 0, 2], 80, REFUSED),
        ([10, 96, 0, 3], 80, DROPPED),
        ([10, 96, 0, 4], 80, DROPPED),
        // A port and an address that no Service has, and a node port on loopback.
        ([10, 96, 0, 1], 81, REFUSED),
        ([10, 96, 0, 9], 80, DROPPED),
        ([127, 0, 0, 1], 30_080, REFUSED),
    ] {
        assert_eq!(
            fates(packet(CLIENT, to, port)),
            BTreeSet::from([fate]),
            "{to:?} {port}"
        );
    }
    let places = kernel.frontends(Family::V4);
    assert_eq!(places.len(), 5);
    assert_eq!(
        places[&NODE_PORT],
        [passes(&[2], false), passes(&[2, 7], true)]
    );
}

#[test]
fn a_client_keeps_its_endpoint() {
    let kernel = kernel();
    let sticky = |octets: &[u8]| ServicePlan {
        affinity_timeout_s: Some(60),
        ..service(1, vec![frontend(address(1), octets)])
    };
    let mut backend = kernel.open();
    apply(&mut backend, &[sticky(&[1, 2, 3])]).unwrap();
    let client = packet(CLIENT, [10, 96, 0, 1], 80);
    let second = kernel.connect(&client, 1);
    assert_eq!(kernel.fates(&client), BTreeSet::from([second]));
    assert_eq!(kernel.connect(&client, 2), second);
    assert_eq!(
        kernel.fates(&packet([192, 0, 2, 8], [10, 96, 0, 1], 80)).len(),
        3
    );
    // Its endpoint is gone.
    let left: Vec<u8> =
        (1..=3).filter(|octet| !passes(&[*octet], true).contains(&second)).collect();
    apply(&mut backend, &[sticky(&left)]).unwrap();
    assert_eq!(kernel.fates(&client), passes(&left, true));
}

/// Whatever another program does, and wherever a process dies, the next process leads to the same places.
#[test]
fn a_process_that_dies_with_any_transaction_is_followed_by_one_that_ends_its_work() {
    let before: Vec<_> = (0..20).map(|n| service(n, vec![frontend(address(n), &[1, 2])])).collect();
    let after: Vec<_> =
        (10..30).map(|n| service(n, vec![frontend(address(n), &[2, 4, 5])])).collect();
    let start = || {
        let kernel = kernel();
        kernel.set_capacity(9);
        apply(&mut kernel.open(), &before).unwrap();
        kernel
    };
    let whole = start();
    let first = whole.transactions();
    apply(&mut whole.open(), &after).unwrap();
    let count = whole.transactions() - first;
    assert!(count > 5, "{count}");
    let expected = whole.frontends(Family::V4);
    for n in 1..=count {
        let kernel = start();
        let mut backend = kernel.open();
        kernel.crash_with(n);
        kernel.disturb(n, Disturbance::Thin(TableKind::Services, Family::V4, 7));
        let died = catch_unwind(AssertUnwindSafe(|| apply(&mut backend, &after)));
        if died.is_ok() {
            // What goes into which transaction is not always the same, and so there may be fewer.
            assert!(n > 5, "{n}");
            continue;
        }
        assert!(died.unwrap_err().is::<ProcessDied>() && kernel.has_died());
        assert_eq!(kernel.transactions(), first + n);
        assert!(catch_unwind(AssertUnwindSafe(|| apply(&mut backend, &after))).is_err());
        let mut backend = kernel.open();
        apply(&mut backend, &after).unwrap();
        assert_eq!(
            Verification::of_all(|| backend.side(Family::V4).verify()).unwrap(),
            Verification::Equal
        );
        assert_eq!(kernel.frontends(Family::V4), expected);
    }
}

#[test]
fn changes_by_another_program_are_reported_and_repaired() {
    let plans: Vec<_> = (0..5).map(|n| service(n, vec![frontend(address(n), &[1, 2])])).collect();
    let kernel = kernel();
    let mut backend = kernel.open();
    let mut reports = backend.notifications.take().unwrap();
    apply(&mut backend, &plans).unwrap();
    let whole = kernel.frontends(Family::V4);
    kernel.disturb(0, Disturbance::Elsewhere);
    assert_eq!(reports.read(), [false, false]);
    let of = OF_SERVICES;
    for disturbance in [
        Disturbance::RemoveFrontend(address(3), Family::V4),
        Disturbance::Thin(of.0, of.1, 2),
        Disturbance::Flush(of.0, of.1),
        Disturbance::DeleteTable(of.0, of.1),
    ] {
        kernel.disturb(0, disturbance);
        assert_ne!(kernel.frontends(Family::V4), whole, "{disturbance:?}");
        assert_eq!(reports.read(), [true, false]);
        let repaired = backend.side(Family::V4).repair().unwrap();
        assert!(
            matches!(repaired, Verification::Repaired(_)),
            "{repaired:?}"
        );
        assert_eq!(kernel.frontends(Family::V4), whole);
        // A change finds it by itself.
        kernel.disturb(0, disturbance);
        apply(&mut backend, &plans[..4]).unwrap();
        assert_eq!(kernel.frontends(Family::V4).len(), 4);
        apply(&mut backend, &plans).unwrap();
        assert_eq!(kernel.frontends(Family::V4), whole);
    }
    kernel.disturb(0, Disturbance::RemoveFrontend(address(3), Family::V4));
    kernel.lose_reports();
    assert_eq!(reports.read(), [true, true]);
    backend.side(Family::V4).repair().unwrap();
    assert_eq!(kernel.frontends(Family::V4), whole);
}

#[test]
fn a_fault_ends_the_attempt_and_the_next_one_succeeds() {
    let plans = [service(1, vec![frontend(address(1), &[1])])];
    let one = |fault: fn(&mut TableFaults)| {
        let mut faults = TableFaults::default();
        fault(&mut faults);
        faults
    };
    for (faults, is_applied) in [
        (one(|faults| faults.broken = true), false),
        (one(|faults| faults.failing_reads = 1), false),
        (one(|faults| faults.failing_commits = 9), false),
        (one(|faults| faults.lost_answers = 1), true),
    ] {
        let kernel = kernel();
        kernel.set_faults(TableKind::Services, Family::V4, faults);
        let mut backend = kernel.open();
        assert!(apply(&mut backend, &plans).is_err(), "{faults:?}");
        assert_eq!(
            kernel.has_table(TableKind::Services, Family::V4),
            is_applied
        );
        kernel.set_faults(TableKind::Services, Family::V4, TableFaults::default());
        apply(&mut backend, &plans).unwrap();
        assert_eq!(
            kernel.frontends(Family::V4)[&address(1)][0],
            passes(&[1], true)
        );
    }
}

#[test]
fn policies_drop_what_they_do_not_allow() {
    let kernel = kernel();
    let mut enforcer = Enforcer::new(kernel.open().policies);
    let name = PodName::new("shop", "web");
    let pod = PolicyObject::Pod(LocalPod {
        name: name.clone(),
        addresses: vec![[10, 0, 0, 2].into()],
        ports: Vec::new(),
        // A policy that is not known yet isolates it.
        policies: vec![kplane_model::PolicyName::new("shop", "none")],
        tier: None,
    });
    let objects = [(PolicyKey::Pod(name), Some(&pod))];
    let change = PolicyChange {
        objects: &objects,
        complete: true,
        closed: true,
        pod_ranges: &["10.0.0.0/24".parse().unwrap()],
    };
    enforcer.apply(Family::V4, change).unwrap();
    let dropped = PacketFate::Dropped(TableKind::Policies);
    let refused = PacketFate::Refused(TableKind::Policies);
    let passes = PacketFate::Passes {
        to: endpoint(2),
        masqueraded: false,
    };
    let to_pod = |source, flow| TestPacket {
        flow,
        ..packet(source, [10, 0, 0, 2], 8080)
    };
    for (packet, fate) in [
        (to_pod(CLIENT, PacketFlow::New), dropped),
        (to_pod(CLIENT, PacketFlow::Known), passes),
        (to_pod(CLIENT, PacketFlow::Cut), dropped),
        (to_pod(CLIENT, PacketFlow::CutReply), dropped),
        (to_pod(CLIENT, PacketFlow::Midstream), refused),
        (to_pod(NODE, PacketFlow::New), passes),
        (to_pod([10, 0, 0, 2], PacketFlow::New), passes),
    ] {
        assert_eq!(kernel.fates(&packet), BTreeSet::from([fate]), "{packet:?}");
    }
}
