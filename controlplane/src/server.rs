//! gRPC services of the control plane.

mod agent;
mod attendance;
mod convergence;
mod desired;
mod feeds;
mod freeze;
mod guarded;
mod issues;
mod layers;
mod mailbox;
mod outbound;
mod pages;
mod questions;
mod session;
mod status;
#[cfg(test)]
mod tests;
mod views;

pub use agent::AgentServer;
pub use desired::DesiredServer;
pub use guarded::Guarded;
#[cfg(test)]
pub(crate) use guarded::spawn_watch;
pub(crate) use pages::node_states;
pub use status::StatusServer;

use crate::wire::{confidence, millis};
