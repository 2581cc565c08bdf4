//! The objects of NetworkPolicies as they came, and which of them name which.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{
    Direction, GroupId, LocalPod, PeerId, PodName, Policy, PolicyName, PolicyPort, PolicyRule,
};

use super::ported::{PortName, Ported, port_name};

/// All objects, with indexes.
#[derive(Debug, Default)]
pub(super) struct Objects {
    pub(super) peers: HashMap<IpAddr, PeerId>,
    /// The parents of all classes.
    pub(super) classes: HashMap<PeerId, PeerId>,
    pub(super) ported: Ported,
    pub(super) groups: HashMap<GroupId, BTreeMap<u8, Vec<PeerId>>>,
    pub(super) policies: HashMap<PolicyName, Policy>,
    /// The namespaces with policies, on whatever node these are.
    pub(super) namespaces: BTreeSet<Arc<str>>,
    pub(super) pods: BTreeMap<PodName, LocalPod>,
    /// The Pods that name a policy.
    pub(super) pods_of: HashMap<PolicyName, BTreeSet<PodName>>,
    /// The policies that name a group.
    policies_with: HashMap<GroupId, BTreeSet<PolicyName>>,
    /// The policies with an egress rule that names a port.
    policies_naming: HashMap<PortName, BTreeSet<PolicyName>>,
}

impl Objects {
    /// Returns the members of a group.
    pub(super) fn members(&self, group: GroupId) -> impl Iterator<Item = PeerId> {
        self.groups
            .get(&group)
            .into_iter()
            .flatten()
            .flat_map(|(_, members)| members.iter().copied())
    }

    /// Returns how many members a group has.
    pub(super) fn size(&self, group: GroupId) -> u64 {
        self.groups
            .get(&group)
            .into_iter()
            .flatten()
            .map(|(_, members)| members.len() as u64)
            .sum()
    }

    /// Returns the policies that name a group.
    pub(super) fn policies_with(&self, group: GroupId) -> Vec<PolicyName> {
        self.policies_with.get(&group).into_iter().flatten().cloned().collect()
    }

    /// Returns the policies with an egress rule that names one of some ports.
    pub(super) fn policies_naming(&self, ports: &BTreeSet<PortName>) -> BTreeSet<PolicyName> {
        ports
            .iter()
            .filter_map(|port| self.policies_naming.get(port))
            .flatten()
            .cloned()
            .collect()
    }

    /// Returns the Pods that name a policy.
    pub(super) fn pods_of(&self, policy: &PolicyName) -> Vec<PodName> {
        self.pods_of.get(policy).into_iter().flatten().cloned().collect()
    }

    /// Records a policy, or that it is gone. Returns the one before.
    pub(super) fn set_policy(&mut self, name: &PolicyName, new: Option<&Policy>) -> Option<Policy> {
        let old = match new {
            Some(new) => self.policies.insert(name.clone(), new.clone()),
            None => self.policies.remove(name),
        };
        for group in old.iter().flat_map(groups) {
            take_out(&mut self.policies_with, &group, name);
        }
        for port in old.iter().flat_map(egress_names) {
            take_out(&mut self.policies_naming, &port, name);
        }
        for group in new.into_iter().flat_map(groups) {
            let policies = self.policies_with.entry(group).or_default();
            policies.insert(name.clone());
        }
        for port in new.into_iter().flat_map(egress_names) {
            let policies = self.policies_naming.entry(port).or_default();
            policies.insert(name.clone());
        }
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

fn groups(policy: &Policy) -> impl Iterator<Item = GroupId> {
    let peers = rules(policy).filter_map(|(_, rule)| rule.peers.as_ref());
    peers.flat_map(|peers| peers.groups.iter().copied())
}

/// Returns the ports that egress rules of a policy name.
fn egress_names(policy: &Policy) -> impl Iterator<Item = PortName> {
    policy
        .egress
        .iter()
        .flatten()
        .flat_map(|rule| &rule.ports)
        .flatten()
        .filter_map(port_name)
}

/// Returns whether a rule has ports with names.
pub(super) fn names_ports(rule: &PolicyRule) -> bool {
    rule.ports.iter().flatten().any(|port| matches!(port, PolicyPort::Named(..)))
}
