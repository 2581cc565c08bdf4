//! The network around the objects: their nodes and pods, and callers of Services. Every node has a
//! client outside the cluster whose packets go through that node, so that the work of each node's
//! kernel can be observed at the same time.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use kplane_model::{Cidr, Family, Protocol};
use kplane_rig::client;
use kplane_rig::echo::Server;
use kplane_rig::netns::NetNs;
use kplane_rig::topology::{LINK, NodeSpec, Pod, Topology};

use super::layout::{self, Book, member};
use super::objects::{Objects, PodSpec};

/// The name of the control plane's machine.
pub(crate) const CONTROL: &str = "control";

/// The prefix of the names of pods that only call.
pub(crate) const SHELL: &str = "shell-";
/// Most endpoints for which one machine's kernel has room: its table of neighbours holds 1,024.
const MOST_PODS: usize = 800;

/// The whole network. Dropping it removes everything.
#[derive(Debug)]
pub(crate) struct World {
    // Servers end before the topology's echo thread: fields drop in order.
    servers: Vec<Server>,
    /// Machines, links and pods.
    pub(crate) topology: Topology,
    /// Callers by node, in the order client, guest, pod, node; a node may lack some.
    pub(crate) callers: Vec<Caller>,
    /// Ranges by which agents distinguish pods from other clients.
    pub(crate) cluster_cidrs: Vec<Cidr>,
    /// Number of namespaces.
    pub(crate) size: usize,
    networks: Vec<Cidr>,
    book: Book,
}

/// A client that calls Services through one node.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    /// The kind of caller.
    pub(crate) role: Role,
    /// The node whose kernel handles its packets.
    pub(crate) node: String,
    /// The namespace from which it sends.
    pub(crate) ns: NetNs,
    /// Its source addresses, at most one for each family.
    pub(crate) ips: Vec<IpAddr>,
}

/// Kinds of callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    /// A client outside the cluster.
    Client,
    /// A client outside, with an address that source ranges allow.
    Guest,
    /// A pod.
    Pod,
    /// The node itself.
    Node,
}

impl Caller {
    /// Returns its address in a family.
    pub(crate) fn ip(&self, family: Family) -> Option<IpAddr> {
        self.ips
            .iter()
            .copied()
            .find(|ip| Family::of(*ip) == family)
    }
}

impl World {
    /// Builds the network of some objects.
    pub(crate) fn build(objects: &Objects) -> Result<Self> {
        ensure!(
            !objects.nodes.is_empty(),
            "there are no Nodes in the manifests"
        );
        let (pods, most) = (objects.pods.len(), MOST_PODS);
        ensure!(
            pods <= most,
            "{pods} pods, but there is room for {most}: leave some Services out"
        );
        let mut book = Book::default();
        let networks = layout::networks(objects);
        let gateways = networks.iter().map(|cidr| member(*cidr));
        gateways
            .chain(layout::addresses(objects))
            .for_each(|ip| book.note(ip));
        let mut topology = Topology::on(&networks)?;
        for node in &objects.nodes {
            topology.add_node(NodeSpec {
                name: node.name.to_string(),
                ips: node.addresses.clone(),
                pod_cidrs: node.pod_cidrs.clone(),
            })?;
        }
        let mut world = Self {
            servers: Vec::new(),
            topology,
            callers: Vec::new(),
            cluster_cidrs: layout::cluster_cidrs(objects, &networks),
            // The fabric between the machines is a namespace, too.
            size: 1 + objects.nodes.len(),
            networks,
            book,
        };
        world.add_host(CONTROL)?;
        for pod in &objects.pods {
            world.add_pod(pod)?;
        }
        let outside = layout::outside(objects);
        let guests = layout::guests(objects);
        for node in &objects.nodes {
            world.add_clients(&node.name, &outside, &guests)?;
            world.add_shell(&node.name)?;
        }
        Ok(world)
    }

    /// Returns a new address for a pod on a node.
    pub(crate) fn new_address(&mut self, node: &str, family: Family) -> Result<IpAddr> {
        let mut cidrs = self.topology.node(node)?.pod_cidrs().iter().copied();
        let cidr = cidrs.find(|cidr| cidr.family() == family);
        self.book
            .take(cidr.with_context(|| format!("{node} has no {family} range of pods"))?)
    }

    /// Adds a pod with its servers.
    pub(crate) fn add_pod(&mut self, spec: &PodSpec) -> Result<()> {
        let ips: Vec<IpAddr> = spec.ips.iter().copied().collect();
        let owner = |ip: &IpAddr| {
            let mut nodes = self.topology.nodes();
            nodes
                .find(|node| node.ips().contains(ip))
                .map(|node| node.name().to_owned())
        };
        let host = ips.iter().find_map(owner);
        let known = spec
            .node
            .as_deref()
            .filter(|node| self.topology.node(node).is_ok());
        let pod = match (host, known) {
            (Some(node), _) => self.topology.add_host_pod(&node, &spec.name)?,
            (None, Some(node)) => {
                self.size += 1;
                self.topology.add_pod(node, &spec.name, &ips)?
            }
            (None, None) => return self.add_stranger(spec, &ips),
        };
        for (protocol, port) in &spec.listens {
            if let Some(protocol) = speaks(*protocol) {
                pod.serve(protocol, *port)?;
            }
        }
        Ok(())
    }

