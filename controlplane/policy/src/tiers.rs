//! ClusterNetworkPolicies: what of them nodes get.
//!
//! ```text
//! policies, nodes -> terms: peers and ranges that rules name, in the order of tiers and priorities
//! address, Pod -> class: which of these it is     Pod -> subject: which policies select it
//! subject, class -> decision, for each tier and direction
//! ```
//!
//! An address that no rule names has no class, and a Pod that no policy selects is no subject. Both are identified by
//! digests of what they stand for. A changed Pod or namespace is judged alone; a changed policy makes all anew.

mod decide;
mod judge;
mod terms;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem::take;
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{
    DecisionRow, Decisions, Direction, NamedPort, NodeName, PeerId, PodName, PolicyKey,
    PolicyObject, PortActions, Tier, TierSpan,
};

use self::terms::{Nodes, Terms};
use crate::limits::Limits;
use crate::namespaces::NamespaceLabels;
use crate::pods::{PodEntry, Pods};
use crate::published::{Sums, sum_of_decisions};
use crate::{ClusterPolicy, Labels, PolicyChanges};

/// Addresses that no rule can tell apart.
#[derive(Debug)]
struct AddressClass {
    /// The peers of rules that it is, and the ranges of rules that it is in; by their places in the terms, sorted.
    peers: Vec<usize>,
    blocks: Arc<[usize]>,
    /// Container ports that egress rules name.
    ports: Vec<NamedPort>,
    users: usize,
}

/// Pods that the same policies select.
#[derive(Debug)]
struct Subject {
    /// By their places in the terms.
    policies: Vec<usize>,
    /// Container ports that their ingress rules name.
    ports: Vec<NamedPort>,
    users: usize,
}

/// What changed since the last call of `take`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Stale {
    #[default]
    Nothing,
    /// Nodes that rules may name.
    Nodes,
    Policies,
}

/// All ClusterNetworkPolicies, and what follows from them.
#[derive(Debug, Default)]
pub(crate) struct Tiers {
    pub(crate) policies: BTreeMap<Arc<str>, Arc<ClusterPolicy>>,
    nodes: Nodes,
    stale: Stale,
    terms: Terms,
    classes: BTreeMap<PeerId, AddressClass>,
    of_address: HashMap<IpAddr, PeerId>,
    subjects: BTreeMap<PeerId, Subject>,
    of_pod: HashMap<PodName, PeerId>,
    /// Decisions that may have changed.
    changed: BTreeSet<(PeerId, u8)>,
    /// What was published.
    names: BTreeSet<Arc<str>>,
    spans: BTreeMap<(IpAddr, IpAddr), PeerId>,
    /// The classes of these, as long as the terms are the same.
    joined: Vec<PeerId>,
    decisions: Sums<(PeerId, u8)>,
    /// Decisions that fit into no message: the Pods are denied everything there.
    pub(crate) too_large: BTreeSet<(PeerId, u8)>,
    pub(crate) limits: Limits,
}

impl Tiers {
    pub(crate) fn put(&mut self, policy: ClusterPolicy) {
        if self.policies.get(&policy.name).is_none_or(|old| **old != policy) {
            self.policies.insert(policy.name.clone(), Arc::new(policy));
            self.stale = Stale::Policies;
        }
    }

    pub(crate) fn delete(&mut self, name: &str) {
        if self.policies.remove(name).is_some() {
            self.stale = Stale::Policies;
        }
    }

    /// Adds, replaces or removes (`None`) a node.
    pub(crate) fn set_node(&mut self, name: &NodeName, node: Option<(Labels, Vec<IpAddr>)>) {
        let differs = match node {
            Some(node) => self.nodes.insert(name.clone(), node.clone()) != Some(node),
            None => self.nodes.remove(name).is_some(),
        };
        if differs {
            self.stale = self.stale.max(Stale::Nodes);
        }
    }

    /// Returns the number of nodes.
    pub(crate) fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Returns whether there is a policy.
    pub(crate) fn is_active(&self) -> bool {
        !self.policies.is_empty()
    }

