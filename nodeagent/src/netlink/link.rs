//! Network links (`NETLINK_ROUTE`, linux/rtnetlink.h): as much as is needed to delete one.

use netlink_sys::protocols::NETLINK_ROUTE;

use super::message::Request;
use super::{NetlinkError, NfSocket};

/// `RTM_DELLINK`.
const RTM_DELLINK: u16 = 17;
/// `sizeof(struct ifinfomsg)`; all zero: the link is told by its name.
const IFINFOMSG_BYTES: usize = 16;
/// `IFLA_IFNAME`.
const IFLA_IFNAME: u16 = 3;

/// Deletes a link, with its addresses, from this thread's network namespace.
///
/// # Errors
/// [`NetlinkError`]; `ENODEV` when there is no such link.
pub fn delete_link(name: &str) -> Result<(), NetlinkError> {
    let header = [0; IFINFOMSG_BYTES];
    let request = Request::with_header("delete link", RTM_DELLINK, &header, |w| {
        w.str(IFLA_IFNAME, name);
    });
    NfSocket::open_for(NETLINK_ROUTE)?.execute(request)
}
