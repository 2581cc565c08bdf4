//! Elements of the sets: typed, and as the kernel wants them.
//!
//! Keys are the fields in network byte order, each padded with zeros to four bytes; an index is in
//! host byte order. A range is two elements in a set of ranges: its first address, and, marked as
//! an end, the one behind its last, which is left out when there is none. In a concatenation it is
//! one element with a second key for the last address.

use std::net::IpAddr;

use kplane_model::{Cidr, EndpointAddr, Family, Protocol};

use super::affinity::{AffinityId, Part};
use super::schema::{Balancer, Set, TABLE};
#[allow(
    clippy::wildcard_imports,
    reason = "constants named as in the kernel's headers"
)]
use super::uapi::*;
use kplane_netlink::{AttributeWriter, Batch, Label, MAX_ATTRIBUTE_PAYLOAD_BYTES, Operation};

/// Upper bound for one [`Element`] in a message. The largest is an IPv6 [`Key::FirewallSource`]:
/// an entry (4) with two keys of 40, each in two headers (2 x 48) = 100.
const MAX_ELEMENT_BYTES: usize = 128;

/// Where connections go to: an address, a protocol and a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Destination {
    /// The address, of the table's family.
    pub ip: IpAddr,
    /// The protocol.
    pub protocol: Protocol,
    /// The port.
    pub port: u16,
}

/// A port on every address of the node that serves NodePorts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodePort {
    /// The protocol.
    pub protocol: Protocol,
    /// The port.
    pub port: u16,
}

/// Key of an element. Which kind belongs into which set: [`Key::fits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A destination.
    Service(Destination),
    /// A NodePort.
    NodePort(NodePort),
    /// An address.
    Ip(IpAddr),
    /// An endpoint that reaches itself: source and destination address are the same.
    Hairpin(Destination),
    /// A range of addresses. Ranges of one set must not overlap; adjacent ones may stay apart.
    Range(Cidr),
    /// Clients that may reach a destination. Ranges of one destination must not overlap.
    FirewallSource(Destination, Cidr),
    /// One endpoint of a destination, by index.
    ServiceSlot(Destination, u32),
    /// One endpoint of a NodePort, by index.
    NodePortSlot(NodePort, u32),
}

impl Key {
    /// Whether this kind of key belongs into `set`.
    #[must_use]
    pub fn fits(self, set: Set) -> bool {
        let by_address = |balancer: Balancer| balancer.by_address();
        match set {
            Set::Services
            | Set::MasqueradeServices
            | Set::InsideServices
            | Set::RejectServices
            | Set::DropServices
            | Set::RememberServices
            | Set::FirewallServices => matches!(self, Self::Service(_)),
            Set::Nodeports
            | Set::MasqueradeNodeports
            | Set::InsideNodeports
            | Set::RejectNodeports
            | Set::RememberNodeports
            | Set::DropNodeports => matches!(self, Self::NodePort(_)),
            Set::FirewallSources => matches!(self, Self::FirewallSource(..)),
            Set::ClusterIps => matches!(self, Self::Ip(_)),
            Set::Hairpin => matches!(self, Self::Hairpin(_)),
            Set::ServiceCidrs | Set::PodCidrs | Set::UnmasqueradedSources | Set::NodeportIps => {
                matches!(self, Self::Range(_))
            }
            Set::Class(balancer, _) | Set::Sticky(balancer) => match self {
                Self::Service(_) => by_address(balancer),
                Self::NodePort(_) => !by_address(balancer),
                _ => false,
            },
            Set::Endpoints(balancer) => match self {
                Self::ServiceSlot(..) => by_address(balancer),
                Self::NodePortSlot(..) => !by_address(balancer),
                _ => false,
            },
        }
    }
}

/// One element of one set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Element {
    /// The set.
    pub set: Set,
    /// The key.
    pub key: Key,
    /// In maps only.
    pub data: Option<Data>,
}

/// What an element of a map carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Data {
    /// An endpoint.
    Endpoint(EndpointAddr),
    /// `jump affinity-pick-ID`
    Pick(AffinityId),
    /// `goto affinity-keep-ID`
    Keep(AffinityId),
    /// `goto affinity-split-ID`
    Split(AffinityId),
}

