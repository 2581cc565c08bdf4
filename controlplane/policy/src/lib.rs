//! NetworkPolicies of a cluster, and what each change of them means for nodes.
//!
//! ```text
//! policies, namespaces, Pods -> Policies -> PolicyChanges: objects that nodes share, and the Pods of each node
//! ```
//!
//! Everything here is synchronous, deterministic and free of I/O. Objects come in valid: who reads them reports what is
//! wrong with them, and leaves that out. Ids such as NP6 refer to the list of semantics of NetworkPolicies.

mod classes;
mod facts;
mod group;
mod groups;
mod identity;
mod input;
mod judge;
mod lookup;
mod namespaces;
mod pods;
mod policies;
mod published;
mod rules;
mod subjects;
#[cfg(test)]
mod tests;
mod texts;
mod uses;

pub use facts::{PolicyCounts, PolicyFacts, PolicySummary};
pub use input::{Labels, NetworkPolicy, PeerSpec, Pod, Requirement, Rule, Selector};
pub use judge::{End, Judgement, Verdict};
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
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.shared.is_empty() && self.pods.is_empty()
    }
}
