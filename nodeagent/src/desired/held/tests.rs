//! Tests of Services that are kept.

use std::collections::{BTreeMap, BTreeSet};

use kplane_model::{
    DesiredKey, DesiredObject, Family, LocalPod, PeerId, PodName, Policy, PolicyName, PolicyObject,
    ServiceKey, ServiceName, TierSpan, TrafficPolicy,
};
use kplane_proto::v1 as pb;
use kplane_proto::v1::Confidence::{self, Confirmed, Partial, Unspecified as Whole};
use proptest::prelude::*;

use super::super::fixture::{Plane, key_of, local, node, svc};
use super::super::tests::restarted;
use super::super::{CliffGuard, Desired, Dirty};

const ENDPOINT: &str = "10.0.0.1:80";

fn name(number: u8) -> String {
    format!("s{number}")
}

fn key(number: u8) -> ServiceKey {
    key_of(&name(number), Family::V4)
}

fn named(number: u8) -> DesiredKey {
    DesiredKey::Service(key(number))
}

/// A Service with an address of its own.
fn numbered(number: u8, endpoints: &[&str]) -> DesiredObject {
    with_port(number, 80, endpoints)
}

fn with_port(number: u8, port: u16, endpoints: &[&str]) -> DesiredObject {
    let DesiredObject::Service(mut program) = svc(&name(number), endpoints) else {
        panic!("a Service");
    };
    program.port.cluster_ip = [10, 96, 1, number].into();
    program.port.port = port;
    DesiredObject::Service(program)
}

fn served(numbers: std::ops::Range<u8>) -> Vec<DesiredObject> {
    numbers.map(|number| numbered(number, &[ENDPOINT])).collect()
}

/// Returns an agent that holds these objects, from a control plane that is gone.
fn holding(objects: &[DesiredObject]) -> Desired {
    let mut desired = Desired::default();
    desired.apply(Plane::new(objects.to_vec()).snapshot_update()).unwrap();
    desired
}

/// Returns another control plane.
fn plane(epoch: u64, confidence: Confidence, objects: Vec<DesiredObject>) -> Plane {
    let mut plane = Plane::new(objects);
    (plane.epoch, plane.confidence) = (epoch, confidence);
    plane
}

/// Services that are served: with endpoints, or without.
fn there(desired: &Desired) -> BTreeMap<ServiceName, bool> {
    let mut there = BTreeMap::new();
    for (program, _) in desired.services(Family::V4) {
        let any = there.entry(program.port.key.service.clone()).or_default();
        *any |= program.has_any;
    }
    there
}

fn count(desired: &Desired) -> (usize, usize) {
    let there = there(desired);
    (
        there.len(),
        there.values().filter(|served| **served).count(),
    )
}

fn held(desired: &Desired) -> (usize, usize) {
    desired.held().map_or((0, 0), |held| (held.services, held.without_endpoints))
}

/// Seen in practice: two control planes with different folders; failing over deleted 991 of 1,001
/// Services.
#[test]
fn a_cliff_is_held_until_somebody_agrees() {
    let mut desired = holding(&served(0..100));
    let mut other = plane(7, Whole, served(95..105));
    let dirty = desired.apply(other.snapshot_update()).unwrap();
    assert_eq!(dirty.services.len(), 5, "new ones are taken");
    assert_eq!((count(&desired), held(&desired)), ((105, 105), (95, 0)));
    let reported = desired.held().unwrap();
    assert_eq!(
        reported.reason,
        "95 of 100 Services would be removed at once"
    );
    assert_eq!(reported.examples.len(), 8);
    assert_eq!(reported.examples[0], "shop/s0");
    assert!(reported.since_ms > 0);
    assert_eq!(desired.resume().unwrap().digest, other.digest());

    // More changes of the same kind change nothing.
    other.put(&numbered(120, &[ENDPOINT]));
    desired.apply(other.delta_update()).unwrap();
    assert_eq!((count(&desired), held(&desired)), ((106, 106), (95, 0)));
    assert_eq!(desired.held().unwrap().since_ms, reported.since_ms);

    other.confidence = Confirmed;
    let dirty = desired.apply(other.delta_update()).unwrap();
    assert_eq!(dirty.services.len(), 95);
    assert_eq!((count(&desired), desired.held()), ((11, 11), None));
}