impl Data {
    /// The endpoint, if it is one.
    #[must_use]
    pub fn endpoint(self) -> Option<EndpointAddr> {
        match self {
            Self::Endpoint(endpoint) => Some(endpoint),
            Self::Pick(_) | Self::Keep(_) | Self::Split(_) => None,
        }
    }

    /// What the kernel is told to do with a packet, or `None` for an endpoint.
    fn verdict(self) -> Option<(i32, String)> {
        match self {
            Self::Endpoint(_) => None,
            Self::Pick(id) => Some((NFT_JUMP, id.name(Part::Pick))),
            Self::Keep(id) => Some((NFT_GOTO, id.name(Part::Keep))),
            Self::Split(id) => Some((NFT_GOTO, id.name(Part::Split))),
        }
    }

    /// The inverse of [`Self::verdict`].
    pub(super) fn from_verdict(code: i32, chain: &str) -> Option<Self> {
        let pick = || AffinityId::from_name(chain, Part::Pick).map(Self::Pick);
        let keep = || AffinityId::from_name(chain, Part::Keep).map(Self::Keep);
        let split = || AffinityId::from_name(chain, Part::Split).map(Self::Split);
        match code {
            NFT_JUMP => pick(),
            NFT_GOTO => keep().or_else(split),
            _ => None,
        }
    }
}

/// What to do with elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementOp {
    /// Add them. An element that is there already is no error if its data is the same.
    Add,
    /// Delete them; data is not looked at. An element that is not there is an error.
    Delete,
}

/// Appends operations that add or delete elements of a family's table: one per set, or more where
/// the elements of a set do not fit into one attribute. The kernel does them in this order, so the
/// deletion of a key goes into the batch before the addition of the same key.
pub fn push_elements<'a>(
    batch: &mut Batch,
    family: Family,
    op: ElementOp,
    elements: impl IntoIterator<Item = &'a Element>,
) {
    let mut sorted: Vec<&Element> = elements.into_iter().collect();
    // Stable, and linear for elements that come set by set.
    sorted.sort_by_key(|element| element.set);
    let mut rest = &sorted[..];
    while let Some(first) = rest.first() {
        rest = push_some(batch, family, op, first.set, rest);
    }
}

/// Appends one operation for as many of the first elements as are of `set` and fit.
fn push_some<'a, 'e>(
    batch: &mut Batch,
    family: Family,
    op: ElementOp,
    set: Set,
    elements: &'a [&'e Element],
) -> &'a [&'e Element] {
    let (action, kind, flags) = match op {
        ElementOp::Add => ("add element", msg::NEWSETELEM, NLM_F_CREATE),
        ElementOp::Delete => ("delete element", msg::DELSETELEM, 0),
    };
    let operation = Operation {
        label: Label {
            action,
            object: set.name(),
        },
        kind,
        flags,
        family: nfproto(family),
    };
    let mut taken = 0;
    batch.push(operation, |w| {
        w.str(NFTA_SET_ELEM_LIST_TABLE, TABLE);
        w.str(NFTA_SET_ELEM_LIST_SET, set.name());
        w.nest(NFTA_SET_ELEM_LIST_ELEMENTS, |w| {
            let full = w.position() + MAX_ATTRIBUTE_PAYLOAD_BYTES - MAX_ELEMENT_BYTES;
            for element in elements {
                if element.set != set || w.position() > full {
                    break;
                }
                debug_assert!(element.key.fits(set), "{element:?}");
                debug_assert_eq!(element.data.is_some(), set.is_map(), "{element:?}");
                encode(w, op, element);
                taken += 1;
            }
        });
    });
    &elements[taken..]
}

