//! The content of one family's table: objects in, elements out. This module is pure.
//!
//! Each object is taken over by itself: what depended on the old one is taken back, and what depends on the new one is
//! added, with counts of how many parts of policies need an element. So a change costs what it concerns.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;

use kplane_model::{
    Cidr, Direction, Family, GroupId, LocalPod, PeerClass, PeerId, PodName, Policy, PolicyKey,
    PolicyName, PolicyObject,
};

use super::blocks::{Blocks, Range};
use super::elsewhere::Elsewhere;
use super::expand::{Member, Terms, addresses};
use super::followed::Followed;
use super::held::Held;
use super::numbers::Numbers;
use super::objects::Objects;
use super::ported::name_of;
use super::refused::RefusedPods;
use super::shares::{ElementLimits, Grants};
use super::suspects::Suspects;
use super::tiers::Tiers;
use super::{PolicyChange, PolicyFailure, PolicyPart};
use crate::backend::nftables::{Key, PolicySet};
use crate::plan::disjoint;

/// Count of numbers up to which those of classes that are gone are kept.
const SPARE_NUMBERS: usize = 4096;

/// The objects of a family, and the elements that they need.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) family: Family,
    pub(super) objects: Objects,
    pub(super) numbers: Numbers,
    pub(super) blocks: Blocks,
    pub(super) tiers: Tiers,
    pub(super) held: Held,
    /// Pairs of policies and Pods that are left out, and prices.
    pub(super) grants: Grants,
    /// Number of elements that the decisions of tiers for each Pod need.
    pub(super) weights: BTreeMap<PodName, u64>,
    /// Pods that are cut off: their decisions need too many elements, or the kernel refuses some.
    pub(super) cut_off: BTreeSet<PodName>,
    pub(super) refused: RefusedPods,
    /// What is not enforced as written; `None` = it has to be found out anew.
    pub(super) failures: Option<Vec<PolicyFailure>>,
    /// The count of numbers at which those of classes that are gone are forgotten.
    most_numbers: usize,
    ranges: Vec<Cidr>,
    pub(super) elsewhere: Elsewhere,
    /// Nobody knows yet which policies there are.
    closed: bool,
    /// A part of a change is taken over.
    pub(super) begun: bool,
    pub(super) limits: ElementLimits,
    pub(super) followed: Followed,
    /// Addresses of the Pods that are followed.
    pub(super) sampled: BTreeSet<IpAddr>,
}

impl Content {
    pub(super) fn new(family: Family) -> Self {
        Self {
            family,
            objects: Objects::default(),
            numbers: Numbers::default(),
            blocks: Blocks::default(),
            tiers: Tiers::default(),
            held: Held::default(),
            grants: Grants::default(),
            weights: BTreeMap::new(),
            cut_off: BTreeSet::new(),
            refused: RefusedPods::default(),
            failures: None,
            most_numbers: SPARE_NUMBERS,
            ranges: Vec::new(),
            elsewhere: Elsewhere::default(),
            closed: false,
            begun: false,
            limits: ElementLimits::default(),
            followed: Followed::default(),
            sampled: BTreeSet::new(),
        }
    }

    /// Removes everything, but gives no number again that meant something else.
    pub(super) fn clear(&mut self) {
        *self = Self {
            numbers: std::mem::take(&mut self.numbers),
            limits: self.limits,
            refused: std::mem::take(&mut self.refused),
            followed: std::mem::take(&mut self.followed),
            ..Self::new(self.family)
        };
    }

    /// Returns whether an address is in the ranges of this node's Pods.
    pub(super) fn is_in_range(&self, ip: IpAddr) -> bool {
        self.ranges.iter().any(|range| range.contains(ip))
    }

    /// Returns whether there is a policy, of whatever Pods, or it is not known yet which there are. Older control planes
    /// name no namespaces.
    pub(super) fn has_policies(&self) -> bool {
        let objects = &self.objects;
        let any = !objects.namespaces.is_empty() || !objects.policies.is_empty();
        self.closed || any || !self.tiers.policies.is_empty()
    }

    fn begin(&mut self) {
        if !std::mem::replace(&mut self.begun, true) {
            self.tiers.forget_rows();
        }
    }

