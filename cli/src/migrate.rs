//! The way of nodes from kube-proxy to kplane, and back: the pure part.
//!
//! ```text
//! objects of the cluster + the fleet --> Picture --> stage of each node --> next step of an order
//! ```
//!
//! A label of each node says who serves it, and both DaemonSets follow that label by node affinity. The state of a
//! migration is in these labels and in an annotation of kube-proxy's DaemonSet, and nowhere else. So every command can
//! be stopped at any moment, and continued from any machine.

pub(crate) mod affinity;
pub(crate) mod cleanup;
pub(crate) mod order;
pub(crate) mod plan;
pub(crate) mod pods;
pub(crate) mod record;
pub(crate) mod snapshot;
pub(crate) mod stage;

/// The label of nodes that says who serves them.
pub(crate) const LABEL: &str = "kplane.io/proxy";

/// Value of the label on a node that kplane serves.
pub(crate) const KPLANE: &str = "kplane";

/// Value of the label on a node that goes back to kube-proxy: kube-proxy runs again, and kplane's rules are not removed
/// yet. Nodes without the label belong to kube-proxy.
pub(crate) const RETURNING: &str = "returning";

/// The agents' DaemonSet, in the namespace of kplane.
pub(crate) const AGENTS: &str = "kplane-nodeagent";
