//! `AgentService`: what agents say, and what they get.

#![deny(clippy::indexing_slicing)]

mod agent;
mod attendance;
mod mailbox;
mod outbound;
mod questions;
mod session;
mod updates;

pub use agent::AgentServer;
pub use attendance::Attendance;
pub use session::is_node_name;

use kplane_util::clock::millis;
