//! What kplane's packet tests and benchmarks share: the product's parts on the test rig.
//!
//! The rig itself ([`kplane_rig`]: namespaces, pods, packets) knows nothing of the product, so that the
//! tests beside the product's crates can use it. Everything here knows the product: [`plane`] joins a
//! control plane's store with an agent's engine in one process, [`support`] has nodes that run a backend
//! and Services for them, [`contents`] compares tables, and [`fleet`] simulates agents. Tests find the rig's modules here too, under the same names.

pub use kplane_rig::*;

pub mod chart;
pub mod contents;
pub mod fleet;
pub mod plane;
pub mod support;
