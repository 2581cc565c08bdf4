//! Generated cases: what a Service, its endpoints and its client may be like.
//!
//! A [`Case`] is one choice for every parameter. What must happen to its packets is said in
//! [`super::model_fate`], how it is written down for the control plane in [`super::model_objects`].

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use anyhow::{Context as _, Result, ensure};
use kplane_model::{Family, Protocol};

use super::cluster::zone_name;
use super::service::{At, TARGET, node_ip, node_name, pod_ips, svc};
use super::world::{Client, Setup};

/// The second port of pod `c`: an endpoint of its own, with another target port (A28).
pub const SECOND_TARGET: u16 = 8081;

/// Defines a parameter: its values in order, each with the words for it.
macro_rules! parameter {
    ($(#[$doc:meta])* $name:ident { $($value:ident = $words:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($value,)+ }

        impl $name {
            pub const ALL: &[Self] = &[$(Self::$value,)+];

            pub fn words(self) -> &'static str {
                match self { $(Self::$value => $words,)+ }
            }
        }
    };
}

parameter! {
    /// The kind of Service, and at which of its addresses it is asked.
    Place {
        ClusterIp = "the ClusterIP of a Service that has only that",
        ClusterIpOfNodePort = "the ClusterIP of a NodePort Service",
        ClusterIpOfLoadBalancer = "the ClusterIP of a LoadBalancer Service",
        ClusterIpOfExternal = "the ClusterIP of a Service with externalIPs",
        UnusedPort = "a port that a NodePort Service does not have, on its ClusterIP",
        NodePort = "the node port of a NodePort Service",
        NodePortOfLoadBalancer = "the node port of a LoadBalancer Service",
        NodePortNotAllocated = "the node port that a LoadBalancer Service does not allocate",
        LoadBalancer = "the load-balancer IP",
        LoadBalancerWithoutNodePorts = "the load-balancer IP of a Service without node ports",
        LoadBalancerAndExternal = "the load-balancer IP of a Service with externalIPs",
        LoadBalancerProxy = "a load-balancer IP with ipMode Proxy",
        External = "the external IP of a ClusterIP Service",
        ExternalOfLoadBalancer = "the external IP of a LoadBalancer Service",
    }
}

parameter! {
    /// A traffic policy.
    Policy { Cluster = "Cluster", Local = "Local", }
}

parameter! {
    /// `sessionAffinity`
    Affinity { None = "no affinity", ClientIp = "affinity ClientIP", }
}

parameter! {
    /// `loadBalancerSourceRanges`
    Ranges {
        None = "no source ranges",
        Admitting = "source ranges that hold the client",
        Excluding = "source ranges that do not hold the client",
        Everything = "source ranges that do not hold the client, and /0",
        Node = "source ranges that hold the node's own address",
    }
}

parameter! {
    /// Which endpoints there are and how they are. `a` and `b` are on node-1, `c` on node-2.
    Endpoints {
        None = "no endpoints",
        ReadyHere = "a, b ready",
        ReadyThere = "c ready on two ports",
        ReadyBoth = "a, b, c ready",
        DrainingHere = "a draining",
        DrainingThere = "c draining",
        DrainingBoth = "a, b, c draining",
        DrainingHereReadyThere = "a draining, c ready",
        ReadyHereDrainingThere = "a ready, c draining",
        ServingOnly = "a, c serving but not ready",
        ServingOnlyHereReadyThere = "a serving but not ready, c ready",
        ServingOnlyHereDrainingThere = "a serving but not ready, c draining",
        Terminated = "a, c terminating and no longer serving",
        Reused = "a ready in one slice and terminated in the next, c ready",
    }
}

parameter! {
    /// Topology hints of the endpoints.
    Hints {
        None = "no hints",
        OwnZone = "each hinted for its own zone",
        ZoneHere = "all hinted for the zone of node-1",
        ZoneElsewhere = "all hinted for a zone without nodes",
        OwnNode = "each hinted for its own node and zone",
        NodeElsewhere = "each hinted for its own zone and a node that is none",
        FirstUnhinted = "each hinted for its own zone but the first",
        FirstWithoutNode = "each hinted for its own zone, and but the first for its own node",
    }
}

