//! Virtual servers of kube-proxy's IPVS mode, or ours, while another backend serves. Looking makes
//! nothing.
//!
//! New connections do not come to them any more: the other backend translates packets before IPVS sees
//! them. Connections that IPVS carries go on as long as their virtual server and its address are there.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use kplane_model::{Family, Protocol};

use super::kernel::LINK;
use super::sets::{Entry, SetId};
use super::state::{Places, Snapshot};
use kplane_netlink::ipset::{self, IpSets};
use kplane_netlink::ipvs::{Command, Ipvs, Real, ServerKey};
use kplane_netlink::{Errno, Links, NetlinkError, link_index};

mod sockets;

/// Addresses that are taken from the device between two looks at the node's own connections.
const AT_ONCE: usize = 256;

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
            let set = match sets.list(id.name(family)) {
                // No IP sets in this kernel.
                Err(error) if error.errno() == Some(Errno::EINVAL) => None,
                set => set?,
            };
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
        // What is gone already is no failure, and what fails is seen by the next look.
        ipvs.perform(&step.commands)?;
        in_use.connections += step.connections;
        let free = addresses.iter().filter(|ip| !step.needed.contains(ip));
        let free: Vec<IpAddr> = free.copied().collect();
        let held = release(&mut links, family, &free, spare)?;
        in_use.addresses += addresses.len() - free.len() + held;
    }
    Ok(in_use)
}

/// Takes addresses from the device, and from the set of those of which other ports are closed; returns how
/// many stay, since the node itself has connections from them.
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
        // As late as can be: a connection that begins now would lose its address.
        let used = if spare {
            sockets::addresses()?
        } else {
            HashSet::new()
        };
        let (kept, free): (Vec<IpAddr>, Vec<IpAddr>) =
            some.iter().partition(|ip| used.contains(ip));
        held += kept.len();
        let changes: Vec<_> = free.iter().map(|ip| (false, *ip)).collect();
        links.perform(link, &changes)?;
        let entries = free
            .iter()
            .map(|ip| ipset::Command::Delete(set, Entry::Ip(*ip)));
        sets.perform(&entries.collect::<Vec<_>>())?;
    }
    Ok(held)
}

/// What is done about virtual servers.
#[derive(Debug, Default, PartialEq, Eq)]
struct Step {
    commands: Vec<Command>,
    /// Addresses of those that stay.
    needed: HashSet<IpAddr>,
    /// Those that they carry.
    connections: u64,
}

/// Decides that. A virtual server on an address that may not stay goes in any case.
fn step(servers: &[ServerKey], reals: &[Real], may_stay: impl Fn(IpAddr) -> bool) -> Step {
    let mut step = Step::default();
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
