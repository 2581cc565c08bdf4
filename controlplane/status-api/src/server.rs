//! gRPC services that people, tools and other replicas call.

#![deny(clippy::indexing_slicing)]

mod affinity;
pub mod approval;
mod attempts;
mod broken;
mod convergence;
mod description;
mod desired;
mod drops;
mod flows;
mod freeze;
mod graph;
mod guarded;
mod issues;
mod kernel;
mod lag;
mod neighbours;
mod node_query;
mod on_node;
mod others;
mod pages;
mod peer;
mod policies;
mod policy_index;
pub mod prestop;
mod probe;
mod proxied;
mod recorder;
mod request;
mod servers;
mod service_on_node;
mod services;
mod status;
#[cfg(test)]
mod tests;
mod views;
mod why;

pub(crate) use broken::{Scope, worst_first};
pub use desired::DesiredServer;
pub use guarded::Guarded;
pub(crate) use guarded::{admit, connection};
pub(crate) use pages::Overview;
pub use pages::{Census, census};
pub use peer::PeerServer;
pub use recorder::{Metrics, Print, RecorderServer};
pub use status::StatusServer;

use kplane_agents::identity::Caller;
use kplane_agents::overrides::MAX_REASON;
use kplane_desired_state::wire::confidence;
use kplane_util::clock::millis;
use kplane_util::clock::wall_ms;
use tokio::sync::mpsc;
use tonic::{Response, Status};

/// The outcome of a call.
type Answer<T> = Result<Response<T>, Status>;

/// The end of a stream into which a server puts its answers.
type Outbox<T> = mpsc::Sender<Result<T, Status>>;

/// Returns an operator's name, as long as the document of orders keeps it; empty if the caller has none.
fn operator(caller: Option<&Caller>) -> String {
    let name = caller.and_then(Caller::name).unwrap_or_default();
    name[..name.floor_char_boundary(MAX_REASON)].to_owned()
}
