//! Plans one ServicePort (A12-A18).

use std::collections::BTreeSet;
use std::net::IpAddr;

use kplane_model::{
    Cidr, EndpointAddr, LocalEndpoints, NodeFacts, Protocol, ServicePort, ServiceProgram,
    TrafficPolicy,
};

use super::{Frontend, FrontendAddr, Origin, ServicePlan, Unserved};

/// Plans a ServicePort from what all nodes share, the node's own endpoints, and the facts of the node.
pub fn plan_service(
    program: &ServiceProgram,
    local: Option<&LocalEndpoints>,
    node: &NodeFacts,
) -> ServicePlan {
    let port = &program.port;
    let planner = Planner {
        program,
        local: local.map(|l| l.selected().collect()).unwrap_or_default(),
    };
    let mut frontends = vec![planner.internal(address(port, port.cluster_ip))];
    let ranges = source_ranges(port, node);
    for ip in unique(port, &port.load_balancer_ips) {
        let mut frontend = planner.external(address(port, ip), Origin::LoadBalancer);
        frontend.source_ranges.clone_from(&ranges);
        frontends.push(frontend);
    }
    for ip in unique(port, &port.external_ips) {
        // An address in both lists keeps the load balancer's restrictions.
        if !port.load_balancer_ips.contains(&ip) {
            frontends.push(planner.external(address(port, ip), Origin::ExternalIp));
        }
    }
    if let Some(node_port) = port.node_port {
        let at = FrontendAddr::NodePort {
            protocol: port.key.protocol,
            port: node_port,
        };
        frontends.push(planner.external(at, Origin::NodePort));
    }
    ServicePlan {
        key: port.key.clone(),
        cluster_ip: port.cluster_ip,
        frontends,
        local: local.map(|l| l.endpoints.iter().map(|e| e.addr).collect()).unwrap_or_default(),
        affinity_timeout_s: port.affinity_timeout_s,
        ipvs_scheduler: port.ipvs_scheduler,
        proxied: port.proxied,
        health_check_node_port: port.health_check_node_port,
        serving: serving(program, local),
        dead: dead(program, local),
    }
}

/// Returns the endpoints to which connections end. What is on this node is not dead.
fn dead(program: &ServiceProgram, local: Option<&LocalEndpoints>) -> Vec<EndpointAddr> {
    let is_here = |at: &EndpointAddr| {
        local.is_some_and(|local| local.endpoints.iter().any(|endpoint| endpoint.addr == *at))
    };
    program.dead.iter().copied().filter(|at| !is_here(at)).collect()
}

/// Returns the endpoints whose UDP flows go on (F2).
fn serving(program: &ServiceProgram, local: Option<&LocalEndpoints>) -> Vec<EndpointAddr> {
    if program.port.key.protocol != Protocol::Udp {
        return Vec::new();
    }
    let local = local.into_iter().flat_map(|l| &l.endpoints).map(|e| e.addr);
    let shared = program.endpoints.iter().chain(&program.serving_others);
    let all: BTreeSet<EndpointAddr> = shared.copied().chain(local).collect();
    all.into_iter().collect()
}

fn address(port: &ServicePort, ip: IpAddr) -> FrontendAddr {
    FrontendAddr::Address {
        ip,
        protocol: port.key.protocol,
        port: port.port,
    }
}

/// Returns the addresses without duplicates, and without the ClusterIP, which has a frontend of its own.
fn unique(port: &ServicePort, ips: &[IpAddr]) -> BTreeSet<IpAddr> {
    ips.iter().copied().filter(|ip| *ip != port.cluster_ip).collect()
}

/// Returns the sources that may use load-balancer addresses (A8). If a node's own address is allowed, the
/// node also reaches these addresses with the load-balancer address as source, because it owns that address
/// locally (A9).
fn source_ranges(port: &ServicePort, node: &NodeFacts) -> Vec<Cidr> {
    let allows = |ip: &IpAddr| port.source_ranges.iter().any(|range| range.contains(*ip));
    let mut ranges = port.source_ranges.clone();
    if node.addresses.iter().any(allows) {
        ranges.extend(port.load_balancer_ips.iter().copied().map(Cidr::single));
    }
    ranges
}

struct Planner<'a> {
    program: &'a ServiceProgram,
    local: Vec<EndpointAddr>,
}

impl Planner<'_> {
    /// Plans the frontend of the ClusterIP: the internal policy decides (A12).
    fn internal(&self, at: FrontendAddr) -> Frontend {
        let endpoints = match self.program.port.internal_policy {
            TrafficPolicy::Cluster => self.program.endpoints.clone(),
            TrafficPolicy::Local => self.local.clone(),
        };
        Frontend {
            at,
            origin: Origin::ClusterIp,
            unserved: self.unserved(&endpoints),
            endpoints,
            policy: self.program.port.internal_policy,
            inside: None,
            masquerade: false,
            source_ranges: Vec::new(),
        }
    }

    /// Plans any other place: the external policy decides (A13, A15, A16).
    fn external(&self, at: FrontendAddr, origin: Origin) -> Frontend {
        let all = self.program.endpoints.clone();
        match self.program.port.external_policy {
            TrafficPolicy::Cluster => Frontend {
                at,
                origin,
                unserved: self.unserved(&all),
                endpoints: all,
                policy: TrafficPolicy::Cluster,
                inside: None,
                masquerade: true,
                source_ranges: Vec::new(),
            },
            TrafficPolicy::Local => Frontend {
                at,
                origin,
                unserved: self.unserved(&self.local),
                endpoints: self.local.clone(),
                policy: TrafficPolicy::Local,
                inside: Some(all),
                masquerade: false,
                source_ranges: Vec::new(),
            },
        }
    }

    /// Returns the fate of packets without an endpoint (A18): reject when no endpoint is usable anywhere,
    /// drop when only this node has none.
    fn unserved(&self, endpoints: &[EndpointAddr]) -> Option<Unserved> {
        if !endpoints.is_empty() {
            None
        } else if self.program.has_any {
            Some(Unserved::Drop)
        } else {
            Some(Unserved::Reject)
        }
    }
}
