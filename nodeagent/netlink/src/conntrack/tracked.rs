//! Conntrack entries of all protocols, read to count them.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::time::Instant;

use kplane_model::{Family, Protocol};

use super::{
    CTA_STATUS, CTA_TUPLE_ORIG, CTA_TUPLE_REPLY, ENTRY, IPS_SEEN_REPLY, Selection, parse_tuple,
};
use crate::attribute::Attribute;
use crate::message::Message;
use crate::{NetlinkError, NfSocket};

const CTA_PROTOINFO: u16 = 4;
const CTA_COUNTERS_ORIG: u16 = 9;
const CTA_COUNTERS_REPLY: u16 = 10;
const CTA_TIMESTAMP: u16 = 20;

const CTA_PROTOINFO_TCP: u16 = 1;
const CTA_PROTOINFO_SCTP: u16 = 3;
const CTA_PROTOINFO_TCP_STATE: u16 = 1;
const CTA_PROTOINFO_SCTP_STATE: u16 = 1;

const CTA_COUNTERS_PACKETS: u16 = 1;
const CTA_COUNTERS_BYTES: u16 = 2;

const CTA_TIMESTAMP_START: u16 = 1;

/// `enum tcp_conntrack` (linux/netfilter/nf_conntrack_tcp.h).
const TCP_SYN_SENT: u8 = 1;
const TCP_SYN_RECV: u8 = 2;
const TCP_FIN_WAIT: u8 = 4;
const TCP_LAST_ACK: u8 = 6;
const TCP_TIME_WAIT: u8 = 7;
pub(super) const TCP_CLOSE: u8 = 8;
const TCP_SYN_SENT2: u8 = 9;
/// `enum sctp_conntrack` (linux/netfilter/nf_conntrack_sctp.h).
const SCTP_CLOSED: u8 = 1;
const SCTP_COOKIE_WAIT: u8 = 2;
const SCTP_COOKIE_ECHOED: u8 = 3;
const SCTP_SHUTDOWN_SENT: u8 = 5;
const SCTP_SHUTDOWN_ACK_SENT: u8 = 7;

/// A part of the life of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Nothing has come back from the endpoint.
    Unreplied,
    /// The endpoint has answered, and the connection is not established yet.
    Handshake,
    /// The connection is established, or packets of UDP went both ways.
    Established,
    /// One side has closed the connection.
    Closing,
    /// Both sides have closed the connection, or it was reset.
    Closed,
}

/// The packets of one direction of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Number of packets.
    pub packets: u64,
    /// Number of bytes, with IP headers.
    pub bytes: u64,
}

/// What counting needs of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracked {
    /// The protocol.
    pub protocol: Protocol,
    /// The client, before translation.
    pub client: SocketAddr,
    /// The destination to which the client sends, before translation.
    pub to: SocketAddr,
    /// The sender of replies: the real destination of the client's packets.
    pub endpoint: SocketAddr,
    /// The part of its life.
    pub stage: Stage,
    /// The packets from the client and to it, if the kernel counts them (`net.netfilter.nf_conntrack_acct`).
    pub traffic: Option<[Traffic; 2]>,
    /// Time at which the entry began, in nanoseconds since 1970, if the kernel keeps it.
    pub began_ns: Option<u64>,
}

impl Tracked {
    /// Returns whether this node's rules lead the flow to its endpoint.
    pub fn is_translated(&self) -> bool {
        self.to != self.endpoint
    }

    /// Reads one message of a dump; returns `None` for other protocols, and for anything but a complete entry.
    pub fn parse(message: Message<'_>) -> Option<Self> {
        let read = (message.kind == ENTRY).then(|| Self::read(message));
        read.flatten().map(|(entry, _)| entry)
    }

    /// Reads an entry, its status, and the kernel's state of a connection.
    pub(super) fn read(message: Message<'_>) -> Option<(Self, RawState)> {
        let (mut original, mut reply) = (None, None);
        let (mut state, mut began_ns, mut status) = (None, None, 0);
        let mut counters = [None, None];
        for attribute in message.attributes() {
            match attribute.kind {
                CTA_TUPLE_ORIG => original = parse_tuple(attribute),
                CTA_TUPLE_REPLY => reply = parse_tuple(attribute),
                CTA_STATUS => status = attribute.as_u32()?,
                CTA_PROTOINFO => state = parse_state(attribute),
                CTA_COUNTERS_ORIG => counters[0] = parse_counters(attribute),
                CTA_COUNTERS_REPLY => counters[1] = parse_counters(attribute),
                CTA_TIMESTAMP => began_ns = parse_start(attribute),
                _ => {}
            }
        }
        let ((protocol, original, _), (same, reply, _)) = (original?, reply?);
        let entry = Self {
            protocol,
            client: original.source,
            to: original.destination,
            endpoint: reply.source,
            stage: stage(protocol, state, status & IPS_SEEN_REPLY != 0),
            traffic: counters[0].zip(counters[1]).map(Into::into),
            began_ns,
        };
        (protocol == same).then_some((entry, RawState { status, state }))
    }
}

