//! kplane's control plane as a library: what it knows of agents and other replicas, the streams to them, and what it
//! answers people. Desired state is made in `kplane_picture`.

mod admin;
pub mod app;
pub mod authority;
pub mod certs;
pub mod check;
pub mod doors;
pub mod draining;
pub mod events;
mod findings;
pub mod flags;
pub mod fleet;
pub mod hub;
pub mod identity;
mod issue;
pub mod orders;
mod pace;
mod page;
mod panicked;
pub mod peers;
pub mod server;
pub mod signals;
pub mod snapshots;
pub mod taints;
pub mod trace_counts;
pub mod traces;
pub mod traffic;