#[test]
fn less_than_a_cliff_is_believed() {
    for (kept, left) in [(70..100, 100), (30..100, 70), (9..18, 9)] {
        let before = if kept.end == 18 { 0..18 } else { 0..100 };
        let lost = before.len() - kept.len();
        let cliff = lost > 30;
        let mut desired = holding(&served(before));
        desired.apply(plane(7, Whole, served(kept)).snapshot_update()).unwrap();
        assert_eq!((count(&desired).0, desired.held().is_some()), (left, cliff));
    }
}

#[test]
fn what_a_partial_picture_lacks_stays_until_it_is_whole() {
    let mut objects = served(0..40);
    objects.extend([local("s0", &[ENDPOINT]), node("z")]);
    let mut desired = holding(&objects);
    let mut other = plane(7, Partial, served(1..40));
    other.doubt = "shop.yaml cannot be read".to_owned();
    let dirty = desired.apply(other.snapshot_update()).unwrap();
    assert_eq!(dirty, Dirty::default());
    assert_eq!(held(&desired), (1, 0));
    assert_eq!(desired.held().unwrap().reason, "shop.yaml cannot be read");
    assert!(
        desired.service(&key(0)).unwrap().1.is_some(),
        "and what it adds"
    );
    assert!(desired.node().is_some());

    // A deletion by name is accepted, both for named Services and for kept ones.
    other.delete(&named(1));
    desired.apply(other.delta_update()).unwrap();
    assert_eq!((count(&desired).0, held(&desired)), (39, (1, 0)));

    other.confidence = Whole;
    let dirty = desired.apply(other.delta_update()).unwrap();
    assert_eq!(dirty.services.len(), 1);
    assert!(dirty.node_changed);
    assert_eq!((count(&desired).0, desired.held()), (38, None));
}

#[test]
fn a_whole_picture_after_a_partial_one_may_still_be_a_cliff() {
    let mut desired = holding(&served(0..40));
    let mut other = plane(7, Partial, served(0..5));
    desired.apply(other.snapshot_update()).unwrap();
    other.confidence = Whole;
    assert_eq!(
        desired.apply(other.delta_update()).unwrap(),
        Dirty::default()
    );
    let reported = desired.held().unwrap();
    assert_eq!(
        (reported.services, &*reported.reason),
        (35, "35 of 40 Services would be removed at once")
    );
    // Services that are named again, or deleted by name, are not kept.
    other.put(&numbered(10, &["10.0.0.9:80"]));
    desired.apply(other.delta_update()).unwrap();
    let (program, _) = desired.service(&key(10)).unwrap();
    assert_eq!(program.endpoints[0].to_string(), "10.0.0.9:80");
    other.delete(&named(11));
    desired.apply(other.delta_update()).unwrap();
    assert_eq!((count(&desired).0, held(&desired)), (39, (33, 0)));
    assert_eq!(desired.resume().unwrap().digest, other.digest());
}

/// A missing EndpointSlice is as bad as a missing Service.
#[test]
fn endpoints_stay_as_services_do() {
    let mut objects = served(0..20);
    objects.push(local("s3", &[ENDPOINT]));
    let mut desired = holding(&objects);
    let bare: Vec<_> = (0..20).map(|number| with_port(number, 81, &[])).collect();
    let mut other = plane(7, Whole, bare);
    desired.apply(other.snapshot_update()).unwrap();
    assert_eq!((count(&desired), held(&desired)), ((20, 20), (0, 20)));
    let (program, local) = desired.service(&key(3)).unwrap();
    assert_eq!(
        (program.port.port, local.is_some()),
        (81, true),
        "the rest is new"
    );
    assert_eq!(
        desired.held().unwrap().reason,
        "20 of 20 Services would lose all endpoints at once"
    );
    assert_eq!(desired.resume().unwrap().digest, other.digest());
    assert_eq!(
        desired.apply(other.snapshot_update()).unwrap(),
        Dirty::default()
    );

    // A new version without endpoints does not remove them; one with endpoints replaces them.
    other.put(&with_port(4, 82, &[]));
    other.put(&with_port(5, 82, &["10.0.0.9:80"]));
    desired.apply(other.delta_update()).unwrap();
    assert_eq!((count(&desired), held(&desired)), ((20, 20), (0, 19)));
    assert_eq!(desired.service(&key(4)).unwrap().0.port.port, 82);

    other.confidence = Confirmed;
    let dirty = desired.apply(other.delta_update()).unwrap();
    assert_eq!(dirty.services.len(), 19);
    assert_eq!((count(&desired), desired.held()), ((20, 1), None));
    assert!(desired.service(&key(3)).unwrap().1.is_none());
    assert_eq!(desired.counts(Family::V4).endpoints, 1);
}