    /// Takes over changed policies and nodes, and marks the Pods and addresses that may be something else now.
    pub(crate) fn begin(&mut self, pods: &mut Pods, changes: &mut PolicyChanges) {
        match take(&mut self.stale) {
            Stale::Nothing => return,
            Stale::Nodes if !self.terms.name_nodes => return,
            Stale::Nodes => {
                let before = self.terms.cut(&self.nodes);
                let terms = &self.terms;
                pods.readdress(|address| before.of(address) != terms.pieces.of(address));
            }
            Stale::Policies => {
                self.terms = Terms::new(self.policies.values(), &self.nodes);
                let subjects = take(&mut self.subjects).into_keys();
                self.changed.extend(subjects.map(|subject| (subject, 0)));
                self.changed.extend(self.decisions.keys().copied());
                self.classes.clear();
                self.joined.clear();
                self.of_address.clear();
                self.of_pod.clear();
                pods.touch_all();
                self.publish_names(changes);
            }
        }
        self.publish_spans(changes);
    }

    fn publish_names(&mut self, changes: &mut PolicyChanges) {
        let now: BTreeSet<Arc<str>> = self.policies.keys().cloned().collect();
        for name in now.symmetric_difference(&self.names) {
            let object = now.contains(name).then(|| PolicyObject::Cluster(name.clone()));
            changes.shared.push((PolicyKey::Cluster(name.clone()), object));
        }
        self.names = now;
    }

    fn publish_spans(&mut self, changes: &mut PolicyChanges) {
        let mut now = BTreeMap::new();
        for (first, last, blocks) in self.terms.pieces.all() {
            let id = self.join(Vec::new(), blocks, Vec::new());
            now.extend(id.map(|id| ((first, last), id)));
        }
        let before = std::mem::replace(&mut self.spans, now);
        let joined = self.spans.values().copied().collect();
        for id in std::mem::replace(&mut self.joined, joined) {
            self.leave(id);
        }
        for (range, tier) in &self.spans {
            if before.get(range) != Some(tier) {
                let (first, last) = *range;
                let span = TierSpan {
                    first,
                    last,
                    tier: *tier,
                };
                let key = PolicyKey::Span(first, last);
                changes.shared.push((key, Some(PolicyObject::Span(span))));
            }
        }
        for (first, last) in before.into_keys().filter(|range| !self.spans.contains_key(range)) {
            changes.shared.push((PolicyKey::Span(first, last), None));
        }
    }

    /// Forgets which rules may select Pods of a namespace whose labels changed.
    pub(crate) fn forget_namespace(&mut self, name: &str) {
        self.terms.forget_namespace(name);
    }

    /// Puts an address of a Pod, or of none, into its class.
    pub(crate) fn classify(
        &mut self,
        address: IpAddr,
        pod: Option<(&PodName, &PodEntry)>,
        namespaces: &NamespaceLabels,
    ) -> Option<PeerId> {
        let now = if self.is_active() {
            pod.and_then(|(name, pod)| {
                let peers = self.terms.peers_of(name, pod, namespaces);
                let blocks = self.terms.pieces.of(address);
                let ports = self.terms.egress_ports(pod);
                self.join(peers, blocks, ports)
            })
        } else {
            None
        };
        let before = match now {
            Some(id) => self.of_address.insert(address, id),
            None => self.of_address.remove(&address),
        };
        if let Some(before) = before {
            self.leave(before);
        }
        now
    }

    fn join(
        &mut self,
        peers: Vec<usize>,
        blocks: Arc<[usize]>,
        ports: Vec<NamedPort>,
    ) -> Option<PeerId> {
        if peers.is_empty() && blocks.is_empty() {
            return None;
        }
        let id = self.terms.class_id(&peers, &blocks, &ports);
        let class = self.classes.entry(id).or_insert_with(|| {
            let subjects = self.subjects.keys().map(|subject| (*subject, id.0[0]));
            self.changed.extend(subjects);
            AddressClass {
                peers,
                blocks,
                ports,
                users: 0,
            }
        });
        class.users += 1;
        Some(id)
    }