    /// Removes a pod.
    pub(crate) fn remove_pod(&mut self, name: &str) -> Result<()> {
        self.size -= usize::from(self.topology.pod(name)?.link().is_some());
        self.topology.remove_pod(name)
    }

    /// Adds an endpoint outside the cluster, such as the API server: a machine on the fabric.
    fn add_stranger(&mut self, spec: &PodSpec, ips: &[IpAddr]) -> Result<()> {
        self.add_host(&spec.name)?;
        let host = self.topology.host(&spec.name)?;
        for ip in ips {
            let single = Cidr::single(*ip);
            host.netlink().add_address(LINK, *ip, single.prefix_len())?;
            for node in self.topology.nodes() {
                node.route(single, host)?;
            }
        }
        for node in self.topology.nodes() {
            for cidr in node.pod_cidrs() {
                host.route(*cidr, node)?;
            }
        }
        for (protocol, port) in &spec.listens {
            let Some(protocol) = speaks(*protocol) else {
                continue;
            };
            for ip in ips {
                let address = SocketAddr::new(*ip, *port);
                let server =
                    self.topology
                        .echo()
                        .serve(host.ns(), &spec.name, protocol, address)?;
                self.servers.push(server);
            }
        }
        Ok(())
    }

    /// Adds a machine outside the cluster with an address in each network.
    fn add_host(&mut self, name: &str) -> Result<Vec<IpAddr>> {
        let ips = self.networks.iter().map(|cidr| self.book.take(*cidr));
        let ips: Vec<IpAddr> = ips.collect::<Result<_>>()?;
        self.topology.add_host(name, &ips)?;
        self.size += 1;
        Ok(ips)
    }

    /// Adds a client whose packets go through a node, and that node itself.
    fn add_clients(
        &mut self,
        node: &str,
        outside: &[Cidr],
        guests: &BTreeMap<Family, IpAddr>,
    ) -> Result<()> {
        let name = format!("client-{node}");
        let ips = self.add_host(&name)?;
        let (client, host) = (self.topology.host(&name)?, self.topology.node(node)?);
        for cidr in outside {
            if host.ip(cidr.family()).is_ok() {
                client.route(*cidr, host)?;
            }
        }
        let mut guest_ips = Vec::new();
        for (family, ip) in guests {
            let single = Cidr::single(*ip);
            if host.ip(*family).is_ok() {
                client
                    .netlink()
                    .add_address(LINK, *ip, single.prefix_len())?;
                host.route(single, client)?;
                guest_ips.push(*ip);
            }
        }
        let caller = |role, ns: &NetNs, ips| Caller {
            role,
            node: node.to_owned(),
            ns: ns.clone(),
            ips,
        };
        self.callers.push(caller(Role::Client, client.ns(), ips));
        if !guest_ips.is_empty() {
            self.callers
                .push(caller(Role::Guest, client.ns(), guest_ips));
        }
        self.callers
            .push(caller(Role::Node, host.ns(), host.ips().to_vec()));
        Ok(())
    }

    /// Adds a pod that only calls.
    fn add_shell(&mut self, node: &str) -> Result<()> {
        let host = self.topology.node(node)?;
        let cidrs: Vec<Cidr> = Family::ALL
            .into_iter()
            .filter(|family| host.ip(*family).is_ok())
            .filter_map(|family| host.pod_cidrs().iter().find(|cidr| cidr.family() == family))
            .copied()
            .collect();
        if cidrs.is_empty() {
            return Ok(());
        }
        let ips = cidrs.iter().map(|cidr| self.book.take(*cidr));
        let ips: Vec<IpAddr> = ips.collect::<Result<_>>()?;
        self.size += 1;
        let pod = self
            .topology
            .add_pod(node, &format!("{SHELL}{node}"), &ips)?;
        let caller = Caller {
            role: Role::Pod,
            node: node.to_owned(),
            ns: pod.ns().clone(),
            ips,
        };
        self.callers.push(caller);
        Ok(())
    }

    /// Returns the caller of a kind at a node.
    pub(crate) fn caller(&self, role: Role, node: &str) -> Result<&Caller> {
        let found = self
            .callers
            .iter()
            .find(|c| c.role == role && c.node == node);
        found.with_context(|| format!("no caller {role:?} at {node}"))
    }

    /// Returns the pods' namespaces by name.
    pub(crate) fn pod_namespaces(&self) -> BTreeMap<String, NetNs> {
        let pods = self
            .topology
            .pods()
            .map(|pod: &Pod| (pod.name().to_owned(), pod.ns().clone()));
        pods.collect()
    }
}

/// Returns the rig's name of a protocol, if the rig has servers for it.
pub(crate) fn speaks(protocol: Protocol) -> Option<client::Protocol> {
    match protocol {
        Protocol::Tcp => Some(client::Protocol::Tcp),
        Protocol::Udp => Some(client::Protocol::Udp),
        Protocol::Sctp => None,
    }
}
