//! The cluster that scenarios are played in.
//!
//! ```text
//! client ── node-1: pods a, b, here      all pods serve TARGET; here and there also ask
//!        └─ node-2: pods c, there        the client reaches all Service addresses by node-1
//! ```

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context as _, Result, anyhow, ensure};
use kplane_dataplane::backend::{KernelState, PacketTarget, PodInterface, Settings};
use kplane_dataplane::plan::NodeSettings;
use kplane_model::{self as model, Cidr, Family, NodeFacts};
use kplane_rig::client::Protocol;
use kplane_rig::netns::NetNs;
use kplane_rig::sctp::Watch;
use kplane_rig::topology::{Host, LINK, Topology};

use super::agent::{Agent, Done};
use super::service::{At, Ep, Svc, TARGET, node_ip, node_name, pod_ips, svc};
use super::under_test::UnderTest;

/// Name, number of the node and number on the node of each pod.
const PODS: [(&str, u8, u8); 5] = [
    ("a", 1, 1),
    ("b", 1, 2),
    ("c", 2, 1),
    ("here", 1, 9),
    ("there", 2, 9),
];
/// All pods of the cluster.
const POD_RANGES: [&str; 2] = ["10.244.0.0/16", "fd44::/32"];
/// Where ClusterIPs come from.
pub const SERVICE_RANGES: [&str; 2] = ["10.96.0.0/16", "fd96::/64"];
/// External and load-balancer addresses.
const EXTERNAL_RANGES: [&str; 2] = ["198.18.0.0/15", "fd96::/32"];
/// Number of nodes.
pub const NODES: u8 = 2;

/// How the nodes tell who is who.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup {
    /// Pods are known by their ranges (`clusterCIDR`).
    PodRanges,
    /// Nobody is known to be a pod.
    NoPodRanges,
    /// Pods are known, and all traffic to ClusterIPs is masqueraded (`masqueradeAll`).
    MasqueradeAll,
    /// The same, and nobody is known to be a pod.
    MasqueradeAllNoPodRanges,
    /// Each node knows its own pods by its range (`NodeCIDR`).
    NodeRanges,
    /// Each node knows its own pods by the names of their links (`InterfaceNamePrefix`).
    PodInterfaces,
}

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// A machine outside the cluster, by way of node-1.
    Outside,
    /// A pod on node-1 that is no endpoint.
    PodHere,
    /// A pod on node-2 that is no endpoint; node-2 handles its packets.
    PodThere,
    /// Node-1 itself, from another source than masquerading would choose.
    Node,
    /// Pod `a` on node-1, which serves.
    Endpoint,
}

/// Two nodes with the backend under test, pods and a client.
pub struct World {
    pub topology: Topology,
    pub net: Net,
    /// By number of the node, less one.
    pub agents: Vec<Agent>,
}

/// The namespaces from which to ask, and a look at what arrives; for any thread.
pub struct Net {
    client: NetNs,
    nodes: Vec<NetNs>,
    pods: BTreeMap<&'static str, NetNs>,
    /// Sees SCTP packets arrive at pods.
    pub watch: Watch,
}

impl Setup {
    pub const ALL: [Self; 6] = [
        Self::PodRanges,
        Self::NoPodRanges,
        Self::MasqueradeAll,
        Self::MasqueradeAllNoPodRanges,
        Self::NodeRanges,
        Self::PodInterfaces,
    ];

    /// Whether pods are told from others.
    pub fn knows_pods(self) -> bool {
        !matches!(self, Self::NoPodRanges | Self::MasqueradeAllNoPodRanges)
    }

    pub fn backend_settings(self) -> Settings {
        let interface = PodInterface::new("pod", true);
        Settings {
            pod_interface: if self == Self::PodInterfaces { interface } else { None },
            ..Settings::default()
        }
    }

    pub fn settings(self) -> Result<NodeSettings> {
        let known = matches!(self, Self::PodRanges | Self::MasqueradeAll);
        let all = matches!(self, Self::MasqueradeAll | Self::MasqueradeAllNoPodRanges);
        Ok(NodeSettings {
            cluster_cidrs: if known { cidrs(&POD_RANGES)? } else { vec![] },
            masquerade_all: all,
            node_cidr: self == Self::NodeRanges,
            nodeport_addresses: UnderTest::current()?.nodeport_addresses(),
            ..NodeSettings::default()
        })
    }
}