/// The file with the Services is repaired before the one with their slices.
#[test]
fn a_service_that_is_named_again_keeps_its_endpoints_until_it_has_some() {
    let mut desired = holding(&served(0..3));
    let mut other = plane(7, Partial, vec![node("z")]);
    desired.apply(other.snapshot_update()).unwrap();
    assert_eq!(held(&desired), (3, 0));
    other.put(&numbered(1, &[]));
    desired.apply(other.delta_update()).unwrap();
    assert_eq!((count(&desired), held(&desired)), ((3, 3), (2, 1)));
    other.put(&numbered(1, &["10.0.0.9:80"]));
    desired.apply(other.delta_update()).unwrap();
    assert_eq!((count(&desired), held(&desired)), ((3, 3), (2, 0)));
}

/// Found by the simulation: endpoints that were chosen for policy Local were kept for policy Cluster, and served nobody.
#[test]
fn endpoints_that_are_kept_keep_the_policies_that_chose_them() {
    let DesiredObject::Service(mut old) = numbered(1, &[]) else {
        panic!("a Service");
    };
    old.port.internal_policy = TrafficPolicy::Local;
    old.has_any = true;
    let old = DesiredObject::Service(old);
    let mut desired = holding(&[old, local(&name(1), &[ENDPOINT])]);
    let mut other = plane(7, Partial, vec![with_port(1, 81, &[])]);
    desired.apply(other.snapshot_update()).unwrap();
    let (program, here) = desired.service(&key(1)).unwrap();
    assert_eq!((program.port.port, here.is_some()), (81, true));
    assert_eq!(program.port.internal_policy, TrafficPolicy::Local);
    other.confidence = Confirmed;
    desired.apply(other.delta_update()).unwrap();
    let (program, here) = desired.service(&key(1)).unwrap();
    assert_eq!(program.port.internal_policy, TrafficPolicy::Cluster);
    assert!(here.is_none() && !program.has_any);
}

#[test]
fn a_service_that_is_named_wins_over_one_that_is_kept() {
    let DesiredObject::Service(mut old) = numbered(0, &[ENDPOINT]) else {
        panic!("a Service");
    };
    old.port.node_port = Some(30_000);
    let DesiredObject::Service(mut new) = numbered(1, &[ENDPOINT]) else {
        panic!("a Service");
    };
    let bystander = numbered(2, &[ENDPOINT]);
    let mut same_address = new.clone();
    same_address.port.cluster_ip = old.port.cluster_ip;
    new.port.node_port = Some(30_000);
    new.port.external_policy = TrafficPolicy::Local;
    for competing in [new, same_address] {
        let competing = DesiredObject::Service(competing);
        let mut desired = holding(&[
            DesiredObject::Service(old.clone()),
            bystander.clone(),
            local("s0", &[]),
        ]);
        let mut other = plane(7, Partial, vec![node("z")]);
        desired.apply(other.snapshot_update()).unwrap();
        other.put(&competing);
        let dirty = desired.apply(other.delta_update()).unwrap();
        let both = BTreeSet::from([key(0), key(1)]);
        assert_eq!(dirty.services, both);
        assert!(desired.service(&key(0)).is_none());
        assert_eq!(held(&desired), (1, 0), "the bystander");
        // The result is the same when both come with one snapshot.
        let mut desired = holding(&[DesiredObject::Service(old.clone()), bystander.clone()]);
        desired.apply(plane(7, Partial, vec![competing]).snapshot_update()).unwrap();
        assert_eq!((count(&desired).0, held(&desired)), (2, (1, 0)));
    }
}

fn policy(number: u8) -> DesiredObject {
    DesiredObject::Policy(PolicyObject::Policy(Policy {
        name: PolicyName::new("shop", &format!("p{number}")),
        ingress: Some(Vec::new()),
        egress: None,
    }))
}

fn pod(number: u8) -> DesiredObject {
    DesiredObject::Policy(PolicyObject::Pod(LocalPod {
        name: PodName::new("shop", &format!("pod{number}")),
        addresses: vec![[10, 0, 1, number].into()],
        ports: Vec::new(),
        policies: Vec::new(),
        tier: None,
    }))
}

