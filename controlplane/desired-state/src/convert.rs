//! Conversion of Kubernetes objects to domain types: pure functions, one object at a time.
//!
//! A bad object never stops the others, and a bad part of an object stops only what depends on it
//! (invariant: isolation). For every part that is not served as written, an [`Issue`]
//! says what to do. Where a value is invalid, the choice never widens who may reach what. Behaviour
//! ids such as A27 refer to the list of kube-proxy behaviours that kplane matches.

use std::sync::Arc;

use kplane_model::{Cidr, Endpoint, Family, Issue, Protocol, ServiceName, ServicePort};

mod addresses;
mod cluster;
mod policy;
mod ports;
mod proxied;
mod report;
mod service;
mod slice;
mod tiers;

#[cfg(test)]
mod tests;

pub use cluster::{node, service_cidr};
pub use policy::{
    addresses as pod_addresses, namespace, network_policy, not_enforced, pod, policy_too_large,
};
pub use service::service;
pub use slice::slice;
pub use tiers::{cluster_policy, node_labels, tiers_not_enforced};

/// Maximum number of ports of a Service that are served. The API sets no limit; a real Service has
/// a handful.
pub const MAX_SERVICE_PORTS: usize = 1_000;
/// Maximum number of external addresses, and of load-balancer addresses, of a Service that are
/// served.
pub const MAX_SERVICE_ADDRESSES: usize = 1_000;
/// Maximum number of source ranges of a Service. With more, its load-balancer addresses are
/// refused.
pub const MAX_SOURCE_RANGES: usize = 1_000;
/// Maximum number of endpoints of a slice that are served: ten times what the API server accepts.
pub const MAX_SLICE_ENDPOINTS: usize = 10_000;
/// Maximum product of endpoints and ports of a slice: as many as a whole cluster is expected to
/// have.
pub const MAX_SLICE_TARGETS: usize = 250_000;
/// Maximum number of topology hints of an endpoint; the API server accepts 8.
pub const MAX_HINTS: usize = 64;
/// Maximum number of issues of one object; the last one counts the rest.
pub const MAX_ISSUES_PER_OBJECT: usize = 20;

/// The external addresses that Services may have (A5). Without a restriction, anyone who may write
/// a Service may take any address away from the whole cluster (CVE-2020-8554).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ExternalIps {
    /// All addresses, which is kube-proxy's default.
    #[default]
    All,
    /// Addresses within the operator's ranges.
    Within(Vec<Cidr>),
    /// No addresses, like kube-proxy with its gate `AllowServiceExternalIPs` off.
    Nothing,
}

impl ExternalIps {
    /// Converts the flags: whether Services may have external addresses, and within which ranges;
    /// no ranges = all.
    pub fn new(allowed: bool, within: Vec<Cidr>) -> Self {
        match (allowed, within.is_empty()) {
            (false, _) => Self::Nothing,
            (true, true) => Self::All,
            (true, false) => Self::Within(within),
        }
    }
}

/// A Service after conversion.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConvertedService {
    /// The Service's ports, all families, in the order in which they are written (Z2).
    pub ports: Vec<ServicePort>,
    /// The Service's problems.
    pub issues: Vec<Issue>,
    /// The reason why kplane does not serve it.
    pub skipped: Option<SkipReason>,
    /// The origin of its endpoints.
    pub origin: EndpointOrigin,
}

/// The part of a Service from which controllers make its EndpointSlices. kplane only explains with it why
/// endpoints are missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointOrigin {
    /// The labels of its Pods as `kubectl -l` takes them, such as `app=web,tier=front`; cut off after 256 bytes.
    /// Empty if others write the EndpointSlices.
    pub selector: Box<str>,
    /// The ports whose `targetPort` is a name: the port's name, and that of the container port.
    pub named_targets: Box<[(Arc<str>, Arc<str>)]>,
    /// The Service wants addresses of a load balancer, and nobody has given it any.
    pub waits_for_address: bool,
    /// Endpoints are ready although their Pods are not, or are being deleted.
    pub publishes_unready: bool,
}

/// The reason why kplane does not serve a Service (A1).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SkipReason {
    /// `clusterIP: None`.
    Headless,
    /// `type: ExternalName`, with the name to which DNS leads; cut off after 256 bytes.
    ExternalName(Box<str>),
    /// The label `service.kubernetes.io/service-proxy-name` is set.
    OtherProxy,
    /// The Service has no cluster address yet.
    NoClusterIp,
}

/// An EndpointSlice after conversion.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConvertedSlice {
    /// The Service that the slice belongs to; `None` when kplane does not serve the slice (A27,
    /// Z1).
    pub service: Option<ServiceName>,
    /// The slice's endpoints, one entry per port. A port without usable endpoints has an empty
    /// entry.
    pub ports: Vec<SliceEndpoints>,
    /// The family of the slice's addresses, if it has one.
    pub family: Option<Family>,
    /// Number of addresses that can be used, with or without ports.
    pub addresses: usize,
    /// The endpoints' conditions follow from the state of Pods.
    pub follows_pods: bool,
    /// Time of the change that led to the slice, milliseconds since 1970; 0 = the slice states
    /// none, or an invalid one.
    pub trigger_ms: u64,
    /// The slice's problems.
    pub issues: Vec<Issue>,
}

/// The endpoints of one port of a slice, in the order in which they are written.
/// [`kplane_model::select::merge`] joins slices.
#[derive(Clone, Debug, PartialEq)]
pub struct SliceEndpoints {
    /// Name of the port, matched with the Service port's name (A28).
    pub port_name: Arc<str>,
    /// Protocol of the port.
    pub protocol: Protocol,
    /// Family of the slice (Z2).
    pub family: Family,
    /// The endpoints.
    pub endpoints: Vec<Endpoint>,
}

/// Returns a port number that packets can carry: 1..=65535.
fn port_number(number: i64) -> Option<u16> {
    u16::try_from(number).ok().filter(|port| *port != 0)
}

/// Returns whether Kubernetes allows a port's name: empty, or a DNS label.
fn is_port_name(name: &str) -> bool {
    name.len() <= 63
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

/// Parses a protocol; unset is TCP (A3).
fn protocol(text: Option<&str>) -> Result<Protocol, kplane_model::UnknownProtocol> {
    text.map_or(Ok(Protocol::Tcp), str::parse)
}
