//! The needs of one ServicePort: virtual servers, entries of sets, addresses. This module is pure.
//!
//! A virtual server has one list of real servers for all clients. So it cannot distinguish clients inside and
//! outside of the cluster as the other backends do (A16). Where a Local policy has no endpoint on this node,
//! the endpoints of the cluster serve, unless [`IpvsSettings::strict_local`] forbids it (A29). The node's own
//! packets to external addresses are served in any case. They do not pass INPUT, where packets of other
//! clients are refused if no set opens their place.

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{Cidr, EndpointAddr, IpvsScheduler, Protocol, TrafficPolicy};

use super::IpvsSettings;
use super::sets::{Entry, SetId};
use crate::plan::{Frontend, FrontendAddr, NodePlan, Origin, ServicePlan};
use kplane_netlink::ipvs::{ServerKey, ServerMode};

/// The node's own addresses of one family, without those of the dummy device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NodeIps(BTreeSet<IpAddr>);

impl NodeIps {
    /// Returns all addresses but loopback and IPv6 link-local ones, which serve nothing.
    pub(super) fn new(all: impl IntoIterator<Item = IpAddr>) -> Self {
        let serves = |ip: &IpAddr| match ip {
            IpAddr::V4(ip) => !ip.is_loopback(),
            IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
        };
        Self(all.into_iter().filter(serves).collect())
    }

    /// Returns the addresses on which node ports are served.
    fn of_node_ports(&self, node: &NodePlan) -> impl Iterator<Item = IpAddr> {
        let served = |ip: &IpAddr| node.nodeport_ips.iter().any(|range| range.contains(*ip));
        self.0.iter().copied().filter(served)
    }

    pub(super) fn contains(&self, ip: IpAddr) -> bool {
        self.0.contains(&ip)
    }
}

/// A virtual server that must exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WantedServer {
    pub(super) key: ServerKey,
    pub(super) mode: ServerMode,
    /// The real servers, sorted, unique.
    pub(super) reals: Arc<[EndpointAddr]>,
}

/// The needs of one ServicePort. Other ServicePorts may need the same objects, except servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Demand {
    /// The frontends of the plan.
    pub(super) frontends: Vec<FrontendAddr>,
    pub(super) servers: Vec<WantedServer>,
    pub(super) entries: Vec<(SetId, Entry)>,
    /// Addresses of the dummy device.
    pub(super) addresses: Vec<IpAddr>,
    /// Load balancers that the node itself may not use.
    pub(super) denied: Vec<ServerKey>,
}

impl Demand {
    /// Returns the needs of a plan on a node, with connections spread by `scheduler`.
    pub(super) fn new(
        plan: &ServicePlan,
        scheduler: IpvsScheduler,
        node: &NodePlan,
        ips: &NodeIps,
        settings: &IpvsSettings,
    ) -> Self {
        let mut planner = DemandPlanner {
            mode: ServerMode {
                scheduler,
                persistent_s: plan.affinity_timeout_s,
            },
            cluster: cluster_endpoints(plan).into(),
            strict_local: settings.strict_local,
            demand: Self {
                frontends: plan.frontends.iter().map(|f| f.at).collect(),
                ..Self::default()
            },
        };
        for frontend in &plan.frontends {
            match frontend.at {
                FrontendAddr::Address { ip, protocol, port } => {
                    let key = ServerKey { ip, protocol, port };
                    planner.address(key, frontend, ips);
                }
                FrontendAddr::NodePort { protocol, port } => {
                    let ips = ips.of_node_ports(node);
                    planner.node_port(protocol, port, frontend, ips);
                }
            }
        }
        let mut demand = planner.demand;
        let protocol = plan.key.protocol;
        let loops = plan.local.iter().map(|at| {
            let entry = Entry::IpPortIp(at.ip, protocol, at.port, at.ip);
            (SetId::LoopBack, entry)
        });
        demand.entries.extend(loops);
        let health = plan
            .health_check_node_port
            .map(Entry::Port)
            .map(|entry| (SetId::HealthCheckNodePort, entry));
        demand.entries.extend(health);
        let mut seen = HashSet::new();
        demand.entries.retain(|entry| seen.insert(*entry));
        demand
    }
}

/// Returns the endpoints of the cluster, if the plan contains them.
fn cluster_endpoints(plan: &ServicePlan) -> &[EndpointAddr] {
    let of = |frontend: &'_ Frontend| match frontend.policy {
        TrafficPolicy::Cluster => true,
        TrafficPolicy::Local => frontend.inside.is_some(),
    };
    let frontend = plan.frontends.iter().find(|frontend| of(frontend));
    frontend.map_or(&[], |frontend| match &frontend.inside {
        Some(inside) => inside,
        None => &frontend.endpoints,
    })
}