/// What is kept of a Pod and of a range does not count beside the Pod and the range that have its addresses now.
#[test]
fn kept_parts_of_policies_give_way_to_named_ones() {
    let span = |last: u8| {
        DesiredObject::Policy(PolicyObject::Span(TierSpan {
            first: [10, 0, 0, 0].into(),
            last: [10, last, 255, 255].into(),
            tier: PeerId([last; 16]),
        }))
    };
    let DesiredObject::Policy(PolicyObject::Pod(mut heir)) = pod(2) else {
        panic!("a Pod");
    };
    heir.addresses = vec![[10, 0, 1, 1].into()];
    let heir = DesiredObject::Policy(PolicyObject::Pod(heir));
    let mut desired = holding(&[policy(0), pod(1), pod(3), span(0)]);
    let mut other = plane(7, Partial, vec![policy(0), heir.clone(), span(255)]);
    desired.apply(other.snapshot_update()).unwrap();
    let left: BTreeSet<_> = desired.policies().map(|(key, _)| key.clone()).collect();
    let expected = [policy(0), heir, pod(3), span(255)].map(|object| match object {
        DesiredObject::Policy(object) => object.key(),
        other => panic!("{other:?}"),
    });
    assert_eq!(left, BTreeSet::from(expected));
}

/// A control plane that forgets deletions sends a snapshot. It has named what it lacks, so that is gone, as after a difference;
/// another control plane, or one that doubts its picture, may not know of it.
#[test]
fn what_the_same_control_plane_no_longer_names_is_gone() {
    let mut objects = served(0..40);
    objects.extend([policy(0), pod(1)]);
    let first = Plane::new(objects.clone());
    for (epoch, confidence, kept) in [
        (first.epoch, Whole, false),
        (first.epoch, Partial, true),
        (first.epoch + 1, Whole, true),
    ] {
        let mut desired = holding(&objects);
        let mut emptied = plane(epoch, confidence, served(0..1));
        emptied.revision = first.revision + 1;
        desired.apply(emptied.snapshot_update()).unwrap();
        let left = there(&desired).len() > 1 && desired.has_policies();
        assert_eq!(left, kept, "{epoch} {confidence:?}");
        assert_eq!(desired.held_services() > 0, kept, "{epoch} {confidence:?}");
        // What is kept from another one is judged as before.
        desired.apply(emptied.snapshot_update()).unwrap();
        assert_eq!(desired.held_services() > 0, kept, "{epoch} {confidence:?}");
    }
}

/// All policies of a node are a cliff, however many Pods stay; so they are when the picture becomes whole later.
#[test]
fn many_pods_do_not_hide_that_all_policies_go() {
    let policies = (0..12).map(policy);
    let objects: Vec<_> = policies.chain((0..200).map(pod)).collect();
    for first in [Whole, Partial] {
        let mut desired = holding(&objects);
        let mut other = plane(7, first, objects[12..].to_vec());
        desired.apply(other.snapshot_update()).unwrap();
        other.confidence = Whole;
        desired.apply(other.delta_update()).unwrap();
        assert_eq!(desired.policies().count(), objects.len(), "{first:?}");
        other.confidence = Confirmed;
        desired.apply(other.delta_update()).unwrap();
        assert_eq!(desired.policies().count(), 200, "{first:?}");
    }
}

/// The policies of a node go with its last Pods. Those of the cluster are known by their namespaces.
#[test]
fn a_node_that_loses_its_last_policy_is_no_cliff_and_a_cluster_that_does_is_one() {
    let namespace = DesiredObject::Policy(PolicyObject::Namespace("shop".into()));
    let objects = [namespace.clone(), policy(0), pod(1)];
    let mut desired = holding(&objects);
    let mut other = plane(7, Whole, vec![namespace]);
    desired.apply(other.snapshot_update()).unwrap();
    assert_eq!((desired.policies().count(), desired.held()), (1, None));
    assert!(desired.has_policies());

    let mut desired = holding(&objects);
    let mut other = plane(7, Whole, Vec::new());
    desired.apply(other.snapshot_update()).unwrap();
    assert_eq!(desired.policies().count(), objects.len());
    assert_eq!(desired.held().map(|held| held.policies), Some(2));
    other.confidence = Confirmed;
    desired.apply(other.delta_update()).unwrap();
    assert!(!desired.has_policies());
}

