//! kplane's control plane as a library: source -> index -> publish -> stream.

mod admin;
pub mod admission;
pub mod app;
pub mod authority;
mod bounded;
pub mod buckets;
pub mod certs;
pub mod check;
pub mod convert;
pub mod dial;
pub mod doors;
pub mod draining;
pub mod events;
pub mod fleet;
pub mod freshness;
pub mod hub;
pub mod identity;
pub mod index;
mod issue;
pub mod k8s;
pub mod kubernetes;
pub mod publish;
pub mod server;
pub mod signals;
pub mod snapshots;
pub mod source;
pub mod trust;
