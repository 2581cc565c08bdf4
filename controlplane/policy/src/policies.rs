//! The index of policies, namespaces and Pods.
//!
//! Events change the inputs only, and mark what changed. [`Policies::take`] works out what follows: the class of each
//! changed Pod, the groups that policies use, their members, and the objects that differ from those published before.
//! Everything is a function of the inputs, so their order does not matter.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::take;
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{
    Direction, LocalPod, NodeName, Peer, PodName, PolicyKey, PolicyName, PolicyObject,
};

use crate::Selector;
use crate::classes::Classes;
use crate::groups::Groups;
use crate::namespaces::NamespaceLabels;
use crate::placement::Placement;
use crate::pods::Pods;
use crate::published::{Published, sum_of_peer};
use crate::rules::Entry;
use crate::subjects::Subjects;
use crate::tiers::Tiers;
use crate::{ClusterPolicy, Labels, NetworkPolicy, Node, Pod, PolicyChanges};

/// All policies, namespaces and Pods, and what follows from them.
///
/// While there is no policy, nothing is published.
#[derive(Debug, Default)]
pub struct Policies {
    pub(crate) policies: Subjects,
    pub(crate) namespaces: NamespaceLabels,
    pub(crate) pods: Pods,
    pub(crate) classes: Classes,
    pub(crate) groups: Groups,
    pub(crate) tiers: Tiers,
    published: Published,
    pub(crate) placement: Placement,
    /// Pods of which not all policies fit into a message, and how many policies select them.
    pub(crate) crowded: BTreeMap<PodName, usize>,
    /// Pods that claim an address which means a Pod of another node, the address, and that Pod.
    pub(crate) address_conflicts: BTreeMap<PodName, (IpAddr, PodName)>,
    /// Number of Pods when the groups of all namespaces were last weighed.
    pub(crate) weighed: usize,
    /// There was a policy at the last call of `take`.
    is_active: bool,
}

impl Policies {
    /// Returns an empty index with limits of its own.
    #[cfg(test)]
    pub(crate) fn with_limits(limits: crate::limits::Limits) -> Self {
        let mut policies = Self::default();
        policies.policies.limits = limits;
        policies.groups.limits = limits;
        policies.tiers.limits = limits;
        policies
    }

    /// Adds or replaces a policy.
    pub fn put_policy(&mut self, policy: NetworkPolicy) {
        self.policies.put(policy);
    }

    /// Removes a policy.
    pub fn delete_policy(&mut self, name: &PolicyName) {
        self.policies.delete(name);
    }

    /// Adds or replaces a ClusterNetworkPolicy.
    pub fn put_cluster_policy(&mut self, policy: ClusterPolicy) {
        self.tiers.put(policy);
    }

    /// Removes a ClusterNetworkPolicy.
    pub fn delete_cluster_policy(&mut self, name: &str) {
        self.tiers.delete(name);
    }

    /// Adds, replaces or removes (`None`) a node. The last ranges of a node that has none any more still count.
    pub fn set_node(&mut self, name: &NodeName, node: Option<Node>) {
        let ranges = node.as_ref().map(|node| node.ranges.clone());
        self.pods.set_ranges(name, ranges.unwrap_or_default());
        let node = node.map(|node| (node.labels, node.addresses));
        self.tiers.set_node(name, node);
    }

    /// Adds or replaces a namespace.
    pub fn put_namespace(&mut self, name: &Arc<str>, labels: Labels) {
        self.namespaces.put(name, labels);
    }

    /// Removes a namespace.
    pub fn delete_namespace(&mut self, name: &Arc<str>) {
        self.namespaces.delete(name);
    }

    /// Adds or replaces a Pod.
    pub fn put_pod(&mut self, pod: Pod) {
        self.pods.put(pod);
    }

    /// Removes a Pod.
    pub fn delete_pod(&mut self, name: &PodName) {
        self.pods.delete(name);
    }

