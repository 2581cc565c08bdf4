//! Tests of the engine's counters, and of what health checks may report.

use kplane_model::{NodeFacts, ServiceProgram, TrafficPolicy};

use super::*;

fn v4(rig: &Rig) -> &FamilyCounters {
    rig.counters.family(Family::V4)
}

/// Internal and external policy.
fn no_local(rig: &Rig) -> [u64; 2] {
    v4(rig).no_local.each_ref().map(Gauge::get)
}

fn program(
    name: &str,
    endpoints: &[&str],
    change: impl FnOnce(&mut ServiceProgram),
) -> DesiredObject {
    let DesiredObject::Service(mut program) = svc(name, endpoints) else {
        unreachable!("a Service");
    };
    change(&mut program);
    DesiredObject::Service(program)
}

fn internal(name: &str, endpoints: &[&str]) -> DesiredObject {
    program(name, endpoints, |program| {
        program.port.internal_policy = TrafficPolicy::Local;
    })
}

fn external(name: &str, node_port: Option<u16>) -> DesiredObject {
    program(name, &["10.0.0.1:80"], |program| {
        program.port.external_policy = TrafficPolicy::Local;
        program.port.node_port = node_port;
    })
}

/// A18, section (h): Local policy, endpoints in the cluster, none here.
#[test]
fn h_no_local_endpoints_follows_what_changes() {
    let mut rig = Rig::settled([
        svc("cluster", &["10.0.0.1:80"]),
        internal("in", &["10.0.0.1:80"]),
        internal("empty", &[]),
        external("out", Some(30_000)),
        // No client outside can reach this one.
        external("nowhere", None),
    ]);
    assert_eq!(no_local(&rig), [1, 1]);
    rig.put(&local("in", &["10.0.0.1:80"]));
    assert_eq!(no_local(&rig), [0, 1]);
    rig.put(&external("more", Some(30_001)));
    assert_eq!(no_local(&rig), [0, 2]);
    rig.plane.delete(&DesiredKey::Service(key_of("out", Family::V4)));
    rig.plane.delete(&DesiredKey::Local(key_of("in", Family::V4)));
    rig.delta();
    assert_eq!(no_local(&rig), [1, 1]);
    // A complete plan has the same result.
    rig.put(&DesiredObject::Node(NodeFacts::default()));
    assert_eq!(no_local(&rig), [1, 1]);
}

/// ServicePorts that the kernel does not hold are not counted as dropping.
#[test]
fn h_no_local_endpoints_waits_for_the_kernel() {
    let mut rig = Rig::settled([internal("in", &["10.0.0.1:80"])]);
    rig.script.set(|script| script.broken.push(Family::V4));
    rig.put(&local("in", &["10.0.0.1:80"]));
    assert_eq!(no_local(&rig), [1, 0]);
    rig.script.set(|script| script.broken.clear());
    rig.next();
    assert_eq!(no_local(&rig), [0, 0]);
}

#[test]
fn h_attempts_and_changes_are_counted() {
    let mut rig = Rig::settled([svc("a", &["10.0.0.1:80"]), svc("b", &[])]);
    let seen = |rig: &Rig| {
        [
            v4(rig).service_changes.get(),
            v4(rig).endpoint_changes.get(),
        ]
    };
    let pending = |rig: &Rig| {
        [
            v4(rig).service_pending.get(),
            v4(rig).endpoint_pending.get(),
        ]
    };
    assert_eq!((seen(&rig), pending(&rig)), ([2, 1], [0, 0]));
    rig.script.set(|script| script.broken.push(Family::V4));
    // Other endpoints, and another rule.
    rig.put(&svc("a", &["10.0.0.2:80"]));
    rig.put(&internal("b", &[]));
    assert_eq!((seen(&rig), pending(&rig)), ([3, 2], [1, 1]));
    assert_eq!(v4(&rig).failures.get(), 1, "the second one waits");
    rig.script.set(|script| script.broken.clear());
    rig.next();
    assert_eq!(pending(&rig), [0, 0]);
    assert_eq!(v4(&rig).synced_at_ms.get(), rig.now.ms);
}

/// G2: a family is behind since its oldest update, whatever came after.
#[test]
fn g2_a_family_is_behind_since_its_oldest_update() {
    let mut rig = Rig::settled([svc("a", &[])]);
    let since = |rig: &Rig| rig.core.report().families.map(|f| f.behind_since);
    assert_eq!(since(&rig), [None, None]);
    rig.plane.put(&svc("b", &[]));
    let update = rig.plane.delta_update();
    let arrived = update.arrived;
    let work = rig.core.take(update).unwrap();
    assert_eq!(since(&rig), [Some(arrived); 2]);
    rig.script.set(|script| script.broken.push(Family::V4));
    rig.core.program(&work, rig.now);
    assert_eq!(since(&rig), [Some(arrived), None]);
    rig.put(&svc("c", &[]));
    assert_eq!(since(&rig), [Some(arrived), None]);
    rig.script.set(|script| script.broken.clear());
    rig.next();
    assert_eq!(since(&rig), [None, None]);
}

#[test]
fn repairs_of_drift_are_counted_when_they_are_done() {
    let mut rig = Rig::settled([svc("a", &[])]);
    rig.script.set(|script| script.drift.push((Family::V4, "a set is gone")));
    rig.put(&svc("b", &[]));
    assert_eq!(rig.core.report().families[0].repairs.count, 0);
    while rig.core.report().families[0].repairs.count == 0 {
        rig.next();
    }
    assert!(rig.programmed()[0]);
    assert_eq!(rig.core.report().families[1].repairs.count, 0);
}
