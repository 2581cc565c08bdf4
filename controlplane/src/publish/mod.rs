//! Publishing: "share, then overlay".
//!
//! Each object is encoded once per variant, whatever the number of agents. The store keeps the
//! latest state of every object and, per object, the revision of its last change: no queue per
//! agent, no history. An agent is a cursor into that order, so a slow one costs eight bytes and
//! catches up by what is newest.

mod blob;
mod cursor;
mod log;
mod state;
mod store;
mod triggers;

#[cfg(test)]
mod tests;

pub use cursor::{Cursor, Piece, PieceEnd};
pub use store::{Head, Store};
pub use triggers::Sent;

use std::collections::BTreeMap;
use std::time::SystemTime;

use kplane_model::select::Variants;
use kplane_model::{
    Cidr, Family, LocalEndpoint, NodeFacts, NodeName, ServiceKey, ServiceName, ServicePort,
};

/// All of one ServicePort, for all nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Addresses and policies.
    pub port: ServicePort,
    /// Cluster endpoints by kind of node.
    pub variants: Variants,
    /// Endpoints by the node on which they live.
    pub local: BTreeMap<NodeName, Vec<LocalEndpoint>>,
}

/// What changed in the index: becomes one revision.
#[derive(Clone, Debug)]
pub struct Publication {
    /// ServicePorts that are new or (perhaps) changed, or gone.
    pub services: Vec<(ServiceKey, Option<Published>)>,
    /// Nodes that are new or (perhaps) changed, or gone (`known` is false then). The store adds
    /// the cluster's ServiceCIDRs to them.
    pub nodes: Vec<NodeFacts>,
    /// The cluster's ServiceCIDRs, if they changed.
    pub service_cidrs: Option<Vec<Cidr>>,
    /// When the first of the changes was observed.
    pub observed_at: SystemTime,
    /// What led to the changes of endpoints among them.
    pub triggers: Vec<Trigger>,
}

/// A change in the cluster that led to other endpoints of a Service, as far as its time is known.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Trigger {
    /// When it happened, milliseconds since 1970 by the clock of whoever wrote the EndpointSlice.
    pub at_ms: u64,
    /// The Service.
    pub service: ServiceName,
    /// The family of the endpoints.
    pub family: Family,
}
