//! Machines on the fabric: nodes, the control host, clients.

use std::net::{IpAddr, Ipv6Addr};

use anyhow::{Context as _, Result};
use kplane_model::{Cidr, Family};

use super::pod::Pod;
use crate::link::{Netlink, Route, answers_neighbours};
use crate::netns::NetNs;

/// A node's address on each pod link, for IPv6 (for IPv4 it is the node's own).
const GATEWAY_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1));

/// The link of a host to the fabric, and of a pod to its node.
pub const LINK: &str = "eth0";

/// A machine on the fabric, with its own network namespace.
#[derive(Debug)]
pub struct Host {
    pub(super) name: String,
    pub(super) ns: NetNs,
    pub(super) netlink: Netlink,
    pub(super) ips: Vec<IpAddr>,
    pub(super) pod_cidrs: Vec<Cidr>,
}

impl Host {
    /// Returns the host's name in the topology.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the host's namespace, for probes, processes and threads.
    pub fn ns(&self) -> &NetNs {
        &self.ns
    }

    /// Returns a connection for changing its links, addresses and routes.
    pub fn netlink(&self) -> &Netlink {
        &self.netlink
    }

    /// Returns the host's addresses on the fabric.
    pub fn ips(&self) -> &[IpAddr] {
        &self.ips
    }

    /// Returns the prefixes of its pods; none for a host that is not a node.
    pub fn pod_cidrs(&self) -> &[Cidr] {
        &self.pod_cidrs
    }

    /// Returns the host's first address of a family.
    ///
    /// # Errors
    /// The host has none.
    pub fn ip(&self, family: Family) -> Result<IpAddr> {
        self.ips
            .iter()
            .copied()
            .find(|ip| Family::of(*ip) == family)
            .with_context(|| format!("{} has no {family:?} address", self.name))
    }

    /// Routes packets for `dst` through `node`, as a router or load balancer in front of the
    /// cluster does. A second call with another node moves the route.
    ///
    /// # Errors
    /// The node has no address of that family.
    pub fn route(&self, dst: Cidr, node: &Self) -> Result<()> {
        let gateway = node.ip(dst.family())?;
        self.netlink.add_route(&Route::to(dst).via(gateway))
    }

    /// Removes the route of a [`Host::route`].
    ///
    /// # Errors
    /// The route does not exist.
    pub fn unroute(&self, dst: Cidr) -> Result<()> {
        self.netlink.delete_route(&Route::to(dst))
    }

    /// Links a pod's namespace to this node, with routes both ways.
    pub(super) fn connect(&self, pod: &Pod) -> Result<()> {
        let Some(link) = &pod.link else {
            return Ok(());
        };
        self.netlink.veth(link, &pod.ns, LINK)?;
        let inside = pod.ns.netlink()?;
        inside.up(LINK)?;
        for ip in &pod.ips {
            let (own, single) = (self.ip(Family::of(*ip))?, Cidr::single(*ip));
            inside.add_address(LINK, *ip, single.prefix_len())?;
            let route = Route::to(single).dev(link).source(own);
            self.netlink.add_route(&route)?;
        }
        if pod.ips.iter().any(IpAddr::is_ipv4) {
            let gateway = self.ip(Family::V4)?;
            inside.add_route(&Route::default_via(gateway).dev(LINK))?;
        }
        if pod.ips.iter().any(IpAddr::is_ipv6) {
            self.netlink.add_address(link, GATEWAY_V6, 64)?;
            inside.add_route(&Route::default_via(GATEWAY_V6).dev(LINK))?;
        }
        inside.carries(LINK)?;
        self.netlink.carries(link)?;
        let ips = &pod.ips;
        pod.ns.run(|| answers_neighbours(ips))
    }

    /// Returns the pod's addresses that other nodes do not route here by this node's prefixes.
    pub(super) fn strangers(&self, pod: &Pod) -> Vec<Cidr> {
        let covered = |ip: IpAddr| {
            let mut cidrs = self.pod_cidrs.iter().copied();
            self.ips.contains(&ip) || cidrs.any(|cidr| cidr.contains(ip))
        };
        pod.ips.iter().copied().filter(|ip| !covered(*ip)).map(Cidr::single).collect()
    }
}
