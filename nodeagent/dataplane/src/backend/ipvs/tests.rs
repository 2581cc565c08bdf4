//! Services, nodes and a kernel for tests.

mod demand;

pub(super) mod kernel;
mod rules;

use std::net::IpAddr;

use kplane_model::{
    Cidr, EndpointAddr, Family, IpvsScheduler, KeyParts, Protocol, ServiceKey, ServiceName,
    TrafficPolicy,
};

use crate::plan::{Frontend, FrontendAddr, NodePlan, Origin, ServicePlan};
use kplane_netlink::ipvs::ServerKey;

/// The address on which node ports are served.
pub(super) const NODE_IP: &str = "192.168.0.1";

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(super) fn at(text: &str) -> EndpointAddr {
    let (ip, port) = text.rsplit_once(':').unwrap();
    EndpointAddr {
        ip: ip.parse().unwrap(),
        port: port.parse().unwrap(),
    }
}

pub(super) fn server(text: &str, protocol: Protocol) -> ServerKey {
    let EndpointAddr { ip, port } = at(text);
    ServerKey { ip, protocol, port }
}

pub(super) fn node() -> NodePlan {
    let pods: Cidr = "10.1.0.0/16".parse().unwrap();
    NodePlan {
        pod_sources: vec![pods],
        unmasqueraded_sources: vec![pods],
        nodeport_ips: vec![Cidr::everything(Family::V4)],
        nodeport_localhost: false,
        service_cidrs: Vec::new(),
    }
}

/// Builds a plan as `plan_service` would.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Svc {
    name: String,
    protocol: Protocol,
    cluster: Vec<EndpointAddr>,
    here: Vec<EndpointAddr>,
    cluster_ip: IpAddr,
    frontends: Vec<(FrontendAddr, Origin, Vec<Cidr>)>,
    external: TrafficPolicy,
    internal: TrafficPolicy,
    pub(super) affinity: Option<u32>,
    health: Option<u16>,
    scheduler: Option<IpvsScheduler>,
}

const PORT: u16 = 80;

impl Svc {
    pub(super) fn new(name: &str, cluster_ip: &str) -> Self {
        Self {
            name: name.to_owned(),
            protocol: Protocol::Tcp,
            cluster: Vec::new(),
            here: Vec::new(),
            cluster_ip: ip(cluster_ip),
            frontends: Vec::new(),
            external: TrafficPolicy::Cluster,
            internal: TrafficPolicy::Cluster,
            affinity: None,
            scheduler: None,
            health: None,
        }
    }

    pub(super) fn protocol(mut self, protocol: Protocol) -> Self {
        self.protocol = protocol;
        self
    }

    pub(super) fn endpoints(mut self, all: &[&str]) -> Self {
        self.cluster = all.iter().map(|text| at(text)).collect();
        self.cluster.sort_unstable();
        self
    }

    /// Sets the endpoints that are on this node.
    pub(super) fn here(mut self, here: &[&str]) -> Self {
        self.here = here.iter().map(|text| at(text)).collect();
        self
    }

    pub(super) fn node_port(mut self, port: u16) -> Self {
        let protocol = self.protocol;
        let at = FrontendAddr::NodePort { protocol, port };
        self.frontends.push((at, Origin::NodePort, Vec::new()));
        self
    }

    fn address(mut self, text: &str, origin: Origin, ranges: &[&str]) -> Self {
        let at = FrontendAddr::Address {
            ip: ip(text),
            protocol: self.protocol,
            port: PORT,
        };
        let ranges = ranges.iter().map(|range| range.parse().unwrap()).collect();
        self.frontends.push((at, origin, ranges));
        self
    }

    pub(super) fn external_ip(self, text: &str) -> Self {
        self.address(text, Origin::ExternalIp, &[])
    }

    pub(super) fn load_balancer(self, text: &str, ranges: &[&str]) -> Self {
        self.address(text, Origin::LoadBalancer, ranges)
    }

    pub(super) fn external_local(mut self) -> Self {
        self.external = TrafficPolicy::Local;
        self
    }

    pub(super) fn internal_local(mut self) -> Self {
        self.internal = TrafficPolicy::Local;
        self
    }

    pub(super) fn scheduler(mut self, name: &str) -> Self {
        self.scheduler = Some(IpvsScheduler::parse(name).unwrap());
        self
    }

    pub(super) fn health(mut self, port: u16) -> Self {
        self.health = Some(port);
        self
    }

    pub(super) fn key(&self) -> ServiceKey {
        ServiceKey::from(KeyParts {
            service: ServiceName::new("ns", &self.name),
            port_name: "".into(),
            protocol: self.protocol,
            family: Family::of(self.cluster_ip),
        })
    }

    pub(super) fn plan(&self) -> ServicePlan {
        let of = |policy| match policy {
            TrafficPolicy::Cluster => self.cluster.clone(),
            TrafficPolicy::Local => self.here.clone(),
        };
        let frontend = |at, origin, policy, source_ranges| Frontend {
            at,
            origin,
            endpoints: of(policy),
            policy,
            inside: (policy == TrafficPolicy::Local && origin != Origin::ClusterIp)
                .then(|| self.cluster.clone()),
            masquerade: origin != Origin::ClusterIp && policy == TrafficPolicy::Cluster,
            unserved: None,
            source_ranges,
        };
        let cluster_ip = FrontendAddr::Address {
            ip: self.cluster_ip,
            protocol: self.protocol,
            port: PORT,
        };
        let mut frontends = vec![frontend(
            cluster_ip,
            Origin::ClusterIp,
            self.internal,
            Vec::new(),
        )];
        let others = self.frontends.iter();
        frontends.extend(
            others
                .map(|(at, origin, ranges)| frontend(*at, *origin, self.external, ranges.clone())),
        );
        ServicePlan {
            frontends,
            local: self.here.clone(),
            affinity_timeout_s: self.affinity,
            health_check_node_port: self.health,
            ipvs_scheduler: self.scheduler,
            proxied: None,
            ..ServicePlan::sample(self.key(), self.cluster_ip)
        }
    }
}

/// Returns the ServicePorts of a complete or partial change.
pub(super) fn all(services: &[Svc]) -> Vec<(ServiceKey, Option<ServicePlan>)> {
    let one = |svc: &Svc| (svc.key(), Some(svc.plan()));
    services.iter().map(one).collect()
}
