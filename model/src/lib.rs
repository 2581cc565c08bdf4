//! Domain types and pure functions of kplane.
//!
//! Everything here is synchronous, allocation-light and free of I/O: no kube, no tonic, no tokio,
//! no netlink. `kplane-proto` turns wire messages into these types and back; the control plane
//! computes [`ServiceProgram`]s with [`select`]; agents plan from them.
//!
//! Behaviour ids such as A27 or B3 refer to the list of kube-proxy behaviours that kplane matches.

mod avoided;
mod bounds;
pub mod chance;
mod cidr;
mod digest;
pub mod fate;
mod issue;
mod key;
mod net;
mod node;
mod policy;
mod program;
mod proxied;
mod proxy_state;
mod proxying;
mod ranges;
mod reason;
mod reserved;
mod samples;
mod scheduler;
pub mod select;
mod service;
mod shared;
mod text;

pub use avoided::nodes_agree;
pub use bounds::{Allowance, MAX_SERVICE_ELEMENTS, MAX_SERVICE_PLACES, ServiceSize};
pub use cidr::{Cidr, ParseCidrError, service_addresses};
pub use digest::{Digest, ObjectHash};
pub use issue::{Issue, ObjectRef, Severity};
pub use key::{KeyParts, NameParts, ServiceKey, ServiceName};
pub use net::{
    EndpointAddr, Family, FrontendAddr, ParseIpError, Protocol, UnknownProtocol,
    allow_loopback_endpoints, ip_bits, ip_from_bits, parse_ip, proxy_address, refused_endpoint_ip,
};
pub use node::{NodeFacts, NodeName, ZoneName};
pub use policy::{
    Block, DecisionRow, Decisions, Direction, GroupId, GroupPart, LocalPod, NamedPort, Peer,
    PeerClass, PeerId, Peers, PodName, Policy, PolicyKey, PolicyName, PolicyObject, PolicyPort,
    PolicyRule, PortAction, PortActions, Tier, TierAction, TierSpan,
};
pub use program::{DesiredKey, DesiredObject, LocalEndpoint, LocalEndpoints, ServiceProgram};
pub use proxied::Proxied;
pub use proxy_state::{
    ProxyConnection, ProxyCounts, ProxyEndpoint, ProxyFailure, ProxyPort, ProxyStage,
};
pub use proxying::{ParseNamespacesError, ProxyEndpoints, ProxyNamespaces};
pub use ranges::{MAX_RANGES, RangeDigests, Ranges, is_number_of_ranges, range_of, ranges_for};
pub use reason::Reason;
pub use reserved::{
    FIRST_FREE_PORT, HEALTHZ_PORT, Holder, KUBELET_PORTS, METRICS_PORT, OWN_MARK,
    ParsePortRangeError, PortRange, ReservedPorts, usual_holder,
};
pub use scheduler::IpvsScheduler;
pub use service::{Endpoint, ServicePort, TrafficPolicy};
pub use shared::shared;
pub use text::{is_hidden, one_line};
