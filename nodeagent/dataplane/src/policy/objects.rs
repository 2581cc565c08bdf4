//! The objects of NetworkPolicies as they came, and which of them name which.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use kplane_model::{
    Block, Direction, Family, GroupId, LocalPod, NamedPort, PeerId, PodName, Policy, PolicyName,
    PolicyPort, PolicyRule,
};

/// What a rule names as the other end.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Peer {
    Group(GroupId),
    Block(Block),
}

/// A class that has ports with names.
#[derive(Clone, Debug)]
pub(super) struct Ported {
    pub(super) parent: PeerId,
    pub(super) ports: Vec<NamedPort>,
}

/// All objects, with indexes.
#[derive(Debug, Default)]
pub(super) struct Objects {
    pub(super) peers: HashMap<IpAddr, PeerId>,
    /// The parents of all classes.
    pub(super) classes: HashMap<PeerId, PeerId>,
    pub(super) ported: BTreeMap<PeerId, Ported>,
    pub(super) groups: HashMap<GroupId, BTreeMap<u8, Vec<PeerId>>>,
    pub(super) policies: HashMap<PolicyName, Policy>,
    pub(super) pods: BTreeMap<PodName, LocalPod>,
    /// The Pods that name a policy.
    pub(super) pods_of: HashMap<PolicyName, BTreeSet<PodName>>,
    /// The policies that name a source.
    policies_with: HashMap<Peer, BTreeSet<PolicyName>>,
    /// The policies with an egress rule that names a port by its name.
    pub(super) named_egress: BTreeSet<PolicyName>,
}

impl Objects {
    /// Returns the members of a group.
    pub(super) fn members(&self, group: GroupId) -> impl Iterator<Item = PeerId> {
        let parts = self.groups.get(&group).into_iter().flatten();
        parts.flat_map(|(_, members)| members.iter().copied())
    }

    /// Returns the pairs of a Pod and a policy of which the policy names a source.
    pub(super) fn pairs_with(&self, source: &Peer) -> Vec<(PodName, PolicyName)> {
        let policies = self.policies_with.get(source).into_iter().flatten();
        policies.flat_map(|policy| self.pairs_of(policy)).collect()
    }

    /// Returns the pairs of a Pod and this policy.
    pub(super) fn pairs_of(&self, policy: &PolicyName) -> Vec<(PodName, PolicyName)> {
        let pods = self.pods_of.get(policy).into_iter().flatten();
        pods.map(|pod| (pod.clone(), policy.clone())).collect()
    }

    /// Returns whether some Pod names a policy.
    pub(super) fn has_pods(&self, policy: &PolicyName) -> bool {
        self.pods_of.contains_key(policy)
    }

    /// Records a policy, or that it is gone. Returns the one before.
    pub(super) fn set_policy(&mut self, name: &PolicyName, new: Option<&Policy>) -> Option<Policy> {
        let old = match new {
            Some(new) => self.policies.insert(name.clone(), new.clone()),
            None => self.policies.remove(name),
        };
        for source in old.iter().flat_map(sources) {
            take_out(&mut self.policies_with, &source, name);
        }
        for source in new.into_iter().flat_map(sources) {
            let policies = self.policies_with.entry(source).or_default();
            policies.insert(name.clone());
        }
        match new.is_some_and(names_egress_ports) {
            true => self.named_egress.insert(name.clone()),
            false => self.named_egress.remove(name),
        };
        old
    }

    /// Records that a Pod names a policy, or no longer does.
    pub(super) fn set_pair(&mut self, pod: &PodName, policy: &PolicyName, there: bool) {
        if there {
            let pods = self.pods_of.entry(policy.clone()).or_default();
            pods.insert(pod.clone());
        } else {
            take_out(&mut self.pods_of, policy, pod);
        }
    }
}

/// Removes an entry of an index.
fn take_out<K, V>(index: &mut HashMap<K, BTreeSet<V>>, key: &K, value: &V)
where
    K: Eq + std::hash::Hash,
    V: Ord,
{
    if let Some(values) = index.get_mut(key) {
        values.remove(value);
        if values.is_empty() {
            index.remove(key);
        }
    }
}

/// Returns all rules of a policy.
pub(super) fn rules(policy: &Policy) -> impl Iterator<Item = (Direction, &PolicyRule)> {
    Direction::ALL.into_iter().flat_map(|direction| {
        let rules = policy.rules(direction).unwrap_or_default();
        rules.iter().map(move |rule| (direction, rule))
    })
}

fn sources(policy: &Policy) -> Vec<Peer> {
    let peers = rules(policy).filter_map(|(_, rule)| rule.peers.as_ref());
    let sources = peers.flat_map(|peers| {
        let groups = peers.groups.iter().copied().map(Peer::Group);
        groups.chain(peers.blocks.iter().cloned().map(Peer::Block))
    });
    sources.collect()
}

/// Returns the blocks of a policy of a family, each as often as rules have it.
pub(super) fn blocks(policy: &Policy, family: Family) -> impl Iterator<Item = &Block> {
    let peers = rules(policy).filter_map(|(_, rule)| rule.peers.as_ref());
    let blocks = peers.flat_map(|peers| &peers.blocks);
    blocks.filter(move |block| block.range.family() == family)
}

/// Returns whether a rule has ports with names.
pub(super) fn names_ports(rule: &PolicyRule) -> bool {
    let mut ports = rule.ports.iter().flatten();
    ports.any(|port| matches!(port, PolicyPort::Named(..)))
}

fn names_egress_ports(policy: &Policy) -> bool {
    let mut rules = policy.egress.iter().flatten();
    rules.any(names_ports)
}
