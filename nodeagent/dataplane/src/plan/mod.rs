//! Planning: from desired state and node facts to what a data path must do. Pure, and the same
//! for every backend.

mod bound;
mod node;
mod reserved;
mod service;

#[cfg(test)]
mod tests;

pub use bound::cut;
pub use node::{NodePlan, NodeSettings, disjoint};
pub use reserved::Reserved;
pub use service::plan_service;

use std::fmt;
use std::net::IpAddr;

use kplane_model::{Cidr, EndpointAddr, IpvsScheduler, Protocol, ServiceKey, TrafficPolicy};

/// Where packets for a ServicePort arrive. At most one ServicePort owns one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FrontendAddr {
    /// An address and port, wherever the packet enters.
    Address {
        /// ClusterIP, externalIP or load-balancer address.
        ip: IpAddr,
        /// The protocol.
        protocol: Protocol,
        /// The Service's port.
        port: u16,
    },
    /// A port on the node's own addresses (A21).
    NodePort {
        /// The protocol.
        protocol: Protocol,
        /// The port.
        port: u16,
    },
}

impl fmt::Display for FrontendAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { ip, protocol, port } => {
                write!(
                    f,
                    "{}/{protocol}",
                    EndpointAddr {
                        ip: *ip,
                        port: *port
                    }
                )
            }
            Self::NodePort { protocol, port } => write!(f, "node port {port}/{protocol}"),
        }
    }
}

/// Why packets arrive at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The Service's address inside the cluster: the internal policy decides (A12).
    ClusterIp,
    /// An address of its load balancer (A6).
    LoadBalancer,
    /// One of `spec.externalIPs` (A5).
    ExternalIp,
    /// A port on the node's own addresses (A21).
    NodePort,
}

/// What happens to a packet for which there is no endpoint (A18).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unserved {
    /// The sender is told: nothing is usable anywhere.
    Reject,
    /// Silently dropped: the policy is Local and other nodes may have endpoints.
    Drop,
}

/// Everything about one place where packets arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frontend {
    /// The place.
    pub at: FrontendAddr,
    /// Why it is one.
    pub origin: Origin,
    /// Endpoints for everybody, or for packets from outside the cluster if `inside` is set.
    /// Sorted, unique.
    pub endpoints: Vec<EndpointAddr>,
    /// What `endpoints` are chosen by: those of this node, or those of the cluster.
    pub policy: TrafficPolicy,
    /// Endpoints for pods and for the node itself, where these differ (A16). Sorted, unique.
    pub inside: Option<Vec<EndpointAddr>>,
    /// Always masquerade (A15: external destination with policy Cluster).
    pub masquerade: bool,
    /// The fate of packets for which there is no endpoint; `None` if there always is one.
    pub unserved: Option<Unserved>,
    /// Sources that may use it; empty = everybody (A8).
    pub source_ranges: Vec<Cidr>,
}

/// Everything about one ServicePort on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePlan {
    /// Identity.
    pub key: ServiceKey,
    /// Its address inside the cluster: unused ports of it are rejected (A20), and packets to it
    /// from outside the pod network are masqueraded (A15).
    pub cluster_ip: IpAddr,
    /// All places where its packets arrive; no two are equal.
    pub frontends: Vec<Frontend>,
    /// Endpoints on this node that may reach themselves through the Service (A15: hairpin).
    pub local: Vec<EndpointAddr>,
    /// Session affinity: idle timeout in seconds (A11).
    pub affinity_timeout_s: Option<u32>,
    /// Scheduler of its own where the backend is ipvs (D7).
    pub ipvs_scheduler: Option<IpvsScheduler>,
    /// Port of the health check server on the node, which a firewall must let through (A22, A26).
    pub health_check_node_port: Option<u16>,
    /// Endpoints to which established flows may go on, whatever the policies (F2): selected,
    /// elsewhere, or shut down and still serving. Sorted, unique; empty unless the protocol is UDP.
    pub serving: Vec<EndpointAddr>,
}
