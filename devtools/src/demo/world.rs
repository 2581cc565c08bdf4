//! The network around the objects: their nodes and pods, and callers of Services. Every node has a
//! client outside the cluster whose packets go through that node, so that the work of each node's
//! kernel can be observed at the same time.

use std::collections::BTreeSet;
use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use kplane_model::{Cidr, Family, NodeFacts};
use kplane_rig::client::Protocol;
use kplane_rig::netns::NetNs;
use kplane_rig::topology::{Host, LINK, NodeSpec, Topology, gateway};

use super::objects::{Objects, PodSpec};

/// The name of the control plane's machine.
pub(crate) const CONTROL: &str = "control";
/// The prefix of the names of pods that only call.
pub(crate) const SHELL: &str = "shell-";
/// Most endpoints for which one machine's kernel has room: its table of neighbours holds 1,024.
const MOST_PODS: usize = 800;
/// Longest prefix of a network that the demo creates, so that there is room for its own machines.
const LONGEST: [u8; 2] = [24, 112];

/// The whole network. Dropping it removes everything.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) topology: Topology,
    /// Callers by node, in the order pod, client, guest, node; a node may lack some.
    pub(crate) callers: Vec<Caller>,
    /// Ranges by which agents distinguish pods from other clients.
    pub(crate) cluster_cidrs: Vec<Cidr>,
    networks: Vec<Cidr>,
    /// Addresses in use.
    taken: BTreeSet<IpAddr>,
}

/// A client that calls Services.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) role: Role,
    /// The node whose kernel handles its packets.
    pub(crate) node: String,
    pub(crate) ns: NetNs,
    /// Its source addresses; the first of each family is used.
    pub(crate) ips: Vec<IpAddr>,
}

/// Kinds of callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    /// A client outside the cluster.
    Client,
    /// A client outside, with an address that source ranges allow.
    Guest,
    Pod,
    /// The node itself.
    Node,
}

impl Caller {
    /// Returns its address in a family.
    pub(crate) fn ip(&self, family: Family) -> Option<IpAddr> {
        self.ips.iter().copied().find(|ip| Family::of(*ip) == family)
    }
}

impl World {
    /// Builds the network of some objects.
    pub(crate) fn build(objects: &Objects) -> Result<Self> {
        let (nodes, pods) = (&objects.nodes, objects.pods.len());
        ensure!(!nodes.is_empty(), "there are no Nodes in the manifests");
        ensure!(
            pods <= MOST_PODS,
            "{pods} pods, but there is room for {MOST_PODS}: leave some Services out"
        );
        let networks = networks(objects);
        let mut taken: BTreeSet<IpAddr> = networks.iter().map(|cidr| gateway(*cidr)).collect();
        taken.extend(nodes.iter().flat_map(|node| &node.addresses));
        taken.extend(objects.pods.iter().flat_map(|pod| &pod.ips));
        let mut world = Self {
            topology: Topology::on(&networks)?,
            callers: Vec::new(),
            cluster_cidrs: cluster_cidrs(objects),
            networks,
            taken,
        };
        for node in nodes {
            world.topology.add_node(NodeSpec {
                name: node.name.to_string(),
                ips: node.addresses.clone(),
                pod_cidrs: node.pod_cidrs.clone(),
            })?;
        }
        world.add_host(CONTROL)?;
        for pod in &objects.pods {
            world.add_pod(pod)?;
        }
        for node in nodes {
            world.add_shell(node)?;
            world.add_clients(node, objects)?;
        }
        Ok(world)
    }

    /// Returns the number of namespaces: those of the fabric, the hosts, the nodes and the pods.
    pub(crate) fn size(&self) -> usize {
        let pods = self.topology.pods().filter(|pod| pod.link().is_some());
        2 + 2 * self.topology.nodes().count() + pods.count()
    }

    /// Takes the highest free address of a prefix, except its last one (a broadcast address).
    pub(crate) fn take(&mut self, cidr: Cidr) -> Result<IpAddr> {
        let mut ip = before(cidr.last());
        while self.taken.contains(&ip) {
            ip = before(ip);
        }
        let free = cidr.contains(ip) && self.taken.insert(ip);
        ensure!(free, "there is no free address in {cidr}");
        Ok(ip)
    }

    /// Adds a pod with its servers. A pod of the first node plays an endpoint outside the cluster,
    /// such as the API server.
    pub(crate) fn add_pod(&mut self, spec: &PodSpec) -> Result<()> {
        let ips: Vec<IpAddr> = spec.ips.iter().copied().collect();
        let nodes: Vec<&Host> = self.topology.nodes().collect();
        let find = |is: &dyn Fn(&Host) -> bool| nodes.iter().find(|node| is(node));
        let host = find(&|node| node.ips().iter().any(|ip| ips.contains(ip)));
        let known = find(&|node| Some(node.name()) == spec.node.as_deref());
        let node = host
            .or(known)
            .or(nodes.first())
            .context("there are no nodes")?
            .name()
            .to_owned();
        let pod = if host.is_some() {
            self.topology.add_host_pod(&node, &spec.name)?
        } else {
            self.topology.add_pod(&node, &spec.name, &ips)?
        };
        for (protocol, port) in &spec.listens {
            if let Some(protocol) = Protocol::of(*protocol) {
                pod.serve(protocol, *port)?;
            }
        }
        Ok(())
    }

