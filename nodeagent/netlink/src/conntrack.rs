//! Conntrack entries over netlink (linux/netfilter/nfnetlink_conntrack.h): listing entries of a family, reading them, and
//! deleting one.

use std::net::{IpAddr, SocketAddr};

use kplane_model::{Family, Protocol};

use super::attribute::{Attribute, AttributeWriter};
use super::message::{Message, Request};
use super::nfproto;

mod any;
mod reported;
mod tracked;

pub use any::AnyFlow;
pub(crate) use reported::only_translated;
pub use reported::{Ending, Reported};
pub use tracked::{Stage, Tracked, Traffic};

/// `NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_NEW`: the message that describes an entry.
const ENTRY: u16 = 1 << 8;
/// `NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_GET`.
const GET: u16 = 1 << 8 | 1;
/// `NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_DELETE`: a request, or the report of an entry that ended.
const DELETE: u16 = 1 << 8 | 2;

const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_STATUS: u16 = 3;
const CTA_MARK: u16 = 8;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_FILTER: u16 = 25;

const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_TUPLE_ZONE: u16 = 3;

const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_SRC: u16 = 3;
const CTA_IP_V6_DST: u16 = 4;

const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_SRC_PORT: u16 = 2;
const CTA_PROTO_DST_PORT: u16 = 3;

const CTA_FILTER_ORIG_FLAGS: u16 = 1;
const CTA_FILTER_REPLY_FLAGS: u16 = 2;
/// `CTA_FILTER_F_*` (linux/netfilter/nf_internals.h): parts of a tuple that must be equal.
const FILTER_IP_SRC: u32 = 1 << 0;
const FILTER_IP_DST: u32 = 1 << 1;
const FILTER_PROTO_NUM: u32 = 1 << 3;
const FILTER_SRC_PORT: u32 = 1 << 4;
const FILTER_DST_PORT: u32 = 1 << 5;
/// A flag that no kernel has.
const FILTER_UNKNOWN: u32 = 1 << 31;

/// `IPS_SEEN_REPLY` (linux/netfilter/nf_conntrack_common.h): the other side has answered.
pub const IPS_SEEN_REPLY: u32 = 1 << 1;

/// `IPS_DST_NAT` (linux/netfilter/nf_conntrack_common.h): the destination is translated.
pub const IPS_DST_NAT: u32 = 1 << 5;

/// The addresses and ports of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuple {
    /// The sender.
    pub source: SocketAddr,
    /// The receiver.
    pub destination: SocketAddr,
}

/// An entry of UDP, TCP or SCTP in the kernel's conntrack table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// The protocol.
    pub protocol: Protocol,
    /// The packets that the client sends, before translation.
    pub original: Tuple,
    /// The packets expected in reply. Their source is the real destination of the client's packets.
    pub reply: Tuple,
    /// The status, `IPS_*`.
    pub status: u32,
    /// The id, which differs from that of a later entry with the same tuple, unless both were at the
    /// same memory address.
    pub id: Option<u32>,
    /// The zone of both directions, if it is not the default one.
    pub zone: Option<u16>,
    /// The zone of the original direction only.
    pub original_zone: Option<u16>,
}

impl Flow {
    /// Returns whether the destination is translated.
    pub fn is_translated(&self) -> bool {
        self.status & IPS_DST_NAT != 0
    }

    /// Returns whether the other side has answered.
    pub fn is_replied(&self) -> bool {
        self.status & IPS_SEEN_REPLY != 0
    }

    /// Returns whether the entry is in its own zone. There another program (a virtual switch) tracks
    /// packets that the rules of this namespace may see again.
    pub fn is_zoned(&self) -> bool {
        self.zone.is_some() || self.original_zone.is_some()
    }

    /// Reads one message of a dump; returns `None` for anything but a complete entry of a protocol with ports.
    pub fn parse(message: Message<'_>) -> Option<Self> {
        if message.kind != ENTRY {
            return None;
        }
        let (mut original, mut reply) = (None, None);
        let (mut status, mut id, mut zone) = (0, None, None);
        for attribute in message.attributes() {
            match attribute.kind {
                CTA_TUPLE_ORIG => original = parse_tuple(attribute),
                CTA_TUPLE_REPLY => reply = parse_tuple(attribute),
                CTA_STATUS => status = attribute.as_u32()?,
                CTA_ID => id = attribute.as_u32(),
                CTA_ZONE => zone = as_u16(attribute),
                _ => {}
            }
        }
        let ((protocol, original, original_zone), (same, reply, _)) = (original?, reply?);
        (protocol == same).then_some(Self {
            protocol,
            original,
            reply,
            status,
            id,
            zone,
            original_zone,
        })
    }

