//! The check whether the kernel has a scheduler, and advice if it has not (D7).

use std::net::{IpAddr, Ipv4Addr};

use kplane_model::{IpvsScheduler, Protocol};
use kplane_netlink::ipvs::{Command, Ipvs, ServerKey, ServerMode};
use kplane_netlink::{Errno, NetlinkError};

/// A virtual server that no client reaches, on an address for documentation (D7).
const PROBE_SERVER: ServerKey = ServerKey {
    ip: IpAddr::V4(Ipv4Addr::new(198, 51, 100, 0)),
    protocol: Protocol::Tcp,
    port: 20_000,
};

/// Returns whether the kernel has a scheduler, which the kernel may have to load (D7).
///
/// # Errors
/// Virtual servers cannot be created at all.
pub(super) fn has_scheduler(
    ipvs: &mut Ipvs,
    scheduler: IpvsScheduler,
) -> Result<bool, NetlinkError> {
    let mode = ServerMode {
        scheduler,
        persistent_s: None,
    };
    let (refused, _) = ipvs.perform(&[Command::AddServer(PROBE_SERVER, mode)])?;
    match refused.first().map(|refusal| refusal.errno) {
        None | Some(Errno::EEXIST) => {}
        Some(Errno::ENOENT) => return Ok(false),
        Some(errno) => {
            let what = "make a virtual server";
            return Err(NetlinkError::Socket { what, errno });
        }
    }
    ipvs.perform(&[Command::DeleteServer(PROBE_SERVER)])?;
    Ok(true)
}

/// Returns advice about a scheduler that the kernel lacks.
pub(super) fn missing_scheduler(scheduler: IpvsScheduler) -> String {
    format!(
        "the kernel has no IPVS scheduler {scheduler}: load the kernel module ip_vs_{scheduler}, or \
         choose another"
    )
}
