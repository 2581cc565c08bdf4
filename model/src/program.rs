//! What is published to agents: "share, then overlay".

use crate::key::ServiceKey;
use crate::net::EndpointAddr;
use crate::node::NodeFacts;
use crate::service::ServicePort;

/// One object of a node's desired state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DesiredObject {
    /// A ServicePort, shared by nodes.
    Service(ServiceProgram),
    /// A ServicePort's endpoints on the node.
    Local(LocalEndpoints),
    /// Facts of the node.
    Node(NodeFacts),
}

/// Identity of a [`DesiredObject`] among those of one node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DesiredKey {
    /// A ServicePort, shared by nodes.
    Service(ServiceKey),
    /// A ServicePort's endpoints on the node.
    Local(ServiceKey),
    /// Facts of the node.
    Node,
}

impl DesiredObject {
    /// The object's identity.
    #[must_use]
    pub fn key(&self) -> DesiredKey {
        match self {
            Self::Service(program) => DesiredKey::Service(program.port.key.clone()),
            Self::Local(local) => DesiredKey::Local(local.key.clone()),
            Self::Node(_) => DesiredKey::Node,
        }
    }
}

/// Everything about one ServicePort that is the same on every node (or every node of a zone): the
/// shared part. See [`crate::select::Variants`] for when there is more than one of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceProgram {
    /// Addresses, ports and policies.
    pub port: ServicePort,
    /// Endpoints for policy Cluster, sorted and unique (B3, A27).
    pub endpoints: Vec<EndpointAddr>,
    /// Some usable endpoint exists somewhere: decides drop against reject (A18, B6).
    pub has_any: bool,
    /// Endpoints that serve but are not in `endpoints`: established UDP flows to them go on (F2).
    /// Sorted and unique; empty unless the protocol is UDP.
    pub serving_others: Vec<EndpointAddr>,
}

/// An endpoint that lives on the node the overlay is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LocalEndpoint {
    /// Where packets go.
    pub addr: EndpointAddr,
    /// Ready, as opposed to draining.
    pub ready: bool,
}

/// The endpoints of one ServicePort on one node: the overlay. Feeds Local policies with their
/// terminating fallback (B5), hairpin (A15) and health checks (A25).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalEndpoints {
    /// The ServicePort.
    pub key: ServiceKey,
    /// Usable endpoints on the node, sorted by address and unique.
    pub endpoints: Vec<LocalEndpoint>,
}

impl LocalEndpoints {
    /// The endpoints that a Local policy may use: the ready ones, or the draining ones when none
    /// is ready (B5).
    pub fn selected(&self) -> impl Iterator<Item = EndpointAddr> + '_ {
        let any_ready = self.endpoints.iter().any(|e| e.ready);
        self.endpoints
            .iter()
            .filter(move |e| e.ready == any_ready)
            .map(|e| e.addr)
    }
}