/// What the kernel says of an entry's life.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawState {
    /// `IPS_*`.
    pub(super) status: u32,
    /// State of TCP or SCTP, if the message has one.
    pub(super) state: Option<u8>,
}

/// Returns the part of a connection's life, by the kernel's state of it.
fn stage(protocol: Protocol, state: Option<u8>, is_replied: bool) -> Stage {
    let by_state = match (protocol, state) {
        (Protocol::Tcp, Some(TCP_TIME_WAIT | TCP_CLOSE)) => return Stage::Closed,
        (Protocol::Sctp, Some(SCTP_CLOSED)) => return Stage::Closed,
        (Protocol::Tcp, Some(TCP_SYN_SENT | TCP_SYN_RECV | TCP_SYN_SENT2)) => Stage::Handshake,
        (Protocol::Tcp, Some(TCP_FIN_WAIT..=TCP_LAST_ACK)) => Stage::Closing,
        (Protocol::Sctp, Some(SCTP_COOKIE_WAIT | SCTP_COOKIE_ECHOED)) => Stage::Handshake,
        (Protocol::Sctp, Some(SCTP_SHUTDOWN_SENT..=SCTP_SHUTDOWN_ACK_SENT)) => Stage::Closing,
        _ => Stage::Established,
    };
    if is_replied { by_state } else { Stage::Unreplied }
}

/// Returns the state of a connection.
fn parse_state(attribute: Attribute<'_>) -> Option<u8> {
    let info = attribute.children().find_map(|info| match info.kind {
        CTA_PROTOINFO_TCP => Some((info, CTA_PROTOINFO_TCP_STATE)),
        CTA_PROTOINFO_SCTP => Some((info, CTA_PROTOINFO_SCTP_STATE)),
        _ => None,
    });
    let (info, kind) = info?;
    let state = info.children().find(|part| part.kind == kind)?;
    state.payload.first().copied()
}

/// Returns the counters of one direction.
fn parse_counters(attribute: Attribute<'_>) -> Option<Traffic> {
    let number = |kind| {
        let part = attribute.children().find(|part| part.kind == kind)?;
        part.payload.try_into().ok().map(u64::from_be_bytes)
    };
    Some(Traffic {
        packets: number(CTA_COUNTERS_PACKETS)?,
        bytes: number(CTA_COUNTERS_BYTES)?,
    })
}

fn parse_start(attribute: Attribute<'_>) -> Option<u64> {
    let start = attribute.children().find(|part| part.kind == CTA_TIMESTAMP_START)?;
    start.payload.try_into().ok().map(u64::from_be_bytes)
}

impl NfSocket {
    /// Passes on each conntrack entry of a family as it comes: those that are selected, where the kernel can select them,
    /// or all. Returns `None` when the time was over before the end of the list, and
    /// otherwise the number of entries that the kernel listed. The socket is of no use after an end before its time.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn tracked(
        &mut self,
        family: Family,
        selection: Selection,
        until: Instant,
        mut each: impl FnMut(Tracked),
    ) -> Result<Option<u64>, NetlinkError> {
        let mut read = 0_u64;
        let whole = self.dump_until(selection.request(family), |message| {
            read = read.saturating_add(1);
            if let Some(tracked) = Tracked::parse(message) {
                each(tracked);
            }
            // A clock is cheap, and is still not read for each entry.
            if read.is_multiple_of(1024) && Instant::now() >= until {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        Ok(whole.then_some(read))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_the_kernel_are_parts_of_a_life() {
        use Protocol::{Sctp, Tcp, Udp};
        use Stage::{Closed, Closing, Established, Handshake, Unreplied};

        for (protocol, state, is_replied, expected) in [
            (Tcp, Some(1), false, Unreplied),
            (Tcp, Some(2), true, Handshake),
            (Tcp, Some(3), true, Established),
            (Tcp, Some(4), true, Closing),
            (Tcp, Some(6), true, Closing),
            (Tcp, Some(7), true, Closed),
            (Tcp, Some(8), false, Closed),
            (Sctp, Some(1), true, Closed),
            (Sctp, Some(2), false, Unreplied),
            (Sctp, Some(3), true, Handshake),
            (Sctp, Some(4), true, Established),
            (Sctp, Some(7), true, Closing),
            (Udp, None, false, Unreplied),
            (Udp, None, true, Established),
        ] {
            let found = stage(protocol, state, is_replied);
            assert_eq!(found, expected, "{protocol} {state:?} {is_replied}");
        }
    }
}