struct DemandPlanner {
    mode: ServerMode,
    /// Endpoints of the cluster.
    cluster: Arc<[EndpointAddr]>,
    strict_local: bool,
    demand: Demand,
}

impl DemandPlanner {
    fn reals(&self, frontend: &Frontend) -> Arc<[EndpointAddr]> {
        let falls_back = lacks_local(frontend) && !self.strict_local;
        if falls_back || *frontend.endpoints == *self.cluster {
            Arc::clone(&self.cluster)
        } else {
            frontend.endpoints.as_slice().into()
        }
    }

    fn serve(&mut self, key: ServerKey, reals: Arc<[EndpointAddr]>) {
        let mode = self.mode;
        self.demand.servers.push(WantedServer { key, mode, reals });
    }

    fn enter(&mut self, set: SetId, entry: Entry) {
        self.demand.entries.push((set, entry));
    }

    fn address(&mut self, key: ServerKey, frontend: &Frontend, ips: &NodeIps) {
        let ServerKey { ip, protocol, port } = key;
        // An address that the node has anyway must not be on two links (D2).
        let is_bound = frontend.origin == Origin::ClusterIp || !ips.contains(ip);
        let for_node_only = self.strict_local
            && lacks_local(frontend)
            && frontend.origin != Origin::ClusterIp
            && is_bound;
        if !for_node_only {
            self.open(frontend, Entry::IpPort(ip, protocol, port));
        }
        if frontend.origin == Origin::LoadBalancer {
            self.restrict(key, &frontend.source_ranges);
        }
        if is_bound {
            self.demand.addresses.push(ip);
            self.enter(SetId::IpvsIps, Entry::Ip(ip));
        }
        let reals = if for_node_only { Arc::clone(&self.cluster) } else { self.reals(frontend) };
        self.serve(key, reals);
    }

    /// Adds the entry that lets packets from elsewhere reach a frontend.
    fn open(&mut self, frontend: &Frontend, entry: Entry) {
        let is_local = frontend.policy == TrafficPolicy::Local;
        match frontend.origin {
            Origin::ClusterIp => self.enter(SetId::ClusterIp, entry),
            Origin::ExternalIp if is_local => self.enter(SetId::ExternalIpLocal, entry),
            Origin::ExternalIp | Origin::NodePort => self.enter(SetId::ExternalIp, entry),
            Origin::LoadBalancer => {
                self.enter(SetId::LoadBalancer, entry);
                if is_local {
                    self.enter(SetId::LoadBalancerLocal, entry);
                }
            }
        }
    }

    /// Restricts the sources that may use a load balancer's address (A8, A9).
    fn restrict(&mut self, key: ServerKey, ranges: &[Cidr]) {
        if ranges.is_empty() {
            return;
        }
        let ServerKey { ip, protocol, port } = key;
        self.enter(SetId::LoadBalancerFw, Entry::IpPort(ip, protocol, port));
        let itself = Cidr::single(ip);
        if ranges.contains(&itself) {
            let entry = Entry::IpPortIp(ip, protocol, port, ip);
            self.enter(SetId::LoadBalancerSourceIp, entry);
        } else {
            self.demand.denied.push(key);
        }
        for range in ranges.iter().filter(|range| **range != itself) {
            for half in halves(*range) {
                let entry = Entry::IpPortNet(ip, protocol, port, half);
                self.enter(SetId::LoadBalancerSourceCidr, entry);
            }
        }
    }

    fn node_port(
        &mut self,
        protocol: Protocol,
        port: u16,
        frontend: &Frontend,
        ips: impl Iterator<Item = IpAddr>,
    ) {
        let (all, local) = SetId::of_node_ports(protocol);
        let is_local = frontend.policy == TrafficPolicy::Local;
        let reals = self.reals(frontend);
        for ip in ips {
            let key = ServerKey { ip, protocol, port };
            let entry = match protocol {
                Protocol::Sctp => Entry::IpPort(ip, protocol, port),
                Protocol::Tcp | Protocol::Udp => Entry::Port(port),
            };
            self.enter(all, entry);
            if is_local {
                self.enter(local, entry);
            }
            self.serve(key, Arc::clone(&reals));
        }
    }
}

/// Returns whether the policy is Local and the node has no endpoint.
fn lacks_local(frontend: &Frontend) -> bool {
    frontend.policy == TrafficPolicy::Local && frontend.endpoints.is_empty()
}

/// Splits a range of everything into two halves, because the kernel has no entry for it.
fn halves(range: Cidr) -> impl Iterator<Item = Cidr> {
    let whole = range.prefix_len() > 0;
    let parts = if whole {
        [Some(range), None]
    } else {
        [range.first(), range.last()].map(|ip| Cidr::new(ip, 1))
    };
    parts.into_iter().flatten()
}
