//! Tests of the desired state.

use bytes::Bytes;
use kplane_model::{Family, Peer, PeerId, PolicyObject, RangeDigests};
use kplane_proto::convert::encode_object;
use proptest::prelude::*;

use super::fixture::{EPOCH, Plane, RANGES, hostile, key_of, local, node, svc, svc6};
use super::*;

fn v4(name: &str) -> DesiredKey {
    DesiredKey::Service(key_of(name, Family::V4))
}

fn names(dirty: &Dirty) -> Vec<&str> {
    dirty.services.iter().map(|key| &*key.service.name).collect()
}

/// Returns a control plane, and an agent in sync with it.
fn synced(objects: impl IntoIterator<Item = DesiredObject>) -> (Plane, Desired) {
    let mut plane = Plane::new(objects);
    let mut desired = Desired::default();
    desired.apply(plane.snapshot_update()).unwrap();
    (plane, desired)
}

fn endpoints(desired: &Desired, name: &str) -> Vec<String> {
    let (program, _) = desired.service(&key_of(name, Family::V4)).unwrap();
    program.endpoints.iter().map(ToString::to_string).collect()
}

#[test]
fn a_first_snapshot_touches_everything_in_it() {
    let mut plane = Plane::new([
        svc("web", &["10.0.0.1:80"]),
        svc6("web", &[]),
        local("web", &["10.0.0.1:80"]),
        node("z1"),
    ]);
    let mut desired = Desired::default();
    assert_eq!((desired.position(), desired.resume()), (None, None));
    let dirty = desired.apply(plane.snapshot_update()).unwrap();
    let both = [key_of("web", Family::V4), key_of("web", Family::V6)];
    assert_eq!(dirty.services, BTreeSet::from(both));
    assert!(dirty.node_changed);
    let position = Position {
        epoch: EPOCH,
        revision: 4,
    };
    let digest = plane.digest();
    assert_eq!(desired.resume(), Some(Resume { position, digest }));
    let views: Vec<_> = desired.services(Family::V4).collect();
    assert_eq!(views.len(), 1);
    assert_eq!(views[0].1.unwrap().endpoints.len(), 1);
    let counts = Counts {
        services: 1,
        endpoints: 1,
    };
    assert_eq!(desired.counts(Family::V4), counts);
}

#[test]
fn a_delta_touches_what_it_names() {
    let (mut plane, mut desired) = synced([svc("a", &[]), svc("b", &[]), svc("c", &[])]);
    plane.put(&svc("b", &["10.0.0.9:80"]));
    plane.delete(&v4("c"));
    plane.put(&local("a", &["10.0.0.1:80"]));
    let dirty = desired.apply(plane.delta_update()).unwrap();
    assert_eq!(names(&dirty), ["a", "b", "c"]);
    assert!(desired.service(&key_of("c", Family::V4)).is_none());
    assert_eq!(endpoints(&desired, "b"), ["10.0.0.9:80"]);
    assert_eq!(desired.counts(Family::V4).services, 2);
}

#[test]
fn a_snapshot_removes_what_it_does_not_name_and_leaves_equals_alone() {
    let (mut plane, mut desired) = synced([svc("a", &[]), svc("b", &[]), svc("c", &[]), node("z")]);
    plane.delete(&v4("a"));
    plane.put(&svc("b", &["10.0.0.9:80"]));
    let dirty = desired.apply(plane.snapshot_update()).unwrap();
    assert_eq!(names(&dirty), ["a", "b"]);
    assert!(!dirty.node_changed);
    plane.delete(&DesiredKey::Node);
    let dirty = desired.apply(plane.snapshot_update()).unwrap();
    assert!(dirty.node_changed && dirty.services.is_empty());
    assert_eq!(desired.node(), None);
}