/// Silence of a control plane about policies opens no Pod, whatever its source says; an order does.
#[test]
fn policies_stay_until_a_control_plane_speaks_of_them() {
    let objects = [policy(0), pod(1)];
    for (said, confidence) in [
        (pb::Enforcement::Unspecified, Confirmed),
        (pb::Enforcement::Unread, Whole),
    ] {
        let mut desired = holding(&objects);
        assert_eq!(desired.policy_doubt(), None);
        let mut other = plane(7, confidence, Vec::new());
        other.enforcement = said;
        desired.apply(other.snapshot_update()).unwrap();
        desired.apply(other.delta_update()).unwrap();
        assert_eq!(desired.policies().count(), 2, "{said:?}");
        assert_eq!(desired.held().map(|held| held.policies), Some(2));
        assert!(desired.policy_doubt().is_some() && !desired.lacks_policies());
        let mut off = restarted(&desired);
        off.apply(other.snapshot_update()).unwrap();
        assert_eq!(off.policies().count(), 2, "{said:?}, after a restart");
        other.enforcement = pb::Enforcement::Off;
        for desired in [&mut desired, &mut off] {
            desired.apply(other.delta_update()).unwrap();
            assert_eq!((desired.policies().count(), desired.held()), (0, None));
            assert_eq!(desired.policy_doubt(), None);
        }
    }
}

/// What is read later decides, as a snapshot would: one of two policies may go, and the last one not without a second word.
#[test]
fn policies_that_are_read_later_replace_those_that_were_kept() {
    for (named, left) in [(vec![policy(1), policy(2)], 2), (Vec::new(), 1)] {
        let mut desired = holding(&[policy(0)]);
        let mut other = plane(7, Whole, Vec::new());
        other.enforcement = pb::Enforcement::Unread;
        desired.apply(other.snapshot_update()).unwrap();
        named.iter().for_each(|object| other.put(object));
        other.enforcement = pb::Enforcement::On;
        desired.apply(other.delta_update()).unwrap();
        assert_eq!(desired.policies().count(), left, "{named:?}");
        other.confidence = Confirmed;
        desired.apply(other.delta_update()).unwrap();
        assert_eq!(desired.policies().count(), named.len());
    }
}

/// A node that never heard of policies is closed while the control plane reads them, and never again.
#[test]
fn an_agent_that_was_never_told_is_closed_until_policies_are_read() {
    let mut first = plane(7, Whole, Vec::new());
    first.enforcement = pb::Enforcement::Unread;
    let mut desired = Desired::new(CliffGuard::default());
    assert!(!desired.lacks_policies());
    for (said, lacks) in [
        (pb::Enforcement::Unread, true),
        (pb::Enforcement::On, false),
        (pb::Enforcement::Unread, false),
    ] {
        first.enforcement = said;
        desired.apply(first.snapshot_update()).unwrap();
        assert_eq!(desired.lacks_policies(), lacks, "{said:?}");
    }
}

/// The last policy is a cliff, however few there were.
#[test]
fn the_last_policy_does_not_go_unconfirmed() {
    let mut desired = holding(&[policy(0), pod(1)]);
    let mut other = plane(7, Whole, vec![pod(1)]);
    desired.apply(other.snapshot_update()).unwrap();
    assert_eq!(desired.policies().count(), 2);
    other.confidence = Confirmed;
    desired.apply(other.delta_update()).unwrap();
    assert_eq!(desired.policies().count(), 1);
}

/// The control plane decides about ports: a Service that is named may lose some.
#[test]
fn ports_of_a_service_that_is_named_go() {
    let DesiredObject::Service(mut other) = with_port(0, 90, &[ENDPOINT]) else {
        panic!("a Service");
    };
    other.port.key.port_name = "metrics".into();
    let mut desired = holding(&[numbered(0, &[ENDPOINT]), DesiredObject::Service(other)]);
    let mut plane = plane(7, Partial, served(0..1));
    desired.apply(plane.snapshot_update()).unwrap();
    assert_eq!(desired.services(Family::V4).count(), 1);
    assert_eq!(desired.held(), None);
}

