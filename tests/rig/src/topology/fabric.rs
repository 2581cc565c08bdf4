//! The network between the hosts.

use std::net::IpAddr;

use anyhow::{Context as _, Result};
use kplane_model::Cidr;

use super::host::{Host, LINK};
use crate::link::{Netlink, answers_neighbours};
use crate::netns::NetNs;

/// The fabric's bridge.
const BRIDGE: &str = "fabric";

/// One bridge, and a gateway that leads nowhere: its namespace does not forward.
#[derive(Debug)]
pub(super) struct Fabric {
    pub(super) ns: NetNs,
    netlink: Netlink,
    cidrs: Vec<Cidr>,
    /// Number of ports created so far, for their names.
    ports: u32,
}

impl Fabric {
    pub(super) fn new(cidrs: &[Cidr]) -> Result<Self> {
        let ns = NetNs::new("fabric")?;
        let netlink = ns.netlink()?;
        netlink.bridge(BRIDGE)?;
        let fabric = Self {
            ns,
            netlink,
            cidrs: cidrs.to_vec(),
            ports: 0,
        };
        for (gateway, cidr) in fabric.gateways().zip(&fabric.cidrs) {
            let len = cidr.prefix_len();
            fabric.netlink.add_address(BRIDGE, gateway, len)?;
        }
        Ok(fabric)
    }

    /// Returns the gateway of each prefix.
    pub(super) fn gateways(&self) -> impl Iterator<Item = IpAddr> {
        self.cidrs.iter().map(|cidr| gateway(*cidr))
    }

    /// Creates a host with a link to the bridge.
    pub(super) fn connect(
        &mut self,
        name: &str,
        ips: Vec<IpAddr>,
        pod_cidrs: Vec<Cidr>,
    ) -> Result<Host> {
        let ns = NetNs::new(name)?;
        self.ports += 1;
        let port = format!("port{}", self.ports);
        let own = link_local(self.ports);
        self.netlink.veth(&port, &ns, LINK)?;
        self.netlink.attach(&port, BRIDGE)?;
        let netlink = ns.netlink()?;
        netlink.up(LINK)?;
        netlink.add_address(LINK, own, 64)?;
        for ip in &ips {
            let cidr = self
                .cidrs
                .iter()
                .find(|cidr| cidr.contains(*ip))
                .with_context(|| format!("{name}: {ip} is outside the fabric"))?;
            netlink.add_address(LINK, *ip, cidr.prefix_len())?;
        }
        netlink.carries(LINK)?;
        self.netlink.carries(&port)?;
        ns.run(|| answers_neighbours(&ips))?;
        Ok(Host {
            name: name.to_owned(),
            ns,
            netlink,
            ips,
            pod_cidrs,
        })
    }
}

/// Returns an address from which a host asks for its neighbours at once. The kernel gives each link such an address,
/// but a busy kernel makes it usable late: until then it sends no question for a packet that it forwards.
fn link_local(port: u32) -> IpAddr {
    let [high, low] =
        [port >> 16, port & 0xffff].map(|half| u16::try_from(half).unwrap_or(u16::MAX));
    IpAddr::from([0xfe80, 0, 0, 0, 0, 1, high, low])
}

/// Returns the address of the fabric in a prefix: the second (its first is even, unless the prefix
/// holds one only).
pub fn gateway(cidr: Cidr) -> IpAddr {
    match cidr.first() {
        IpAddr::V4(ip) => IpAddr::V4((ip.to_bits() | 1).into()),
        IpAddr::V6(ip) => IpAddr::V6((ip.to_bits() | 1).into()),
    }
}
