//! NetworkPolicies, and the namespaces and Pods that they are about, within the index.

use kplane_model::{Issue, ObjectRef, Reason};
use kplane_policy::{Excess, Policies, PolicyChanges};
use kplane_proto::v1::Enforcement;

use super::Index;
use super::holding::service_name;
use crate::admission::Enforce;
use crate::convert::{self, not_enforced, tiers_not_enforced};
use crate::k8s::{Kind, Object, ObjectId};

impl Index {
    /// Returns the NetworkPolicies, if nodes enforce them.
    pub fn policies(&self) -> Option<&Policies> {
        self.policies.as_ref()
    }

    /// Returns what is said of NetworkPolicies as a whole.
    pub fn enforcement(&self) -> Enforcement {
        match self.enforce {
            None => Enforcement::Unspecified,
            Some(Enforce::Off) => Enforcement::Off,
            Some(Enforce::On) if self.resync.has(&Kind::WITH_POLICIES) => Enforcement::On,
            Some(Enforce::On) => Enforcement::Unread,
        }
    }

    /// Adds or replaces an object of a kind that NetworkPolicies are about.
    pub(super) fn put_policy_object(&mut self, object: &Object, location: &str) -> Vec<Issue> {
        let Some(policies) = &mut self.policies else {
            return match object {
                Object::NetworkPolicy(policy) => not_enforced(policy, location),
                Object::ClusterNetworkPolicy(policy) => tiers_not_enforced(policy, location),
                _ => Vec::new(),
            };
        };
        match object {
            Object::NetworkPolicy(policy) => {
                let (converted, mut issues) = convert::network_policy(policy, location);
                let name = converted.name.clone();
                policies.put_policy(converted);
                let mut too_large = policies.too_large();
                let size = too_large.find_map(|(of, size)| (*of == name).then_some(size));
                issues.extend(size.map(|size| convert::policy_too_large(policy, location, size)));
                return issues;
            }
            Object::ClusterNetworkPolicy(policy) => {
                let (converted, issues) = convert::cluster_policy(policy, location);
                match converted {
                    Some(converted) => policies.put_cluster_policy(converted),
                    None => policies.delete_cluster_policy(&policy.metadata.name),
                }
                return issues;
            }
            Object::Node(node) => {
                let (facts, _) = convert::node(node, location);
                let node = kplane_policy::Node {
                    labels: convert::node_labels(node),
                    addresses: facts.addresses,
                    ranges: facts.pod_cidrs,
                };
                policies.set_node(&facts.name, Some(node));
            }
            Object::Namespace(namespace) => {
                policies.put_namespace(&namespace.metadata.name, convert::namespace(namespace));
            }
            Object::Pod(pod) => match convert::pod(pod) {
                Some(pod) => policies.put_pod(pod),
                None => policies.delete_pod(&service_name(&object.id())),
            },
            _ => {}
        }
        Vec::new()
    }

    /// Removes an object of a kind that NetworkPolicies are about.
    pub(super) fn delete_policy_object(&mut self, id: &ObjectId) {
        let Some(policies) = &mut self.policies else {
            return;
        };
        match id.kind {
            Kind::NetworkPolicy => policies.delete_policy(&service_name(id)),
            Kind::Namespace => policies.delete_namespace(&id.name),
            Kind::Pod => policies.delete_pod(&service_name(id)),
            Kind::ClusterNetworkPolicy => policies.delete_cluster_policy(&id.name),
            Kind::Node => policies.set_node(&id.name, None),
            Kind::Service | Kind::EndpointSlice | Kind::ServiceCidr => {}
        }
    }

