//! gRPC services of the control plane.

mod agent;
mod approval;
mod attendance;
mod convergence;
mod desired;
mod guarded;
mod issues;
mod others;
mod pages;
mod peer;
mod questions;
mod session;
mod standing;
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
pub use peer::PeerServer;
pub use status::StatusServer;

use std::time::{SystemTime, UNIX_EPOCH};

use kplane_proto::v1::Confidence;

use tonic::Status;

use crate::hub::Closing;
use crate::trust::Trust;

/// Returns the trust in the picture for the wire.
fn confidence(trust: &Trust) -> Confidence {
    match trust {
        Trust::Partial(_) => Confidence::Partial,
        Trust::Whole => Confidence::Unspecified,
        Trust::Confirmed => Confidence::Confirmed,
    }
}

/// Returns the status of a question that came too late.
#[expect(clippy::needless_pass_by_value, reason = "handed to map_err")]
fn closing(error: Closing) -> Status {
    Status::unavailable(error.to_string())
}

/// Returns milliseconds since 1970, 0 for times before.
pub(crate) fn millis(at: SystemTime) -> u64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
