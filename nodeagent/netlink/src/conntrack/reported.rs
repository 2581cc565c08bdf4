//! The kernel's reports of connections that begin and end, as it sends them unasked.

use kplane_model::Protocol;
use socket2::SockFilter;

use super::IPS_SEEN_REPLY as SEEN_REPLY;
use super::tracked::{RawState, TCP_CLOSE, Tracked};
use super::{CTA_STATUS, DELETE, ENTRY, IPS_DST_NAT};
use crate::filter::{
    ALL, INDEX_NUMBER, JUMP_EQUAL, JUMP_SET, LOAD_AT_INDEX, LOAD_NUMBER, LOAD_WORD, RETURN,
    TO_INDEX,
};
use crate::message::{HEADER_BYTES, Message, NFGENMSG_BYTES};

/// `IPS_ASSURED` (linux/netfilter/nf_conntrack_common.h). Of TCP: the handshake was completed.
const ASSURED: u32 = 1 << 2;

/// A connection that began or ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reported {
    /// The connection.
    pub connection: Tracked,
    /// The way in which it ended; `None` = it began.
    pub ending: Option<Ending>,
}

/// The way in which a connection ended, according to the kernel's last state of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// None of the others. UDP always ends like this, because nothing says whether its client wanted an answer.
    Over,
    /// A connection of TCP or SCTP that was never established. The endpoint refused it: the kernel deletes its entry at
    /// once, in the state CLOSE and without `IPS_SEEN_REPLY`. Or nothing came back: the entry ends after
    /// `net.netfilter.nf_conntrack_tcp_timeout_syn_sent` (120 s), without `IPS_SEEN_REPLY`. Or the handshake of TCP was not
    /// completed: the entry lacks `IPS_ASSURED`.
    Failed,
    /// An established connection of TCP that one side ended by RST: its last state is CLOSE, and not TIME_WAIT. Kernels before
    /// 5.10 do not report the last state, so such a connection is [`Ending::Over`] there.
    Reset,
}

impl Reported {
    /// Reads a report; returns `None` for other messages, other protocols, and incomplete entries.
    pub fn parse(message: Message<'_>) -> Option<Self> {
        let ends = match message.kind {
            ENTRY => false,
            DELETE => true,
            _ => return None,
        };
        let (connection, raw) = Tracked::read(message)?;
        let ending = ends.then(|| ending(connection.protocol, raw));
        Some(Self { connection, ending })
    }
}

fn ending(protocol: Protocol, raw: RawState) -> Ending {
    let lacks = |flag| raw.status & flag == 0;
    match protocol {
        Protocol::Udp => Ending::Over,
        _ if lacks(SEEN_REPLY) => Ending::Failed,
        Protocol::Tcp if lacks(ASSURED) => Ending::Failed,
        Protocol::Tcp if raw.state == Some(TCP_CLOSE) => Ending::Reset,
        _ => Ending::Over,
    }
}

/// Returns a classic BPF program (linux/filter.h) that passes reports of connections whose destination is translated, and
/// those without a status. The kernel looks for the attribute itself (`SKF_AD_NLATTR`).
pub(crate) fn only_translated() -> [SockFilter; 9] {
    /// `SKF_AD_OFF + SKF_AD_NLATTR`: the offset of the first attribute from A on whose type is X; 0 = there is none.
    const FIND_ATTRIBUTE: u32 = 0xffff_f00c;
    /// `sizeof(struct nlattr)`.
    const ATTRIBUTE_HEADER: u32 = 4;
    /// Offset of the first attribute, behind `struct nlmsghdr` and `struct nfgenmsg`.
    const FIRST: u32 = 20;
    const _: () = assert!(FIRST as usize == HEADER_BYTES + NFGENMSG_BYTES);
    [
        SockFilter::new(LOAD_NUMBER, 0, 0, FIRST),
        SockFilter::new(INDEX_NUMBER, 0, 0, CTA_STATUS.into()),
        SockFilter::new(LOAD_WORD, 0, 0, FIND_ATTRIBUTE),
        SockFilter::new(JUMP_EQUAL, 3, 0, 0),
        SockFilter::new(TO_INDEX, 0, 0, 0),
        // The status is in network byte order, as the program reads.
        SockFilter::new(LOAD_AT_INDEX, 0, 0, ATTRIBUTE_HEADER),
        SockFilter::new(JUMP_SET, 0, 1, IPS_DST_NAT),
        SockFilter::new(RETURN, 0, 0, ALL),
        SockFilter::new(RETURN, 0, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_told_by_status_and_state() {
        use Ending::{Failed, Over, Reset};
        use Protocol::{Sctp, Tcp, Udp};

        const BOTH: u32 = SEEN_REPLY | ASSURED;
        for (protocol, status, state, expected) in [
            // TIME_WAIT, and kernels that do not say the state.
            (Tcp, BOTH, Some(7), Over),
            (Tcp, BOTH, None, Over),
            (Tcp, BOTH, Some(8), Reset),
            // Refused, unanswered, and a handshake without an end.
            (Tcp, 0, Some(8), Failed),
            (Tcp, 0, Some(1), Failed),
            (Tcp, SEEN_REPLY, Some(2), Failed),
            (Sctp, 0, None, Failed),
            (Sctp, SEEN_REPLY, None, Over),
            (Udp, 0, None, Over),
            (Udp, BOTH, None, Over),
        ] {
            let found = ending(protocol, RawState { status, state });
            assert_eq!(found, expected, "{protocol} {status:#x} {state:?}");
        }
    }
}