impl World {
    /// A world in which nothing is programmed yet.
    pub fn new(setup: Setup) -> Result<Self> {
        let topology = bare_topology()?;
        let agent = |number| {
            let node = topology.node(&node_name(number))?;
            let (facts, settings) = (facts(number)?, setup.settings()?);
            Agent::open_with(node.ns(), facts, settings, setup.backend_settings())
        };
        let agents = (1..=NODES).map(agent).collect::<Result<_>>()?;
        let net = Net::of(&topology)?;
        Ok(Self {
            topology,
            net,
            agents,
        })
    }

    /// A world with these Services.
    pub fn serving(setup: Setup, services: &[Svc]) -> Result<Self> {
        let mut world = Self::new(setup)?;
        world.replace(services)?;
        Ok(world)
    }

    /// The same network without agents.
    pub fn without_agents() -> Result<Self> {
        let topology = bare_topology()?;
        Ok(Self {
            net: Net::of(&topology)?,
            topology,
            agents: Vec::new(),
        })
    }

    /// Makes these Services everything there is, on all nodes.
    pub fn replace(&mut self, services: &[Svc]) -> Result<()> {
        self.on_all(|agent| agent.replace(services))
    }

    /// Adds or changes Services on all nodes.
    pub fn update(&mut self, services: &[Svc]) -> Result<()> {
        self.on_all(|agent| agent.update(services))
    }

    /// Deletes Services on all nodes.
    pub fn remove(&mut self, services: &[Svc]) -> Result<()> {
        self.on_all(|agent| agent.exchange(services, &[]))
    }

    fn on_all(&mut self, mut change: impl FnMut(&mut Agent) -> Result<Done>) -> Result<()> {
        for agent in &mut self.agents {
            let done = change(agent)?;
            ensure!(done.failures.is_empty(), "{:?}", done.failures);
        }
        Ok(())
    }

    /// The agent of node-1.
    pub fn first(&mut self) -> Result<&mut Agent> {
        self.agents.first_mut().context("a world without agents")
    }

    /// The addresses of all pods.
    pub fn pod_range(family: Family) -> Result<Cidr> {
        Ok(POD_RANGES[family as usize].parse()?)
    }

    /// The namespace of a node.
    pub fn node(&self, number: u8) -> Result<&NetNs> {
        Ok(self.topology.node(&node_name(number))?.ns())
    }

    /// What the kernel of a node says of a destination, as `kpctl why` asks it.
    pub fn look_up(
        &self,
        number: u8,
        at: SocketAddr,
        protocol: model::Protocol,
    ) -> Result<KernelState> {
        let node = self.topology.node(&node_name(number))?;
        let target = if node.ips().contains(&at.ip()) {
            PacketTarget::NodePort {
                family: Family::of(at.ip()),
                protocol,
                port: at.port(),
            }
        } else {
            PacketTarget::Address { at, protocol }
        };
        let kind = UnderTest::current()?.kind();
        let answer = || kind.look_up(target).map_err(|error| anyhow!("{error}"));
        node.ns().run(answer)
    }
}

impl Net {
    fn of(topology: &Topology) -> Result<Self> {
        let node = |number| Ok(topology.node(&node_name(number))?.ns().clone());
        let pod = |(name, ..): &(&'static str, u8, u8)| {
            let pod = topology.pod(name)?;
            Ok((*name, pod.ns().clone()))
        };
        let pods: BTreeMap<_, NetNs> = PODS.iter().map(pod).collect::<Result<_>>()?;
        Ok(Self {
            client: topology.host("client")?.ns().clone(),
            nodes: (1..=NODES).map(node).collect::<Result<_>>()?,
            watch: Watch::open(pods.values())?,
            pods,
        })
    }

    /// The namespace of a pod.
    pub fn pod(&self, name: &str) -> Result<&NetNs> {
        self.pods.get(name).with_context(|| format!("no pod {name}"))
    }

    /// The namespace of a client.
    pub fn ns(&self, client: Client) -> Result<&NetNs> {
        let pod = |name| self.pods.get(name);
        match client {
            Client::Outside => Some(&self.client),
            Client::PodHere => pod("here"),
            Client::PodThere => pod("there"),
            Client::Node => self.nodes.first(),
            Client::Endpoint => pod("a"),
        }
        .with_context(|| format!("no {client:?}"))
    }
}

impl Client {
    pub const ALL: [Self; 5] = [
        Self::Outside,
        Self::PodHere,
        Self::PodThere,
        Self::Node,
        Self::Endpoint,
    ];

