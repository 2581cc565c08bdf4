//! Answers for operators: which policies and Pods are there, and which belong together?

use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{Direction, NodeName, PodName, PolicyName};

use crate::rules::Entry;
use crate::subjects::Subjects;
use crate::{ClusterPolicy, NetworkPolicy, Policies};

/// Maximum number of Pods that [`PolicyFacts`] name.
const NAMED_PODS: usize = 100;

/// Numbers of objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyCounts {
    /// Policies.
    pub policies: usize,
    /// ClusterNetworkPolicies.
    pub cluster_policies: usize,
    /// Namespaces that exist.
    pub namespaces: usize,
    /// Pods with addresses of their own.
    pub pods: usize,
    /// Classes of Pods that rules can tell apart, at the last call of [`Policies::take`].
    pub classes: usize,
    /// Groups of Pods that rules of policies for some Pod name, at the last call of [`Policies::take`].
    pub groups: usize,
    /// Policies that fit into no message, or are beyond the share of their namespace.
    pub too_large: usize,
}

/// A policy, and whom it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyFacts {
    /// The policy.
    pub policy: NetworkPolicy,
    /// Number of Pods that it selects.
    pub pods: usize,
    /// The first 100 of them, sorted.
    pub names: Vec<PodName>,
}

/// A ClusterNetworkPolicy, and whom it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterPolicyFacts {
    /// The policy.
    pub policy: Arc<ClusterPolicy>,
    /// Number of Pods that it selects.
    pub pods: usize,
    /// 100 of them at most, sorted.
    pub names: Vec<PodName>,
}

/// What a policy is beyond of, with the share of its namespace in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Excess {
    /// What policies take in messages.
    Messages {
        /// What this one takes.
        weight: usize,
        /// The share.
        share: usize,
    },
    /// What the groups of Pods that policies name take of the control plane's memory.
    Groups {
        /// The share.
        share: usize,
    },
}

/// A line of the list of policies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicySummary {
    /// The policy.
    pub name: PolicyName,
    /// It is about ingress.
    pub ingress: bool,
    /// It is about egress.
    pub egress: bool,
    /// Number of Pods that it selects.
    pub pods: usize,
}

impl Policies {
    /// Returns the numbers of objects.
    pub fn counts(&self) -> PolicyCounts {
        PolicyCounts {
            policies: self.policies.len(),
            cluster_policies: self.tiers.policies.len(),
            namespaces: self.namespaces.len(),
            pods: self.pods.len(),
            classes: self.classes.len(),
            groups: self.groups.len(),
            too_large: self.policies.too_large.len() + self.beyond_share().count(),
        }
    }

    /// Returns the policies whose objects fit into no message, sorted, and the objects' sizes in bytes. They isolate
    /// their Pods and allow nothing.
    pub fn too_large(&self) -> impl Iterator<Item = (&PolicyName, usize)> {
        self.policies.too_large.iter().map(|(name, size)| (name, *size))
    }

    /// Returns the policies that are beyond the share of their namespace. They isolate their Pods and allow nothing. As of
    /// the last call of [`Policies::take`].
    pub fn beyond_share(&self) -> impl Iterator<Item = (&PolicyName, Excess)> {
        let Subjects { beyond, wide, .. } = &self.policies;
        let share = self.policies.limits.share;
        beyond
            .iter()
            .map(move |(name, weight)| {
                let weight = *weight;
                (name, Excess::Messages { weight, share })
            })
            .chain(wide.iter().map(|(name, share)| (name, Excess::Groups { share: *share })))
    }

    /// Returns the Pods of which not all policies fit into a message, sorted, and how many policies select them. Of
    /// those that allow something, the last ones by name do not count. As of the last call of [`Policies::take`].
    pub fn crowded(&self) -> impl Iterator<Item = (&PodName, usize)> {
        self.crowded.iter().map(|(name, policies)| (name, *policies))
    }

    /// Returns the Pods that claim an address which means a Pod of another node, sorted, the address, and that Pod. As of
    /// the last call of [`Policies::take`].
    pub fn address_conflicts(&self) -> impl Iterator<Item = (&PodName, IpAddr, &PodName)> {
        self.address_conflicts
            .iter()
            .map(|(name, (address, other))| (name, *address, other))
    }