/// The facts of a node shape all its rules, so a file that cannot be read does not remove them.
#[test]
fn facts_of_the_node_stay_with_what_is_kept() {
    let stranger = || {
        let DesiredObject::Node(mut facts) = node("z") else {
            panic!("a node");
        };
        (facts.known, facts.zone, facts.addresses) = (false, None, Vec::new());
        DesiredObject::Node(facts)
    };
    let zone = |desired: &Desired| desired.node().and_then(|node| node.zone.clone());
    let mut desired = holding(&[numbered(0, &[ENDPOINT]), node("z")]);
    let mut other = plane(7, Partial, vec![stranger(), numbered(0, &[ENDPOINT])]);
    assert_eq!(
        desired.apply(other.snapshot_update()).unwrap(),
        Dirty::default()
    );
    assert_eq!((zone(&desired), desired.held()), (Some("z".into()), None));
    other.confidence = Whole;
    assert!(desired.apply(other.delta_update()).unwrap().node_changed);
    assert_eq!(zone(&desired), None);
    desired.apply(plane(8, Whole, vec![node("z")]).snapshot_update()).unwrap();
    other = plane(9, Partial, vec![stranger()]);
    desired.apply(other.snapshot_update()).unwrap();
    other.put(&node("y"));
    desired.apply(other.delta_update()).unwrap();
    assert_eq!(zone(&desired), Some("y".into()));
}

/// After a start, the first snapshot is compared with the cache file.
#[test]
fn what_is_remembered_counts_as_if_it_had_been_there() {
    let before = holding(&served(0..40));
    let memory = before.saved_state(1).unwrap();
    let started = |confidence, objects| {
        let mut desired = Desired::default();
        desired.restore(memory.clone());
        assert_eq!((desired.position(), desired.held()), (None, None));
        let mut plane = plane(7, confidence, objects);
        let dirty = desired.apply(plane.snapshot_update()).unwrap();
        assert_eq!(desired.resume().unwrap().digest, plane.digest());
        (count(&desired).0, held(&desired).0, dirty.services.len())
    };
    assert_eq!(
        started(Whole, vec![node("z")]),
        (40, 40, 0),
        "an empty folder"
    );
    assert_eq!(started(Whole, served(0..38)), (38, 0, 2));
    assert_eq!(started(Partial, served(0..38)), (40, 2, 0));
    assert_eq!(started(Confirmed, served(0..2)), (2, 0, 38));
    let mut desired = Desired::new(CliffGuard {
        enabled: false,
        ..CliffGuard::default()
    });
    let mut twice = memory.clone();
    twice.objects.extend(memory.objects);
    desired.restore(twice);
    desired.apply(plane(7, Whole, vec![node("z")]).snapshot_update()).unwrap();
    assert_eq!(
        (count(&desired).0, desired.counts(Family::V4).services),
        (0, 0)
    );
}

#[derive(Clone, Debug)]
enum Step {
    Put(u8, u8),
    PutLocal(u8),
    Delete(u8),
    /// The control plane restarts and does not find these.
    Lose(BTreeSet<u8>),
    /// The control plane restarts and does not find the endpoints of these.
    LoseEndpoints(BTreeSet<u8>),
    Send(Confidence, bool),
}

fn any_step() -> impl Strategy<Value = Step> {
    let number = 0_u8..12;
    let some = prop::collection::btree_set(0_u8..12, 0..10);
    let confidence = prop_oneof![4 => Just(Whole), 3 => Just(Partial), 1 => Just(Confirmed)];
    prop_oneof![
        4 => (number.clone(), 0_u8..4).prop_map(|(number, port)| Step::Put(number, port)),
        1 => number.clone().prop_map(Step::PutLocal),
        1 => number.prop_map(Step::Delete),
        1 => some.clone().prop_map(Step::Lose),
        1 => some.prop_map(Step::LoseEndpoints),
        5 => (confidence, any::<bool>()).prop_map(|(word, snapshot)| Step::Send(word, snapshot)),
    ]
}

/// A control plane, and the changes since the agent's last update.
struct Story {
    plane: Plane,
    objects: BTreeMap<DesiredKey, DesiredObject>,
    /// Whether the control plane restarted, so that the agent needs a snapshot.
    fresh: bool,
    deleted: BTreeSet<ServiceName>,
}