parameter! {
    /// Who asks.
    Asker {
        Outside = "a client outside",
        PodHere = "a pod on node-1",
        PodThere = "a pod on node-2",
        Node = "node-1 itself",
        Endpoint = "endpoint a itself",
        NodeFromVip = "node-1 itself, from the load-balancer IP, which it has",
    }
}

/// One choice for every parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub setup: Setup,
    pub place: Place,
    pub family: Family,
    pub protocol: Protocol,
    pub internal: Policy,
    pub external: Policy,
    pub affinity: Affinity,
    pub ranges: Ranges,
    pub endpoints: Endpoints,
    pub hints: Hints,
    pub asker: Asker,
}

/// A case as numbers: the index of the value of each parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Choice(pub [usize; Choice::PARAMETERS]);

impl Choice {
    pub const PARAMETERS: usize = 11;
    /// Number of values of each parameter.
    pub const SIZES: [usize; Self::PARAMETERS] = [
        Setup::ALL.len(),
        Place::ALL.len(),
        Family::ALL.len(),
        Protocol::ALL.len(),
        Policy::ALL.len(),
        Policy::ALL.len(),
        Affinity::ALL.len(),
        Ranges::ALL.len(),
        Endpoints::ALL.len(),
        Hints::ALL.len(),
        Asker::ALL.len(),
    ];

    /// The case that the numbers stand for.
    pub fn case(self) -> Case {
        let [
            setup,
            place,
            family,
            protocol,
            internal,
            external,
            affinity,
            ranges,
            endpoints,
            hints,
            asker,
        ] = self.0;
        Case {
            setup: Setup::ALL[setup],
            place: Place::ALL[place],
            family: Family::ALL[family],
            protocol: Protocol::ALL[protocol],
            internal: Policy::ALL[internal],
            external: Policy::ALL[external],
            affinity: Affinity::ALL[affinity],
            ranges: Ranges::ALL[ranges],
            endpoints: Endpoints::ALL[endpoints],
            hints: Hints::ALL[hints],
            asker: Asker::ALL[asker],
        }
    }

    /// Whether two values, each as parameter and index, may go together: a node has a load-balancer
    /// IP of its own only where one is captured.
    pub fn may_go_together(one: (usize, usize), other: (usize, usize)) -> bool {
        const PLACE: usize = 1;
        const ASKER: usize = 10;
        let ((PLACE, place), (ASKER, asker)) = (one.min(other), one.max(other)) else {
            return true;
        };
        Asker::ALL[asker] != Asker::NodeFromVip || Place::ALL[place].is_load_balancer()
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = self.0.map(|number| number.to_string());
        f.write_str(&numbers.join("."))
    }
}

impl FromStr for Choice {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let numbers: Vec<usize> = text
            .split('.')
            .map(str::parse)
            .collect::<Result<_, _>>()
            .with_context(|| format!("case {text:?}"))?;
        let choice: [usize; Self::PARAMETERS] = numbers[..].try_into()?;
        let valid = choice.iter().zip(Self::SIZES).all(|(n, size)| *n < size);
        ensure!(valid, "case {text:?}: sizes are {:?}", Self::SIZES);
        Ok(Self(choice))
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let detection = match self.setup {
            Setup::PodRanges => "pods known by their ranges",
            Setup::NoPodRanges => "nobody known to be a pod",
            Setup::MasqueradeAll => "pods known by their ranges, masqueradeAll",
            Setup::MasqueradeAllNoPodRanges => "nobody known to be a pod, masqueradeAll",
            Setup::NodeRanges => "pods known by their node's range",
            Setup::PodInterfaces => "pods known by their interfaces",
        };
        write!(
            f,
            "{} asks {} ({} {}); internal policy {}, external {}; {}; {}; {}, {}; {detection}",
            self.asker.words(),
            self.place.words(),
            self.family,
            self.protocol,
            self.internal.words(),
            self.external.words(),
            self.affinity.words(),
            self.ranges.words(),
            self.endpoints.words(),
            self.hints.words(),
        )
    }
}

/// A load-balancer IP, as the Service's status says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IpMode {
    Vip,
    Proxy,
}

/// What a Service has besides its ClusterIP.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub kind: &'static str,
    pub node_port: bool,
    pub load_balancer: Option<IpMode>,
    pub external: bool,
}

impl Place {
    /// Whether it is a load-balancer address that the node captures.
    pub fn is_load_balancer(self) -> bool {
        self.at() == At::LoadBalancer && self != Self::LoadBalancerProxy
    }

