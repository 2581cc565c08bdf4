//! Named packet counters (`nfacct`, linux/netfilter/nfnetlink_acct.h), to which iptables rules can
//! add.

use nix::errno::Errno;

use super::{Messages, NetlinkError, NfSocket, Request};

/// `NFNL_SUBSYS_ACCT`.
const SUBSYSTEM: u16 = 7 << 8;
/// `NFNL_MSG_ACCT_NEW`, `_GET` and `_DEL`.
const NEW: u16 = SUBSYSTEM;
const GET: u16 = SUBSYSTEM | 1;
const DELETE: u16 = SUBSYSTEM | 3;

const NFACCT_NAME: u16 = 1;
/// `NFACCT_PKTS`: 64 bits, network byte order.
const NFACCT_PKTS: u16 = 2;

/// Creates a counter unless it exists; an existing one keeps its count.
///
/// # Errors
/// [`NetlinkError`], such as a kernel without `nfnetlink_acct`.
pub fn create_counter(socket: &mut NfSocket, name: &str) -> Result<(), NetlinkError> {
    let created = socket.execute(request("create packet counter", NEW, name));
    unless(created, &[Errno::EBUSY, Errno::EEXIST])
}

/// Returns the number of packets that a counter has counted.
///
/// # Errors
/// [`NetlinkError`]; `ENOENT` when the counter does not exist.
pub fn read_counter(socket: &mut NfSocket, name: &str) -> Result<u64, NetlinkError> {
    let what = "read packet counter";
    let answer = socket.get(request(what, GET, name))?;
    packets(&answer).ok_or(NetlinkError::Unexpected { what })
}

/// Deletes a counter, unless it does not exist or a rule adds to it.
///
/// # Errors
/// [`NetlinkError`].
pub fn delete_counter(socket: &mut NfSocket, name: &str) -> Result<(), NetlinkError> {
    let deleted = socket.execute(request("delete packet counter", DELETE, name));
    unless(deleted, &[Errno::ENOENT, Errno::EBUSY])
}

fn request(what: &'static str, kind: u16, name: &str) -> Request {
    Request::new(what, kind, 0, |w| w.str(NFACCT_NAME, name))
}

fn unless(outcome: Result<(), NetlinkError>, fine: &[Errno]) -> Result<(), NetlinkError> {
    match outcome {
        Err(error) if error.errno().is_some_and(|errno| fine.contains(&errno)) => Ok(()),
        outcome => outcome,
    }
}

fn packets(answer: &[u8]) -> Option<u64> {
    let message = Messages(answer).next()?;
    let packets = message.attributes().get(NFACCT_PKTS)?;
    Some(u64::from_be_bytes(packets.payload.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answer is as `strace nfacct get NAME` shows it: a counter with 3 packets and 252 bytes.
    #[test]
    fn an_answer_is_read_and_rubbish_is_not() {
        let answer = Request::new("answer", SUBSYSTEM, 0, |w| {
            w.str(NFACCT_NAME, "ct_state_invalid_dropped_pkts");
            w.bytes(NFACCT_PKTS, &3_u64.to_be_bytes());
            w.bytes(3, &252_u64.to_be_bytes());
        });
        assert_eq!(packets(&answer.bytes), Some(3));
        for end in 0..answer.bytes.len() - 12 {
            assert_eq!(packets(&answer.bytes[..end]), None);
        }
        let short = Request::new("answer", SUBSYSTEM, 0, |w| w.bytes(NFACCT_PKTS, &[0; 4]));
        assert_eq!(packets(&short.bytes), None);
    }
}
