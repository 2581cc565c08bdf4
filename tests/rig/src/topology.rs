//! A cluster's network: a fabric, nodes on it, pods behind them, an outside client.
//!
//! ```text
//! control ─┐            ┌─ node-1 ─┬─ pod        fabric: one bridge; its own address is the
//!          ├── fabric ──┤          └─ pod        nodes' default gateway and swallows what has
//! client  ─┘            └─ node-2 ─── pod        no better route
//! ```
//!
//! Nodes forward and reach all pods; pods reach everything through their node, one routed link
//! each (so a pod may have any address). Hosts outside reach nodes, and what [`Host::route`] adds.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use kplane_model::{Cidr, Family};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::echo::Pool;
use crate::link::Route;
use crate::netns::NetNs;
use crate::sysctl;

mod fabric;
mod host;
mod pod;

use fabric::Fabric;
pub use fabric::gateway;
pub use host::{Host, LINK};
pub use pod::Pod;

/// The whole network. Dropping it removes everything.
#[derive(Debug)]
pub struct Topology {
    // Pods come first: fields drop in order, and their servers need the echo thread.
    pods: BTreeMap<String, Pod>,
    nodes: BTreeMap<String, Host>,
    hosts: BTreeMap<String, Host>,
    fabric: Fabric,
    echo: Arc<Pool>,
    /// Number of pod links created so far, for their names.
    links: u32,
}

/// The name of a node, and the addresses of the node and its pods.
#[derive(Clone, Debug)]
pub struct NodeSpec {
    /// The name, unique in the topology.
    pub name: String,
    /// The addresses, inside the fabric's prefixes; at most one per family matters.
    pub ips: Vec<IpAddr>,
    /// Prefixes that other nodes route here; a pod may also have an address outside them.
    pub pod_cidrs: Vec<Cidr>,
}

impl NodeSpec {
    /// Returns node `number` (1..=254) of a standard topology: `node-1` with 172.30.1.1, fd30::1:1,
    /// pods in 10.244.1.0/24 and fd44:0:0:1::/64.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn standard(number: u8) -> Result<Self> {
        ensure!((1..=254).contains(&number), "node number {number}");
        let v6 = format!("fd30::1:{number:x}").parse()?;
        Ok(Self {
            name: format!("node-{number}"),
            ips: vec![IpAddr::from([172, 30, 1, number]), v6],
            pod_cidrs: vec![
                format!("10.244.{number}.0/24").parse()?,
                format!("fd44:0:0:{number:x}::/64").parse()?,
            ],
        })
    }
}

impl Topology {
    /// Creates `nodes` nodes (see [`NodeSpec::standard`]) on 172.30.0.0/16 and fd30::/64, a control
    /// host (.0.2, ::2) and an outside client (.0.3, ::3).
    ///
    /// # Errors
    /// The privileges are missing, or more than 254 nodes are requested.
    pub fn standard(nodes: u8) -> Result<Self> {
        let mut topology = Self::on(&["172.30.0.0/16".parse()?, "fd30::/64".parse()?])?;
        topology.add_host("control", &["172.30.0.2".parse()?, "fd30::2".parse()?])?;
        topology.add_host("client", &["172.30.0.3".parse()?, "fd30::3".parse()?])?;
        for number in 1..=nodes {
            topology.add_node(NodeSpec::standard(number)?)?;
        }
        Ok(topology)
    }

    /// Creates an empty fabric with these prefixes. The second address of each is the gateway's.
    /// Raises the process' limit of open files as far as allowed.
    ///
    /// # Errors
    /// The privileges are missing.
    pub fn on(cidrs: &[Cidr]) -> Result<Self> {
        let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
        setrlimit(Resource::RLIMIT_NOFILE, most, most).context("raise the limit of open files")?;
        Ok(Self {
            pods: BTreeMap::new(),
            nodes: BTreeMap::new(),
            hosts: BTreeMap::new(),
            fabric: Fabric::new(cidrs)?,
            echo: Arc::new(Pool::new()?),
            links: 0,
        })
    }

    /// Adds a machine outside the cluster.
    ///
    /// # Errors
    /// The name is taken, or an address is outside the fabric or taken.
    pub fn add_host(&mut self, name: &str, ips: &[IpAddr]) -> Result<&Host> {
        ensure!(!self.hosts.contains_key(name), "there is a host {name}");
        let host = self.fabric.connect(name, ips.to_vec(), Vec::new())?;
        Ok(self.hosts.entry(name.to_owned()).or_insert(host))
    }

    /// Adds a node, at any time.
    ///
    /// # Errors
    /// As [`Topology::add_host`].
    pub fn add_node(&mut self, spec: NodeSpec) -> Result<&Host> {
        let NodeSpec {
            name,
            ips,
            pod_cidrs,
        } = spec;
        ensure!(!self.nodes.contains_key(&name), "there is a node {name}");
        let node = self.fabric.connect(&name, ips, pod_cidrs)?;
        node.ns.sysctl(sysctl::FORWARDING)?;
        for gateway in self.fabric.gateways() {
            if node.ip(Family::of(gateway)).is_ok() {
                node.netlink.add_route(&Route::default_via(gateway))?;
            }
        }
        for other in self.nodes.values() {
            for cidr in &node.pod_cidrs {
                other.route(*cidr, &node)?;
            }
            for cidr in &other.pod_cidrs {
                node.route(*cidr, other)?;
            }
        }
        for pod in self.pods.values() {
            let at = self.node(&pod.node)?;
            for ip in at.strangers(pod) {
                node.route(ip, at)?;
            }
        }
        Ok(self.nodes.entry(name).or_insert(node))
    }

