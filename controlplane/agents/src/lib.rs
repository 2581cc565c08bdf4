//! What a kplane control plane knows of its agents and of other replicas, and its streams to agents.
//!
//! ```text
//! kplane_desired_state: the store -> hub -> streams -> agents -> streams -> fleet: what each agent has reported
//!                             who may come in: limiters, identity, authority, certs
//!                             what operators have ordered: overrides
//! node_query: questions to agents; prestop: agents' questions about Pods that wait to end
//! peers: what other replicas know, and what their agents answer
//! suspects, failure_detector: nodes that are probably dead, and how that is found out
//! events, taints: what the API server learns of it
//! ```
//!
//! Nothing here answers people.

pub mod authority;
mod cert_issuer;
pub mod certs;
pub mod connection_limits;
pub mod draining;
pub mod events;
pub mod failure_detector;
pub mod fleet;
pub mod hub;
pub mod identity;
pub mod node_query;
pub mod overrides;
mod panicked;
pub mod peers;
pub mod prestop;
mod publish_debounce;
mod samples;
pub mod snapshots;
pub mod streams;
pub mod suspects;
pub mod taints;
pub mod traffic;
