//! IPVS (generic netlink, linux/genetlink.h and linux/ip_vs.h): as much as is needed to empty it.

use netlink_sys::protocols::NETLINK_GENERIC;

use super::message::Request;
use super::{Messages, NetlinkError, NfSocket};

/// `GENL_ID_CTRL`: the family that knows all others.
const GENL_ID_CTRL: u16 = 0x10;
/// `CTRL_CMD_GETFAMILY`.
const CTRL_CMD_GETFAMILY: u8 = 3;
/// `CTRL_ATTR_FAMILY_ID`, two bytes in host order.
const CTRL_ATTR_FAMILY_ID: u16 = 1;
/// `CTRL_ATTR_FAMILY_NAME`.
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
/// `IPVS_GENL_NAME`.
const IPVS_GENL_NAME: &str = "IPVS";
/// `IPVS_CMD_FLUSH`.
const IPVS_CMD_FLUSH: u8 = 17;

/// Removes all IPVS virtual servers of this thread's network namespace.
///
/// # Errors
/// [`NetlinkError`]; `ENOENT` when the kernel has no IPVS.
pub fn flush_ipvs() -> Result<(), NetlinkError> {
    let mut socket = NfSocket::open_for(NETLINK_GENERIC)?;
    let family = family_id(&mut socket, IPVS_GENL_NAME)?;
    let header = genl_header(IPVS_CMD_FLUSH);
    socket.execute(Request::with_header("flush IPVS", family, &header, |_| {}))
}

/// `struct genlmsghdr`: command, version, two bytes reserved.
fn genl_header(command: u8) -> [u8; 4] {
    [command, 1, 0, 0]
}

/// The number that the kernel gave to a family of generic netlink.
fn family_id(socket: &mut NfSocket, name: &str) -> Result<u16, NetlinkError> {
    let what = "look up a generic netlink family";
    let header = genl_header(CTRL_CMD_GETFAMILY);
    let answer = socket.get(Request::with_header(what, GENL_ID_CTRL, &header, |w| {
        w.str(CTRL_ATTR_FAMILY_NAME, name);
    }))?;
    // `attributes` skips four bytes, which is genlmsghdr's length as well.
    Messages(&answer)
        .next()
        .and_then(|m| m.attributes().get(CTRL_ATTR_FAMILY_ID))
        .and_then(|id| id.payload.try_into().ok().map(u16::from_ne_bytes))
        .ok_or(NetlinkError::Unexpected { what })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::Errno;

    /// Needs no privilege and changes nothing.
    #[test]
    fn families_are_found_by_name() {
        let mut socket = NfSocket::open_for(NETLINK_GENERIC).unwrap();
        assert_eq!(family_id(&mut socket, "nlctrl").unwrap(), GENL_ID_CTRL);
        let error = family_id(&mut socket, "no-such").unwrap_err();
        assert_eq!(error.errno(), Some(Errno::ENOENT));
    }
}
