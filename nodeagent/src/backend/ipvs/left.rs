//! Virtual servers of kube-proxy's IPVS mode, or ours, while another backend serves. Looking makes
//! nothing.

use std::collections::HashSet;

use kplane_model::Family;

use super::kernel::LINK;
use super::sets::SetId;
use super::state::{Places, Snapshot};
use crate::netlink::ipset::IpSets;
use crate::netlink::ipvs::{Command, Ipvs, ServerKey};
use crate::netlink::{Errno, Links, NetlinkError, link_index};

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
        let link = link_index(LINK);
        let addresses = links.addresses(family)?;
        let ours = addresses
            .iter()
            .filter(|address| Some(address.link) == link);
        let ours: HashSet<_> = ours.map(|address| address.ip).collect();
        let places = Places::new(&snapshot);
        let servers = ipvs.servers(family)?.into_iter().map(|server| server.key);
        found.extend(servers.filter(|key| places.has(*key, &ours)));
    }
    Ok(found)
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