    /// Returns what changed since the last call.
    pub fn take(&mut self) -> PolicyChanges {
        let mut changes = PolicyChanges::default();
        let is_active = self.policies.len() > 0 || self.tiers.is_active();
        if is_active != self.is_active {
            self.is_active = is_active;
            self.pods.touch_all();
        }
        self.pods.take_ranges();
        self.tiers.begin(&mut self.pods, &mut changes);
        self.touch_namespaces();
        self.classify();
        self.take_namespaces();
        self.weigh_groups();
        let changed = self.take_policies(&mut changes);
        self.take_peers(&mut changes);
        self.take_classes(&mut changes);
        self.take_pods(&mut changes);
        self.take_reach(changed, &mut changes);
        self.tiers.publish_decisions(&mut changes);
        changes
    }

    /// Marks the Pods of changed policies, and publishes which namespaces have one. Returns the policies as they were.
    fn take_policies(
        &mut self,
        changes: &mut PolicyChanges,
    ) -> BTreeMap<PolicyName, Option<Arc<Entry>>> {
        let mut changed = take(&mut self.policies.before);
        changed.retain(|name, before| before.as_ref() != self.policies.get(name));
        for (name, before) in &changed {
            let now = self.policies.get(name).cloned();
            self.touch_pods(before.as_deref(), now.as_deref());
            let namespace = &name.namespace;
            let there = self.policies.is_in(namespace);
            if self.published.namespaces.note(namespace, there.then_some([0; 16])) {
                let object = there.then(|| PolicyObject::Namespace(Arc::clone(namespace)));
                let key = PolicyKey::Namespace(Arc::clone(namespace));
                changes.shared.push((key, object));
            }
        }
        changed
    }

    /// Marks the Pods whose policies, or whose ports that policies name, may have changed.
    fn touch_pods(&mut self, before: Option<&Entry>, now: Option<&Entry>) {
        if let (Some(before), Some(now)) = (before, now)
            && before.matters_to_pods() == now.matters_to_pods()
        {
            return;
        }
        for entry in before.into_iter().chain(now) {
            let NetworkPolicy { name, pods, .. } = &entry.policy;
            self.pods.touch_selected(&name.namespace, pods);
        }
    }

    /// Updates the groups that select changed namespaces.
    fn take_namespaces(&mut self) {
        for (name, before) in take(&mut self.namespaces.before) {
            let there = (&self.pods, &self.classes);
            let now = self.namespaces.get(&name);
            self.groups.set_namespace(&name, before.as_ref(), there, now);
        }
    }

    /// Marks the Pods of changed namespaces, which may be something else to tiers now.
    fn touch_namespaces(&mut self) {
        for name in self.namespaces.before.keys() {
            if self.tiers.is_active() {
                self.tiers.forget_namespace(name);
                self.pods.touch_selected(name, &Selector::default());
            }
        }
    }

    /// Puts changed Pods into their classes, and classes into groups.
    fn classify(&mut self) {
        for class in take(&mut self.pods.left) {
            self.classes.leave(class);
        }
        let changed = take(&mut self.pods.changed);
        for name in &changed {
            let Some(pod) = self.pods.get_mut(name) else {
                continue;
            };
            let old = pod.class.take();
            if let Some(old) = old {
                self.classes.leave(old);
            }
            if self.is_active {
                let (id, is_new) = self.classes.join(&name.namespace, pod);
                pod.class = Some(id);
                if is_new && let Some(class) = self.classes.get(id) {
                    self.groups.set_class(id, class, true, &self.namespaces);
                }
            }
            if pod.class != old || self.tiers.is_active() {
                let addresses = pod.addresses.clone();
                self.pods.readdressed.extend(addresses);
            }
        }
        self.pods.changed = changed;
        for (id, class) in self.classes.remove_empty() {
            self.groups.set_class(id, &class, false, &self.namespaces);
        }
    }

