//! Kubernetes objects become domain types: pure functions, one object at a time.
//!
//! A bad object never stops the others, and a bad part of an object stops only what depends on it
//! (design invariant 4). Whatever is not served as written is named in an [`Issue`] that says what
//! to do. Where a value cannot be understood, the choice never widens who may reach what.
//! Behaviour ids such as A27 refer to the list of kube-proxy behaviours that kplane matches.

use std::sync::Arc;

use kplane_model::{Cidr, Endpoint, Family, Issue, Protocol, ServiceName, ServicePort};

mod addresses;
mod cluster;
mod ports;
mod report;
mod service;
mod slice;

#[cfg(test)]
mod tests;

pub use cluster::{node, service_cidr};
pub use service::service;
pub use slice::slice;

/// Ports of a Service that are served. The API sets no limit; a real Service has a handful.
pub const MAX_SERVICE_PORTS: usize = 1_000;
/// External addresses, and load-balancer addresses, of a Service that are served.
pub const MAX_SERVICE_ADDRESSES: usize = 1_000;
/// Source ranges of a Service. With more, its load-balancer addresses are refused.
pub const MAX_SOURCE_RANGES: usize = 1_000;
/// Endpoints of a slice that are served: ten times what the API server accepts.
pub const MAX_SLICE_ENDPOINTS: usize = 10_000;
/// Endpoints times ports of a slice: as much as a whole cluster is expected to have.
pub const MAX_SLICE_TARGETS: usize = 250_000;
/// Topology hints of an endpoint; the API server accepts 8.
pub const MAX_HINTS: usize = 64;
/// Issues that one object may cause; the rest is counted in the last one.
pub const MAX_ISSUES_PER_OBJECT: usize = 20;

/// Which external addresses Services may have (A5). Whoever may write a Service may otherwise take
/// any address away from the whole cluster (CVE-2020-8554).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ExternalIps {
    /// Any, as kube-proxy has it by default.
    #[default]
    All,
    /// Those within the operator's ranges.
    Within(Vec<Cidr>),
    /// None: kube-proxy with its gate `AllowServiceExternalIPs` off.
    Nothing,
}

impl ExternalIps {
    /// As the flags have it: whether there may be any, and within which ranges; no ranges = all.
    #[must_use]
    pub fn new(allowed: bool, within: Vec<Cidr>) -> Self {
        match (allowed, within.is_empty()) {
            (false, _) => Self::Nothing,
            (true, true) => Self::All,
            (true, false) => Self::Within(within),
        }
    }
}

/// What a Service means.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConvertedService {
    /// Its ports, all families, in the order in which they are written (Z2).
    pub ports: Vec<ServicePort>,
    /// Its problems.
    pub issues: Vec<Issue>,
    /// Why it is not ours to serve.
    pub skipped: Option<SkipReason>,
}

/// Why a Service is not ours to serve (A1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SkipReason {
    /// `clusterIP: None`.
    Headless,
    /// `type: ExternalName`.
    ExternalName,
    /// The label `service.kubernetes.io/service-proxy-name` is set.
    OtherProxy,
    /// No cluster address has been given to it yet.
    NoClusterIp,
}

/// What an EndpointSlice means.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConvertedSlice {
    /// The Service that it belongs to; `None` when it is not ours to serve (A27, Z1).
    pub service: Option<ServiceName>,
    /// Its endpoints, one entry a port. A port without usable endpoints is there all the same.
    pub ports: Vec<SliceEndpoints>,
    /// The family of its addresses, if it has one.
    pub family: Option<Family>,
    /// When the change happened that led to it, milliseconds since 1970; 0 = it does not say, or
    /// nothing that can be understood.
    pub trigger_ms: u64,
    /// Its problems.
    pub issues: Vec<Issue>,
}

/// The endpoints of one port of a slice, in the order in which they are written: joining slices is
/// [`kplane_model::select::merge`]'s.
#[derive(Clone, Debug, PartialEq)]
pub struct SliceEndpoints {
    /// Name of the port, to be matched with the Service port's (A28).
    pub port_name: Arc<str>,
    /// Protocol of the port.
    pub protocol: Protocol,
    /// Family of the slice (Z2).
    pub family: Family,
    /// The endpoints.
    pub endpoints: Vec<Endpoint>,
}

/// A port number that packets can carry: 1..=65535.
fn port_number(number: i64) -> Option<u16> {
    u16::try_from(number).ok().filter(|port| *port != 0)
}

/// A port's name as Kubernetes allows it: empty, or a DNS label.
fn is_port_name(name: &str) -> bool {
    name.len() <= 63
        && name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

/// A protocol; unset is TCP (A3).
fn protocol(text: Option<&str>) -> Result<Protocol, kplane_model::UnknownProtocol> {
    text.map_or(Ok(Protocol::Tcp), str::parse)
}