    /// Another address of the same Service, if it has one that is asked in other cases.
    pub fn elsewhere(self) -> Option<Self> {
        Some(match self {
            Self::NodePort => Self::ClusterIpOfNodePort,
            Self::LoadBalancer => Self::NodePortOfLoadBalancer,
            Self::NodePortOfLoadBalancer => Self::ClusterIpOfLoadBalancer,
            Self::External => Self::ClusterIpOfExternal,
            Self::LoadBalancerAndExternal => Self::ExternalOfLoadBalancer,
            Self::ExternalOfLoadBalancer => Self::LoadBalancerAndExternal,
            Self::ClusterIpOfNodePort => Self::NodePort,
            Self::ClusterIpOfLoadBalancer => Self::LoadBalancer,
            Self::ClusterIpOfExternal => Self::External,
            Self::ClusterIp
            | Self::UnusedPort
            | Self::NodePortNotAllocated
            | Self::LoadBalancerWithoutNodePorts
            | Self::LoadBalancerProxy => return None,
        })
    }

    /// The kind of address.
    pub fn at(self) -> At {
        match self {
            Self::ClusterIp
            | Self::ClusterIpOfNodePort
            | Self::ClusterIpOfLoadBalancer
            | Self::ClusterIpOfExternal
            | Self::UnusedPort => At::ClusterIp,
            Self::NodePort | Self::NodePortOfLoadBalancer | Self::NodePortNotAllocated => {
                At::NodePort
            }
            Self::LoadBalancer
            | Self::LoadBalancerWithoutNodePorts
            | Self::LoadBalancerAndExternal
            | Self::LoadBalancerProxy => At::LoadBalancer,
            Self::External | Self::ExternalOfLoadBalancer => At::ExternalIp,
        }
    }

    pub fn shape(self) -> Shape {
        let shape = |kind, node_port, load_balancer, external| Shape {
            kind,
            node_port,
            load_balancer,
            external,
        };
        let vip = Some(IpMode::Vip);
        match self {
            Self::ClusterIp => shape("ClusterIP", false, None, false),
            Self::ClusterIpOfNodePort | Self::NodePort | Self::UnusedPort => {
                shape("NodePort", true, None, false)
            }
            Self::ClusterIpOfLoadBalancer | Self::NodePortOfLoadBalancer | Self::LoadBalancer => {
                shape("LoadBalancer", true, vip, false)
            }
            Self::ClusterIpOfExternal | Self::External => shape("ClusterIP", false, None, true),
            Self::NodePortNotAllocated | Self::LoadBalancerWithoutNodePorts => {
                shape("LoadBalancer", false, vip, false)
            }
            Self::LoadBalancerAndExternal | Self::ExternalOfLoadBalancer => {
                shape("LoadBalancer", true, vip, true)
            }
            Self::LoadBalancerProxy => shape("LoadBalancer", true, Some(IpMode::Proxy), false),
        }
    }
}

impl Asker {
    /// The namespace from which it asks.
    pub fn client(self) -> Client {
        match self {
            Self::Outside => Client::Outside,
            Self::PodHere => Client::PodHere,
            Self::PodThere => Client::PodThere,
            Self::Node | Self::NodeFromVip => Client::Node,
            Self::Endpoint => Client::Endpoint,
        }
    }
}

/// How an endpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    Ready,
    /// Not ready, terminating, but still serving.
    Draining,
    /// Serving, neither ready nor terminating.
    ServingOnly,
    /// Terminating, no longer serving.
    Terminated,
}

/// An endpoint of a case.
#[derive(Clone, Debug)]
pub struct Pod {
    pub name: &'static str,
    pub node: u8,
    pub port: u16,
    pub condition: Condition,
    /// A later slice says that it has terminated.
    pub reused: bool,
    pub zone_hint: Option<String>,
    pub node_hint: Option<String>,
}

impl Pod {
    fn new(name: &'static str, condition: Condition) -> Self {
        Self {
            name,
            node: if name == "c" { 2 } else { 1 },
            port: TARGET,
            condition,
            reused: false,
            zone_hint: None,
            node_hint: None,
        }
    }

    pub fn address(&self, family: Family) -> SocketAddr {
        let number = if self.name == "b" { 2 } else { 1 };
        let ip = pod_ips(self.node, number)[family as usize];
        SocketAddr::new(ip, self.port)
    }
}

