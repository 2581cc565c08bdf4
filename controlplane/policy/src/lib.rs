//! NetworkPolicies of a cluster, and what each change of them means for nodes.
//!
//! ```text
//! policies, namespaces, Pods -> Policies -> PolicyChanges: objects of all nodes, and those of some nodes
//! ```
//!
//! The inputs are indexed in `pods`, `namespaces` and `subjects` (policies by the Pods that they select). `classes` and
//! `groups` follow from them, `placement` says which nodes get which policies and groups, `tiers` has the ClusterNetworkPolicies,
//! `policies` brings it all together, and `judge` and `facts` answer operators.
//!
//! Everything here is synchronous, deterministic and free of I/O. Objects come in valid: who reads them reports what is
//! wrong with them, and leaves that out. Ids such as NP6 refer to the list of semantics of NetworkPolicies.

mod audience;
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
mod parts;
mod placement;
mod pods;
mod policies;
mod prices;
mod published;
mod ranges;
mod rules;
mod share;
mod subjects;
#[cfg(test)]
mod tests;
mod texts;
mod tiers;
mod uses;

pub use doubts::Doubt;
pub use facts::{ClusterPolicyFacts, Excess, PolicyCounts, PolicyFacts, PolicySummary};
pub use input::{
    ClusterPolicy, Labels, NetworkPolicy, Node, PeerSpec, Pod, Requirement, Rule, Selector,
    TierRule,
};
pub use judge::{End, Judgement, Lack, Nearest, Ruling, Verdict};
pub use policies::Policies;

use kplane_model::{NodeName, PolicyKey, PolicyObject};

/// Changes of the NetworkPolicies' objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyChanges {
    /// Objects that all nodes have and that are new, changed, or gone (`None`).
    pub shared: Vec<(PolicyKey, Option<PolicyObject>)>,
    /// Objects that some nodes have.
    pub own: Vec<OwnChange>,
}

/// An object that is new, changed, or gone (`None`) on some nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnChange {
    /// The object's identity.
    pub key: PolicyKey,
    /// The object.
    pub object: Option<PolicyObject>,
    /// The nodes.
    pub nodes: Vec<NodeName>,
}

impl PolicyChanges {
    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.shared.is_empty() && self.own.is_empty()
    }

    fn push_own(&mut self, key: PolicyKey, object: Option<PolicyObject>, nodes: Vec<NodeName>) {
        if !nodes.is_empty() {
            self.own.push(OwnChange { key, object, nodes });
        }
    }
}