    /// Removes a node without pods, and the routes to it. Its links go when its namespace does.
    ///
    /// # Errors
    /// The node does not exist, or has pods.
    pub fn remove_node(&mut self, name: &str) -> Result<()> {
        let empty = self.pods.values().all(|pod| pod.node != name);
        ensure!(empty, "{name} has pods");
        let node = self.nodes.remove(name).with_context(|| format!("no node {name}"))?;
        for other in self.nodes.values() {
            for cidr in &node.pod_cidrs {
                other.unroute(*cidr)?;
            }
        }
        Ok(())
    }

    /// Adds a pod to a node, at any time, with any addresses.
    ///
    /// # Errors
    /// The name is taken, the node does not exist, or the node lacks an address of one of the pod's
    /// families.
    pub fn add_pod(&mut self, node: &str, name: &str, ips: &[IpAddr]) -> Result<&mut Pod> {
        self.check_free(name)?;
        let link = format!("pod{}", self.links);
        self.links += 1;
        let ns = NetNs::new(name)?;
        let pod = self.pod_on(node, name, ns, ips, Some(link));
        let at = self.node(node)?;
        at.connect(&pod).with_context(|| format!("add pod {name} to {node}"))?;
        for ip in at.strangers(&pod) {
            for other in self.others(node) {
                other.route(ip, at)?;
            }
        }
        Ok(self.pods.entry(name.to_owned()).or_insert(pod))
    }

    /// Adds a pod that lives in its node's namespace and has the node's addresses.
    ///
    /// # Errors
    /// The name is taken, or there is no such node.
    pub fn add_host_pod(&mut self, node: &str, name: &str) -> Result<&mut Pod> {
        self.check_free(name)?;
        let at = self.node(node)?;
        let pod = self.pod_on(node, name, at.ns.clone(), &at.ips, None);
        Ok(self.pods.entry(name.to_owned()).or_insert(pod))
    }

    /// Removes a pod with its servers, its link, and the routes to it.
    ///
    /// # Errors
    /// The pod does not exist.
    pub fn remove_pod(&mut self, name: &str) -> Result<()> {
        let pod = self.pods.remove(name).with_context(|| format!("no pod {name}"))?;
        let Some(link) = &pod.link else {
            return Ok(());
        };
        let at = self.node(&pod.node)?;
        at.netlink.delete(link)?;
        for ip in at.strangers(&pod) {
            for other in self.others(&pod.node) {
                other.unroute(ip)?;
            }
        }
        Ok(())
    }

    /// Returns a node.
    ///
    /// # Errors
    /// The node does not exist.
    pub fn node(&self, name: &str) -> Result<&Host> {
        self.nodes.get(name).with_context(|| format!("no node {name}"))
    }

    /// Returns all nodes, by name.
    pub fn nodes(&self) -> impl Iterator<Item = &Host> {
        self.nodes.values()
    }

    /// Returns a machine outside the cluster, such as `client` and `control` of a standard
    /// topology.
    ///
    /// # Errors
    /// The host does not exist.
    pub fn host(&self, name: &str) -> Result<&Host> {
        self.hosts.get(name).with_context(|| format!("no host {name}"))
    }

    /// Returns a pod.
    ///
    /// # Errors
    /// The pod does not exist.
    pub fn pod(&self, name: &str) -> Result<&Pod> {
        self.pods.get(name).with_context(|| format!("no pod {name}"))
    }

    /// Returns a pod, for starting and stopping servers.
    ///
    /// # Errors
    /// The pod does not exist.
    pub fn pod_mut(&mut self, name: &str) -> Result<&mut Pod> {
        self.pods.get_mut(name).with_context(|| format!("no pod {name}"))
    }

    /// Returns all pods, by name.
    pub fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.pods.values()
    }

    /// Returns the addresses of the fabric, one for each of its prefixes. The fabric swallows what is sent to them for
    /// others.
    pub fn gateways(&self) -> impl Iterator<Item = IpAddr> {
        self.fabric.gateways()
    }

    /// Returns the namespace of the bridge that joins all hosts; a capture there sees all traffic
    /// between them.
    pub fn fabric(&self) -> &NetNs {
        &self.fabric.ns
    }

    /// Returns the thread of all servers, for servers outside pods.
    pub fn echo(&self) -> &Pool {
        &self.echo
    }

    fn pod_on(
        &self,
        node: &str,
        name: &str,
        ns: NetNs,
        ips: &[IpAddr],
        link: Option<String>,
    ) -> Pod {
        Pod {
            name: name.to_owned(),
            node: node.to_owned(),
            ns,
            ips: ips.to_vec(),
            link,
            echo: self.echo.clone(),
            servers: BTreeMap::new(),
        }
    }

    fn check_free(&self, name: &str) -> Result<()> {
        ensure!(!self.pods.contains_key(name), "there is a pod {name}");
        Ok(())
    }

    fn others(&self, node: &str) -> impl Iterator<Item = &Host> {
        self.nodes.values().filter(move |other| other.name != node)
    }
}