#[test]
fn one_bad_object_stops_nobody_and_keeps_its_place() {
    let (mut plane, mut desired) = synced([svc("a", &["10.0.0.1:80"]), svc("b", &[])]);
    plane.put_raw(v4("a"), hostile("a"));
    plane.put(&svc("b", &["10.0.0.2:80"]));
    let dirty = desired.apply(plane.delta_update()).unwrap();
    assert_eq!(names(&dirty), ["b"]);
    assert_eq!(dirty.rejects.len(), 1);
    assert_eq!(dirty.rejects[0].0, Some(v4("a")));
    assert!(
        dirty.rejects[0].1.contains("loopback"),
        "{}",
        dirty.rejects[0].1
    );
    assert_eq!(
        endpoints(&desired, "a"),
        ["10.0.0.1:80"],
        "the last good one stays"
    );

    // The digest includes the invalid object, so deltas and a resume continue.
    assert_eq!(desired.resume().unwrap().digest, plane.digest());
    let since = desired.rejects().next().unwrap().1.since_ms;
    let dirty = desired.apply(plane.snapshot_update()).unwrap();
    assert_eq!(
        dirty,
        Dirty::default(),
        "nothing is new in the same snapshot"
    );
    let (key, reject) = desired.rejects().next().unwrap();
    assert_eq!((key, reject.since_ms), (Some(&v4("a")), since));

    // A repaired or deleted object is no longer reported.
    plane.put(&svc("a", &["10.0.0.3:80"]));
    let dirty = desired.apply(plane.delta_update()).unwrap();
    assert_eq!(names(&dirty), ["a"]);
    assert_eq!(desired.rejects().count(), 0);
    plane.put_raw(v4("new"), hostile("new"));
    desired.apply(plane.delta_update()).unwrap();
    assert!(desired.service(&key_of("new", Family::V4)).is_none());
    plane.delete(&v4("new"));
    let dirty = desired.apply(plane.delta_update()).unwrap();
    assert!(dirty.services.is_empty(), "it never was in the kernel");
    assert_eq!(desired.rejects().count(), 0);
}

/// Bytes without a readable name may replace any object. The digest of such an update is accepted
/// without a check, and a reconnect asks for a snapshot.
#[test]
fn an_object_without_a_name_suspends_the_resume_until_a_snapshot() {
    let (mut plane, mut desired) = synced([svc("a", &[])]);
    plane.put_raw(v4("x"), Bytes::from_static(b"\x0a\xff"));
    plane.put(&svc("b", &[]));
    let dirty = desired.apply(plane.delta_update()).unwrap();
    assert_eq!(names(&dirty), ["b"]);
    assert_eq!(dirty.rejects[0].0, None);
    assert_eq!(desired.resume(), None);

    // Later updates are checked again, which does not make up for the unchecked one.
    plane.put(&svc("c", &[]));
    desired.apply(plane.delta_update()).unwrap();
    assert_eq!(desired.resume(), None);
    let mut bad = plane.delta_update();
    bad.digest = Digest::default();
    assert!(desired.apply(bad).is_err());

    desired.apply(plane.snapshot_update()).unwrap();
    assert_eq!(desired.resume().unwrap().digest, plane.digest());
    assert_eq!(desired.rejects().count(), 1, "still there, still named");
}

#[test]
fn kinds_of_the_future_are_counted_and_skipped() {
    let (mut plane, mut desired) = synced([svc("a", &[])]);
    // Field 15, length 1: a kind that does not exist.
    plane.put_raw(v4("x"), Bytes::from_static(b"\x7a\x01\x00"));
    let dirty = desired.apply(plane.snapshot_update()).unwrap();
    assert_eq!((dirty.unknown_kinds, dirty.services.len()), (1, 0));
    assert_eq!(desired.resume().unwrap().digest, plane.digest());
    let mut delta = plane.delta_update();
    delta.changes = Staged::of(vec![staged::Change::gone(Default::default())]);
    delta.digest = Digest::default();
    assert_eq!(desired.apply(delta).unwrap().unknown_kinds, 1);
    assert_eq!(desired.resume(), None);
}

#[test]
fn a_wrong_digest_takes_nothing() {
    let (mut plane, mut desired) = synced([svc("a", &[]), svc("b", &[])]);
    let before = desired.resume();
    plane.delete(&v4("a"));
    plane.put(&svc("b", &["10.0.0.1:80"]));
    for mut update in [plane.delta_update(), plane.snapshot_update()] {
        update.changes.named.pop_last();
        let refusal = desired.apply(update).unwrap_err();
        assert!(matches!(refusal, Refusal::Digest { .. }), "{refusal}");
        assert_eq!(refusal.remedy(), Remedy::Snapshot);
        assert_eq!(desired.resume(), before);
        assert!(endpoints(&desired, "b").is_empty());
        assert_eq!(desired.counts(Family::V4).services, 2);
    }
}