    /// Takes over some objects of a change whose rest [`Content::apply`] takes over.
    pub(super) fn take_over(&mut self, objects: &[PolicyPart<'_>], suspects: &mut Suspects) {
        self.begin();
        // Pods come last, and find the rest.
        let is_pod = |key: &PolicyKey| matches!(key, PolicyKey::Pod(_));
        for pods in [false, true] {
            for (key, object) in objects.iter().filter(|(key, _)| is_pod(key) == pods) {
                if let (PolicyKey::Policy(name), Some(PolicyObject::Policy(policy))) = (key, object)
                {
                    self.set_aside(name, suspects.works_on(name, policy));
                }
                self.set(key, *object);
            }
        }
    }

    /// Takes over a change.
    pub(super) fn apply(&mut self, change: PolicyChange<'_>, suspects: &mut Suspects) {
        self.begin();
        if change.complete {
            let named: HashSet<&PolicyKey> = change.objects.iter().map(|(key, _)| key).collect();
            let gone = self.keys().into_iter().filter(|key| !named.contains(key));
            for key in gone.collect::<Vec<_>>() {
                self.set(&key, None);
            }
        }
        self.take_over(change.objects, suspects);
        self.closed = change.closed;
        let ranges_changed = self.set_ranges(change.pod_ranges);
        self.renew_elsewhere(ranges_changed);
        self.renew_spans();
        self.keep_limits();
        self.grant_all(suspects);
        self.recut();
        self.renew_rows();
        self.sample();
        self.forget_numbers();
        suspects.is_done();
        self.begun = false;
        if !self.cut_off.is_empty() {
            self.failures = None;
        }
        if self.failures.is_none() {
            self.failures = Some(self.find_failures());
        }
    }

    /// Returns all parts that are not enforced as written.
    pub(super) fn failures(&self) -> &[PolicyFailure] {
        self.failures.as_deref().unwrap_or_default()
    }

    fn keys(&self) -> Vec<PolicyKey> {
        let objects = &self.objects;
        let groups = objects
            .groups
            .iter()
            .flat_map(|(id, parts)| parts.keys().map(|n| PolicyKey::Group(*id, *n)));
        let pods = objects.pods.keys().cloned().map(PolicyKey::Pod);
        let tiers = self
            .tiers
            .decisions
            .iter()
            .flat_map(|(id, parts)| parts.keys().map(|n| PolicyKey::Decisions(*id, *n)))
            .chain(self.tiers.spans.keys().map(|(a, b)| PolicyKey::Span(*a, *b)))
            .chain(self.tiers.policies.iter().cloned().map(PolicyKey::Cluster))
            .chain(objects.namespaces.iter().cloned().map(PolicyKey::Namespace));
        pods.chain(objects.peers.keys().copied().map(PolicyKey::Peer))
            .chain(objects.classes.keys().copied().map(PolicyKey::Class))
            .chain(groups)
            .chain(objects.policies.keys().cloned().map(PolicyKey::Policy))
            .chain(tiers)
            .collect()
    }

    fn set(&mut self, key: &PolicyKey, object: Option<&PolicyObject>) {
        match (key, object) {
            (PolicyKey::Peer(address), Some(PolicyObject::Peer(peer))) => {
                self.set_peer(*address, Some((peer.class, peer.tier)));
            }
            (PolicyKey::Class(id), Some(PolicyObject::Class(class))) => {
                self.set_class(*id, Some(class));
            }
            (PolicyKey::Group(id, part), Some(PolicyObject::Group(group))) => {
                self.set_group(*id, *part, &group.members);
            }
            (PolicyKey::Policy(name), Some(PolicyObject::Policy(policy))) => {
                self.set_policy(name, Some(policy));
            }
            (PolicyKey::Pod(name), Some(PolicyObject::Pod(pod))) => self.set_pod(name, Some(pod)),
            (PolicyKey::Span(first, last), Some(PolicyObject::Span(span))) => {
                self.set_span((*first, *last), Some(span));
            }
            (PolicyKey::Decisions(id, part), Some(PolicyObject::Decisions(new))) => {
                self.set_decisions(*id, *part, Some(&new.rows));
            }
            (PolicyKey::Namespace(name), Some(PolicyObject::Namespace(_))) => {
                self.objects.namespaces.insert(name.clone());
            }
            (PolicyKey::Cluster(name), new) => {
                self.set_cluster_policy(name, matches!(new, Some(PolicyObject::Cluster(_))));
            }
            // An object under the key of another kind is none.
            (PolicyKey::Peer(address), _) => self.set_peer(*address, None),
            (PolicyKey::Class(id), _) => self.set_class(*id, None),
            (PolicyKey::Group(id, part), _) => self.set_group(*id, *part, &[]),
            (PolicyKey::Policy(name), _) => self.set_policy(name, None),
            (PolicyKey::Namespace(name), _) => drop(self.objects.namespaces.remove(name)),
            (PolicyKey::Pod(name), _) => self.set_pod(name, None),
            (PolicyKey::Span(first, last), _) => self.set_span((*first, *last), None),
            (PolicyKey::Decisions(id, part), _) => self.set_decisions(*id, *part, None),
        }
    }

    fn set_peer(&mut self, address: IpAddr, peer: Option<(PeerId, Option<PeerId>)>) {
        if Family::of(address) != self.family {
            return;
        }
        self.set_tier_of(address, peer.and_then(|(_, tier)| tier));
        let class = peer.map(|(class, _)| class);
        self.elsewhere.touch(address);
        match class {
            Some(class) => self.objects.peers.insert(address, class),
            None => self.objects.peers.remove(&address),
        };
        let number = class.map(|class| self.numbers.give(class));
        self.held.set((PolicySet::Peers, Key::Ip(address)), number);
    }

    fn set_class(&mut self, id: PeerId, new: Option<&PeerClass>) {
        let ports = new.map_or(&[][..], |class| &class.ports);
        let ported = &mut self.objects.ported;
        let mut names: BTreeSet<_> = ported.names(id).collect();
        names.extend(ports.iter().map(name_of));
        for policy in self.objects.policies_naming(&names) {
            self.retract(&policy);
        }
        if let Some(parent) = self.objects.classes.remove(&id) {
            self.parents(id, parent, false);
        }
        let parent = new.map_or(id, |class| class.parent);
        self.objects.ported.set(id, parent, ports);
        if new.is_some() {
            self.objects.classes.insert(id, parent);
            self.parents(id, parent, true);
        }
    }

    fn parents(&mut self, class: PeerId, namespace: PeerId, there: bool) {
        let [class, parent, all] =
            [class, namespace, PeerId::ALL_PODS].map(|id| self.numbers.give(id));
        for (of, to) in [(class, parent), (parent, all)] {
            let place = (PolicySet::Parents, Key::Number(of));
            self.held.count(place, Some(to), there);
        }
    }

    fn set_group(&mut self, id: GroupId, part: u8, new: &[PeerId]) {
        for member in new {
            self.numbers.give(*member);
        }
        let parts = self.objects.groups.get(&id);
        let old = parts.and_then(|parts| parts.get(&part).cloned()).unwrap_or_default();
        let only = |these: &[PeerId], those: &[PeerId]| -> Vec<Member> {
            these
                .iter()
                .copied()
                .filter(|member| those.binary_search(member).is_err())
                .map(Member::Peer)
                .collect()
        };
        let (gone, come) = (only(&old, new), only(new, &old));
        self.regroup(id, &gone, &come, |content| {
            let parts = content.objects.groups.entry(id).or_default();
            match new {
                [] => parts.remove(&part),
                _ => parts.insert(part, new.to_vec()),
            };
            if parts.is_empty() {
                content.objects.groups.remove(&id);
            }
        });
    }

    pub(super) fn terms(&self) -> Terms<'_> {
        Terms {
            family: self.family,
            objects: &self.objects,
            numbers: &self.numbers,
        }
    }

