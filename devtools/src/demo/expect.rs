//! The expected fate of a packet: the policy rules of a Service port on one node (A12-A18, A8), in
//! terms of what callers and pods can see.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use kplane_model::select::categorize;
use kplane_model::{Cidr, NodeFacts, ServicePort, TrafficPolicy};
use kplane_rig::ask::Expect;

use super::objects::Port;
use super::world::Role;

/// The kinds of addresses at which a Service port is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    ClusterIP,
    ExternalIP,
    LoadBalancer,
    NodePort,
}

/// Returns all addresses of a Service port, at a node with this address.
pub(crate) fn targets(port: &ServicePort, node: IpAddr) -> BTreeSet<(Kind, SocketAddr)> {
    let at = |kind, ip: &IpAddr| (kind, SocketAddr::new(*ip, port.port));
    let balancers = &port.load_balancer_ips;
    // An address of both kinds keeps the load balancer's restrictions.
    let external = port.external_ips.iter().filter(|ip| !balancers.contains(ip));
    let mut targets = BTreeSet::from([at(Kind::ClusterIP, &port.cluster_ip)]);
    targets.extend(external.map(|ip| at(Kind::ExternalIP, ip)));
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
    (node, node_ip): (&NodeFacts, IpAddr),
    pods: &[Cidr],
) -> Expect {
    let service = &port.port;
    let ranges = &service.source_ranges;
    let let_in = ranges.is_empty() || ranges.iter().any(|range| range.contains(source));
    if kind == Kind::LoadBalancer && !let_in {
        return Expect::Dropped;
    }
    let chosen = categorize(service, &port.endpoints, &node.name, node.zone.as_deref());
    let is_pod = pods.iter().any(|cidr| cidr.contains(source));
    // Without ranges of pods, agents take every client for a pod here (A15).
    let can_tell = pods.iter().any(|cidr| cidr.family() == service.key.family);
    let inside = is_pod || role == Role::Node;
    let internal_local = service.internal_policy == TrafficPolicy::Local;
    let (local, masqueraded) = match kind {
        Kind::ClusterIP => (internal_local, can_tell && !is_pod),
        _ if service.external_policy == TrafficPolicy::Cluster => (false, true),
        // A16: pods and the node itself reach all endpoints directly.
        _ => (!inside, role == Role::Node),
    };
    let endpoints = if local { chosen.local } else { chosen.cluster };
    let endpoints = endpoints.unwrap_or_default();
    match (endpoints.is_empty(), chosen.has_any) {
        (true, true) => return Expect::Dropped,
        (true, false) => return Expect::Refused,
        (false, _) => {}
    }
    let sees = |ip: IpAddr| match masqueraded || ip == source {
        // Packets that are delivered on the node itself pass no postrouting.
        _ if ip == node_ip => Vec::new(),
        true => vec![node_ip],
        false => vec![source],
    };
    let endpoints = endpoints.into_iter().map(|e| (SocketAddr::new(e.ip, e.port), sees(e.ip)));
    Expect::Reach(endpoints.collect())
}