#[test]
fn a_delta_before_a_snapshot_is_refused() {
    let refusal = Desired::default()
        .apply(Plane::new([svc("a", &[])]).delta_update())
        .unwrap_err();
    assert_eq!(refusal.remedy(), Remedy::Snapshot);
}

#[test]
fn time_does_not_go_back_within_an_epoch() {
    let (mut plane, mut desired) = synced([svc("a", &[]), svc("b", &[])]);
    let mut at = |epoch, revision| {
        (plane.epoch, plane.revision) = (epoch, revision);
        let taken = desired.apply(plane.snapshot_update());
        (taken.map(|_| ()), desired.position().unwrap())
    };
    let older = |held, got| {
        let here = |revision| Position {
            epoch: EPOCH,
            revision,
        };
        Err(Refusal::Older {
            held: here(held),
            got: here(got),
        })
    };
    assert_eq!(at(EPOCH, 1).0, older(2, 1));
    assert_eq!(at(EPOCH, 2).0, Ok(()), "the same once more");
    // Each replica has its own revisions; a return to the first one must not go back.
    assert_eq!(
        at(7, 1),
        (
            Ok(()),
            Position {
                epoch: 7,
                revision: 1
            }
        )
    );
    assert_eq!(at(EPOCH, 1).0, older(2, 1));
    assert_eq!(
        at(EPOCH, 3),
        (
            Ok(()),
            Position {
                epoch: EPOCH,
                revision: 3
            }
        )
    );
    // The number of remembered replicas is bounded.
    for epoch in 100..200 {
        assert_eq!(at(epoch, 1).0, Ok(()));
    }
    assert!(desired.positions.len() <= MAX_EPOCHS);
}

/// A new replica with the same content ends an empty update: no work, but a new position.
#[test]
fn an_equal_digest_moves_to_another_epoch_without_a_snapshot() {
    let (mut plane, mut desired) = synced([svc("a", &[])]);
    (plane.epoch, plane.revision) = (99, 1);
    assert_eq!(
        desired.apply(plane.delta_update()).unwrap(),
        Dirty::default()
    );
    assert_eq!(
        desired.position(),
        Some(Position {
            epoch: 99,
            revision: 1
        })
    );
}

/// Returns an agent that has just started with what another one saved.
pub(super) fn restarted(before: &Desired) -> Desired {
    let mut saved = before.saved_state(1).unwrap();
    // The file has objects, and no hashes of them.
    for one in &mut saved.objects {
        one.hash = ObjectHash::of(&encode_object(&one.object));
    }
    let mut desired = Desired::default();
    desired.restore(saved);
    desired
}

/// The node's addresses are remembered when the Node object goes or names none, also across restarts.
#[test]
fn a21_the_last_known_address_outlives_the_node_object() {
    let ip = |text: &str| Some(text.parse().unwrap());
    let facts = |addresses: &[&str]| {
        DesiredObject::Node(NodeFacts {
            name: "n1".into(),
            known: !addresses.is_empty(),
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            ..NodeFacts::default()
        })
    };
    let (mut plane, mut desired) = synced([svc("a", &[]), facts(&["192.0.2.1", "192.0.2.2"])]);
    assert_eq!(desired.last_known(), [ip("192.0.2.1"), None]);
    let known = [ip("192.0.2.2"), ip("2001:db8::1")];
    for (addresses, expected) in [
        (&["192.0.2.2", "2001:db8::1"][..], known),
        (&["2001:db8::1"], known),
        (&[], known),
    ] {
        plane.put(&facts(addresses));
        desired.apply(plane.delta_update()).unwrap();
        assert_eq!(desired.last_known(), expected, "{addresses:?}");
    }
    let mut desired = restarted(&desired);
    assert_eq!(
        desired.last_known(),
        known,
        "the object has no address any more"
    );
    desired.apply(plane.snapshot_update()).unwrap();
    assert_eq!(desired.last_known(), known);
    // Files of earlier releases have the objects alone.
    let (_, before) = synced([svc("a", &[]), facts(&["192.0.2.1"])]);
    let earlier = SavedState {
        last_known: [None; 2],
        ..before.saved_state(1).unwrap()
    };
    let mut desired = Desired::default();
    desired.restore(earlier);
    assert_eq!(desired.last_known(), [ip("192.0.2.1"), None]);
}

