//! Conntrack entries of all protocols, read to count them.

use std::net::{IpAddr, SocketAddr};
use std::ops::ControlFlow;
use std::time::Instant;

use kplane_model::{Family, Protocol};

use super::{
    CTA_FILTER, CTA_FILTER_REPLY_FLAGS, CTA_PROTO_DST_PORT, CTA_PROTO_NUM, CTA_PROTO_SRC_PORT,
    CTA_TUPLE_IP, CTA_TUPLE_ORIG, CTA_TUPLE_PROTO, CTA_TUPLE_REPLY, ENTRY, FILTER_IP_SRC,
    FILTER_PROTO_NUM, FILTER_SRC_PORT, GET, as_u16, parse_addresses, write_ip,
};
use crate::attribute::Attribute;
use crate::message::{Message, Request};
use crate::{NetlinkError, NfSocket, nfproto};

const CTA_PROTOINFO: u16 = 4;
const CTA_TIMESTAMP: u16 = 20;

const CTA_PROTOINFO_TCP: u16 = 1;
const CTA_PROTOINFO_SCTP: u16 = 3;
const CTA_PROTOINFO_TCP_STATE: u16 = 1;
const CTA_PROTOINFO_SCTP_STATE: u16 = 1;

const CTA_TIMESTAMP_START: u16 = 1;

/// `enum tcp_conntrack` (linux/netfilter/nf_conntrack_tcp.h): both sides have closed, or the connection was reset.
const TCP_TIME_WAIT: u8 = 7;
const TCP_CLOSE: u8 = 8;
/// `enum sctp_conntrack` (linux/netfilter/nf_conntrack_sctp.h).
const SCTP_CLOSED: u8 = 1;

/// What counting needs of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracked {
    /// The protocol.
    pub protocol: Protocol,
    /// The destination to which the client sends, before translation.
    pub to: SocketAddr,
    /// The sender of replies: the real destination of the client's packets.
    pub endpoint: SocketAddr,
    /// Both sides have closed the connection, or it was reset.
    pub closed: bool,
    /// Time at which the entry began, in nanoseconds since 1970, if the kernel keeps it.
    pub began_ns: Option<u64>,
}

impl Tracked {
    /// Returns whether this node's rules lead the flow to its endpoint.
    #[must_use]
    pub fn is_translated(&self) -> bool {
        self.to != self.endpoint
    }

    /// Reads one message of a dump; returns `None` for other protocols, and for anything but a complete entry.
    #[must_use]
    pub fn parse(message: Message<'_>) -> Option<Self> {
        if message.kind != ENTRY {
            return None;
        }
        let (mut original, mut reply) = (None, None);
        let (mut state, mut began_ns) = (None, None);
        for attribute in message.attributes() {
            match attribute.kind {
                CTA_TUPLE_ORIG => original = parse_tuple(attribute),
                CTA_TUPLE_REPLY => reply = parse_tuple(attribute),
                CTA_PROTOINFO => state = parse_state(attribute),
                CTA_TIMESTAMP => began_ns = parse_start(attribute),
                _ => {}
            }
        }
        let ((protocol, _, to), (same, endpoint, _)) = (original?, reply?);
        let closed = match protocol {
            Protocol::Tcp => matches!(state, Some(TCP_TIME_WAIT | TCP_CLOSE)),
            Protocol::Sctp => state == Some(SCTP_CLOSED),
            Protocol::Udp => false,
        };
        (protocol == same).then_some(Self {
            protocol,
            to,
            endpoint,
            closed,
            began_ns,
        })
    }
}

/// Returns the protocol, the sender and the receiver of one direction.
fn parse_tuple(attribute: Attribute<'_>) -> Option<(Protocol, SocketAddr, SocketAddr)> {
    let (mut addresses, mut ports) = (None, None);
    for part in attribute.children() {
        match part.kind {
            CTA_TUPLE_IP => addresses = parse_addresses(part),
            CTA_TUPLE_PROTO => ports = parse_ports(part),
            _ => {}
        }
    }
    let ((source, destination), (protocol, from, to)) = (addresses?, ports?);
    let from = SocketAddr::new(source, from);
    Some((protocol, from, SocketAddr::new(destination, to)))
}

