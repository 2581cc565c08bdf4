//! NetworkPolicies of a cluster, and what each change of them means for nodes.
//!
//! ```text
//! policies, namespaces, Pods -> Policies -> PolicyChanges: objects that nodes share, and the Pods of each node
//! ```
//!
//! The inputs are indexed in `pods`, `namespaces` and `subjects` (policies by the Pods that they select). `classes` and
//! `groups` follow from them, `tiers` has the ClusterNetworkPolicies, `policies` brings it all together, and `judge` and `facts` answer operators.
//!
//! Everything here is synchronous, deterministic and free of I/O. Objects come in valid: who reads them reports what is
//! wrong with them, and leaves that out. Ids such as NP6 refer to the list of semantics of NetworkPolicies.

mod classes;
mod doubts;
mod facts;
mod group;
mod groups;
mod identity;
mod input;
mod judge;
mod limits;
mod lookup;
mod namespaces;
mod pods;
mod policies;
mod published;
mod ranges;
mod rules;
mod subjects;
#[cfg(test)]
mod tests;
mod texts;
mod tiers;
mod uses;

pub use doubts::Doubt;
pub use facts::{ClusterPolicyFacts, PolicyCounts, PolicyFacts, PolicySummary};
pub use input::{
    ClusterPolicy, Labels, NetworkPolicy, Node, PeerSpec, Pod, Requirement, Rule, Selector,
    TierRule,
};
pub use judge::{End, Judgement, Lack, Nearest, Ruling, Verdict};
pub use policies::Policies;

use kplane_model::{LocalPod, NodeName, PodName, PolicyKey, PolicyObject};

/// Changes of the NetworkPolicies' objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyChanges {
    /// Objects that nodes share and that are new, changed, or gone (`None`).
    pub shared: Vec<(PolicyKey, Option<PolicyObject>)>,
    /// Pods of nodes that are new, changed, or gone (`None`).
    pub pods: Vec<(NodeName, PodName, Option<LocalPod>)>,
}

impl PolicyChanges {
    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.shared.is_empty() && self.pods.is_empty()
    }
}
