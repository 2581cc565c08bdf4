//! The expected fate of a packet: the policy rules of a Service port on one node (A12-A18, A8), in
//! terms of what callers and pods can see.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use kplane_model::select::categorize;
use kplane_model::{Cidr, NodeFacts, ServicePort, TrafficPolicy};

use super::objects::Port;
use super::world::Role;

/// The kinds of addresses at which a Service port is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    ClusterIp,
    ExternalIp,
    LoadBalancer,
    NodePort,
}

/// The expected outcome of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Expect {
    /// One of the endpoints answers, and each of them sooner or later.
    Answer {
        /// The endpoints that may answer.
        from: BTreeSet<SocketAddr>,
        /// Whether they see the node's address instead of the caller's. A pod that calls itself
        /// sees the node's in any case.
        masqueraded: bool,
        /// Whether all calls of one caller go to the same endpoint, as far as that is programmed
        /// (A11).
        sticky: bool,
    },
    /// The caller gets a refusal.
    Refused,
    /// No packet comes back.
    Silence,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ClusterIp => "ClusterIP",
            Self::ExternalIp => "external IP",
            Self::LoadBalancer => "load balancer",
            Self::NodePort => "NodePort",
        })
    }
}

impl fmt::Display for Expect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from: Vec<String> = self.endpoints().iter().map(ToString::to_string).collect();
        match self {
            Self::Answer { .. } => write!(f, "an answer from {}", from.join(", ")),
            Self::Refused => f.write_str("a refusal"),
            Self::Silence => f.write_str("silence"),
        }
    }
}

impl Expect {
    /// Returns the endpoints that may answer.
    pub(crate) fn endpoints(&self) -> BTreeSet<SocketAddr> {
        match self {
            Self::Answer { from, .. } => from.clone(),
            Self::Refused | Self::Silence => BTreeSet::new(),
        }
    }
}

/// Returns all addresses of a Service port, at a node with this address.
pub(crate) fn targets(port: &ServicePort, node: IpAddr) -> BTreeSet<(Kind, SocketAddr)> {
    let at = |kind, ip: &IpAddr| (kind, SocketAddr::new(*ip, port.port));
    let balancers = &port.load_balancer_ips;
    // An address of both kinds keeps the load balancer's restrictions.
    let external = port
        .external_ips
        .iter()
        .filter(|ip| !balancers.contains(ip));
    let mut targets = BTreeSet::from([at(Kind::ClusterIp, &port.cluster_ip)]);
    targets.extend(external.map(|ip| at(Kind::ExternalIp, ip)));
    targets.extend(balancers.iter().map(|ip| at(Kind::LoadBalancer, ip)));
    let node_port = |number| (Kind::NodePort, SocketAddr::new(node, number));
    targets.extend(port.node_port.map(node_port));
    targets
}

/// Returns the expected outcome of a call from `source`, which has `role` at `node`.
pub(crate) fn expect(
    port: &Port,
    kind: Kind,
    (role, source): (Role, IpAddr),
    node: &NodeFacts,
    pods: &[Cidr],
) -> Expect {
    let service = &port.port;
    let ranges = &service.source_ranges;
    let let_in = ranges.is_empty() || ranges.iter().any(|range| range.contains(source));
    if kind == Kind::LoadBalancer && !let_in {
        return Expect::Silence;
    }
    let chosen = categorize(service, &port.endpoints, &node.name, node.zone.as_deref());
    let is_pod = pods.iter().any(|cidr| cidr.contains(source));
    // Without ranges of pods, agents take every client for a pod here (A15).
    let can_tell = pods.iter().any(|cidr| cidr.family() == service.key.family);
    let inside = is_pod || role == Role::Node;
    let (local, masqueraded) = match kind {
        Kind::ClusterIp => (
            service.internal_policy == TrafficPolicy::Local,
            can_tell && !is_pod,
        ),
        _ if service.external_policy == TrafficPolicy::Cluster => (false, true),
        // A16: pods and the node itself reach all endpoints directly.
        _ => (!inside, role == Role::Node),
    };
    let endpoints = if local { chosen.local } else { chosen.cluster };
    let endpoints = endpoints.unwrap_or_default();
    match (endpoints.is_empty(), chosen.has_any) {
        (true, true) => Expect::Silence,
        (true, false) => Expect::Refused,
        (false, _) => Expect::Answer {
            from: endpoints
                .iter()
                .map(|e| SocketAddr::new(e.ip, e.port))
                .collect(),
            masqueraded,
            sticky: service.affinity_timeout_s.is_some(),
        },
    }
}
