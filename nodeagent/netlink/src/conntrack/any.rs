//! Entries of all protocols, read to delete some.

use std::net::IpAddr;

use kplane_model::{Family, Protocol};

use super::{
    CTA_ID, CTA_MARK, CTA_PROTO_NUM, CTA_PROTO_SRC_PORT, CTA_STATUS, CTA_TUPLE_IP, CTA_TUPLE_ORIG,
    CTA_TUPLE_PROTO, CTA_TUPLE_REPLY, CTA_ZONE, DELETE, ENTRY, as_u16, parse_addresses,
};
use crate::attribute::{Attribute, AttributeWriter, NLA_F_NESTED};
use crate::message::{Message, Request};
use crate::nfproto;

/// `IPS_EXPECTED` (linux/netfilter/nf_conntrack_common.h): the connection belongs to another one, as data of FTP do.
const IPS_EXPECTED: u32 = 1 << 0;

/// An entry of any protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnyFlow {
    /// The sender of the first packet, before translation.
    pub source: IpAddr,
    /// The receiver of the first packet, behind translation.
    pub destination: IpAddr,
    /// The protocol, and the receiver's port behind translation; `None` = a protocol without ports (ICMP).
    pub port: Option<(Protocol, u16)>,
    /// The mark.
    pub mark: u32,
    /// The original tuple as the kernel wrote it: its form is the protocol's.
    original: Box<[u8]>,
    zone: Option<u16>,
    id: Option<u32>,
}

impl AnyFlow {
    /// Reads one message of a dump; returns `None` for anything but a complete entry, and for a connection that its
    /// helper expected: that one is allowed as a part of another.
    pub fn parse(message: Message<'_>) -> Option<Self> {
        if message.kind != ENTRY {
            return None;
        }
        let (mut original, mut reply) = (None, None);
        let (mut zone, mut id, mut mark) = (None, None, 0);
        for attribute in message.attributes() {
            match attribute.kind {
                CTA_TUPLE_ORIG => original = Some(attribute),
                CTA_TUPLE_REPLY => reply = Some(attribute),
                CTA_ZONE => zone = as_u16(attribute),
                CTA_ID => id = attribute.as_u32(),
                CTA_MARK => mark = attribute.as_u32()?,
                CTA_STATUS if attribute.as_u32()? & IPS_EXPECTED != 0 => return None,
                _ => {}
            }
        }
        let (original, reply) = (original?, reply?);
        let ((source, _), (destination, _)) = (addresses(original)?, addresses(reply)?);
        (source.is_ipv4() == destination.is_ipv4()).then(|| Self {
            source,
            destination,
            port: sending_port(reply),
            mark,
            original: original.payload.into(),
            zone,
            id,
        })
    }

    /// Returns the request to delete this entry.
    pub fn delete(&self) -> Request {
        self.request("delete conntrack entry", DELETE, |w| {
            if let Some(id) = self.id {
                w.u32(CTA_ID, id);
            }
        })
    }

    /// Returns the request to set this entry's mark.
    pub fn set_mark(&self, mark: u32) -> Request {
        self.request("mark conntrack entry", ENTRY, |w| w.u32(CTA_MARK, mark))
    }

    fn request(
        &self,
        what: &'static str,
        kind: u16,
        more: impl FnOnce(&mut AttributeWriter<'_>),
    ) -> Request {
        let family = Family::of(self.source);
        Request::new(what, kind, nfproto(family), |w| {
            w.bytes(CTA_TUPLE_ORIG | NLA_F_NESTED, &self.original);
            if let Some(zone) = self.zone {
                w.bytes(CTA_ZONE, &zone.to_be_bytes());
            }
            more(w);
        })
    }
}

fn addresses(tuple: Attribute<'_>) -> Option<(IpAddr, IpAddr)> {
    let mut parts = tuple.children();
    parts.find(|part| part.kind == CTA_TUPLE_IP).and_then(parse_addresses)
}

fn sending_port(tuple: Attribute<'_>) -> Option<(Protocol, u16)> {
    let (mut protocol, mut port) = (None, None);
    let parts = tuple.children().filter(|part| part.kind == CTA_TUPLE_PROTO);
    for part in parts.flat_map(Attribute::children) {
        match (part.kind, part.payload) {
            (CTA_PROTO_NUM, [number]) => protocol = Protocol::from_number(*number),
            (CTA_PROTO_SRC_PORT, _) => port = as_u16(part),
            _ => {}
        }
    }
    protocol.zip(port)
}