    /// Returns the request to delete this entry. It hardly ever deletes a later one with the same
    /// tuple.
    pub fn delete(&self) -> Request {
        let family = Family::of(self.original.source.ip());
        Request::new("delete conntrack entry", DELETE, nfproto(family), |w| {
            w.nest(CTA_TUPLE_ORIG, |w| {
                write_tuple(w, self.original, self.protocol);
                if let Some(zone) = self.original_zone {
                    w.bytes(CTA_TUPLE_ZONE, &zone.to_be_bytes());
                }
            });
            if let Some(zone) = self.zone {
                w.bytes(CTA_ZONE, &zone.to_be_bytes());
            }
            if let Some(id) = self.id {
                w.u32(CTA_ID, id);
            }
        })
    }
}

/// Returns the request for the one UDP entry with these replies. The kernel answers with `ENOENT` if there is none.
pub fn replied_by(reply: Tuple) -> Request {
    let family = Family::of(reply.source.ip());
    Request::new("get conntrack entry", GET, nfproto(family), |w| {
        w.nest(CTA_TUPLE_REPLY, |w| write_tuple(w, reply, Protocol::Udp));
    })
}

/// A protocol and one of its ports; `None` = any.
pub type ProtocolPort = Option<(Protocol, Option<u16>)>;

/// The entries of a family that the kernel should list. Kernels before 5.8 list all entries for any selection, and any
/// kernel those of all IPv6 addresses, so the caller must check each entry of an answer again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// All entries.
    Any,
    /// The entries from an address, before translation.
    From(IpAddr),
    /// The entries to an address (`None` = any), before translation.
    To(Option<IpAddr>, ProtocolPort),
    /// The entries whose replies come from an address.
    RepliesFrom(IpAddr, ProtocolPort),
}

impl Selection {
    /// All entries of UDP.
    pub const UDP: Self = Self::all_of(Protocol::Udp);

    /// Returns the selection of all entries of a protocol.
    pub const fn all_of(protocol: Protocol) -> Self {
        Self::To(None, Some((protocol, None)))
    }

    /// Returns the request for this selection.
    pub fn request(self, family: Family) -> Request {
        let (end, ip, protocol) = match self {
            Self::Any => (DESTINATION, None, None),
            Self::From(ip) => (SOURCE, Some(ip), None),
            Self::To(ip, protocol) => (DESTINATION, ip, protocol),
            Self::RepliesFrom(ip, protocol) => (REPLIER, Some(ip), protocol),
        };
        // With an IPv6 address, kernels up to at least 6.1 list exactly the entries with other
        // addresses (`ctnetlink_filter_match_tuple` reverses the result of ipv6_addr_cmp()).
        let ip = if family == Family::V4 { ip } else { None };
        Request::new("list conntrack entries", GET, nfproto(family), |w| {
            if ip.is_none() && protocol.is_none() {
                return;
            }
            let mut flags = 0;
            w.nest(end.tuple, |w| {
                if let Some(ip) = ip {
                    flags |= end.by_ip;
                    w.nest(CTA_TUPLE_IP, |w| write_ip(w, end.is_source, ip));
                }
                let Some((protocol, port)) = protocol else {
                    return;
                };
                flags |= FILTER_PROTO_NUM;
                w.nest(CTA_TUPLE_PROTO, |w| {
                    w.u8(CTA_PROTO_NUM, protocol.number());
                    if let Some(port) = port {
                        flags |= end.by_port;
                        w.bytes(end.port, &port.to_be_bytes());
                    }
                });
            });
            // The flags are in host byte order, unlike the rest.
            w.nest(CTA_FILTER, |w| w.bytes(end.flags, &flags.to_ne_bytes()));
        })
    }
}

/// The attributes of a selection by one end of a direction.
struct TupleAttributes {
    tuple: u16,
    flags: u16,
    is_source: bool,
    port: u16,
    by_ip: u32,
    by_port: u32,
}

const DESTINATION: TupleAttributes = TupleAttributes {
    tuple: CTA_TUPLE_ORIG,
    flags: CTA_FILTER_ORIG_FLAGS,
    is_source: false,
    port: CTA_PROTO_DST_PORT,
    by_ip: FILTER_IP_DST,
    by_port: FILTER_DST_PORT,
};

const REPLIER: TupleAttributes = TupleAttributes {
    tuple: CTA_TUPLE_REPLY,
    flags: CTA_FILTER_REPLY_FLAGS,
    is_source: true,
    port: CTA_PROTO_SRC_PORT,
    by_ip: FILTER_IP_SRC,
    by_port: FILTER_SRC_PORT,
};

const SOURCE: TupleAttributes = TupleAttributes {
    tuple: CTA_TUPLE_ORIG,
    flags: CTA_FILTER_ORIG_FLAGS,
    ..REPLIER
};