    fn leave(&mut self, id: PeerId) {
        let Some(class) = self.classes.get_mut(&id) else {
            return;
        };
        class.users = class.users.saturating_sub(1);
        if class.users == 0 {
            self.classes.remove(&id);
            let subjects = self.subjects.keys().map(|subject| (*subject, id.0[0]));
            self.changed.extend(subjects);
        }
    }

    /// Returns the subject that a Pod is, or was.
    pub(crate) fn subject(
        &mut self,
        name: &PodName,
        pod: Option<&PodEntry>,
        namespaces: &NamespaceLabels,
    ) -> Option<PeerId> {
        let now = if self.is_active() {
            pod.and_then(|pod| {
                let policies = self.terms.policies_of(name, pod, namespaces);
                (!policies.is_empty()).then(|| {
                    let ports = self.terms.ingress_ports(&policies, pod);
                    let id = self.terms.subject_id(&policies, &ports);
                    let subject = self.subjects.entry(id).or_insert_with(|| {
                        let parts = self.classes.keys().map(|class| class.0[0]).chain([0]);
                        self.changed.extend(parts.map(|part| (id, part)));
                        Subject {
                            policies,
                            ports,
                            users: 0,
                        }
                    });
                    subject.users += 1;
                    id
                })
            })
        } else {
            None
        };
        let before = match now {
            Some(id) => self.of_pod.insert(name.clone(), id),
            None => self.of_pod.remove(name),
        };
        let before = before.and_then(|id| Some((id, self.subjects.get_mut(&id)?)));
        if let Some((id, subject)) = before {
            subject.users = subject.users.saturating_sub(1);
            if subject.users == 0 {
                self.subjects.remove(&id);
                let published = self.decisions.keys().filter(|(of, _)| *of == id);
                self.changed.extend(published.copied().chain([(id, 0)]));
            }
        }
        now
    }

    /// Publishes decisions that changed.
    pub(crate) fn publish_decisions(&mut self, changes: &mut PolicyChanges) {
        for (subject, part) in take(&mut self.changed) {
            self.too_large.remove(&(subject, part));
            let object = self.decide(subject, part);
            let sum = object.as_ref().map(sum_of_decisions);
            if self.decisions.note(&(subject, part), sum) {
                let key = PolicyKey::Decisions(subject, part);
                changes.shared.push((key, object.map(PolicyObject::Decisions)));
            }
        }
    }

    fn decide(&mut self, id: PeerId, part: u8) -> Option<Decisions> {
        let subject = self.subjects.get(&id)?;
        let (mut first, mut last) = ([0; 16], [u8::MAX; 16]);
        (first[0], last[0]) = (part, part);
        let classes = self.classes.range(PeerId(first)..=PeerId(last));
        let mut rows: BTreeMap<(Direction, Tier, PortActions), Vec<PeerId>> = BTreeMap::new();
        for (class_id, class) in classes {
            for (direction, tier) in
                Direction::ALL.into_iter().flat_map(|d| Tier::ALL.map(|t| (d, t)))
            {
                let mut actions = self.terms.decide(subject, class, direction, tier);
                if actions.ranges.len() > self.limits.ranges {
                    self.too_large.insert((id, part));
                    actions = PortActions::DENY;
                }
                if actions != PortActions::PASS {
                    rows.entry((direction, tier, actions)).or_default().push(*class_id);
                }
            }
        }
        let size = |((.., actions), peers): (&(_, _, PortActions), &Vec<_>)| {
            16 + 12 * actions.ranges.len() + 16 * peers.len()
        };
        if rows.iter().map(size).sum::<usize>() > self.limits.object {
            self.too_large.insert((id, part));
            let all: BTreeSet<PeerId> = take(&mut rows).into_values().flatten().collect();
            let all: Vec<PeerId> = all.into_iter().collect();
            for direction in Direction::ALL {
                rows.insert((direction, Tier::Admin, PortActions::DENY), all.clone());
            }
        }
        if rows.is_empty() && part != 0 {
            return None;
        }
        let rows = rows.into_iter().map(|((direction, tier, actions), peers)| DecisionRow {
            direction,
            tier,
            actions,
            peers,
        });
        Some(Decisions {
            subject: id,
            part,
            rows: rows.collect(),
        })
    }
}
