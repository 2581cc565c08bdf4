//! Virtual servers of kube-proxy's IPVS mode, or kplane's, while another backend serves. Reading them creates
//! nothing.
//!
//! They get no new connections any more, because the other backend translates packets before IPVS sees them.
//! Connections of IPVS go on as long as their virtual server and its address exist.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use kplane_model::{Family, Protocol};

use super::machine::LINK;
use super::sets::{Entry, SetId};
use super::state::{FrontendsInSets, Snapshot};
use kplane_netlink::ipset::{self, IpSets};
use kplane_netlink::ipvs::{Command, Ipvs, Real, ServerKey};
use kplane_netlink::{Errno, Links, NetlinkError, link_index};

mod sockets;

/// Most addresses to remove from the device between two reads of the node's own connections.
const AT_ONCE: usize = 256;

/// Returns the virtual servers whose frontends are in kube-proxy's IP sets. If these sets are empty, returns
/// those on addresses of kube-proxy's device.
///
/// # Errors
/// [`NetlinkError`]. A kernel without IPVS has no virtual servers.
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
            let set = match sets.list(id.name(family)) {
                // This kernel has no IP sets.
                Err(error) if error.errno() == Some(Errno::EINVAL) => None,
                set => set?,
            };
            let entries = set.map(|set| set.entries).unwrap_or_default();
            snapshot.entries.insert(id, entries.into_iter().collect());
        }
        let ours = addresses(&mut links, family)?;
        let frontends = FrontendsInSets::new(&snapshot);
        let servers = ipvs.servers(family)?.into_iter().map(|server| server.key);
        found.extend(servers.filter(|key| frontends.has(*key, &ours)));
    }
    Ok(found)
}

/// Returns the addresses of kplane's device.
fn addresses(links: &mut Links, family: Family) -> Result<HashSet<IpAddr>, NetlinkError> {
    let link = link_index(LINK);
    Ok(links
        .addresses(family)?
        .into_iter()
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
    refused
        .into_iter()
        .find(|r| r.errno != Errno::ESRCH)
        .map_or(Ok(()), |refusal| Err(refusal.into_error(&[])))
}

/// The virtual servers and addresses that are still needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InUse {
    /// TCP connections of IPVS.
    pub(crate) connections: u64,
    /// Addresses of the device that these connections, or the node's own connections, use.
    pub(crate) addresses: usize,
}

/// Removes the virtual servers and addresses that no connection needs, and keeps new connections from the
/// others. Connections of UDP and SCTP do not count (D5). `spare` says for each family whether its addresses
/// may stay. If not, they and their servers are removed at once.
///
/// # Errors
/// [`NetlinkError`]. The next call does the remaining work.
pub(crate) fn drain(servers: &[ServerKey], spare: [bool; 2]) -> Result<InUse, NetlinkError> {
    let mut ipvs = match Ipvs::open() {
        Err(error) if error.errno() == Some(Errno::ENOENT) => return Ok(InUse::default()),
        ipvs => ipvs?,
    };
    let mut links = Links::open()?;
    let mut in_use = InUse::default();
    for family in Family::ALL {
        let listed = ipvs.servers(family)?;
        let reals = ipvs.reals(&listed, family)?;
        let of_family = |key: &&ServerKey| Family::of(key.ip) == family;
        let servers: Vec<ServerKey> = servers.iter().filter(of_family).copied().collect();
        let addresses = addresses(&mut links, family)?;
        let spare = spare[family as usize];
        let step = step(&servers, &reals, |ip| spare || !addresses.contains(&ip));
        // A missing object is no failure. The next call notices what failed.
        ipvs.perform(&step.commands)?;
        in_use.connections += step.connections;
        let free: Vec<IpAddr> =
            addresses.iter().filter(|ip| !step.needed.contains(ip)).copied().collect();
        let held = release(&mut links, family, &free, spare)?;
        in_use.addresses += addresses.len() - free.len() + held;
    }
    Ok(in_use)
}

/// Removes addresses from the device, and from the set of addresses whose other ports are closed. Returns the
/// number of addresses that stay because the node itself has connections from them.
fn release(
    links: &mut Links,
    family: Family,
    addresses: &[IpAddr],
    spare: bool,
) -> Result<usize, NetlinkError> {
    let Some(link) = link_index(LINK) else {
        return Ok(0);
    };
    let mut sets = IpSets::open()?;
    let set = SetId::IpvsIps.name(family);
    let mut held = 0;
    for some in addresses.chunks(AT_ONCE) {
        // The list is read as late as possible, because a connection that begins after this loses its
        // address.
        let used = if spare { sockets::addresses()? } else { HashSet::new() };
        let (kept, free): (Vec<IpAddr>, Vec<IpAddr>) =
            some.iter().partition(|ip| used.contains(ip));
        held += kept.len();
        let changes: Vec<_> = free.iter().map(|ip| (false, *ip)).collect();
        links.perform(link, &changes)?;
        let entries = free.iter().map(|ip| ipset::SetCommand::Delete(set, Entry::Ip(*ip)));
        sets.perform(&entries.collect::<Vec<_>>())?;
    }
    Ok(held)
}

/// The decision about virtual servers.
#[derive(Debug, Default, PartialEq, Eq)]
struct ServerCleanup {
    commands: Vec<Command>,
    /// Addresses of the virtual servers that stay.
    needed: HashSet<IpAddr>,
    /// Connections of these virtual servers.
    connections: u64,
}

/// Decides about virtual servers. A virtual server on an address that may not stay is removed in any case.
fn step(servers: &[ServerKey], reals: &[Real], may_stay: impl Fn(IpAddr) -> bool) -> ServerCleanup {
    let mut step = ServerCleanup::default();
    let mut of: HashMap<ServerKey, Vec<&Real>> = HashMap::new();
    for real in reals {
        of.entry(real.server).or_default().push(real);
    }
    for key in servers {
        let reals = of.get(key).map_or(&[][..], Vec::as_slice);
        let connections: u64 = reals.iter().map(|real| real.active + real.inactive).sum();
        if connections == 0 || key.protocol != Protocol::Tcp || !may_stay(key.ip) {
            step.commands.push(Command::DeleteServer(*key));
            continue;
        }
        step.connections += connections;
        step.needed.insert(key.ip);
        let serving = reals.iter().filter(|real| real.weight > 0);
        let rest = serving.map(|real| Command::SetReal(*key, real.at, 0));
        step.commands.extend(rest);
    }
    step
}

#[cfg(test)]
mod tests;