    /// Publishes addresses, and marks the Pods that have, or do not have, one of them now.
    fn take_peers(&mut self, changes: &mut PolicyChanges) {
        for address in take(&mut self.pods.readdressed) {
            self.pods.touch_claims(address);
            let peer = self.peer(address);
            let sum = peer.as_ref().map(sum_of_peer);
            if self.published.peers.note(&address, sum) {
                let object = peer.map(PolicyObject::Peer);
                changes.shared.push((PolicyKey::Peer(address), object));
            }
        }
    }

    fn peer(&mut self, address: IpAddr) -> Option<Peer> {
        let name = self.pods.of_address(address);
        let pod = name.and_then(|name| Some((name, self.pods.get(name)?)));
        let tier = self.tiers.classify(address, pod, &self.namespaces);
        let class = pod?.1.class?;
        Some(Peer {
            address,
            class,
            tier,
        })
    }

    /// Publishes classes.
    fn take_classes(&mut self, changes: &mut PolicyChanges) {
        for id in take(&mut self.classes.changed) {
            let class = self.classes.object(id);
            // The identity says all.
            let sum = class.as_ref().map(|class| class.id.0);
            if self.published.classes.note(&id, sum) {
                let object = class.map(PolicyObject::Class);
                changes.shared.push((PolicyKey::Class(id), object));
            }
        }
    }

    /// Publishes Pods to their nodes.
    fn take_pods(&mut self, changes: &mut PolicyChanges) {
        self.share_names();
        self.pods.all_changed = false;
        for name in take(&mut self.pods.changed) {
            self.crowded.remove(&name);
            self.address_conflicts.remove(&name);
            if let Some((address, other)) = self.pods.lost(&name)
                && self.is_active
            {
                self.address_conflicts.insert(name.clone(), (address, other.clone()));
            }
            let now = self.local_pod(&name).map(|(node, pod, left_out)| {
                if left_out > 0 {
                    let policies = pod.policies.len() + left_out;
                    self.crowded.insert(name.clone(), policies);
                }
                (node, pod)
            });
            if let Some((before, now)) = self.published.note_pod(&name, now, changes) {
                self.placement.move_pod(before.as_ref(), now.as_ref());
            }
        }
    }

    /// Divides anew what the objects of a namespace's Pods may name, where the number of Pods has changed much.
    fn share_names(&mut self) {
        let namespaces: BTreeSet<_> =
            self.pods.changed.iter().map(|pod| Arc::clone(&pod.namespace)).collect();
        let everything = Selector::default();
        for namespace in namespaces {
            let pods = self.pods.most_selected(Some(&namespace), &everything);
            if self.policies.share_names(&namespace, pods) {
                self.pods.touch_selected(&namespace, &everything);
            }
        }
    }

    /// Returns a Pod's node, the object that the node gets, and how many policies are not in it.
    fn local_pod(&mut self, name: &PodName) -> Option<(NodeName, LocalPod, usize)> {
        let pod = if self.is_active { self.pods.get(name) } else { None };
        let pod = pod.filter(|pod| !pod.node.is_empty());
        let tier = self.tiers.subject(name, pod, &self.namespaces);
        let pod = pod?;
        let (policies, left_out) = self.policies.enforced(&name.namespace, &pod.labels);
        let mut ports = pod.ports.to_vec();
        if !ports.is_empty() {
            let names: BTreeSet<_> =
                policies.iter().flat_map(|p| p.names(Direction::Ingress)).collect();
            ports.retain(|port| names.contains(&(Arc::clone(&port.name), port.protocol)));
        }
        let object = LocalPod {
            name: name.clone(),
            addresses: self.pods.addresses(name).collect(),
            ports,
            policies: policies.iter().map(|p| p.policy.name.clone()).collect(),
            tier,
        };
        Some((Arc::clone(&pod.node), object, left_out))
    }
}