    /// The node that sees the client's packets first.
    pub fn node(self) -> u8 {
        match self {
            Self::PodThere => 2,
            Self::Outside | Self::PodHere | Self::Node | Self::Endpoint => 1,
        }
    }

    /// The address it sends from.
    pub fn source(self, family: Family) -> IpAddr {
        match (self, family) {
            (Self::Outside, Family::V4) => IpAddr::from([172, 30, 0, 3]),
            (Self::Outside, Family::V6) => Ipv6Addr::new(0xfd30, 0, 0, 0, 0, 0, 0, 3).into(),
            (Self::PodHere, _) => pod_ips(1, 9)[family as usize],
            (Self::PodThere, _) => pod_ips(2, 9)[family as usize],
            (Self::Endpoint, _) => pod_ips(1, 1)[family as usize],
            // To masquerade the kernel takes the oldest IPv4 and the newest IPv6 address.
            (Self::Node, Family::V4) => second_ip(family),
            (Self::Node, Family::V6) => node_ip(1, family),
        }
    }

    /// Whether `ip` is what masquerading makes of this client's address.
    pub fn is_masqueraded(self, ip: IpAddr) -> bool {
        let family = Family::of(ip);
        let of_node = ip == node_ip(self.node(), family);
        (of_node || ip == second_ip(family)) && ip != self.source(family)
    }
}

/// The loopback address of a family.
pub fn loopback(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::LOCALHOST.into(),
        Family::V6 => Ipv6Addr::LOCALHOST.into(),
    }
}

/// An address of node-1 beside its primary one.
pub fn second_ip(family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::from([172, 30, 9, 1]),
        Family::V6 => Ipv6Addr::new(0xfd30, 0, 0, 0, 0, 0, 9, 1).into(),
    }
}

/// The endpoint that a pod is.
///
/// # Errors
/// There is no such pod.
pub fn ep(name: &str) -> Ep {
    let pod = PODS.iter().find(|(pod, ..)| *pod == name);
    let (_, node, number) = pod.copied().unwrap_or(("nobody", 2, 250));
    Ep::new(node, pod_ips(node, number))
}

/// Service 1 over TCP alone, at its ClusterIP and a node port, with the pods `a`, `b` and `c`.
pub fn tcp_service() -> Svc {
    let service = svc(1).only(kplane_model::Protocol::Tcp).reached(At::NodePort);
    service.endpoints(["a", "b", "c"].map(ep))
}

pub fn facts(number: u8) -> Result<NodeFacts> {
    Ok(NodeFacts {
        name: node_name(number).into(),
        zone: None,
        addresses: Family::ALL.map(|family| node_ip(number, family)).to_vec(),
        pod_cidrs: pod_cidrs(number),
        service_cidrs: cidrs(&SERVICE_RANGES)?,
        eligible: true,
        known: true,
        other_nodes: false,
    })
}

/// The ranges of a node's pods.
pub fn pod_cidrs(number: u8) -> Vec<Cidr> {
    pod_ips(number, 0)
        .into_iter()
        .zip([24, 64])
        .filter_map(|(ip, prefix_len)| Cidr::new(ip, prefix_len))
        .collect()
}

pub fn cidrs(texts: &[&str]) -> Result<Vec<Cidr>> {
    texts.iter().map(|text| Ok(text.parse()?)).collect()
}

fn bare_topology() -> Result<Topology> {
    let mut topology = Topology::standard(NODES)?;
    for number in 1..=NODES {
        UnderTest::current()?.prepare(topology.node(&node_name(number))?.ns())?;
    }
    for (name, node, number) in PODS {
        let pod = topology.add_pod(&node_name(node), name, &pod_ips(node, number))?;
        pod.serve(Protocol::Tcp, TARGET)?;
        pod.serve(Protocol::Udp, TARGET)?;
    }
    let (client, node) = (topology.host("client")?, topology.node("node-1")?);
    for cidr in cidrs(&SERVICE_RANGES)?.into_iter().chain(cidrs(&EXTERNAL_RANGES)?) {
        client.route(cidr, node)?;
    }
    for (family, prefix_len) in [(Family::V4, 16), (Family::V6, 64)] {
        let netlink = node.netlink();
        netlink.add_address(LINK, second_ip(family), prefix_len)?;
    }
    Ok(topology)
}

/// Gives a node one more address, alone and not with a prefix.
pub fn take_address(node: &Host, ip: IpAddr) -> Result<()> {
    let whole = Cidr::single(ip).prefix_len();
    node.netlink().add_address(LINK, ip, whole)
}
