//! Planning: turns desired state and node facts into instructions for a data path. It is pure, and the same
//! for every backend.

mod bound;
mod node;
mod reserved;
mod service;

#[cfg(test)]
mod tests;

pub use bound::cut;
pub use node::{NodePlan, NodePorts, NodeSettings, disjoint, loopback};
pub use reserved::Reserved;
pub use service::plan_service;

use std::net::IpAddr;

pub use kplane_model::FrontendAddr;
use kplane_model::{Cidr, EndpointAddr, IpvsScheduler, Proxied, ServiceKey, TrafficPolicy};

/// The reason why packets arrive at a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The Service's address inside the cluster. The internal policy decides (A12).
    ClusterIp,
    /// An address of the Service's load balancer (A6).
    LoadBalancer,
    /// One of `spec.externalIPs` (A5).
    ExternalIp,
    /// A port on the node's own addresses (A21).
    NodePort,
}

/// The fate of a packet for which there is no endpoint (A18).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unserved {
    /// The sender gets an error: no endpoint is usable anywhere.
    Reject,
    /// The packet is dropped silently: the policy is Local, and other nodes may have endpoints.
    Drop,
}

/// A frontend where packets arrive, with its endpoints and rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frontend {
    /// The place.
    pub at: FrontendAddr,
    /// The reason why packets arrive there.
    pub origin: Origin,
    /// Endpoints for all packets, or for packets from outside the cluster if `inside` is set. Sorted, unique.
    pub endpoints: Vec<EndpointAddr>,
    /// The policy that chose `endpoints`: those of this node, or those of the cluster.
    pub policy: TrafficPolicy,
    /// Endpoints for packets from pods and from the node itself, where these differ (A16). Sorted, unique.
    pub inside: Option<Vec<EndpointAddr>>,
    /// Whether to masquerade always (A15: external destination with policy Cluster).
    pub masquerade: bool,
    /// The fate of packets for which there is no endpoint; `None` if there is always an endpoint.
    pub unserved: Option<Unserved>,
    /// Sources that may use the place; empty = all (A8).
    pub source_ranges: Vec<Cidr>,
}

/// The plan of one ServicePort on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePlan {
    /// The identity.
    pub key: ServiceKey,
    /// The address inside the cluster. Packets to its unused ports are rejected (A20). Packets to it from
    /// outside the pod network are masqueraded (A15).
    pub cluster_ip: IpAddr,
    /// All frontends where the ServicePort's packets arrive; no two are equal.
    pub frontends: Vec<Frontend>,
    /// Endpoints on this node that may reach themselves through the Service (A15: hairpin).
    pub local: Vec<EndpointAddr>,
    /// Session affinity: idle timeout in seconds (A11).
    pub affinity_timeout_s: Option<u32>,
    /// The ServicePort's own scheduler, for the ipvs backend (D7).
    pub ipvs_scheduler: Option<IpvsScheduler>,
    /// The treatment that the Service asks of the userspace proxy; `None` = the node's backend serves it as all.
    pub proxied: Option<Proxied>,
    /// Port of the health check server on the node, which a firewall must let through (A22, A26).
    pub health_check_node_port: Option<u16>,
    /// Endpoints to which established flows may go on, whatever the policies (F2): selected endpoints,
    /// endpoints elsewhere, and endpoints that shut down and still serve. Sorted, unique; empty unless the
    /// protocol is UDP.
    pub serving: Vec<EndpointAddr>,
    /// Endpoints on dead nodes, to which connections end. Sorted, unique; none of this node.
    pub dead: Vec<EndpointAddr>,
}
