//! Generated ServicePorts: many shapes, frontends close to each other and far apart, none shared.

use std::net::IpAddr;

use kplane_model::{
    Cidr, EndpointAddr, Family, KeyParts, LocalEndpoints, NodeFacts, Protocol, ServiceKey,
    ServicePort, ServiceProgram, TrafficPolicy,
};
use proptest::prelude::*;

use crate::plan::{ServicePlan, plan_service};

/// The properties of a ServicePort. Its number gives it a name and frontends of its own.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    /// Endpoints: the number of each, and whether it is on the node.
    pub(super) endpoints: Vec<(u8, bool)>,
    pub(super) load_balancer: bool,
    pub(super) external: bool,
    pub(super) node_port: bool,
    pub(super) internal: TrafficPolicy,
    pub(super) policy: TrafficPolicy,
    pub(super) affinity: bool,
    pub(super) ranges: bool,
    pub(super) health: bool,
}

/// A ServicePort with a ClusterIP and two endpoints.
pub(super) fn plain() -> Shape {
    Shape {
        endpoints: vec![(1, false), (2, true)],
        load_balancer: false,
        external: false,
        node_port: false,
        internal: TrafficPolicy::Cluster,
        policy: TrafficPolicy::Cluster,
        affinity: false,
        ranges: false,
        health: false,
    }
}

pub(super) fn shape() -> impl Strategy<Value = Shape> {
    let policy = || prop_oneof![Just(TrafficPolicy::Cluster), Just(TrafficPolicy::Local)];
    let endpoints = prop::collection::btree_map(0_u8..8, any::<bool>(), 0..4);
    let flags = (any::<[bool; 6]>(), policy(), policy());
    (endpoints, flags).prop_map(|(endpoints, (flags, internal, external))| {
        let [
            load_balancer,
            external_ip,
            node_port,
            affinity,
            ranges,
            health,
        ] = flags;
        let accessible = load_balancer || external_ip || node_port;
        Shape {
            endpoints: endpoints.into_iter().collect(),
            load_balancer,
            external: external_ip,
            node_port,
            internal,
            // The control plane ensures this (A13).
            policy: if accessible { external } else { TrafficPolicy::Cluster },
            affinity,
            ranges: ranges && load_balancer,
            health: health && load_balancer && external == TrafficPolicy::Local,
        }
    })
}

pub(super) fn key(number: u16, family: Family) -> ServiceKey {
    ServiceKey::from(KeyParts {
        protocol: Protocol::ALL[usize::from(number % 3)],
        family,
        ..KeyParts::clone(&ServiceKey::sample("shop", &format!("svc-{number}")))
    })
}

/// An address of the family whose last four bytes are `low`.
fn ip(family: Family, low: u32) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(low.into()),
        Family::V6 => IpAddr::V6((0xfd00_u128 << 112 | u128::from(low)).into()),
    }
}

/// Three ServicePorts share an address. Some addresses are far from the rest.
pub(super) fn cluster_ip(number: u16, family: Family) -> IpAddr {
    let base = if number.is_multiple_of(13) { 0xac14_0000 } else { 0x0a60_0000 };
    ip(family, base + u32::from(number / 3) * 5)
}

pub(super) fn port(number: u16) -> u16 {
    80 + number % 40
}

pub(super) fn load_balancer_ip(number: u16, family: Family) -> IpAddr {
    ip(family, 0xc633_6400 + u32::from(number))
}

pub(super) fn external_ip(number: u16, family: Family) -> IpAddr {
    ip(family, 0xc000_0200 + u32::from(number))
}

pub(super) fn node_port(number: u16) -> u16 {
    30_000 + number
}

pub(super) fn pod(number: u8, family: Family) -> IpAddr {
    ip(family, 0x0af4_0100 + u32::from(number))
}

pub(super) fn plan(number: u16, family: Family, shape: &Shape) -> ServicePlan {
    let addr = |pod_number: u8| EndpointAddr::new(pod(pod_number, family), 8080);
    let range = match family {
        Family::V4 => "203.0.113.0/24",
        Family::V6 => "2001:db8::/32",
    };
    let key = key(number, family);
    let port = ServicePort {
        port: port(number),
        cluster_ip: cluster_ip(number, family),
        external_ips: shape.external.then(|| external_ip(number, family)).into_iter().collect(),
        load_balancer_ips: shape
            .load_balancer
            .then(|| load_balancer_ip(number, family))
            .into_iter()
            .collect(),
        node_port: shape.node_port.then(|| node_port(number)),
        internal_policy: shape.internal,
        external_policy: shape.policy,
        affinity_timeout_s: shape.affinity.then_some(600),
        source_ranges: shape.ranges.then(|| range.parse::<Cidr>().unwrap()).into_iter().collect(),
        // Two ServicePorts share one port.
        health_check_node_port: shape.health.then_some(32_000 + number / 2),
        ..ServicePort::sample(key.clone())
    };
    let endpoints = shape.endpoints.iter().map(|(number, _)| addr(*number));
    let program = ServiceProgram::sample(port, endpoints.collect());
    let local = shape.endpoints.iter().filter(|(_, local)| *local);
    let local = LocalEndpoints::sample(key, local.map(|(number, _)| addr(*number)));
    plan_service(&program, Some(&local), &NodeFacts::default())
}
