//! Publishing: a part that nodes share, and an overlay for each node.
//!
//! Each object is encoded once per variant, whatever the number of agents. The store keeps the
//! latest state of every object and the revision of its last change. There is no queue per agent
//! and no history. An agent is a cursor into the order of changes, so a slow agent costs eight
//! bytes and catches up with the latest state.
//!
//! The desired state of a node consists of `ServiceProgram`s that nearly all nodes share, and of its own
//! `LocalEndpoints` and `NodeConfig`. A program exists once as a default. Variants for a zone or a node exist only
//! where topology hints make a difference. The log of changes contains each key once, at the revision of its last
//! change, so a snapshot is the log from 0.

#![deny(clippy::indexing_slicing)]

mod blob;
mod common;
mod cursor;
mod log;
mod nodes;
mod pending;
mod policies;
mod resume;
mod snapshot_cache;
mod state;
mod store;
mod triggers;
mod watermarks;

#[cfg(test)]
mod tests;

pub use common::{Ready, message, update_end};
pub use cursor::{Cursor, Mark, Piece, PieceEnd};
pub use resume::Way;
pub use snapshot_cache::Walk;
pub use state::Moment;
pub use store::{Head, ServiceChange, Staged, Store};
pub use triggers::Sent;
pub use watermarks::{Followed, MAX_POINTS, Point};

use std::collections::BTreeMap;
use std::time::SystemTime;

use kplane_model::select::{Variants, local_by_node, sample_local, variants};
use kplane_model::{
    Cidr, Endpoint, EndpointAddr, Family, LocalEndpoint, NodeFacts, NodeName, ServiceKey,
    ServiceName, ServicePort,
};
use kplane_policy::PolicyChanges;

/// All published data of one ServicePort, for all nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Addresses and policies.
    pub port: ServicePort,
    /// Cluster endpoints by kind of node.
    pub variants: Variants,
    /// Endpoints by the node on which they run.
    pub local: BTreeMap<NodeName, Vec<LocalEndpoint>>,
    /// Endpoints on dead nodes, sorted and unique; empty for UDP.
    pub dead: Vec<EndpointAddr>,
}

impl Published {
    /// Selects among the endpoints of a ServicePort, which are [merged](kplane_model::select::merge).
    pub fn new(port: ServicePort, endpoints: &[Endpoint]) -> Self {
        Self {
            variants: variants(&port, endpoints),
            local: local_by_node(endpoints),
            dead: Vec::new(),
            port,
        }
    }

    /// Adds the endpoints on dead nodes, and cuts each list of endpoints that a node may get to `most`. A node's own endpoints
    /// have a list of their own.
    pub(crate) fn complete(&mut self, dead: Vec<EndpointAddr>, most: usize) {
        self.variants.limit(most);
        self.dead = dead;
        self.dead.truncate(most);
        self.local.values_mut().for_each(|local| sample_local(local, most));
    }

    /// Drops what is for other nodes.
    fn keep_only(&mut self, node: &NodeName) {
        self.local.retain(|other, _| other == node);
        self.variants.by_node.retain(|other, _| other == node);
    }
}

/// A change of the index, which becomes one revision.
#[derive(Clone, Debug)]
pub struct Publication {
    /// ServicePorts that are new, possibly changed, or gone (`None`).
    pub services: Vec<(ServiceKey, Option<Published>)>,
    /// Nodes that are new, possibly changed, or gone (`known` is false then). The store adds the
    /// cluster's ServiceCIDRs to them.
    pub nodes: Vec<NodeFacts>,
    /// Parts of NetworkPolicies that are new, changed or gone.
    pub policies: PolicyChanges,
    /// The cluster's ServiceCIDRs, if they changed.
    pub service_cidrs: Option<Vec<Cidr>>,
    /// Time at which the first of the changes was observed.
    pub observed_at: SystemTime,
    /// Triggers of the endpoint changes among them.
    pub triggers: Vec<Trigger>,
}

impl Publication {
    /// Returns a change that was observed now and that no trigger led to, for tests and benchmarks.
    pub fn sample(services: Vec<(ServiceKey, Option<Published>)>, nodes: Vec<NodeFacts>) -> Self {
        Self {
            services,
            nodes,
            policies: PolicyChanges::default(),
            service_cidrs: None,
            observed_at: SystemTime::now(),
            triggers: Vec::new(),
        }
    }
}

/// A change in the cluster with a known time that led to other endpoints of a Service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Trigger {
    /// Time of the change, milliseconds since 1970 by the clock of the EndpointSlice's writer.
    pub at_ms: u64,
    /// The Service.
    pub service: ServiceName,
    /// The family of the endpoints.
    pub family: Family,
}
