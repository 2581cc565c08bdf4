//! Counters by name that rules add to (`NFNL_SUBSYS_ACCT`, linux/netfilter/nfnetlink_acct.h).

use super::message::Request;
use super::{Errno, Messages, NetlinkError, NfSocket};

/// `NFNL_SUBSYS_ACCT << 8`.
const ACCT: u16 = 7 << 8;
/// `NFNL_MSG_ACCT_NEW`.
const NFNL_MSG_ACCT_NEW: u16 = 0;
/// `NFNL_MSG_ACCT_GET`.
const NFNL_MSG_ACCT_GET: u16 = 1;
/// `NFACCT_NAME`: at most 31 bytes and a zero.
const NFACCT_NAME: u16 = 1;
/// `NFACCT_PKTS`: 64 bits, big-endian.
const NFACCT_PKTS: u16 = 2;

/// Makes a counter in this thread's network namespace. One that is there goes on counting.
///
/// # Errors
/// [`NetlinkError`]: the kernel has none, or the privilege is missing.
pub fn ensure_counter(name: &str) -> Result<(), NetlinkError> {
    let what = "make a counter";
    let request = Request::new(what, ACCT | NFNL_MSG_ACCT_NEW, 0, |w| {
        w.str(NFACCT_NAME, name);
    });
    match NfSocket::open()?.execute(request) {
        Err(error) if error.errno() == Some(Errno::EBUSY) => Ok(()),
        made => made,
    }
}

/// The packets that a counter of this thread's network namespace has seen.
///
/// # Errors
/// [`NetlinkError`]; `ENOENT` if there is no such counter.
pub fn counted_packets(name: &str) -> Result<u64, NetlinkError> {
    let what = "read a counter";
    let request = Request::new(what, ACCT | NFNL_MSG_ACCT_GET, 0, |w| {
        w.str(NFACCT_NAME, name);
    });
    let answer = NfSocket::open()?.get(request)?;
    Messages(&answer)
        .next()
        .and_then(|message| message.attributes().get(NFACCT_PKTS))
        .and_then(|packets| packets.payload.try_into().ok().map(u64::from_be_bytes))
        .ok_or(NetlinkError::Unexpected { what })
}
