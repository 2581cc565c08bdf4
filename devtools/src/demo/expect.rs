//! The expected fate of a packet: the policy rules of a Service port on one node (A12-A18, A8), in
//! terms of what callers and pods can see.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use kplane_model::select::categorize;
use kplane_model::{Cidr, NodeFacts, TrafficPolicy};

use super::objects::Port;
use super::world::Role;

/// The address at which a Service port is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// The Service's address inside the cluster.
    ClusterIp,
    /// One of `spec.externalIPs`.
    ExternalIp(IpAddr),
    /// One of the load balancer's addresses.
    LoadBalancer(IpAddr),
    /// A port of the caller's node.
    NodePort(u16),
}

/// The expected outcome of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Expect {
    /// One of the endpoints answers, and each of them sooner or later.
    Answer {
        /// The endpoints that may answer.
        from: BTreeSet<SocketAddr>,
        /// The caller's address that the endpoints see.
        seen_as: SeenAs,
        /// Whether all calls of one caller go to the same endpoint, as far as that is programmed
        /// (A11).
        sticky: bool,
    },
    /// The caller gets a refusal.
    Refused,
    /// No packet comes back.
    Silence,
}

/// The source address that a pod sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SeenAs {
    /// The caller's own address. A pod that calls itself sees the node's instead.
    Caller,
    /// The node's address.
    Node,
}

impl Target {
    /// Returns the address and port to call, at a node with this address.
    pub(crate) fn address(self, port: &Port, node: IpAddr) -> SocketAddr {
        match self {
            Self::ClusterIp => SocketAddr::new(port.port.cluster_ip, port.port.port),
            Self::ExternalIp(ip) | Self::LoadBalancer(ip) => SocketAddr::new(ip, port.port.port),
            Self::NodePort(number) => SocketAddr::new(node, number),
        }
    }

    /// Returns all targets of a Service port.
    pub(crate) fn all(port: &Port) -> Vec<Self> {
        let port = &port.port;
        let mut targets = vec![Self::ClusterIp];
        let distinct: BTreeSet<IpAddr> = port.external_ips.iter().copied().collect();
        // An address of both kinds keeps the load balancer's restrictions.
        let external = distinct
            .into_iter()
            .filter(|ip| !port.load_balancer_ips.contains(ip));
        targets.extend(external.map(Self::ExternalIp));
        let distinct: BTreeSet<IpAddr> = port.load_balancer_ips.iter().copied().collect();
        targets.extend(distinct.into_iter().map(Self::LoadBalancer));
        targets.extend(port.node_port.map(Self::NodePort));
        targets
    }

    /// Returns its kind, human-readable.
    pub(crate) fn kind(self) -> &'static str {
        match self {
            Self::ClusterIp => "ClusterIP",
            Self::ExternalIp(_) => "external IP",
            Self::LoadBalancer(_) => "load balancer",
            Self::NodePort(_) => "NodePort",
        }
    }
}

/// Returns the expected outcome of a call from `source`, which has `role` at `node`.
pub(crate) fn expect(
    port: &Port,
    target: Target,
    (role, source): (Role, IpAddr),
    node: &NodeFacts,
    pods: &[Cidr],
) -> Expect {
    let service = &port.port;
    let is_lb = matches!(target, Target::LoadBalancer(_));
    let ranges = &service.source_ranges;
    if is_lb && !ranges.is_empty() && !ranges.iter().any(|range| range.contains(source)) {
        return Expect::Silence;
    }
    let chosen = categorize(service, &port.endpoints, &node.name, node.zone.as_deref());
    let is_pod = pods.iter().any(|cidr| cidr.contains(source));
    // Without ranges of pods, agents take every client for a pod here (A15).
    let can_tell = pods.iter().any(|cidr| cidr.family() == service.key.family);
    let inside = is_pod || role == Role::Node;
    let (local, masquerade) = match target {
        Target::ClusterIp => (
            service.internal_policy == TrafficPolicy::Local,
            can_tell && !is_pod,
        ),
        _ if service.external_policy == TrafficPolicy::Cluster => (false, true),
        // A16: pods and the node itself reach all endpoints directly.
        _ => (!inside, role == Role::Node),
    };
    let endpoints = if local { chosen.local } else { chosen.cluster };
    let endpoints = endpoints.unwrap_or_default();
    if endpoints.is_empty() {
        return if chosen.has_any {
            Expect::Silence
        } else {
            Expect::Refused
        };
    }
    Expect::Answer {
        from: endpoints
            .iter()
            .map(|e| SocketAddr::new(e.ip, e.port))
            .collect(),
        seen_as: if masquerade {
            SeenAs::Node
        } else {
            SeenAs::Caller
        },
        sticky: service.affinity_timeout_s.is_some(),
    }
}

