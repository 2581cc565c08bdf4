//! An agent that goes to another replica, which holds something else.

use kplane_model::{DesiredObject, Family};
use kplane_proto::v1::Confidence;

use super::super::fixture::{Plane, RANGES, hostile, key_of, local, node, svc};
use super::super::{CliffGuard, Refusal, Remedy, Update};
use super::*;

/// A Service with an address of its own.
fn numbered(number: u8, endpoints: &[&str]) -> DesiredObject {
    let DesiredObject::Service(mut program) = svc(&format!("s{number}"), endpoints) else {
        panic!("a Service");
    };
    program.port.cluster_ip = [10, 96, 1, number].into();
    DesiredObject::Service(program)
}

fn key(number: u8) -> kplane_model::ServiceKey {
    key_of(&format!("s{number}"), Family::V4)
}

/// Another replica, which holds Services of these numbers.
fn other(numbers: std::ops::Range<u8>) -> Plane {
    let services = numbers.map(|number| numbered(number, &["10.0.0.1:80"]));
    let mut plane = Plane::new(services.chain([node("a"), local("s1", &["10.0.0.1:80"])]));
    plane.epoch = 2;
    plane
}

/// An agent that holds everything of a replica with these Services.
fn agent(numbers: std::ops::Range<u8>) -> Desired {
    let mut desired = Desired::new(CliffGuard::default());
    let mut plane = other(numbers);
    plane.epoch = 1;
    desired.apply(plane.snapshot_update()).unwrap();
    desired
}

/// Returns the update that a replica makes for an agent.
fn replacement(plane: &mut Plane, agent: &Desired) -> Update {
    let digests = agent.ranges(RANGES).unwrap();
    let pieces = plane.replacement(&digests.to_bytes()).unwrap();
    plane.collect(pieces)
}

#[test]
fn only_what_differs_is_sent_and_touched() {
    let mut desired = agent(0..60);
    let mut plane = other(0..60);
    plane.put(&numbered(7, &["10.0.0.9:80"]));
    plane.delete(&DesiredKey::Service(key(8)));
    plane.put(&numbered(60, &["10.0.0.1:80"]));
    plane.delete(&DesiredKey::Local(key(1)));
    plane.put(&local("s2", &["10.0.0.1:80"]));
    let update = replacement(&mut plane, &desired);
    assert!(update.changes.len() < 60 / 2, "{}", update.changes.len());
    let dirty = desired.apply(update).unwrap();
    let expected = [1, 2, 7, 8, 60].map(key).into_iter().collect();
    assert_eq!(dirty.services, expected);
    assert!(!dirty.node_changed);
    assert_eq!(desired.resume().unwrap().digest, plane.digest());
    assert_eq!(desired.position().unwrap().epoch, 2);
    // Nothing more to replace.
    let update = replacement(&mut plane, &desired);
    assert_eq!(update.changes.len(), 2, "the node's own objects");
    assert!(desired.apply(update).unwrap().services.is_empty());
}

/// A restored state is compared as well, before it is in effect.
#[test]
fn a_state_from_the_cache_file_is_compared() {
    let saved = agent(0..20).saved_state(0).unwrap();
    let mut desired = Desired::default();
    desired.restore(saved);
    let mut plane = other(1..20);
    let update = replacement(&mut plane, &desired);
    desired.apply(update).unwrap();
    assert!(desired.service(&key(0)).is_none());
    assert_eq!(desired.digest(), plane.digest());
}

#[test]
fn a_lost_object_is_noticed_and_leads_to_a_snapshot() {
    let mut desired = agent(0..20);
    let mut plane = other(0..20);
    plane.put(&numbered(7, &["10.0.0.9:80"]));
    let mut update = replacement(&mut plane, &desired);
    update.changes.named.pop_last();
    let refusal = desired.apply(update).unwrap_err();
    assert!(matches!(refusal, Refusal::Digest { .. }), "{refusal}");
    assert_eq!(refusal.remedy(), Remedy::Snapshot);
    assert_eq!(desired.position().unwrap().epoch, 1, "nothing was taken");
}

/// Services whose absence is not trusted stay, as with a snapshot (invariant: absence).
#[test]
fn absence_is_judged_as_in_a_snapshot() {
    for confidence in [Confidence::Partial, Confidence::Unspecified] {
        let mut desired = agent(0..60);
        let mut plane = other(0..10);
        plane.confidence = confidence;
        let update = replacement(&mut plane, &desired);
        let dirty = desired.apply(update).unwrap();
        assert!(dirty.services.is_empty(), "{dirty:?}");
        assert_eq!(desired.held().unwrap().services, 50, "{confidence:?}");
        assert!(desired.service(&key(59)).is_some());
        // What the agent holds now is not what a control plane sent.
        assert_eq!(desired.ranges(RANGES), None);
        let update = agent(0..10);
        let digests = update.ranges(RANGES).unwrap();
        let pieces = plane.replacement(&digests.to_bytes()).unwrap();
        let refusal = desired.apply(plane.collect(pieces)).unwrap_err();
        assert!(matches!(refusal, Refusal::NotComparable { .. }));
        assert_eq!(refusal.remedy(), Remedy::Snapshot);
    }
}

#[test]
fn an_agent_with_invalid_objects_or_without_any_asks_for_a_snapshot() {
    assert_eq!(Desired::default().ranges(RANGES), None);
    let mut desired = agent(0..3);
    let mut plane = other(0..3);
    plane.put_raw(DesiredKey::Service(key(1)), hostile("s1"));
    desired.apply(plane.snapshot_update()).unwrap();
    assert_eq!(desired.ranges(RANGES), None);
}

#[test]
fn ranges_that_are_none_end_the_stream() {
    let plane = other(0..1);
    let mut collector = super::super::Collector::new(plane.epoch);
    let piece = kplane_proto::v1::Update {
        ranges: vec![0; 3].into(),
        ..Default::default()
    };
    let refusal = collector.push(piece).unwrap_err();
    assert_eq!(refusal, Refusal::MalformedRanges { len: 3 });
    assert_eq!(refusal.remedy(), Remedy::Reconnect);
}
