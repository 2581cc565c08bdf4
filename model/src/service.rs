//! Services and endpoints as the control plane sees them, one family at a time.

use std::net::IpAddr;
use std::sync::Arc;

use crate::cidr::Cidr;
use crate::key::ServiceKey;
use crate::net::EndpointAddr;
use crate::proxied::Proxied;
use crate::scheduler::IpvsScheduler;

/// The endpoints that a kind of traffic may reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TrafficPolicy {
    /// Any endpoint of the cluster.
    #[default]
    Cluster,
    /// Only endpoints on the node that the packet reached.
    Local,
}

/// One port of one Service in one family: its addresses and policies, without its endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Identity.
    pub key: ServiceKey,
    /// The port on every address of the Service, 1..=65535.
    pub port: u16,
    /// The address inside the cluster.
    pub cluster_ip: IpAddr,
    /// `spec.externalIPs` of this family (A5).
    pub external_ips: Vec<IpAddr>,
    /// Load-balancer ingress addresses that the node captures (A6).
    pub load_balancer_ips: Vec<IpAddr>,
    /// The port on node addresses, if any (A7, A21).
    pub node_port: Option<u16>,
    /// `internalTrafficPolicy`: ClusterIP traffic only (A12).
    pub internal_policy: TrafficPolicy,
    /// `externalTrafficPolicy`, already `Cluster` where the Service is not externally accessible (A13).
    pub external_policy: TrafficPolicy,
    /// Session affinity by client address: idle timeout in seconds, 1..=86400 (A11).
    pub affinity_timeout_s: Option<u32>,
    /// Sources that may use load-balancer addresses; empty = all sources (A8).
    pub source_ranges: Vec<Cidr>,
    /// Port of the health check server (A22).
    pub health_check_node_port: Option<u16>,
    /// The Service's own scheduler on nodes with backend ipvs (an extension of D7); `None` = the
    /// node's.
    pub ipvs_scheduler: Option<IpvsScheduler>,
    /// The treatment that the Service asks of the userspace proxy; `None` = the node's backend serves it as all.
    pub proxied: Option<Proxied>,
}

impl ServicePort {
    /// Returns whether the port is reachable from outside the cluster: it has a node port,
    /// load-balancer or external address (A14).
    pub fn externally_accessible(&self) -> bool {
        self.node_port.is_some()
            || !self.load_balancer_ips.is_empty()
            || !self.external_ips.is_empty()
    }

    /// Returns whether some traffic may reach endpoints anywhere (A14).
    pub fn uses_cluster_endpoints(&self) -> bool {
        self.internal_policy == TrafficPolicy::Cluster || self.externally_accessible()
    }

    /// Returns whether some traffic may reach endpoints on the node only (A14).
    pub fn uses_local_endpoints(&self) -> bool {
        self.internal_policy == TrafficPolicy::Local
            || (self.external_policy == TrafficPolicy::Local && self.externally_accessible())
    }
}

/// One endpoint of a ServicePort with everything that selection considers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Destination of packets.
    pub addr: EndpointAddr,
    /// The endpoint may take new connections (A27: unset means true).
    pub ready: bool,
    /// The endpoint answers requests, whatever its readiness (A27: unset means true).
    pub serving: bool,
    /// The endpoint is being shut down.
    pub terminating: bool,
    /// The name of the Pod that the endpoint is, if the slice names one of its own namespace; it may be empty.
    pub pod: Option<Arc<str>>,
    /// The node on which the endpoint runs.
    pub node: Option<Arc<str>>,
    /// `hints.forZones`.
    pub zone_hints: Vec<Arc<str>>,
    /// `hints.forNodes`.
    pub node_hints: Vec<Arc<str>>,
}

impl Endpoint {
    /// Creates a ready endpoint without node or hints, for builders and tests.
    pub fn ready(addr: EndpointAddr) -> Self {
        Self {
            addr,
            ready: true,
            serving: true,
            terminating: false,
            pod: None,
            node: None,
            zone_hints: Vec::new(),
            node_hints: Vec::new(),
        }
    }

    /// Returns whether the endpoint is not ready, but still answers while it shuts down. Such
    /// endpoints are used only where nothing is ready (B3, B5).
    pub fn is_draining(&self) -> bool {
        !self.ready && self.serving && self.terminating
    }

    /// Returns whether the endpoint is ready or draining. Serving alone is never enough (B7).
    pub fn is_usable(&self) -> bool {
        self.ready || self.is_draining()
    }
}