#[cfg(test)]
mod tests {
    use kplane_model::{Endpoint, EndpointAddr, ServiceKey, ServicePort};

    use super::*;

    const CLIENT: (Role, IpAddr) = (
        Role::Client,
        IpAddr::V4(std::net::Ipv4Addr::new(1, 1, 1, 1)),
    );
    const POD: (Role, IpAddr) = (Role::Pod, IpAddr::V4(std::net::Ipv4Addr::new(10, 1, 0, 9)));
    const NODE: (Role, IpAddr) = (Role::Node, IpAddr::V4(std::net::Ipv4Addr::new(9, 9, 9, 9)));

    fn port() -> Port {
        let endpoint = |ip: [u8; 4], node: &str| Endpoint {
            node: Some(node.into()),
            ..Endpoint::ready(EndpointAddr {
                ip: ip.into(),
                port: 80,
            })
        };
        let port = ServicePort {
            port: 1,
            cluster_ip: [7, 7, 7, 7].into(),
            load_balancer_ips: vec![[8, 8, 8, 8].into()],
            node_port: Some(30_000),
            external_policy: TrafficPolicy::Local,
            ..ServicePort::sample(ServiceKey::sample("a", "b"))
        };
        Port {
            port,
            endpoints: vec![endpoint([10, 1, 0, 1], "n1"), endpoint([10, 2, 0, 1], "n2")],
        }
    }

    fn at(node: &str, port: &Port, target: Target, who: (Role, IpAddr)) -> (usize, Option<SeenAs>) {
        let node = NodeFacts {
            name: node.into(),
            ..NodeFacts::default()
        };
        match expect(port, target, who, &node, &["10.0.0.0/8".parse().unwrap()]) {
            Expect::Answer { from, seen_as, .. } => (from.len(), Some(seen_as)),
            Expect::Refused => (0, Some(SeenAs::Node)),
            Expect::Silence => (0, None),
        }
    }

    #[test]
    fn a15_a16_local_policy_and_its_short_ways() {
        let port = port();
        let np = Target::NodePort(30_000);
        assert_eq!(at("n1", &port, np, CLIENT), (1, Some(SeenAs::Caller)));
        assert_eq!(at("n3", &port, np, CLIENT), (0, None));
        assert_eq!(at("n3", &port, np, POD), (2, Some(SeenAs::Caller)));
        assert_eq!(at("n3", &port, np, NODE), (2, Some(SeenAs::Node)));
        assert_eq!(
            at("n1", &port, Target::ClusterIp, CLIENT),
            (2, Some(SeenAs::Node))
        );
        assert_eq!(
            at("n1", &port, Target::ClusterIp, POD),
            (2, Some(SeenAs::Caller))
        );
    }

    #[test]
    fn a8_a18_who_hears_nothing_and_who_is_refused() {
        let mut port = port();
        port.port.external_policy = TrafficPolicy::Cluster;
        let lb = Target::LoadBalancer([8, 8, 8, 8].into());
        assert_eq!(at("n3", &port, lb, CLIENT), (2, Some(SeenAs::Node)));
        port.port.source_ranges = vec!["1.1.0.0/16".parse().unwrap()];
        assert_eq!(at("n3", &port, lb, CLIENT), (2, Some(SeenAs::Node)));
        assert_eq!(at("n3", &port, lb, POD), (0, None));
        assert_eq!(
            at("n3", &port, Target::NodePort(30_000), POD),
            (2, Some(SeenAs::Node))
        );
        port.endpoints.clear();
        assert_eq!(
            at("n3", &port, Target::ClusterIp, POD),
            (0, Some(SeenAs::Node))
        );
    }
}