impl Case {
    /// Its endpoints, with their hints.
    pub fn pods(&self) -> Vec<Pod> {
        use Condition::{Draining, Ready, ServingOnly, Terminated};
        let all = |names: &[&'static str], condition| -> Vec<Pod> {
            names.iter().map(|name| Pod::new(name, condition)).collect()
        };
        let two = |a, c| vec![Pod::new("a", a), Pod::new("c", c)];
        let mut pods = match self.endpoints {
            Endpoints::None => Vec::new(),
            Endpoints::ReadyHere => all(&["a", "b"], Ready),
            Endpoints::ReadyThere => all(&["c", "c"], Ready),
            Endpoints::ReadyBoth => all(&["a", "b", "c"], Ready),
            Endpoints::DrainingHere => all(&["a"], Draining),
            Endpoints::DrainingThere => all(&["c"], Draining),
            Endpoints::DrainingBoth => all(&["a", "b", "c"], Draining),
            Endpoints::DrainingHereReadyThere => two(Draining, Ready),
            Endpoints::ReadyHereDrainingThere => two(Ready, Draining),
            Endpoints::ServingOnly => two(ServingOnly, ServingOnly),
            Endpoints::ServingOnlyHereReadyThere => two(ServingOnly, Ready),
            Endpoints::ServingOnlyHereDrainingThere => two(ServingOnly, Draining),
            Endpoints::Terminated => two(Terminated, Terminated),
            Endpoints::Reused => two(Ready, Ready),
        };
        if let (Endpoints::ReadyThere, Some(second)) = (self.endpoints, pods.get_mut(1)) {
            second.port = SECOND_TARGET;
        }
        if let (Endpoints::Reused, Some(first)) = (self.endpoints, pods.first_mut()) {
            first.reused = true;
        }
        for (index, pod) in pods.iter_mut().enumerate() {
            self.hint(index, pod);
        }
        pods
    }

    fn hint(&self, index: usize, pod: &mut Pod) {
        let (own_zone, own_node) = (Some(zone_name(pod.node)), Some(node_name(pod.node)));
        let elsewhere = Some("elsewhere".to_owned());
        let not_first = |hint: Option<String>| if index > 0 { hint } else { None };
        (pod.zone_hint, pod.node_hint) = match self.hints {
            Hints::None => (None, None),
            Hints::OwnZone => (own_zone, None),
            Hints::ZoneHere => (Some(zone_name(1)), None),
            Hints::ZoneElsewhere => (elsewhere, None),
            Hints::OwnNode => (own_zone, own_node),
            Hints::NodeElsewhere => (own_zone, elsewhere),
            Hints::FirstUnhinted => (not_first(own_zone), None),
            Hints::FirstWithoutNode => (own_zone, not_first(own_node)),
        };
    }

    /// Where the Service with this number is asked.
    pub fn address(&self, number: u16) -> SocketAddr {
        let node = self.asker.client().node();
        let mut address = svc(number).address(self.place.at(), self.family, node);
        if self.place == Place::UnusedPort {
            address.set_port(81);
        }
        address
    }

    /// The address from which it is asked.
    pub fn source(&self, number: u16) -> IpAddr {
        match self.asker {
            Asker::NodeFromVip => self.address(number).ip(),
            asker => asker.client().source(self.family),
        }
    }

    /// Its `loadBalancerSourceRanges`: those of the other family are there too.
    pub fn source_ranges(&self) -> Vec<String> {
        let client = self.asker.client();
        let each = |ip: fn(Client, Family) -> IpAddr| -> Vec<String> {
            let single =
                |family: Family| format!("{}/{}", ip(client, family), family.address_len() * 8);
            Family::ALL.map(single).to_vec()
        };
        let others = ["192.0.2.0/24", "2001:db8::/32"].map(str::to_owned);
        match self.ranges {
            Ranges::None => Vec::new(),
            Ranges::Admitting => [&each(Client::source)[..], &others].concat(),
            Ranges::Excluding => others.to_vec(),
            Ranges::Everything => [&others[..], &["0.0.0.0/0", "::/0"].map(str::to_owned)].concat(),
            Ranges::Node => each(|client, family| node_ip(client.node(), family)),
        }
    }
}