/// Returns a request with a filter that no kernel has. A kernel with filters refuses it with
/// `EOPNOTSUPP` or `EINVAL`; other kernels list everything.
pub fn probe_filter(family: Family) -> Request {
    probe(
        family,
        CTA_TUPLE_ORIG,
        CTA_FILTER_ORIG_FLAGS,
        FILTER_UNKNOWN,
    )
}

/// Returns a request for replies from an address, without that address. A kernel that filters by
/// replies refuses it with `EINVAL`; a kernel that reads the tuple by the flags of the other
/// direction lists nothing.
pub fn probe_reply_filter(family: Family) -> Request {
    probe(
        family,
        CTA_TUPLE_REPLY,
        CTA_FILTER_REPLY_FLAGS,
        FILTER_IP_SRC,
    )
}

fn probe(family: Family, tuple: u16, flags_kind: u16, flags: u32) -> Request {
    Request::new("probe conntrack filter", GET, nfproto(family), |w| {
        w.nest(tuple, |w| {
            w.nest(CTA_TUPLE_PROTO, |w| {
                w.u8(CTA_PROTO_NUM, Protocol::Udp.number());
            });
        });
        w.nest(CTA_FILTER, |w| w.bytes(flags_kind, &flags.to_ne_bytes()));
    })
}

fn write_ip(w: &mut AttributeWriter<'_>, source: bool, ip: IpAddr) {
    match (ip, source) {
        (IpAddr::V4(ip), true) => w.bytes(CTA_IP_V4_SRC, &ip.octets()),
        (IpAddr::V4(ip), false) => w.bytes(CTA_IP_V4_DST, &ip.octets()),
        (IpAddr::V6(ip), true) => w.bytes(CTA_IP_V6_SRC, &ip.octets()),
        (IpAddr::V6(ip), false) => w.bytes(CTA_IP_V6_DST, &ip.octets()),
    }
}

fn write_tuple(w: &mut AttributeWriter<'_>, tuple: Tuple, protocol: Protocol) {
    w.nest(CTA_TUPLE_IP, |w| {
        write_ip(w, true, tuple.source.ip());
        write_ip(w, false, tuple.destination.ip());
    });
    w.nest(CTA_TUPLE_PROTO, |w| {
        w.u8(CTA_PROTO_NUM, protocol.number());
        w.bytes(CTA_PROTO_SRC_PORT, &tuple.source.port().to_be_bytes());
        w.bytes(CTA_PROTO_DST_PORT, &tuple.destination.port().to_be_bytes());
    });
}

/// Reads the protocol of a tuple, the tuple, and its zone if it has its own.
fn parse_tuple(attribute: Attribute<'_>) -> Option<(Protocol, Tuple, Option<u16>)> {
    let (mut addresses, mut ports, mut zone) = (None, None, None);
    for part in attribute.children() {
        match part.kind {
            CTA_TUPLE_IP => addresses = parse_addresses(part),
            CTA_TUPLE_PROTO => ports = parse_ports(part),
            CTA_TUPLE_ZONE => zone = as_u16(part),
            _ => {}
        }
    }
    let ((source, destination), (protocol, source_port, destination_port)) = (addresses?, ports?);
    let tuple = Tuple {
        source: SocketAddr::new(source, source_port),
        destination: SocketAddr::new(destination, destination_port),
    };
    (source.is_ipv4() == destination.is_ipv4()).then_some((protocol, tuple, zone))
}

fn parse_addresses(attribute: Attribute<'_>) -> Option<(IpAddr, IpAddr)> {
    let (mut source, mut destination) = (None, None);
    for part in attribute.children() {
        match part.kind {
            CTA_IP_V4_SRC | CTA_IP_V6_SRC => source = as_ip(part),
            CTA_IP_V4_DST | CTA_IP_V6_DST => destination = as_ip(part),
            _ => {}
        }
    }
    source.zip(destination)
}

fn parse_ports(attribute: Attribute<'_>) -> Option<(Protocol, u16, u16)> {
    let (mut protocol, mut source, mut destination) = (None, None, None);
    for part in attribute.children() {
        match part.kind {
            CTA_PROTO_NUM => protocol = Protocol::from_number(*part.payload.first()?),
            CTA_PROTO_SRC_PORT => source = as_u16(part),
            CTA_PROTO_DST_PORT => destination = as_u16(part),
            _ => {}
        }
    }
    Some((protocol?, source?, destination?))
}

fn as_ip(attribute: Attribute<'_>) -> Option<IpAddr> {
    match attribute.kind {
        CTA_IP_V4_SRC | CTA_IP_V4_DST => {
            <[u8; 4]>::try_from(attribute.payload).ok().map(IpAddr::from)
        }
        _ => <[u8; 16]>::try_from(attribute.payload).ok().map(IpAddr::from),
    }
}

fn as_u16(attribute: Attribute<'_>) -> Option<u16> {
    attribute.payload.try_into().ok().map(u16::from_be_bytes)
}

#[cfg(test)]
mod tests;