    fn take_each(&mut self, cidrs: &[Cidr]) -> Result<Vec<IpAddr>> {
        cidrs.iter().map(|cidr| self.take(*cidr)).collect()
    }

    /// Adds a machine outside the cluster with an address in each network.
    fn add_host(&mut self, name: &str) -> Result<Vec<IpAddr>> {
        let ips = self.take_each(&self.networks.clone())?;
        self.topology.add_host(name, &ips)?;
        Ok(ips)
    }

    /// Adds a pod that only calls, unless its node has no range of pods.
    fn add_shell(&mut self, node: &NodeFacts) -> Result<()> {
        let has = |cidr: &Cidr| node.primary_address(cidr.family()).is_some();
        let mut cidrs = node.pod_cidrs.clone();
        cidrs.retain(has);
        let ips = self.take_each(&cidrs)?;
        if !ips.is_empty() {
            let name = format!("{SHELL}{}", node.name);
            let ns = self.topology.add_pod(&node.name, &name, &ips)?.ns().clone();
            self.add_caller(Role::Pod, node, ns, ips);
        }
        Ok(())
    }

    /// Adds a client whose packets go through a node, and that node itself.
    fn add_clients(&mut self, node: &NodeFacts, objects: &Objects) -> Result<()> {
        let name = format!("client-{}", node.name);
        let ips = self.add_host(&name)?;
        let (client, host) = (self.topology.host(&name)?, self.topology.node(&node.name)?);
        let reaches = |family| node.primary_address(family).is_some();
        let mut outside = outside(objects);
        outside.retain(|cidr| reaches(cidr.family()));
        outside.iter().try_for_each(|cidr| client.route(*cidr, host))?;
        let guests: Vec<IpAddr> = Family::ALL
            .into_iter()
            .filter(|family| reaches(*family))
            .filter_map(|family| guest(objects, family))
            .collect();
        for ip in &guests {
            let single = Cidr::single(*ip);
            let netlink = client.netlink();
            netlink.add_address(LINK, *ip, single.prefix_len())?;
            host.route(single, client)?;
        }
        let (client, host) = (client.ns().clone(), host.ns().clone());
        self.add_caller(Role::Client, node, client.clone(), ips);
        if !guests.is_empty() {
            self.add_caller(Role::Guest, node, client, guests);
        }
        self.add_caller(Role::Node, node, host, node.addresses.clone());
        Ok(())
    }

    fn add_caller(&mut self, role: Role, node: &NodeFacts, ns: NetNs, ips: Vec<IpAddr>) {
        let node = node.name.to_string();
        let caller = Caller {
            role,
            node,
            ns,
            ips,
        };
        self.callers.push(caller);
    }
}

/// Returns a network for each family, with all nodes in it: the narrowest prefix that leaves room
/// and whose gateway is no node.
fn networks(objects: &Objects) -> Vec<Cidr> {
    let mut networks = Vec::new();
    for family in Family::ALL {
        let ips: Vec<IpAddr> =
            objects.nodes.iter().filter_map(|node| node.primary_address(family)).collect();
        let Some(first) = ips.first() else { continue };
        let fits =
            |cidr: &Cidr| ips.iter().all(|ip| cidr.contains(*ip)) && !ips.contains(&gateway(*cidr));
        let lengths = (0..=LONGEST[family as usize]).rev();
        let mut cidrs = lengths.filter_map(|len| Cidr::new(*first, len));
        networks.extend(cidrs.find(fits));
    }
    networks
}

/// Returns the destinations that clients send to nodes although no node has the address.
fn outside(objects: &Objects) -> BTreeSet<Cidr> {
    let mut cidrs = BTreeSet::new();
    for port in objects.ports() {
        let vips = port.external_ips.iter().chain(&port.load_balancer_ips);
        cidrs.extend(vips.chain([&port.cluster_ip]).map(|ip| Cidr::single(*ip)));
    }
    cidrs.retain(|ip| !objects.service_cidrs.iter().any(|cidr| cidr.covers(*ip)));
    cidrs.extend(&objects.service_cidrs);
    cidrs
}

/// Returns an address that the first source range of a family allows.
fn guest(objects: &Objects, family: Family) -> Option<IpAddr> {
    let mut ranges = objects.ports().flat_map(|port| &port.source_ranges);
    let range = ranges.find(|range| range.family() == family && range.prefix_len() > 0)?;
    Some(gateway(*range)).filter(|ip| range.contains(*ip)).or(Some(range.first()))
}

/// Returns the ranges that distinguish pods from other clients: those of the nodes, and the
/// addresses of pods outside of these.
fn cluster_cidrs(objects: &Objects) -> Vec<Cidr> {
    let nodes = &objects.nodes;
    let mut cidrs: BTreeSet<Cidr> = nodes.iter().flat_map(|node| node.pod_cidrs.clone()).collect();
    let pods = objects.pods.iter().filter(|pod| pod.node.is_some());
    for ip in pods.flat_map(|pod| &pod.ips) {
        let of_node = nodes.iter().any(|node| node.addresses.contains(ip));
        if !of_node && !cidrs.iter().any(|cidr| cidr.contains(*ip)) {
            cidrs.insert(Cidr::single(*ip));
        }
    }
    cidrs.into_iter().collect()
}

fn before(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(ip) => IpAddr::V4(ip.to_bits().wrapping_sub(1).into()),
        IpAddr::V6(ip) => IpAddr::V6(ip.to_bits().wrapping_sub(1).into()),
    }
}