/// The ranges of the node's Pods are remembered when the Node object goes or names none, also across restarts.
#[test]
fn np19_the_last_known_pod_ranges_outlive_the_node_object() {
    let cidrs =
        |texts: &[&str]| -> Vec<Cidr> { texts.iter().map(|t| t.parse().unwrap()).collect() };
    let facts = |ranges: &[&str]| {
        DesiredObject::Node(NodeFacts {
            name: "n1".into(),
            known: !ranges.is_empty(),
            pod_cidrs: cidrs(ranges),
            ..NodeFacts::default()
        })
    };
    let (mut plane, mut desired) = synced([svc("a", &[]), facts(&["10.1.0.0/24"])]);
    let both = &["10.1.1.0/24", "fd00:1::/64"][..];
    for (named, known, lost) in [
        (both, both, 0),
        (&["fd00:2::/64"], &["fd00:2::/64", "10.1.1.0/24"], 1),
        (&[], &["fd00:2::/64", "10.1.1.0/24"], 2),
    ] {
        plane.put(&facts(named));
        desired.apply(plane.delta_update()).unwrap();
        assert_eq!(desired.pod_ranges(), cidrs(known));
        assert_eq!(desired.lost_pod_ranges().count(), lost, "{named:?}");
    }
    let mut desired = restarted(&desired);
    desired.apply(plane.snapshot_update()).unwrap();
    assert_eq!(desired.pod_ranges(), cidrs(&["fd00:2::/64", "10.1.1.0/24"]));
}

/// What an earlier process served is in effect with the first difference from it, or without one while no
/// control plane answers.
#[test]
fn a_restored_state_is_continued_by_differences() {
    let (mut plane, before) = synced([svc("a", &["10.0.0.1:80"]), local("a", &[]), node("z")]);
    for alone in [false, true] {
        let mut desired = restarted(&before);
        assert_eq!(desired.resume(), before.resume());
        assert_eq!((desired.position(), desired.saved_state(1)), (None, None));
        assert!(desired.remembers_services() && !desired.is_stale());
        if alone {
            desired.serve_restored();
            assert_eq!(desired.position(), before.position());
            assert_eq!(desired.saved_state(1), before.saved_state(1));
        }
        assert_eq!(desired.is_stale(), alone);
        plane.put(&svc("b", &[]));
        let dirty = desired.apply(plane.delta_update()).unwrap();
        assert_eq!(names(&dirty), ["b"]);
        assert_eq!(desired.resume().unwrap().digest, plane.digest());
        assert_eq!(endpoints(&desired, "a"), ["10.0.0.1:80"]);
        assert!(!desired.is_stale() && !desired.remembers_services());
        plane.delete(&v4("b"));
        plane.delta();
    }
    // An older replica of the same control plane is refused, as if nothing had happened.
    let mut desired = restarted(&before);
    plane.revision = 1;
    let older = desired.apply(plane.snapshot_update());
    assert!(matches!(older, Err(Refusal::Older { .. })), "{older:?}");
}

/// A state that is not exactly what the control plane sent is served, and completed by a snapshot.
#[test]
fn what_is_not_as_it_was_sent_is_no_state_to_continue_from() {
    let (mut plane, mut desired) = synced([svc("a", &["10.0.0.1:80"]), svc("b", &[])]);
    plane.put_raw(v4("b"), hostile("b"));
    desired.apply(plane.delta_update()).unwrap();
    assert!(desired.resume().is_some());
    let mut next = restarted(&desired);
    assert_eq!(next.resume(), None, "b is an older object than was sent");
    next.serve_restored();
    assert_eq!((next.resume(), next.counts(Family::V4).services), (None, 2));
    // Differences are refused, even one that pretends to fit.
    let delta = next.apply(plane.delta_update());
    assert!(
        matches!(delta, Err(Refusal::NoSnapshot { .. })),
        "{delta:?}"
    );
    next.apply(plane.snapshot_update()).unwrap();
    assert_eq!(next.resume().unwrap().digest, plane.digest());

    // This version does not understand a part of an object: it served the object without that part.
    let mut newer = encode_object(&svc("c", &[])).to_vec();
    newer.extend([0xfa, 0x3e, 1, 0]);
    plane.put_raw(v4("c"), newer.into());
    next.apply(plane.delta_update()).unwrap();
    assert_eq!(restarted(&next).resume(), None);
}

