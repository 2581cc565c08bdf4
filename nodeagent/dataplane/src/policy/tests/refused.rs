//! The kernel refuses an element.

use kplane_model::{Family, PolicyKey, PolicyObject, Protocol};

use super::{IPS, Step, ip, local_pod, name, of_ports, ranges, with_change};
use crate::backend::nftables::TableKind;
use crate::backend::nftables::memory::{MemoryKernel, PacketFate, TableFaults, TestPacket};
use crate::policy::{Enforcer, PolicyApplied, PolicyChange};

fn step(object: PolicyObject) -> Step {
    (object.key(), Some(object))
}

/// Applies a change, and everything as often as the engine would.
fn apply(enforcer: &mut Enforcer, change: &[Step], all: &[Step]) -> PolicyApplied {
    let mut apply = |(steps, complete): (&[Step], bool)| {
        with_change(steps, complete, &ranges(), |change| {
            enforcer.apply(Family::V4, change)
        })
        .ok()
    };
    [(change, false), (all, true), (all, true)]
        .into_iter()
        .find_map(&mut apply)
        .unwrap()
}

/// The Pod about which the kernel refuses something is cut off by name; others get what their policies allow. Another
/// policy is another chance.
#[test]
fn a_pod_about_which_the_kernel_refuses_something_is_cut_off_and_nobody_else() {
    let kernel = MemoryKernel::new([]);
    let mut enforcer = Enforcer::new(kernel.open().policies);
    let mut world = vec![
        step(of_ports(0, 3)),
        step(local_pod(0, &[0])),
        step(of_ports(1, 3)),
        step(local_pod(1, &[1])),
    ];
    let passes = |pod: usize, port| {
        let packet = TestPacket::new(ip(IPS[4]), ip(IPS[pod]), Some((Protocol::Tcp, port)));
        kernel
            .fates(&packet)
            .iter()
            .all(|fate| matches!(fate, PacketFate::Passes { .. }))
    };
    let refuse = |refused| {
        let faults = TableFaults {
            refused,
            ..TableFaults::default()
        };
        kernel.set_faults(TableKind::Policies, Family::V4, faults);
    };
    apply(&mut enforcer, &[], &world[2..]);
    refuse(Some(ip(IPS[0])));
    let applied = apply(&mut enforcer, &world[..2], &world);
    let failing: Vec<_> = applied.failures.iter().map(|f| (&f.key, f.reason.as_str())).collect();
    let [(PolicyKey::Pod(pod), reason)] = failing[..] else {
        panic!("{failing:?}");
    };
    assert!(
        *pod == name(0) && reason.contains("the kernel refuses"),
        "{reason}"
    );
    assert_eq!([passes(0, 3), passes(1, 3)], [false, true]);
    // Something else changes: the Pod stays cut off.
    world[2] = step(of_ports(1, 2));
    assert_eq!(apply(&mut enforcer, &world[2..3], &world).failures.len(), 1);
    assert_eq!([passes(0, 3), passes(1, 3)], [false, false]);
    refuse(None);
    world[0] = step(of_ports(0, 2));
    assert_eq!(apply(&mut enforcer, &world[..1], &world).failures, []);
    assert_eq!(
        [passes(0, 2), passes(0, 3), passes(1, 2)],
        [true, false, true]
    );
}

/// A Pod about which the kernel refuses something once is not cut off.
#[test]
fn a_refusal_that_passes_cuts_nothing_off() {
    let kernel = MemoryKernel::new([]);
    let mut enforcer = Enforcer::new(kernel.open().policies);
    let world = [step(of_ports(0, 3)), step(local_pod(0, &[0]))];
    let all: Vec<_> = world.iter().map(|(key, object)| (key.clone(), object.as_ref())).collect();
    let change = PolicyChange {
        objects: &all,
        complete: true,
        closed: false,
        pod_ranges: &ranges(),
    };
    for _ in 0..3 {
        let faults = TableFaults {
            refused: Some(ip(IPS[0])),
            ..TableFaults::default()
        };
        kernel.set_faults(TableKind::Policies, Family::V4, faults);
        assert_eq!(
            enforcer.apply(Family::V4, change).is_err(),
            kernel.transactions() == 0
        );
        kernel.set_faults(TableKind::Policies, Family::V4, TableFaults::default());
        assert_eq!(enforcer.apply(Family::V4, change).unwrap().failures, []);
    }
}