    fn set_policy(&mut self, name: &PolicyName, new: Option<&Policy>) {
        if self.objects.policies.get(name) == new {
            return;
        }
        self.failures = None;
        if new.is_none() {
            self.set_aside(name, false);
        }
        let pods = self.objects.pods_of(name);
        let is_other = self.objects.policies.contains_key(name);
        for pod in &pods {
            if is_other {
                self.refused.forget(pod);
            }
            self.isolate(pod, name, false);
        }
        self.retract(name);
        self.objects.set_policy(name, new);
        self.count_ranges(name);
        for pod in &pods {
            self.isolate(pod, name, true);
        }
    }

    fn set_pod(&mut self, name: &PodName, new: Option<&LocalPod>) {
        if self.objects.pods.get(name) == new {
            return;
        }
        self.failures = None;
        if let Some(old) = self.objects.pods.get(name).cloned() {
            self.refused.forget(name);
            for policy in &old.policies {
                self.isolate(name, policy, false);
                self.forget_pair(name, policy);
                self.objects.set_pair(name, policy, false);
            }
            self.set_addresses(&old, false);
            self.tier(name, false);
            self.set_subject(name, old.tier, false);
            self.objects.pods.remove(name);
            self.weights.remove(name);
        }
        let Some(new) = new else {
            self.cut_off.remove(name);
            return;
        };
        self.objects.pods.insert(name.clone(), new.clone());
        self.weights.insert(name.clone(), 0);
        self.set_addresses(new, true);
        self.set_subject(name, new.tier, true);
        self.tier(name, true);
        for policy in &new.policies {
            self.objects.set_pair(name, policy, true);
            self.isolate(name, policy, true);
            self.await_pair(name, policy);
        }
    }