    /// Returns a policy, and the Pods that it selects.
    pub fn policy(&self, name: &PolicyName) -> Option<PolicyFacts> {
        let entry = self.policies.get(name)?;
        let mut names: Vec<_> = self.selected(entry).cloned().collect();
        let pods = names.len();
        names.sort_unstable();
        names.truncate(NAMED_PODS);
        Some(PolicyFacts {
            policy: entry.policy.clone(),
            pods,
            names,
        })
    }

    /// Returns the policies that select a Pod, sorted; `None` = there is no such Pod with an address of its own.
    pub fn policies_of(&self, pod: &PodName) -> Option<Vec<PolicyName>> {
        let labels = &self.pods.get(pod)?.labels;
        Some(
            self.policies
                .of_pod(&pod.namespace, labels)
                .into_iter()
                .map(|entry| entry.policy.name.clone())
                .collect(),
        )
    }

    /// Returns the policies that isolate a Pod in a direction, sorted; none if there is no such Pod.
    pub fn isolating(&self, pod: &PodName, direction: Direction) -> Vec<PolicyName> {
        self.pods
            .get(pod)
            .into_iter()
            .flat_map(|of| self.policies.enforced(&pod.namespace, &of.labels).0)
            .filter(|of| of.rules(direction).is_some())
            .map(|of| of.policy.name.clone())
            .collect()
    }

    /// Returns the Pod that has an address.
    pub fn pod_at(&self, address: IpAddr) -> Option<&PodName> {
        self.pods.of_address(address)
    }

    /// Returns the time at which a Pod was created, as Kubernetes writes it; `None` = not known.
    pub fn created(&self, pod: &PodName) -> Option<&Arc<str>> {
        self.pods.get(pod)?.created.as_ref()
    }

    /// Returns the addresses that are a Pod's alone; none if there is no such Pod.
    pub fn addresses_of<'a>(&'a self, pod: &'a PodName) -> impl Iterator<Item = IpAddr> + 'a {
        self.pods.addresses(pod)
    }

    /// Returns a Pod's node.
    pub fn node_of(&self, pod: &PodName) -> Option<&NodeName> {
        Some(&self.pods.get(pod)?.node)
    }

    /// Returns all policies, sorted by name.
    pub fn list(&self) -> impl Iterator<Item = PolicySummary> {
        let mut entries: Vec<_> = self.policies.iter().collect();
        entries.sort_unstable_by(|a, b| a.policy.name.cmp(&b.policy.name));
        entries.into_iter().map(|entry| PolicySummary {
            name: entry.policy.name.clone(),
            ingress: entry.policy.ingress.is_some(),
            egress: entry.policy.egress.is_some(),
            pods: self.selected(entry).count(),
        })
    }

    /// Returns how many decisions of ClusterNetworkPolicies are too large. Everything that they are about is denied.
    pub fn overlarge_decisions(&self) -> usize {
        self.tiers.too_large.len()
    }

    /// Returns the ClusterNetworkPolicies, sorted by tier, priority and name, without the names of Pods.
    pub fn cluster_policies(&self) -> impl Iterator<Item = ClusterPolicyFacts> {
        let mut policies: Vec<_> = self.tiers.policies.values().collect();
        policies.sort_by_key(|policy| policy.rank());
        policies.into_iter().map(|policy| ClusterPolicyFacts {
            policy: Arc::clone(policy),
            pods: self.subjects(policy).count(),
            names: Vec::new(),
        })
    }

    /// Returns a ClusterNetworkPolicy, and the Pods that it selects.
    pub fn cluster_policy(&self, name: &str) -> Option<ClusterPolicyFacts> {
        let policy = self.tiers.policies.get(name)?;
        let mut names: Vec<_> = self.subjects(policy).cloned().collect();
        let pods = names.len();
        names.sort_unstable();
        names.truncate(NAMED_PODS);
        let policy = Arc::clone(policy);
        Some(ClusterPolicyFacts {
            policy,
            pods,
            names,
        })
    }

    fn subjects<'a>(&'a self, policy: &'a ClusterPolicy) -> impl Iterator<Item = &'a PodName> {
        let pods = self.pods.selected_anywhere(&policy.pods);
        pods.filter(|(name, pod)| policy.selects(name, pod, &self.namespaces))
            .map(|(name, _)| name)
    }

    /// Returns the Pods that a policy selects.
    pub(crate) fn selected<'a>(&'a self, entry: &'a Entry) -> impl Iterator<Item = &'a PodName> {
        let policy = &entry.policy;
        self.pods.selected(&policy.name.namespace, &policy.pods)
    }
}
