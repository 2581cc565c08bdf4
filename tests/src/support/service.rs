//! Services as builders: one [`Svc`] stands for a ServicePort in each family and protocol.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use kplane_dataplane::plan::{ServicePlan, plan_service};
use kplane_desired_state::publish::Published;
use kplane_model::select::{local_by_node, merge, variants};
use kplane_model::{
    Cidr, Endpoint, EndpointAddr, Family, IpvsScheduler, KeyParts, LocalEndpoints, NodeFacts,
    Protocol, Proxied, ServiceKey, ServicePort, ServiceProgram, TrafficPolicy,
};

/// The port of every Service.
pub const PORT: u16 = 80;
/// The port of every endpoint, unless said otherwise; another one than [`PORT`], so that a packet
/// that kept its port is found out.
pub const TARGET: u16 = 8080;
/// The node port of [`svc`] number 0.
const FIRST_NODE_PORT: u16 = 30_000;

/// The kinds of places at which a Service is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum At {
    ClusterIp,
    ExternalIp,
    LoadBalancer,
    /// On the primary address of the node that the client meets first.
    NodePort,
}

impl At {
    pub const ALL: [Self; 4] = [
        Self::ClusterIp,
        Self::ExternalIp,
        Self::LoadBalancer,
        Self::NodePort,
    ];
}

/// An endpoint: a pod with an address in both families.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ep {
    pub ips: [IpAddr; 2],
    pub port: u16,
    /// Number of its node.
    pub node: u8,
    /// Takes new connections; otherwise it is draining.
    pub ready: bool,
}

impl Ep {
    pub fn new(node: u8, ips: [IpAddr; 2]) -> Self {
        Self {
            ips,
            port: TARGET,
            node,
            ready: true,
        }
    }

    pub fn port(self, port: u16) -> Self {
        Self { port, ..self }
    }

    pub fn draining(self) -> Self {
        Self {
            ready: false,
            ..self
        }
    }

    pub fn address(&self, family: Family) -> SocketAddr {
        SocketAddr::new(self.ips[family as usize], self.port)
    }

    fn model(&self, family: Family) -> Endpoint {
        let addr = EndpointAddr::new(self.ips[family as usize], self.port);
        Endpoint {
            ready: self.ready,
            terminating: !self.ready,
            node: Some(node_name(self.node).into()),
            ..Endpoint::ready(addr)
        }
    }
}

/// A Service without endpoints that has only its ClusterIP. The number gives it addresses of its
/// own.
pub fn svc(number: u16) -> Svc {
    Svc {
        name: format!("svc-{number}"),
        number,
        places: BTreeSet::from([At::ClusterIp]),
        protocols: Protocol::ALL.to_vec(),
        internal: TrafficPolicy::Cluster,
        external: TrafficPolicy::Cluster,
        ranges: Vec::new(),
        external_ips: None,
        port: PORT,
        affinity_timeout_s: None,
        ipvs_scheduler: None,
        proxied: None,
        endpoints: Vec::new(),
    }
}

/// A Service in both families and, unless said otherwise, all protocols.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Svc {
    pub name: String,
    pub number: u16,
    pub places: BTreeSet<At>,
    pub protocols: Vec<Protocol>,
    pub internal: TrafficPolicy,
    pub external: TrafficPolicy,
    pub ranges: Vec<Cidr>,
    /// Instead of those of its number.
    external_ips: Option<[IpAddr; 2]>,
    port: u16,
    pub affinity_timeout_s: Option<u32>,
    pub ipvs_scheduler: Option<IpvsScheduler>,
    pub proxied: Option<Proxied>,
    pub endpoints: Vec<Ep>,
}

impl Svc {
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// Reached at all kinds of places.
    pub fn everywhere(mut self) -> Self {
        self.places.extend(At::ALL);
        self
    }

    pub fn reached(mut self, at: At) -> Self {
        self.places.insert(at);
        self
    }

    /// With these as its external addresses.
    pub fn external_ips(mut self, ips: [IpAddr; 2]) -> Self {
        self.external_ips = Some(ips);
        self.reached(At::ExternalIp)
    }

    /// With this port at its addresses instead of [`PORT`].
    pub fn on_port(mut self, port: u16) -> Self {
        self.port = port;
        self
    }

    /// `sessionAffinity: ClientIP` with this timeout in seconds.
    pub fn sticky(mut self, timeout_s: u32) -> Self {
        self.affinity_timeout_s = Some(timeout_s);
        self
    }

    pub fn only(mut self, protocol: Protocol) -> Self {
        self.protocols = vec![protocol];
        self
    }

    /// `internalTrafficPolicy: Local`
    pub fn internal_local(mut self) -> Self {
        self.internal = TrafficPolicy::Local;
        self
    }

    /// `externalTrafficPolicy: Local`
    pub fn external_local(mut self) -> Self {
        self.external = TrafficPolicy::Local;
        self
    }

    /// `loadBalancerSourceRanges`, of both families.
    pub fn ranges(mut self, ranges: impl IntoIterator<Item = Cidr>) -> Self {
        self.ranges = ranges.into_iter().collect();
        self
    }

    pub fn endpoints(mut self, endpoints: impl IntoIterator<Item = Ep>) -> Self {
        self.endpoints = endpoints.into_iter().collect();
        self
    }