    /// Records that a policy may deny a Pod something, or takes that back. A policy that is not known may be about both
    /// directions.
    pub(super) fn isolate(&mut self, name: &PodName, policy: &PolicyName, there: bool) {
        let Some(pod) = self.objects.pods.get(name) else {
            return;
        };
        let policy = self.objects.policies.get(policy);
        let is_cut_off = self.cut_off.contains(name);
        let is_about = |direction: &Direction| {
            is_cut_off || policy.is_none_or(|policy| policy.rules(*direction).is_some())
        };
        for direction in Direction::ALL.into_iter().filter(is_about) {
            for address in addresses(pod, self.family) {
                self.held.subject(PolicySet::Isolated(direction), direction, address, there);
            }
        }
    }

    /// Sets the ranges of the node's Pods. Where one is isolated, that of link-local addresses is among them: the API does
    /// not say which Pod has one, and only a bridge hands their packets on. Returns whether they are others than before.
    fn set_ranges(&mut self, ranges: &[Cidr]) -> bool {
        let isolates = self
            .objects
            .pods
            .values()
            .any(|pod| !pod.policies.is_empty() || pod.tier.is_some());
        let ranges = ranges.iter().copied();
        let link_local = Cidr::new([0xfe80, 0, 0, 0, 0, 0, 0, 0].into(), 10);
        let ranges: Vec<Cidr> = ranges
            .chain(if isolates { link_local } else { None })
            .filter(|r| r.family() == self.family)
            .collect();
        let new = disjoint(&ranges);
        let old = std::mem::replace(&mut self.ranges, new.clone());
        let place = |range| (PolicySet::LocalRanges, Key::Range(range));
        for range in old.iter().filter(|range| !new.contains(range)) {
            self.held.remove(place(*range));
        }
        for range in new.iter().filter(|range| !old.contains(range)) {
            self.held.add(place(*range), None);
        }
        old != new
    }

    /// Finds anew which addresses in the ranges Pods of other nodes have.
    fn renew_elsewhere(&mut self, ranges_changed: bool) {
        let (objects, ranges) = (&self.objects, &self.ranges);
        let is_in_range = |ip| ranges.iter().any(|range| range.contains(ip));
        let elsewhere = &mut self.elsewhere;
        let changes = elsewhere.renew(objects, self.family, is_in_range, ranges_changed);
        for (address, there) in changes {
            let place = (PolicySet::LocalPods, Key::Ip(address));
            self.held.count(place, None, there);
        }
    }

    /// Cuts the blocks anew.
    fn recut(&mut self) {
        let Some((old, new)) = self.blocks.recut() else {
            return;
        };
        let place = |range: &Range| (PolicySet::Blocks, Key::Span(range.first, range.last));
        for range in gone(&old.ranges, &new.ranges) {
            self.held.set(place(range), None);
        }
        for range in gone(&new.ranges, &old.ranges) {
            self.held.set(place(range), Some(range.number));
        }
        let place = |child| (PolicySet::Parents, Key::Number(child));
        for (child, _) in gone(&old.parents, &new.parents) {
            self.held.set(place(*child), None);
        }
        for (child, parent) in gone(&new.parents, &old.parents) {
            self.held.set(place(*child), Some(*parent));
        }
    }

    /// Forgets the numbers of classes that are gone, now and then.
    fn forget_numbers(&mut self) {
        if self.numbers.len() < self.most_numbers {
            return;
        }
        let objects = &self.objects;
        let mut used: HashSet<PeerId> = objects.peers.values().copied().collect();
        used.extend(objects.classes.iter().flat_map(|(id, parent)| [*id, *parent]));
        used.extend(objects.groups.keys().flat_map(|id| objects.members(*id)));
        used.extend(self.tiers.named());
        used.insert(PeerId::ALL_PODS);
        self.numbers.keep(|id| used.contains(&id));
        self.most_numbers = 2 * self.numbers.len() + SPARE_NUMBERS;
    }
}

/// Returns what the first of two sorted lists has and the second lacks.
fn gone<'a, T: Ord>(these: &'a [T], those: &'a [T]) -> impl Iterator<Item = &'a T> {
    let is_gone = |item: &&T| those.binary_search(item).is_err();
    these.iter().filter(is_gone)
}