    /// Returns what changed in the NetworkPolicies, and says whether the Pods with too many of them did. Until all that they
    /// are about has been listed, nothing is published of them: half of it would open and close the wrong Pods.
    pub(super) fn take_policies(&mut self, issues_changed: &mut bool) -> PolicyChanges {
        if self.enforcement() != Enforcement::On {
            return PolicyChanges::default();
        }
        let Some(policies) = &mut self.policies else {
            return PolicyChanges::default();
        };
        let changes = policies.take();
        let before = self.crowded.iter().map(|(name, count)| (name, *count));
        if !policies.crowded().eq(before) {
            let crowded = policies.crowded();
            self.crowded = crowded.map(|(name, count)| (name.clone(), count)).collect();
            *issues_changed = true;
        }
        let before = self.beyond.iter().map(|(name, excess)| (name, *excess));
        if !policies.beyond_share().eq(before) {
            let beyond = policies.beyond_share();
            self.beyond = beyond.map(|(name, excess)| (name.clone(), excess)).collect();
            *issues_changed = true;
        }
        let before = self.address_conflicts.iter();
        if !policies
            .address_conflicts()
            .eq(before.map(|(pod, address, other)| (pod, *address, other)))
        {
            let address_conflicts = policies.address_conflicts();
            self.address_conflicts = address_conflicts
                .map(|(pod, address, other)| (pod.clone(), address, other.clone()))
                .collect();
            *issues_changed = true;
        }
        if policies.overlarge_decisions() != self.overlarge {
            self.overlarge = policies.overlarge_decisions();
            *issues_changed = true;
        }
        changes
    }

    /// Returns the issue that ClusterNetworkPolicies decide too much.
    pub(super) fn overlarge_issue(&self) -> Option<Issue> {
        (self.overlarge > 0).then(|| {
            let policies = ObjectRef::new(Kind::ClusterNetworkPolicy.as_str(), "", "");
            let reason = format!(
                "{} groups of Pods have rules with more ranges of ports than fit into a message; what the rules are \
                 about is denied there; use fewer ranges",
                self.overlarge
            );
            Issue::error(Reason::TooLarge, policies, reason)
        })
    }

    /// Returns the issues of Pods that have the address of a Pod of another node.
    pub(super) fn conflict_issues(&self) -> impl Iterator<Item = Issue> {
        self.address_conflicts.iter().map(|(pod, address, other)| {
            let node = |pod| self.policies.as_ref().and_then(|policies| policies.node_of(pod));
            let [here, there] = [pod, other].map(|pod| node(pod).map_or("", |node| &**node));
            let pod = ObjectRef::new(Kind::Pod.as_str(), &pod.namespace, &pod.name);
            let reason = format!(
                "status.podIPs names {address}, which Pod {other} of node {there} has: rules that select Pods mean {other} \
                 by this address; each node enforces the policies of its own Pod; find out which of the nodes {here} and \
                 {there} is wrong"
            );
            Issue::error(Reason::PodAddressConflict, pod, reason)
        })
    }

    /// Returns the issues of NetworkPolicies beyond the share of their namespace.
    pub(super) fn beyond_issues(&self) -> impl Iterator<Item = Issue> {
        self.beyond.iter().map(|(policy, excess)| {
            let policy = ObjectRef::new(Kind::NetworkPolicy.as_str(), &policy.namespace, &policy.name);
            let reason = match excess {
                Excess::Messages { weight, share } => format!(
                    "it takes {weight} bytes with the groups of Pods that it names, and all policies of a namespace may take \
                     {share}: as one of the largest it isolates its Pods and allows nothing; make policies of the namespace \
                     smaller, and write this one again"
                ),
                Excess::Groups { share } => format!(
                    "the groups of Pods that policies of its namespace name would take more than {share} bytes of the control \
                     plane's memory: as one with large groups it isolates its Pods and allows nothing; name namespaces \
                     instead of labels of Pods, or fewer labels"
                ),
            };
            Issue::error(Reason::TooLarge, policy, reason)
        })
    }

    /// Returns the issues of Pods whose policies do not all fit into a message.
    pub(super) fn crowded_issues(&self) -> impl Iterator<Item = Issue> {
        self.crowded.iter().map(|(pod, policies)| {
            let pod = ObjectRef::new(Kind::Pod.as_str(), &pod.namespace, &pod.name);
            let reason = format!(
                "{policies} NetworkPolicies select it, more than fit into a message: it is isolated as all of them ask, \
                 and the last ones by name allow nothing; join policies"
            );
            Issue::error(Reason::TooLarge, pod, reason)
        })
    }
}