fn parse_ports(attribute: Attribute<'_>) -> Option<(Protocol, u16, u16)> {
    let (mut protocol, mut source, mut destination) = (None, None, None);
    for part in attribute.children() {
        match part.kind {
            CTA_PROTO_NUM => {
                let number = *part.payload.first()?;
                protocol = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp]
                    .into_iter()
                    .find(|protocol| protocol.number() == number);
            }
            CTA_PROTO_SRC_PORT => source = as_u16(part),
            CTA_PROTO_DST_PORT => destination = as_u16(part),
            _ => {}
        }
    }
    Some((protocol?, source?, destination?))
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

fn parse_start(attribute: Attribute<'_>) -> Option<u64> {
    let start = attribute
        .children()
        .find(|part| part.kind == CTA_TIMESTAMP_START)?;
    start.payload.try_into().ok().map(u64::from_be_bytes)
}

/// The entries whose replies come from an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepliesFrom {
    /// The address.
    pub ip: IpAddr,
    /// Protocol and port; `None` = all.
    pub port: Option<(Protocol, u16)>,
}

/// Returns the request for all entries of a family, or for a part of them. Kernels before 5.8 list all entries anyway,
/// and any kernel those of all IPv6 addresses, so the caller must check each one.
fn request(family: Family, from: Option<RepliesFrom>) -> Request {
    Request::new("list conntrack entries", GET, nfproto(family), |w| {
        let Some(RepliesFrom { ip, port }) = from else {
            return;
        };
        // Kernels compare IPv6 addresses the wrong way round: see `Selection::request`.
        let ip = Some(ip).filter(|_| family == Family::V4);
        if ip.is_none() && port.is_none() {
            return;
        }
        w.nest(CTA_TUPLE_REPLY, |w| {
            if let Some(ip) = ip {
                w.nest(CTA_TUPLE_IP, |w| write_ip(w, true, ip));
            }
            if let Some((protocol, port)) = port {
                w.nest(CTA_TUPLE_PROTO, |w| {
                    w.u8(CTA_PROTO_NUM, protocol.number());
                    w.bytes(CTA_PROTO_SRC_PORT, &port.to_be_bytes());
                });
            }
        });
        let by_ip = ip.map_or(0, |_| FILTER_IP_SRC);
        let by_port = port.map_or(0, |_| FILTER_PROTO_NUM | FILTER_SRC_PORT);
        // The flags are in host byte order, unlike the rest.
        let flags = (by_ip | by_port).to_ne_bytes();
        w.nest(CTA_FILTER, |w| w.bytes(CTA_FILTER_REPLY_FLAGS, &flags));
    })
}

impl NfSocket {
    /// Passes on each conntrack entry of a family as it comes: those whose replies come from an endpoint, where the
    /// kernel can select them, or all. Returns `None` when the time was over before the end of the list, and
    /// otherwise the number of entries that the kernel listed. The socket is of no use after an end before its time.
    ///
    /// # Errors
    /// [`NetlinkError`].
    pub fn tracked(
        &mut self,
        family: Family,
        from: Option<RepliesFrom>,
        until: Instant,
        mut each: impl FnMut(Tracked),
    ) -> Result<Option<u64>, NetlinkError> {
        let mut read = 0_u64;
        let whole = self.dump_until(request(family, from), |message| {
            read = read.saturating_add(1);
            if let Some(tracked) = Tracked::parse(message) {
                each(tracked);
            }
            // A clock is cheap, and is still not read for each entry.
            match read.is_multiple_of(1024) && Instant::now() >= until {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        })?;
        Ok(whole.then_some(read))
    }
}
