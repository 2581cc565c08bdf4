//! kube-proxy's leftovers in the kernel, found and removed over netlink.

use std::net::IpAddr;
use std::path::Path;

use kplane_model::Family;
use nix::net::if_::if_nametoindex;

use crate::backend::ipvs::is_set_name;
use crate::backend::nftables::uapi::{NFTA_TABLE_NAME, msg};
use crate::proxy_address::LOOPBACK_LINK;
use kplane_netlink::{
    Attribute, Batch, Errno, Label, Links, Messages, NetlinkError, NfSocket, Operation, Request,
    delete_link, ipset, nfproto,
};

/// kube-proxy's table in nftables mode, one per family (E1).
pub(super) const TABLE: &str = "kube-proxy";
/// The table of kplane's nftables backend, one per family.
pub(super) const OUR_TABLE: &str = crate::backend::nftables::TABLE;
/// The table of NetworkPolicies, one per family.
pub(super) const POLICY_TABLE: &str = crate::backend::nftables::POLICY_TABLE;
/// The link that holds all addresses of Services in IPVS mode (D2).
pub(super) const LINK: &str = crate::backend::ipvs::LINK;

/// Returns whether an nftables table of a family exists.
///
/// # Errors
/// [`NetlinkError`]. A kernel without nf_tables or without the family has no table.
pub(super) fn has_table(family: Family, table: &str) -> Result<bool, NetlinkError> {
    let number = nfproto(family);
    let kind = msg::GETTABLE;
    let request = Request::new("find table", kind, number, |w| {
        w.str(NFTA_TABLE_NAME, table);
    });
    match NfSocket::open()?.get(request) {
        Ok(_) => Ok(true),
        Err(error) => match error.errno() {
            Some(Errno::ENOENT | Errno::EINVAL | Errno::EAFNOSUPPORT | Errno::EOPNOTSUPP) => {
                Ok(false)
            }
            _ => Err(error),
        },
    }
}

/// Removes an nftables table of a family. A missing table counts as removed.
///
/// # Errors
/// The reason why the table is still there.
pub(super) fn remove_table(family: Family, table: &'static str) -> Result<(), String> {
    let mut batch = Batch::new();
    let operation = Operation {
        label: Label {
            action: "delete table",
            object: table,
        },
        kind: msg::DELTABLE,
        flags: 0,
        family: nfproto(family),
    };
    batch.push(operation, |w| w.str(NFTA_TABLE_NAME, table));
    let mut socket = NfSocket::open().map_err(|error| error.to_string())?;
    let Err(error) = socket.commit(batch.seal(None)) else {
        return Ok(());
    };
    // The acknowledgement may be lost, or another program may have removed the table first.
    match has_table(family, table) {
        Ok(false) => Ok(()),
        _ => Err(error.to_string()),
    }
}

/// Returns a table's family and name as `nft` writes them.
pub(super) fn written(family: Family, table: &str) -> String {
    let family = family.pick("ip", "ip6");
    format!("{family} {table}")
}

/// Returns the names of all nftables tables of a family, including those of other programs.
///
/// # Errors
/// [`NetlinkError`].
pub(super) fn table_names(family: Family) -> Result<Vec<String>, NetlinkError> {
    let request = Request::new("list tables", msg::GETTABLE, nfproto(family), |_| {});
    let tables = match NfSocket::open()?.dump(request) {
        // This kernel has no nf_tables.
        Err(error) if error.errno() == Some(Errno::EINVAL) => return Ok(Vec::new()),
        tables => tables?,
    };
    Ok(Messages(&tables)
        .filter_map(|message| {
            let name = message.attributes().get(NFTA_TABLE_NAME);
            name.and_then(Attribute::as_str).map(str::to_owned)
        })
        .collect())
}

/// Returns whether `lo` has an address.
///
/// # Errors
/// [`NetlinkError`].
pub(super) fn is_on_lo(ip: IpAddr) -> Result<bool, NetlinkError> {
    let all = Links::open()?.addresses(Family::of(ip))?;
    Ok(all.iter().any(|at| at.link == LOOPBACK_LINK && at.ip == ip))
}

/// Removes an address from `lo`.
///
/// # Errors
/// [`NetlinkError`].
pub(super) fn remove_from_lo(ip: IpAddr) -> Result<(), NetlinkError> {
    Links::open()?.remove(LOOPBACK_LINK, ip)
}

/// Returns whether the link of IPVS mode exists.
pub(super) fn has_link() -> bool {
    if_nametoindex(LINK).is_ok()
}

/// Removes the link of IPVS mode with all its addresses.
///
/// # Errors
/// [`NetlinkError`].
pub(super) fn remove_link() -> Result<(), NetlinkError> {
    match delete_link(LINK) {
        Err(error) if error.errno() == Some(Errno::ENODEV) => Ok(()),
        result => result,
    }
}

/// Returns kube-proxy's IP sets.
///
/// # Errors
/// [`NetlinkError`].
pub(super) fn sets() -> Result<Vec<String>, NetlinkError> {
    // A mere question would make the kernel load the module.
    if Path::new("/sys/module").is_dir() && !Path::new("/sys/module/ip_set").is_dir() {
        return Ok(Vec::new());
    }
    let names = match ipset::IpSets::open()?.names() {
        // This kernel has no IP sets.
        Err(error) if error.errno() == Some(Errno::EINVAL) => return Ok(Vec::new()),
        names => names?,
    };
    Ok(names.into_iter().filter(|name| is_set_name(name)).collect())
}

/// Removes an IP set. No rule may use it any more.
///
/// # Errors
/// [`NetlinkError`].
pub(super) fn remove_set(name: &str) -> Result<(), NetlinkError> {
    match ipset::destroy_set(name) {
        Err(error) if error.errno() == Some(Errno::ENOENT) => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// D3: the sets of both families, and no other sets.
    #[test]
    fn i4_d3_sets_are_kube_proxys_letter_by_letter() {
        for name in ["KUBE-CLUSTER-IP", "KUBE-6-LOOP-BACK", "KUBE-NODE-PORT-UDP"] {
            assert!(is_set_name(name), "{name}");
        }
        for name in [
            "KUBE-",
            "KUBE-6-",
            "KUBE-DST-ABC",
            "CLUSTER-IP",
            "kube-cluster-ip",
        ] {
            assert!(!is_set_name(name), "{name}");
        }
    }
}