    /// Its address of a kind; for a NodePort that of the node with this number.
    pub fn address(&self, at: At, family: Family, node: u8) -> SocketAddr {
        let [high, low] = self.number.to_be_bytes();
        let ip = |v4: [u8; 2], v6: u16| match family {
            Family::V4 => IpAddr::from([v4[0], v4[1], high, low]),
            Family::V6 => Ipv6Addr::new(0xfd96, 0, 0, v6, 0, 0, 0, self.number).into(),
        };
        let external = self.external_ips.map(|ips| ips[family as usize]);
        match at {
            At::ClusterIp => SocketAddr::new(ip([10, 96], 0), self.port),
            At::ExternalIp => SocketAddr::new(external.unwrap_or(ip([198, 18], 1)), self.port),
            At::LoadBalancer => SocketAddr::new(ip([198, 19], 2), self.port),
            At::NodePort => SocketAddr::new(node_ip(node, family), self.node_port()),
        }
    }

    /// Its families and protocols.
    pub fn variants(&self) -> impl Iterator<Item = (Family, Protocol)> {
        Family::ALL
            .into_iter()
            .flat_map(|family| self.protocols.iter().map(move |p| (family, *p)))
    }

    pub fn node_port(&self) -> u16 {
        FIRST_NODE_PORT + self.number
    }

    /// The ServicePorts of a family, planned for a node.
    pub fn plans(
        &self,
        family: Family,
        node: &NodeFacts,
    ) -> Vec<(ServiceKey, Option<ServicePlan>)> {
        let endpoints = merge(self.endpoints.iter().map(|e| e.model(family)));
        let local = local_by_node(&endpoints).remove(&node.name);
        let plan = |protocol: &Protocol| {
            let port = self.port(family, *protocol);
            let variants = variants(&port, &endpoints);
            let key = port.key.clone();
            let local = local.clone().map(|endpoints| LocalEndpoints {
                key: key.clone(),
                endpoints,
            });
            let endpoints = variants.resolve(&node.name, None);
            let program = ServiceProgram {
                endpoints: endpoints.to_vec(),
                has_any: variants.has_any,
                serving_others: variants.serving_others(endpoints, 1),
                dead: Vec::new(),
                port,
            };
            (key, Some(plan_service(&program, local.as_ref(), node)))
        };
        self.protocols.iter().map(plan).collect()
    }

    /// The ServicePorts of both families, as the control plane publishes them.
    pub fn published(&self) -> Vec<(ServiceKey, Option<Published>)> {
        let publish = |(family, protocol)| {
            let endpoints = merge(self.endpoints.iter().map(|e| e.model(family)));
            let port = self.port(family, protocol);
            let published = Published::new(port, &endpoints);
            (published.port.key.clone(), Some(published))
        };
        self.variants().map(publish).collect()
    }

    fn port(&self, family: Family, protocol: Protocol) -> ServicePort {
        let ip = |at| self.address(at, family, 1).ip();
        let ips = |at| {
            let has = self.places.contains(&at);
            has.then(|| ip(at)).into_iter().collect::<Vec<_>>()
        };
        let of_family = |cidr: &&Cidr| cidr.family() == family;
        let key = ServiceKey::from(KeyParts {
            port_name: protocol.as_str().to_lowercase().into(),
            protocol,
            family,
            ..KeyParts::clone(&ServiceKey::sample("test", &self.name))
        });
        let mut port = ServicePort {
            port: self.port,
            cluster_ip: ip(At::ClusterIp),
            external_ips: ips(At::ExternalIp),
            load_balancer_ips: ips(At::LoadBalancer),
            node_port: self.places.contains(&At::NodePort).then(|| self.node_port()),
            internal_policy: self.internal,
            external_policy: self.external,
            affinity_timeout_s: self.affinity_timeout_s,
            source_ranges: self.ranges.iter().filter(of_family).copied().collect(),
            ipvs_scheduler: self.ipvs_scheduler,
            proxied: self.proxied,
            ..ServicePort::sample(key)
        };
        if !port.externally_accessible() {
            // A13.
            port.external_policy = TrafficPolicy::Cluster;
        }
        port
    }

    /// The policy of its ClusterIP, or of its other addresses.
    pub fn policy(&self, inside: bool) -> TrafficPolicy {
        if inside { self.internal } else { self.external }
    }

    /// Where connections may end: at the ready endpoints, or the draining ones when none is ready
    /// (B3, B5); of the whole cluster or of one node. Said here once more, apart from the product.
    pub fn targets(&self, family: Family, node: Option<u8>) -> BTreeSet<SocketAddr> {
        let considered =
            || self.endpoints.iter().filter(move |e| node.is_none_or(|node| e.node == node));
        let any_ready = considered().any(|e| e.ready);
        considered()
            .filter(|e| e.ready == any_ready)
            .map(|e| e.address(family))
            .collect()
    }
}

/// As the rig names its nodes.
pub fn node_name(number: u8) -> String {
    format!("node-{number}")
}

/// The primary address of a node, as the rig numbers them.
pub fn node_ip(number: u8, family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::from([172, 30, 1, number]),
        Family::V6 => Ipv6Addr::new(0xfd30, 0, 0, 0, 0, 0, 1, u16::from(number)).into(),
    }
}

/// The addresses of a pod on a node, as the rig lays out its pod ranges.
pub fn pod_ips(node: u8, number: u8) -> [IpAddr; 2] {
    let v6 = Ipv6Addr::new(0xfd44, 0, 0, u16::from(node), 0, 0, 0, u16::from(number));
    [IpAddr::from([10, 244, node, number]), v6.into()]
}
