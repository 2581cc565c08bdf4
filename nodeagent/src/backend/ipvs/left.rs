//! Virtual servers of kube-proxy's IPVS mode, or ours, while another backend serves. Looking makes
//! nothing.
//!
//! New connections do not come to them any more: the other backend translates packets before IPVS sees
//! them. Connections that IPVS carries go on as long as their virtual server and its address are there.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use kplane_model::{Family, Protocol};

use super::kernel::LINK;
use super::sets::SetId;
use super::state::{Places, Snapshot};
use crate::netlink::ipset::IpSets;
use crate::netlink::ipvs::{Command, Ipvs, Real, ServerKey};
use crate::netlink::{Errno, Links, NetlinkError, link_index};

mod sockets;

/// Those whose places are in kube-proxy's IP sets; where these are empty, those on addresses of its
/// device.
///
/// # Errors
/// [`NetlinkError`]. A kernel without IPVS has none.
pub(crate) fn servers() -> Result<Vec<ServerKey>, NetlinkError> {
    let mut ipvs = match Ipvs::open() {
        Err(error) if error.errno() == Some(Errno::ENOENT) => return Ok(Vec::new()),
        ipvs => ipvs?,
    };
    let (mut sets, mut links) = (IpSets::open()?, Links::open()?);
    let mut found = Vec::new();
    for family in Family::ALL {
        let mut snapshot = Snapshot::default();
        for id in SetId::ALL {
            // No IP sets: no entries.
            let set = sets.list(id.name(family)).ok().flatten();
            let entries = set.map(|set| set.entries).unwrap_or_default();
            snapshot.entries.insert(id, entries.into_iter().collect());
        }
        let ours = addresses(&mut links, family)?;
        let places = Places::new(&snapshot);
        let servers = ipvs.servers(family)?.into_iter().map(|server| server.key);
        found.extend(servers.filter(|key| places.has(*key, &ours)));
    }
    Ok(found)
}

/// Of our device.
fn addresses(links: &mut Links, family: Family) -> Result<HashSet<IpAddr>, NetlinkError> {
    let link = link_index(LINK);
    let all = links.addresses(family)?.into_iter();
    Ok(all
        .filter(|address| Some(address.link) == link)
        .map(|address| address.ip)
        .collect())
}

/// Removes virtual servers.
///
/// # Errors
/// [`NetlinkError`]: the first that could not be removed.
pub(crate) fn remove(servers: &[ServerKey]) -> Result<(), NetlinkError> {
    let commands: Vec<Command> = servers.iter().copied().map(Command::DeleteServer).collect();
    let (refused, _) = Ipvs::open()?.perform(&commands)?;
    let left = refused.into_iter().find(|r| r.errno != Errno::ESRCH);
    left.map_or(Ok(()), |refusal| Err(refusal.into_error(&[])))
}

/// What is still needed of virtual servers and their addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InUse {
    /// TCP connections that IPVS carries.
    pub(crate) connections: u64,
    /// Addresses of the device that these, or the node's own connections, have.
    pub(crate) addresses: usize,
}

/// Removes those virtual servers and addresses that no connection needs, and lets no new connection
/// come to the others. UDP and SCTP are not waited for (D5). `spare` says for each family whether its
/// addresses may stay; if not, they and their servers go at once.
///
/// # Errors
/// [`NetlinkError`]. What was not done is done by the next call.
pub(crate) fn drain(servers: &[ServerKey], spare: [bool; 2]) -> Result<InUse, NetlinkError> {
    let (mut ipvs, mut links) = (Ipvs::open()?, Links::open()?);
    let sockets = sockets::addresses();
    let mut in_use = InUse::default();
    for family in Family::ALL {
        let listed = ipvs.servers(family)?;
        let reals = ipvs.reals(&listed, family)?;
        let addresses = addresses(&mut links, family)?;
        let of_family = |key: &&ServerKey| Family::of(key.ip) == family;
        let servers: Vec<ServerKey> = servers.iter().filter(of_family).copied().collect();
        let there = There {
            servers: &servers,
            reals: &reals,
            addresses: &addresses,
            sockets: &sockets,
            spare: spare[family as usize],
        };
        let step = there.step();
        // What is gone already is no failure, and what fails is seen by the next look.
        ipvs.perform(&step.commands)?;
        if let Some(link) = link_index(LINK) {
            let free: Vec<_> = step.free.iter().map(|ip| (false, *ip)).collect();
            links.perform(link, &free)?;
        }
        in_use.connections += step.in_use.connections;
        in_use.addresses += step.in_use.addresses;
    }
    Ok(in_use)
}

/// What there is of one family.
struct There<'a> {
    servers: &'a [ServerKey],
    reals: &'a [Real],
    /// Of the device.
    addresses: &'a HashSet<IpAddr>,
    /// Local addresses of the node's own connections.
    sockets: &'a HashSet<IpAddr>,
    spare: bool,
}

/// What is done about it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Step {
    commands: Vec<Command>,
    /// Addresses that go.
    free: Vec<IpAddr>,
    in_use: InUse,
}

impl There<'_> {
    fn step(&self) -> Step {
        let mut step = Step::default();
        let mut needed = HashSet::new();
        let mut of: HashMap<ServerKey, Vec<&Real>> = HashMap::new();
        for real in self.reals {
            of.entry(real.server).or_default().push(real);
        }
        for key in self.servers {
            let reals = of.get(key).map_or(&[][..], Vec::as_slice);
            let connections = match self.waits_for(*key) {
                true => reals.iter().map(|real| real.active + real.inactive).sum(),
                false => 0,
            };
            if connections == 0 {
                step.commands.push(Command::DeleteServer(*key));
                continue;
            }
            step.in_use.connections += connections;
            needed.insert(key.ip);
            let serving = reals.iter().filter(|real| real.weight > 0);
            let rest = serving.map(|real| Command::SetReal(*key, real.at, 0));
            step.commands.extend(rest);
        }
        if self.spare {
            needed.extend(self.sockets);
        }
        let free = self.addresses.iter().filter(|ip| !needed.contains(ip));
        step.free = free.copied().collect();
        step.in_use.addresses = self.addresses.len() - step.free.len();
        step
    }

    /// Whether a virtual server stays for its connections.
    fn waits_for(&self, key: ServerKey) -> bool {
        let may_stay = self.spare || !self.addresses.contains(&key.ip);
        key.protocol == Protocol::Tcp && may_stay
    }
}

#[cfg(test)]
mod tests;