/// The size of a Service is known again after a restart, although nothing touches the Service.
#[test]
fn a_restored_service_that_asks_for_too_much_is_cut() {
    let endpoints: Vec<String> = (0..300_000_u32)
        .map(|n| format!("{}:80", std::net::Ipv4Addr::from(0x0a00_0000 + n)))
        .collect();
    let endpoints: Vec<&str> = endpoints.iter().map(String::as_str).collect();
    let (mut plane, before) = synced([svc("big", &endpoints)]);
    let big = key_of("big", Family::V4).service.clone();
    assert!(before.allowance(&big).is_some());
    let mut desired = restarted(&before);
    assert_eq!(desired.allowance(&big), before.allowance(&big));
    desired.apply(plane.snapshot_update()).unwrap();
    assert_eq!(desired.allowance(&big), before.allowance(&big));
}

#[test]
fn pieces_before_a_snapshot_mark_are_forgotten() {
    let mut plane = Plane::new([svc("a", &[]), svc("b", &[])]);
    let mut collector = Collector::new(EPOCH);
    let stray = pb_piece(&svc("stray", &[]));
    assert!(collector.push(stray).unwrap().is_none());
    let mut pieces = plane.snapshot().into_iter();
    let last = pieces.next_back().unwrap();
    for piece in pieces {
        assert!(collector.push(piece).unwrap().is_none());
    }
    let update = collector.push(last).unwrap().unwrap();
    assert_eq!((update.snapshot, update.changes.len()), (true, 2));
    // The next one starts from nothing.
    plane.put(&svc("c", &[]));
    let update = collector.push(plane.delta().remove(0)).unwrap().unwrap();
    assert_eq!((update.snapshot, update.changes.len()), (false, 1));
}

#[test]
fn ends_that_are_wrong_are_refused() {
    let mut piece = Plane::new([svc("a", &[])]).delta().remove(0);
    piece.end.as_mut().unwrap().digest.clear();
    let refusal = Collector::new(EPOCH).push(piece).unwrap_err();
    assert_eq!(refusal, Refusal::Malformed { len: 0 });
    assert_eq!(refusal.remedy(), Remedy::Reconnect);
}