impl Story {
    fn step(&mut self, step: &Step) {
        match step {
            Step::Put(number, 0) => self.put(numbered(*number, &[])),
            Step::Put(number, port) => {
                self.put(numbered(*number, &[&format!("10.0.0.1:{port}")]));
            }
            Step::PutLocal(number) => self.put(local(&name(*number), &[ENDPOINT])),
            Step::Delete(number) => {
                self.deleted.insert(key(*number).service.clone());
                for key in [named(*number), DesiredKey::Local(key(*number))] {
                    self.objects.remove(&key);
                    self.plane.delete(&key);
                }
            }
            Step::Lose(numbers) => {
                for number in numbers {
                    self.objects.remove(&named(*number));
                    self.objects.remove(&DesiredKey::Local(key(*number)));
                }
                self.restart();
            }
            Step::LoseEndpoints(numbers) => {
                for number in numbers {
                    self.objects.remove(&DesiredKey::Local(key(*number)));
                    let object = self.objects.get_mut(&named(*number));
                    object.into_iter().for_each(|object| *object = numbered(*number, &[]));
                }
                self.restart();
            }
            Step::Send(..) => {}
        }
    }

    fn put(&mut self, object: DesiredObject) {
        self.plane.put(&object);
        self.objects.insert(object.key(), object);
    }

    fn restart(&mut self) {
        let epoch = self.plane.epoch + 1;
        self.plane = plane(epoch, Whole, self.objects.values().cloned().collect());
        self.plane.put(&node("z"));
        self.fresh = true;
        self.deleted.clear();
    }
}

/// Returns what is planned of all Services.
fn planned(desired: &Desired) -> BTreeMap<ServiceKey, String> {
    let views = desired.services(Family::V4);
    views.map(|view| (view.0.port.key.clone(), format!("{view:?}"))).collect()
}

fn lost(before: &BTreeMap<ServiceName, bool>, after: &BTreeMap<ServiceName, bool>) -> usize {
    before.keys().filter(|name| !after.contains_key(*name)).count()
}

proptest! {
    /// After any losses and updates of control planes: the digest is the control plane's. What it
    /// names is there. What it does not name goes only for a good reason. Once nothing is kept,
    /// everything is as the control plane sends it.
    #[test]
    fn nothing_vanishes_by_accident(steps in prop::collection::vec(any_step(), 1..50)) {
        let guard = CliffGuard { minimum: 2, ..CliffGuard::default() };
        let mut desired = Desired::new(guard);
        let mut story = Story {
            plane: Plane::new([node("z")]),
            objects: BTreeMap::new(),
            fresh: true,
            deleted: BTreeSet::new(),
        };
        for step in &steps {
            story.step(step);
            let Step::Send(confidence, snapshot) = step else { continue };
            let snapshot = *snapshot || std::mem::take(&mut story.fresh);
            story.plane.confidence = *confidence;
            let update =
                if snapshot { story.plane.snapshot_update() } else { story.plane.delta_update() };
            let (plans, mut before) = (planned(&desired), there(&desired));
            let dirty = desired.apply(update).unwrap();
            let (plans_after, after) = (planned(&desired), there(&desired));
            let deleted = std::mem::take(&mut story.deleted);
            before.retain(|name, _| after.contains_key(name) || !deleted.contains(name));

            prop_assert_eq!(desired.resume().unwrap().digest, story.plane.digest());
            for key in plans.keys().chain(plans_after.keys()) {
                if plans.get(key) != plans_after.get(key) {
                    prop_assert!(dirty.services.contains(key), "{} is missing", key);
                }
            }
            let mut fresh = Desired::default();
            fresh.apply(story.plane.snapshot_update()).unwrap();
            prop_assert_eq!(lost(&there(&fresh), &after), 0);
            for (name, served) in there(&fresh) {
                prop_assert!(after[&name] || !served);
            }
            if desired.held().is_none() {
                prop_assert_eq!(&plans_after, &planned(&fresh));
            }
            prop_assert_eq!(desired.counts(Family::V4).services, plans_after.len() as u64);
            let gone = lost(&before, &after);
            match confidence {
                Confirmed => prop_assert!(desired.held().is_none()),
                Partial => prop_assert_eq!(gone, 0),
                Whole => {
                    let all = if snapshot { before.len() } else { after.len() + gone };
                    prop_assert!(!guard.is_cliff(gone, all), "{} of {}", gone, all);
                }
            }
            // The cache file leads to the same state after a start.
            let mut started = Desired::new(guard);
            started.restore(desired.saved_state(1).unwrap());
            if let Some(resume) = started.resume() {
                prop_assert_eq!((Some(resume), None), (desired.resume(), desired.held()));
            }
            started.apply(story.plane.snapshot_update()).unwrap();
            if *confidence != Whole {
                prop_assert_eq!(planned(&started), plans_after);
            }
        }
    }
}
