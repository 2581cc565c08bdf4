//! What the kernel does with packets to one destination: its virtual server, the device that brings packets to the
//! node, and the sets that open and guard it.

use std::collections::BTreeSet;
use std::net::IpAddr;

use kplane_model::{EndpointAddr, Family, Protocol};
use kplane_netlink::ipset::IpSets;
use kplane_netlink::ipvs::{Ipvs, Server, ServerKey};
use kplane_netlink::{Links, NetlinkError, link_index};

use super::machine::LINK;
use super::sets::{Entry, SetId};
use crate::backend::kernel::{KernelState, MAX_ENDPOINTS, PacketTarget};

/// Sets of destinations that senders other than the node may reach; without them the port is closed (see
/// `rules.rs`).
const OPENING: [SetId; 4] = [
    SetId::ClusterIp,
    SetId::LoadBalancer,
    SetId::ExternalIp,
    SetId::ExternalIpLocal,
];

/// Reads what the kernel has for a destination.
///
/// # Errors
/// [`NetlinkError`].
pub(in crate::backend) fn look_up(target: PacketTarget) -> Result<KernelState, NetlinkError> {
    let family = target.family();
    let addresses = NodeAddresses::read(family)?;
    let mut ipvs = Ipvs::open()?;
    let mut servers = ipvs.servers(family)?;
    servers.retain(|server| addresses.serve(server.key, target));
    let reals = ipvs.reals(&servers, family)?;
    let serving: BTreeSet<EndpointAddr> = reals
        .iter()
        .filter(|real| real.weight > 0 && servers.iter().any(|server| server.key == real.server))
        .map(|real| real.at)
        .collect();
    let mut state = KernelState {
        frontends: servers.iter().map(place).collect(),
        refuses: !servers.is_empty() && serving.is_empty(),
        more: serving.len().saturating_sub(MAX_ENDPOINTS),
        endpoints: serving.into_iter().take(MAX_ENDPOINTS).collect(),
        ..KernelState::default()
    };
    if let PacketTarget::Address { at, protocol } = target {
        let holds = Holds::read(at.ip(), protocol, at.port())?;
        state.frontends.extend(holds.frontends);
        state.guarded = holds.guarded;
        if holds.closed && !state.endpoints.is_empty() {
            // Only the node itself gets through.
            state.inside = Some(std::mem::take(&mut state.endpoints));
            state.refuses = true;
        }
    }
    Ok(state)
}

fn place(server: &Server) -> String {
    let scheduler = server.mode.map_or("unknown", |mode| mode.scheduler.as_str());
    format!("virtual server {} {scheduler}", server.key)
}

struct NodeAddresses {
    /// Those of the device with Services' addresses.
    of_services: BTreeSet<IpAddr>,
    /// All others.
    own: BTreeSet<IpAddr>,
}

impl NodeAddresses {
    fn read(family: Family) -> Result<Self, NetlinkError> {
        let device = link_index(LINK);
        let all = Links::open()?.addresses(family)?;
        let mut addresses = Self {
            of_services: BTreeSet::new(),
            own: BTreeSet::new(),
        };
        for address in all {
            if Some(address.link) == device {
                addresses.of_services.insert(address.ip)
            } else {
                addresses.own.insert(address.ip)
            };
        }
        Ok(addresses)
    }

    /// Returns whether packets to a destination come to a virtual server. They do not if the node lacks the address.
    fn serve(&self, server: ServerKey, target: PacketTarget) -> bool {
        match target {
            PacketTarget::Address { at, protocol } => {
                let asked = ServerKey {
                    ip: at.ip(),
                    protocol,
                    port: at.port(),
                };
                let here = self.of_services.contains(&at.ip()) || self.own.contains(&at.ip());
                server == asked && here
            }
            PacketTarget::NodePort { protocol, port, .. } => {
                (server.protocol, server.port) == (protocol, port) && self.own.contains(&server.ip)
            }
        }
    }
}

/// What the sets hold about an address and port.
struct Holds {
    frontends: Vec<String>,
    guarded: bool,
    closed: bool,
}

impl Holds {
    fn read(ip: IpAddr, protocol: Protocol, port: u16) -> Result<Self, NetlinkError> {
        let mut sets = IpSets::open()?;
        let family = Family::of(ip);
        let mut has = |set: SetId, entry: Entry| -> Result<bool, NetlinkError> {
            let found = sets.list(set.name(family))?;
            Ok(found.is_some_and(|found| found.entries.contains(&entry)))
        };
        let at = Entry::IpPort(ip, protocol, port);
        let mut frontends = Vec::new();
        for set in OPENING {
            if has(set, at)? {
                frontends.push(set.name(family).to_owned());
            }
        }
        let closed = frontends.is_empty() && has(SetId::IpvsIps, Entry::Ip(ip))?;
        let guarded = has(SetId::LoadBalancerFw, at)?;
        if guarded {
            frontends.push(SetId::LoadBalancerFw.name(family).to_owned());
        }
        Ok(Self {
            frontends,
            guarded,
            closed,
        })
    }
}
