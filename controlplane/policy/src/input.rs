//! Policies, namespaces and Pods, as far as policies ask for them.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{
    Block, Cidr, Direction, NamedPort, NodeName, PodName, PolicyName, PolicyPort, Tier, TierAction,
};

use crate::namespaces::NamespaceLabels;
use crate::pods::PodEntry;

/// Labels of an object.
pub type Labels = BTreeMap<Arc<str>, Arc<str>>;

/// A NetworkPolicy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkPolicy {
    /// Its name.
    pub name: PolicyName,
    /// The Pods of its namespace that it is for (NP5).
    pub pods: Selector,
    /// What may come to them; `None` = it is not about ingress (NP3).
    pub ingress: Option<Vec<Rule>>,
    /// What they may reach; `None` = it is not about egress (NP3).
    pub egress: Option<Vec<Rule>>,
}

/// A rule: connections with one of the peers, to one of the ports (NP2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The other ends; `None` = everybody (NP4).
    pub peers: Option<Vec<PeerSpec>>,
    /// The destination's ports; `None` = all of all protocols (NP8). A list without any allows nothing.
    pub ports: Option<Vec<PolicyPort>>,
}

/// A peer of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerSpec {
    /// Pods (NP6).
    Pods {
        /// Their namespaces; `None` = that of the policy.
        namespaces: Option<Selector>,
        /// The Pods in these namespaces; `None` = all.
        pods: Option<Selector>,
    },
    /// Addresses (NP7).
    Block(Block),
    /// The addresses of nodes. Only ClusterNetworkPolicies name them.
    Nodes(Selector),
}

/// A ClusterNetworkPolicy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterPolicy {
    /// Its name.
    pub name: Arc<str>,
    /// Its tier.
    pub tier: Tier,
    /// Its place in the tier: of two policies, the one with the smaller number comes first, then the first by name.
    pub priority: u16,
    /// The namespaces of the Pods that it is for.
    pub namespaces: Selector,
    /// The Pods in these namespaces that it is for.
    pub pods: Selector,
    /// Rules for connections to the Pods. The first that matches counts.
    pub ingress: Vec<TierRule>,
    /// Rules for connections from the Pods.
    pub egress: Vec<TierRule>,
}

/// A rule of a ClusterNetworkPolicy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierRule {
    /// What happens to connections that it matches.
    pub action: TierAction,
    /// The connections. Peers name their namespaces.
    pub rule: Rule,
}

impl ClusterPolicy {
    /// Returns the rules of a direction.
    pub fn rules(&self, direction: Direction) -> &[TierRule] {
        match direction {
            Direction::Ingress => &self.ingress,
            Direction::Egress => &self.egress,
        }
    }

    /// Returns the order of policies.
    pub(crate) fn rank(&self) -> (Tier, u16, Arc<str>) {
        (self.tier, self.priority, Arc::clone(&self.name))
    }

    /// Returns whether it is for a Pod.
    pub(crate) fn selects(
        &self,
        name: &PodName,
        pod: &PodEntry,
        namespaces: &NamespaceLabels,
    ) -> bool {
        pod.labels.meet(&self.pods) && namespaces.meet(&name.namespace, &self.namespaces)
    }
}

/// A label selector: an object is selected if it meets all requirements (NP5).
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Selector(pub Vec<Requirement>);

/// A requirement of a selector. Values are sorted and unique.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Requirement {
    /// The label has one of the values.
    In(Arc<str>, Vec<Arc<str>>),
    /// The label has none of the values, or is missing.
    NotIn(Arc<str>, Vec<Arc<str>>),
    /// The label is there.
    Exists(Arc<str>),
    /// The label is missing.
    DoesNotExist(Arc<str>),
}

impl Selector {
    /// Returns whether an object with these labels is selected.
    pub fn selects(&self, labels: &Labels) -> bool {
        self.holds(|key| labels.get(key))
    }

    /// Returns whether an object is selected, whose labels are read by key.
    pub(crate) fn holds<'a>(&self, label: impl Fn(&str) -> Option<&'a Arc<str>>) -> bool {
        self.0.iter().all(|requirement| match requirement {
            Requirement::In(key, values) => label(key).is_some_and(|value| values.contains(value)),
            Requirement::NotIn(key, values) => {
                label(key).is_none_or(|value| !values.contains(value))
            }
            Requirement::Exists(key) => label(key).is_some(),
            Requirement::DoesNotExist(key) => label(key).is_none(),
        })
    }

    /// Returns the form that is equal for selectors with the same requirements.
    pub(crate) fn canonical(&self) -> Self {
        let mut requirements = self.0.clone();
        for requirement in &mut requirements {
            if let Requirement::In(_, values) | Requirement::NotIn(_, values) = requirement {
                values.sort_unstable();
                values.dedup();
            }
        }
        requirements.sort_unstable();
        requirements.dedup();
        Self(requirements)
    }

    /// Returns a label that selected objects have, with one of some values: the requirement with the fewest values.
    /// `None` if no requirement names values.
    pub(crate) fn pivot(&self) -> Option<(&Arc<str>, &[Arc<str>])> {
        self.0
            .iter()
            .filter_map(|requirement| match requirement {
                Requirement::In(key, values) => Some((key, &values[..])),
                _ => None,
            })
            .min_by_key(|(_, values)| values.len())
    }

    /// Returns whether all objects are selected.
    pub(crate) fn is_everything(&self) -> bool {
        self.0.is_empty()
    }
}

impl Requirement {
    /// Returns the label's key.
    pub(crate) fn key(&self) -> &Arc<str> {
        match self {
            Self::In(key, _)
            | Self::NotIn(key, _)
            | Self::Exists(key)
            | Self::DoesNotExist(key) => key,
        }
    }
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Its labels.
    pub labels: Labels,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// The ranges of its Pods, if it has some.
    pub ranges: Vec<Cidr>,
}

/// A Pod that has an address of its own: not one on its node's network (NP12), nor a finished one (NP18).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its name.
    pub name: PodName,
    /// Its node.
    pub node: NodeName,
    /// Its addresses, as far as it has some yet.
    pub addresses: Vec<IpAddr>,
    /// Its labels.
    pub labels: Labels,
    /// Its container ports with names.
    pub ports: Vec<NamedPort>,
    /// It is being deleted. If another Pod of its node has its address, that one counts (NP18).
    pub terminating: bool,
    /// Time of its creation, RFC 3339: of two Pods of a node with one address, the younger one counts, and of two nodes
    /// the one that had such a Pod first.
    pub created: Option<Arc<str>>,
}
