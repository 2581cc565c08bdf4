//! kplane's picture of a cluster: Kubernetes objects come in from a source, and desired state for all nodes goes out of a
//! store.
//!
//! ```text
//! kubernetes, manifests -> source -> convert -> index -> publish: the store, from which each stream reads
//!                          how far a list is trusted: trust, freshness
//!                          what may be served: admission
//! recorder: what changed
//! ```
//!
//! Nothing here knows nodes, agents, or people who ask.

pub mod admission;
pub mod convert;
pub mod freshness;
pub mod index;
pub mod inside;
pub mod k8s;
pub mod kubernetes;
pub mod publish;
pub mod recorder;
mod samples;
pub mod source;
pub mod tainted;
pub mod trust;
pub mod wire;
