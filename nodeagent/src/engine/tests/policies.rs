//! Tests of the tables of NetworkPolicies.

use kplane_dataplane::backend::nftables::TableKind;
use kplane_dataplane::backend::nftables::memory::{Disturbance, MemoryKernel, TableFaults};
use kplane_model::{
    DesiredObject, LocalPod, Peer, PeerId, PodName, Policy, PolicyName, PolicyObject,
};
use kplane_proto::v1::Enforcement;

use super::settings::node_with_pods;
use super::*;

/// Begins a process that remembers nothing.
fn begin(rig: &mut Rig, machine: &MemoryKernel) {
    let (publisher, _) = service_health::channel();
    let followers = Followers::new(publisher, rig.counters.clone());
    rig.core = Core::new(machine.open(), NodeSettings::default(), followers);
}

/// A control plane that says nothing of policies opens no Pod.
#[test]
fn what_is_left_stays_until_a_control_plane_speaks_of_policies() {
    let name = PolicyName::new("shop", "web");
    let policy = DesiredObject::Policy(PolicyObject::Policy(Policy {
        name: name.clone(),
        ingress: Some(Vec::new()),
        egress: None,
    }));
    let pod = DesiredObject::Policy(PolicyObject::Pod(LocalPod {
        name: PodName::new("shop", "web-0"),
        addresses: vec![[10, 0, 1, 7].into()],
        ports: Vec::new(),
        policies: vec![name],
        tier: None,
    }));
    let machine = MemoryKernel::new([]);
    let has_table = || machine.has_table(TableKind::Policies, Family::V4);
    let mut rig = Rig::new([policy.clone(), pod.clone()]);
    begin(&mut rig, &machine);
    rig.snapshot();
    assert!(has_table());
    rig.plane.delete(&policy.key());
    rig.plane.delete(&pod.key());
    begin(&mut rig, &machine);
    rig.plane.enforcement = Enforcement::Unspecified;
    rig.snapshot();
    rig.idle();
    assert!(has_table());
    rig.plane.enforcement = Enforcement::Off;
    rig.delta();
    assert!(!has_table());
}

/// A change of Services that comes while a change of policies is sent in parts leaves nothing to try again.
#[test]
fn a_change_of_services_between_two_parts_ends() {
    let machine = MemoryKernel::new([]);
    machine.set_part(1);
    let name = PolicyName::new("shop", "web");
    let mut rig = Rig::new([DesiredObject::Policy(PolicyObject::Pod(LocalPod {
        name: PodName::new("shop", "web-0"),
        addresses: vec![[10, 0, 1, 7].into()],
        ports: Vec::new(),
        policies: vec![name.clone()],
        tier: None,
    }))]);
    begin(&mut rig, &machine);
    rig.snapshot();
    rig.idle();
    rig.put(&DesiredObject::Policy(PolicyObject::Policy(Policy {
        name,
        ingress: Some(Vec::new()),
        egress: Some(Vec::new()),
    })));
    rig.put(&svc("web", &["10.0.1.7:80"]));
    let mut ticks = 0;
    while rig.core.due().is_some_and(|at| at <= rig.now.instant) && ticks < 1_000 {
        rig.core.tick(rig.now);
        ticks += 1;
    }
    assert!(ticks > 1 && ticks < 1_000, "{ticks}");
}

/// Many objects are taken over in lots, and changes of Services go between; nobody takes the part of a change for all of it.
#[test]
fn services_do_not_wait_for_many_objects() {
    let machine = MemoryKernel::new([]);
    machine.set_part(2);
    let mut rig = Rig::new([DesiredObject::Policy(PolicyObject::Namespace(
        "shop".into(),
    ))]);
    begin(&mut rig, &machine);
    rig.snapshot();
    rig.idle();
    let peer = |number: u8| {
        DesiredObject::Policy(PolicyObject::Peer(Peer {
            address: [10, 0, 2, number].into(),
            class: PeerId([1; 16]),
            tier: None,
        }))
    };
    let elements = |rig: &Rig| rig.core.report().policies[0].elements;
    let before = elements(&rig);
    for there in [true, false] {
        for number in 0..9 {
            if there {
                rig.plane.put(&peer(number));
            } else {
                rig.plane.delete(&peer(number).key());
            }
        }
        rig.delta();
        rig.put(&svc(
            "web",
            &[if there { "10.0.1.7:80" } else { "10.0.1.8:80" }],
        ));
        assert!(rig.core.report().families[0].programmed);
        assert!(rig.revisions().0 < rig.plane.revision);
        rig.idle();
        assert_eq!(rig.revisions().0, rig.plane.revision);
        assert_eq!(elements(&rig), before + if there { 9 } else { 0 });
    }
    // What another program does is compared with all of a change.
    (0..9).for_each(|number| rig.plane.put(&peer(number)));
    rig.delta();
    rig.core.tick(rig.now);
    machine.disturb(0, Disturbance::DeleteTable(TableKind::Policies, Family::V4));
    rig.core.listen(rig.now);
    rig.idle();
    assert_eq!(rig.revisions().0, rig.plane.revision);
    assert_eq!(elements(&rig), before + 9);
}

/// NP19: unknown Pods of a node are cut off until policies are known, and no position is reported before.
#[test]
fn np19_a_family_that_has_to_be_closed_is_needed() {
    let machine = MemoryKernel::new([]);
    let faults = TableFaults {
        failing_commits: 1,
        ..TableFaults::default()
    };
    machine.set_faults(TableKind::Policies, Family::V4, faults);
    let mut rig = Rig::new([node_with_pods(&["10.0.1.0/24"])]);
    begin(&mut rig, &machine);
    rig.plane.enforcement = Enforcement::Unread;
    rig.snapshot();
    assert_eq!(rig.revisions().0, 0);
    rig.after(SECOND);
    rig.idle();
    assert_eq!(rig.revisions().0, rig.plane.revision);
}