fn pb_piece(object: &DesiredObject) -> kplane_proto::v1::Update {
    kplane_proto::v1::Update {
        objects: vec![encode_object(object)],
        ..Default::default()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Put(u8, u8),
    PutLocal(u8, u8),
    Hostile(u8, u8),
    Delete(u8),
    Node(u8),
    Peer(u8, u8),
    NoPeer(u8),
    Send { snapshot: bool },
    SendRanges,
}

fn any_step() -> impl Strategy<Value = Step> {
    let name = 0_u8..6;
    prop_oneof![
        3 => (name.clone(), 0_u8..4).prop_map(|(name, port)| Step::Put(name, port)),
        2 => (name.clone(), 0_u8..4).prop_map(|(name, port)| Step::PutLocal(name, port)),
        1 => (name.clone(), 0_u8..3).prop_map(|(name, salt)| Step::Hostile(name, salt)),
        2 => name.prop_map(Step::Delete),
        1 => (0_u8..3).prop_map(Step::Node),
        3 => (0_u8..40, 0_u8..3).prop_map(|(ip, class)| Step::Peer(ip, class)),
        1 => (0_u8..40).prop_map(Step::NoPeer),
        3 => any::<bool>().prop_map(|snapshot| Step::Send { snapshot }),
        2 => Just(Step::SendRanges),
    ]
}

fn change(plane: &mut Plane, step: &Step) {
    let endpoint = |port: u8| format!("10.0.0.1:{}", 8_000 + u16::from(port));
    let of = |name: &u8| format!("s{name}");
    match step {
        Step::Put(name, port) => plane.put(&svc(&of(name), &[&endpoint(*port)])),
        Step::PutLocal(name, port) => plane.put(&local(&of(name), &[&endpoint(*port)])),
        Step::Hostile(name, salt) => {
            let bad = format!("127.0.0.{salt}:80");
            plane.put_raw(v4(&of(name)), encode_object(&svc(&of(name), &[&bad])));
        }
        Step::Delete(name) => plane.delete(&v4(&of(name))),
        Step::Node(zone) => plane.put(&node(&of(zone))),
        Step::Peer(ip, class) => plane.put(&peer(*ip, *class)),
        Step::NoPeer(ip) => plane.delete(&peer(*ip, 0).key()),
        Step::Send { .. } | Step::SendRanges => {}
    }
}

proptest! {
    /// After any changes: the digest is that of the control plane, every difference is touched,
    /// counts are right, and the same snapshot again touches nothing.
    #[test]
    fn agent_and_control_plane_agree(steps in prop::collection::vec(any_step(), 1..60)) {
        let (mut plane, mut desired) = synced([svc("s0", &[])]);
        for step in &steps {
            change(&mut plane, step);
            let (before, policies) = (planned(&desired), policies_of(&desired));
            let update = match step {
                Step::Send { snapshot: true } => plane.snapshot_update(),
                Step::Send { snapshot: false } => plane.delta_update(),
                Step::SendRanges => match desired.ranges(RANGES) {
                    Some(digests) => {
                        let pieces = plane_ranges(&mut plane, &digests);
                        plane.collect(pieces)
                    }
                    None => plane.snapshot_update(),
                },
                _ => continue,
            };
            let dirty = desired.apply(update).unwrap();
            prop_assert_eq!(desired.resume().unwrap().digest, plane.digest());
            let after = planned(&desired);
            for key in before.keys().chain(after.keys()) {
                if before.get(key) != after.get(key) {
                    prop_assert!(dirty.services.contains(key), "{} is missing", key);
                }
            }
            let now = policies_of(&desired);
            for key in policies.keys().chain(now.keys()) {
                let differs = policies.get(key) != now.get(key);
                prop_assert_eq!(dirty.policies.contains(key), differs, "{}", key);
            }
            let fresh = Desired::default().counts_after(plane.snapshot_update());
            // The agent also counts objects whose last valid version stays, which a new agent does
            // not have.
            prop_assert!(desired.counts(Family::V4).services >= fresh.services);
            prop_assert_eq!(desired.counts(Family::V4).services, after.len() as u64);
            let again = desired.apply(plane.snapshot_update()).unwrap();
            prop_assert_eq!(again, Dirty::default());
        }
    }
}

fn plane_ranges(plane: &mut Plane, digests: &RangeDigests) -> Vec<kplane_proto::v1::Update> {
    plane.replacement(&digests.to_bytes()).unwrap()
}

/// Returns what planning gets of each ServicePort.
fn planned(desired: &Desired) -> BTreeMap<ServiceKey, String> {
    let views = desired.services(Family::V4);
    views
        .map(|view| {
            let key = &view.0.port.key;
            assert_eq!(
                desired.service(key),
                Some(view),
                "both ways to see it agree"
            );
            (key.clone(), format!("{view:?}"))
        })
        .collect()
}

fn policies_of(desired: &Desired) -> BTreeMap<PolicyKey, PolicyObject> {
    let policies = desired.policies();
    policies.map(|(key, object)| (key.clone(), object.clone())).collect()
}

fn peer(ip: u8, class: u8) -> DesiredObject {
    DesiredObject::Policy(PolicyObject::Peer(Peer {
        address: [10, 0, 0, ip].into(),
        class: PeerId([class; 16]),
        tier: None,
    }))
}

impl Desired {
    fn counts_after(mut self, update: Update) -> Counts {
        self.apply(update).unwrap();
        self.counts(Family::V4)
    }
}
