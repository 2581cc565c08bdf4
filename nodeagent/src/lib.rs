//! kplane's node agent as a library.
//!
//! ```text
//! sync (async client) -> desired (what the node must have) -> plan (pure) -> backend -> report
//! ```
//!
//! The engine owns desired state and backend on its own thread. All asynchronous code is a thin
//! shell around the engine.

pub mod app;
mod attempts;
pub mod avoided;
pub mod cache;
pub mod canary;
pub mod claim;
pub mod cleanup;
pub mod config;
pub mod connection;
pub mod denials;
pub mod desired;
mod dns;
pub mod engine;
#[cfg_attr(not(feature = "userspace"), path = "handover/absent.rs")]
mod handover;
pub mod healthz;
pub mod host_checks;
pub mod log;
pub mod metrics;
pub mod oom;
mod own_places;
pub mod peer_probe;
pub mod preflight;
pub mod prestop;
pub mod pulse;
pub mod reload;
pub mod report;
pub mod service_connections;
pub mod service_health;
pub mod sync;
pub mod sysctl;
mod take_over;