/// One element: one list entry, or two for a range in a set of ranges.
fn encode(list: &mut AttributeWriter<'_>, op: ElementOp, element: &Element) {
    let data = element.data.filter(|_| op == ElementOp::Add);
    match element.key {
        Key::Range(range) => {
            entry(list, |w| {
                value(w, NFTA_SET_ELEM_KEY, |b| put_ip(b, range.first()));
            });
            if let Some(end) = next_ip(range.last()) {
                entry(list, |w| {
                    value(w, NFTA_SET_ELEM_KEY, |b| put_ip(b, end));
                    w.u32(NFTA_SET_ELEM_FLAGS, NFT_SET_ELEM_INTERVAL_END);
                });
            }
        }
        Key::FirewallSource(destination, range) => {
            let key = |bytes: &mut Vec<u8>, source| {
                put_destination(bytes, destination);
                put_ip(bytes, source);
            };
            entry(list, |w| {
                value(w, NFTA_SET_ELEM_KEY, |b| key(b, range.first()));
                value(w, NFTA_SET_ELEM_KEY_END, |b| key(b, range.last()));
            });
        }
        key => entry(list, |w| {
            value(w, NFTA_SET_ELEM_KEY, |b| put_key(b, key));
            if let Some(data) = data {
                put_data(w, data);
            }
        }),
    }
}

pub(super) fn entry(list: &mut AttributeWriter<'_>, fill: impl FnOnce(&mut AttributeWriter<'_>)) {
    list.nest(NFTA_LIST_ELEM, fill);
}

pub(super) fn value(w: &mut AttributeWriter<'_>, kind: u16, fill: impl FnOnce(&mut Vec<u8>)) {
    w.nest(kind, |w| w.with(NFTA_DATA_VALUE, fill));
}

fn put_data(w: &mut AttributeWriter<'_>, data: Data) {
    if let Some(endpoint) = data.endpoint() {
        value(w, NFTA_SET_ELEM_DATA, |b| {
            put_ip(b, endpoint.ip);
            put_port(b, endpoint.port);
        });
    }
    if let Some((code, chain)) = data.verdict() {
        w.nest(NFTA_SET_ELEM_DATA, |w| {
            w.nest(NFTA_DATA_VERDICT, |w| {
                w.bytes(NFTA_VERDICT_CODE, &code.to_be_bytes());
                w.str(NFTA_VERDICT_CHAIN, &chain);
            });
        });
    }
}

/// Keys that are one value.
fn put_key(bytes: &mut Vec<u8>, key: Key) {
    match key {
        Key::Service(destination) => put_destination(bytes, destination),
        Key::NodePort(node_port) => put_node_port(bytes, node_port),
        Key::Ip(ip) => put_ip(bytes, ip),
        Key::Hairpin(endpoint) => {
            put_ip(bytes, endpoint.ip);
            put_destination(bytes, endpoint);
        }
        Key::ServiceSlot(destination, index) => {
            put_destination(bytes, destination);
            bytes.extend_from_slice(&index.to_ne_bytes());
        }
        Key::NodePortSlot(node_port, index) => {
            put_node_port(bytes, node_port);
            bytes.extend_from_slice(&index.to_ne_bytes());
        }
        Key::Range(range) => put_ip(bytes, range.first()),
        Key::FirewallSource(destination, range) => {
            put_destination(bytes, destination);
            put_ip(bytes, range.first());
        }
    }
}

fn put_destination(bytes: &mut Vec<u8>, destination: Destination) {
    put_ip(bytes, destination.ip);
    put_protocol(bytes, destination.protocol);
    put_port(bytes, destination.port);
}

fn put_node_port(bytes: &mut Vec<u8>, node_port: NodePort) {
    put_protocol(bytes, node_port.protocol);
    put_port(bytes, node_port.port);
}

pub(super) fn put_ip(bytes: &mut Vec<u8>, ip: IpAddr) {
    match ip {
        IpAddr::V4(ip) => bytes.extend_from_slice(&ip.octets()),
        IpAddr::V6(ip) => bytes.extend_from_slice(&ip.octets()),
    }
}

fn put_protocol(bytes: &mut Vec<u8>, protocol: Protocol) {
    bytes.extend_from_slice(&[protocol.number(), 0, 0, 0]);
}

fn put_port(bytes: &mut Vec<u8>, port: u16) {
    let [high, low] = port.to_be_bytes();
    bytes.extend_from_slice(&[high, low, 0, 0]);
}

/// The address behind `ip`, if any.
fn next_ip(ip: IpAddr) -> Option<IpAddr> {
    match ip {
        IpAddr::V4(ip) => Some(IpAddr::V4(ip.to_bits().checked_add(1)?.into())),
        IpAddr::V6(ip) => Some(IpAddr::V6(ip.to_bits().checked_add(1)?.into())),
    }
}
