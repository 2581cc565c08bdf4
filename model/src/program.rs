//! Objects that are published to agents: a part that nodes share, and an overlay for each node.

use crate::key::ServiceKey;
use crate::net::EndpointAddr;
use crate::node::NodeFacts;
use crate::policy::{PolicyKey, PolicyObject};
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
    /// A part of the NetworkPolicies.
    Policy(PolicyObject),
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
    /// A part of the NetworkPolicies.
    Policy(PolicyKey),
}

impl DesiredKey {
    /// Returns the ServicePort if this is one that nodes share.
    pub fn service(&self) -> Option<&ServiceKey> {
        match self {
            Self::Service(key) => Some(key),
            Self::Local(_) | Self::Node | Self::Policy(_) => None,
        }
    }
}

impl DesiredObject {
    /// Returns the object's identity.
    pub fn key(&self) -> DesiredKey {
        match self {
            Self::Service(program) => DesiredKey::Service(program.port.key.clone()),
            Self::Local(local) => DesiredKey::Local(local.key.clone()),
            Self::Node(_) => DesiredKey::Node,
            Self::Policy(object) => DesiredKey::Policy(object.key()),
        }
    }
}

/// The shared part of one ServicePort: everything that is the same on every node (or on every node
/// of a zone). See [`crate::select::Variants`] for when there is more than one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceProgram {
    /// Addresses, ports and policies.
    pub port: ServicePort,
    /// Endpoints for policy Cluster, sorted and unique (B3, A27).
    pub endpoints: Vec<EndpointAddr>,
    /// A usable endpoint exists somewhere in the cluster. Packets for which this node may use no
    /// endpoint are then dropped, otherwise rejected (A18, B6).
    pub has_any: bool,
    /// Endpoints that serve but are not in `endpoints`: established UDP flows to them continue
    /// (F2). Sorted and unique; empty unless the protocol is UDP.
    pub serving_others: Vec<EndpointAddr>,
    /// Endpoints on dead nodes that are not in `endpoints`: connections to them end. Sorted and unique; empty for UDP.
    pub dead: Vec<EndpointAddr>,
}

/// An endpoint on the node that the overlay is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LocalEndpoint {
    /// Destination of packets.
    pub addr: EndpointAddr,
    /// The endpoint is ready, as opposed to draining.
    pub ready: bool,
}

/// The overlay of one ServicePort on one node: its endpoints there. Local policies with their
/// terminating fallback (B5), hairpin (A15) and health checks (A25) use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalEndpoints {
    /// The ServicePort.
    pub key: ServiceKey,
    /// Usable endpoints on the node, sorted by address and unique.
    pub endpoints: Vec<LocalEndpoint>,
}

impl LocalEndpoints {
    /// Returns the endpoints that a Local policy may use: the ready ones, or the draining ones when
    /// none is ready (B5).
    pub fn selected(&self) -> impl Iterator<Item = EndpointAddr> + '_ {
        let any_ready = self.endpoints.iter().any(|e| e.ready);
        self.endpoints.iter().filter(move |e| e.ready == any_ready).map(|e| e.addr)
    }
}
