//! Elements of the sets, as types and in the kernel's encoding.
//!
//! Keys are the fields in network byte order, each padded with zeros to a multiple of four bytes; an index is
//! in host byte order. In a set of ranges, a range is two elements: its first address, and, marked as an end,
//! the address behind its last one. The end is left out if there is no such address. In a concatenation, a
//! range is one element with a second key for the last address.

use std::net::IpAddr;

use kplane_model::{Cidr, EndpointAddr, Family, Protocol};

use super::affinity_id::{AffinityId, GroupPart};
use super::policy_schema::PolicySet;
use super::schema::{Balancer, Class, Set};
use super::uapi::*;
use kplane_netlink::{AttributeWriter, Batch, Label, MAX_ATTRIBUTE_PAYLOAD_BYTES, Operation};

/// Upper bound for one [`Element`] in a message, in bytes. The largest is an IPv6 [`Key::FirewallSource`]: an
/// entry (4) with two keys of 40, each in two headers (2 x 48) = 100.
const MAX_ELEMENT_BYTES: usize = 128;

/// A destination of connections: an address, a protocol and a port.
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

/// Key of an element. [`Key::fits`] checks whether a kind of key belongs into a set.
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
    /// A range of addresses. Ranges of one set must not overlap. Adjacent ranges may stay separate.
    Range(Cidr),
    /// Clients that may reach a destination. Ranges of one destination must not overlap.
    FirewallSource(Destination, Cidr),
    /// One endpoint of a destination, by index.
    ServiceSlot(Destination, u32),
    /// One endpoint of a NodePort, by index.
    NodePortSlot(NodePort, u32),
    /// A number of [`PolicySet`], or bits of a word.
    Number(u32),
    /// A Pod to itself.
    Loop(IpAddr),
    /// The addresses from a first to a last one. Those of one set must not overlap.
    Span(IpAddr, IpAddr),
    /// A Pod of this node, and the number of the other end.
    Grant(IpAddr, u32),
    /// As `Grant`, and the destination's port.
    GrantPort(IpAddr, u32, Protocol, u16),
    /// As `Grant`, and the destination's ports from a first to a last one. Those of one set, Pod, number and protocol
    /// must not overlap.
    GrantPorts(IpAddr, u32, Protocol, u16, u16),
    /// A row of ports, and the ports from a first to a last one. Those of one row and protocol must not overlap.
    Row(u32, Protocol, u16, u16),
}

impl Key {
    /// Returns whether this kind of key belongs into `set`.
    pub fn fits(self, set: Set) -> bool {
        match set {
            Set::Classes | Set::InsideClasses => matches!(self, Self::Number(_)),
            Set::Places | Set::RememberServices | Set::FirewallServices => {
                matches!(self, Self::Service(_))
            }
            Set::Nodeports | Set::RememberNodeports => matches!(self, Self::NodePort(_)),
            Set::FirewallSources => matches!(self, Self::FirewallSource(..)),
            Set::ClusterIps => matches!(self, Self::Ip(_)),
            Set::Hairpin => matches!(self, Self::Hairpin(_)),
            Set::ServiceCidrs | Set::PodCidrs | Set::UnmasqueradedSources | Set::NodeportIps => {
                matches!(self, Self::Range(_))
            }
            Set::Sticky(balancer) => match self {
                Self::Service(_) => balancer.by_address(),
                Self::NodePort(_) => !balancer.by_address(),
                _ => false,
            },
            Set::Endpoints(balancer) => match self {
                Self::ServiceSlot(..) => balancer.by_address(),
                Self::NodePortSlot(..) => !balancer.by_address(),
                _ => false,
            },
            Set::Policy(set) => self.fits_policy(set),
        }
    }
}

impl Key {
    fn fits_policy(self, set: PolicySet) -> bool {
        match set {
            PolicySet::LocalRanges => matches!(self, Self::Range(_)),
            PolicySet::LocalPods
            | PolicySet::Isolated(_)
            | PolicySet::Denied(_)
            | PolicySet::Sampled
            | PolicySet::Peers
            | PolicySet::Tiered(_)
            | PolicySet::TierPeers => matches!(self, Self::Ip(_)),
            PolicySet::Loops => matches!(self, Self::Loop(_)),
            PolicySet::Parents | PolicySet::RowAll => matches!(self, Self::Number(_)),
            PolicySet::RowPorts => matches!(self, Self::Row(..)),
            PolicySet::Blocks | PolicySet::TierBlocks => matches!(self, Self::Span(..)),
            PolicySet::All(_) | PolicySet::Decisions(..) => matches!(self, Self::Grant(..)),
            PolicySet::Ports(_) => matches!(self, Self::GrantPort(..)),
            PolicySet::Ranges(_) => matches!(self, Self::GrantPorts(..)),
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
    /// The data, in maps only.
    pub data: Option<Data>,
}

/// The data of an element of a map.
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
    /// `jump` to the chain that draws an endpoint
    Draw(Balancer, Class),
    /// A number of [`PolicySet`], or a place's word.
    Number(u32),
}

impl Data {
    /// Returns the endpoint, if the data is one.
    pub fn endpoint(self) -> Option<EndpointAddr> {
        match self {
            Self::Endpoint(endpoint) => Some(endpoint),
            Self::Pick(_) | Self::Keep(_) | Self::Split(_) | Self::Draw(..) | Self::Number(_) => {
                None
            }
        }
    }

    /// Returns the verdict as the kernel's code and chain name; `None` for other data.
    fn verdict(self) -> Option<(i32, String)> {
        match self {
            Self::Endpoint(_) | Self::Number(_) => None,
            Self::Draw(balancer, class) => Some((NFT_JUMP, balancer.chain(class).to_owned())),
            Self::Pick(id) => Some((NFT_JUMP, id.name(GroupPart::Pick))),
            Self::Keep(id) => Some((NFT_GOTO, id.name(GroupPart::Keep))),
            Self::Split(id) => Some((NFT_GOTO, id.name(GroupPart::Split))),
        }
    }

    /// Returns the verdict with this code and chain: the inverse of [`Self::verdict`].
    pub(super) fn from_verdict(code: i32, chain: &str) -> Option<Self> {
        let pick = || AffinityId::from_name(chain, GroupPart::Pick).map(Self::Pick);
        let keep = || AffinityId::from_name(chain, GroupPart::Keep).map(Self::Keep);
        let split = || AffinityId::from_name(chain, GroupPart::Split).map(Self::Split);
        let draw = || Balancer::of_chain(chain).map(|(of, class)| Self::Draw(of, class));
        match code {
            NFT_JUMP => pick().or_else(draw),
            NFT_GOTO => keep().or_else(split),
            _ => None,
        }
    }
}

/// An operation on elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementOp {
    /// Adds the elements. An existing element is no error if its data is the same.
    Add,
    /// Deletes the elements, whatever their data. A missing element is an error.
    Delete,
}

/// Appends operations that add or delete elements of a family's tables: one operation per set, or more if the
/// elements of a set do not fit into one attribute. The kernel executes the operations in this order. So the
/// deletion of a key belongs into the batch before the addition of the same key.
pub fn push_elements<'a>(
    batch: &mut Batch,
    family: Family,
    op: ElementOp,
    elements: impl IntoIterator<Item = &'a Element>,
) {
    let mut sorted: Vec<&Element> = elements.into_iter().collect();
    // The sort is stable, and linear for elements that come set by set.
    sorted.sort_by_key(|element| element.set);
    let mut rest = &sorted[..];
    while let Some(first) = rest.first() {
        rest = push_some(batch, family, op, first.set, rest);
    }
}

/// Returns the name of the operation that adds elements to a set.
pub(super) fn added_to(set: Set) -> Label {
    Label {
        action: "add element",
        object: set.name(),
    }
}

/// Appends one operation for the first elements, as many as belong to `set` and fit.
fn push_some<'a, 'e>(
    batch: &mut Batch,
    family: Family,
    op: ElementOp,
    set: Set,
    elements: &'a [&'e Element],
) -> &'a [&'e Element] {
    let (label, kind, flags) = match op {
        ElementOp::Add => (added_to(set), msg::NEWSETELEM, NLM_F_CREATE),
        ElementOp::Delete => {
            let object = set.name();
            let action = "delete element";
            (Label { action, object }, msg::DELSETELEM, 0)
        }
    };
    let operation = Operation {
        label,
        kind,
        flags,
        family: nfproto(family),
    };
    let mut taken = 0;
    batch.push(operation, |w| {
        w.str(NFTA_SET_ELEM_LIST_TABLE, set.table().name());
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

/// Writes one element as one list entry, or as two for a range in a set of ranges.
pub(super) fn encode(list: &mut AttributeWriter<'_>, op: ElementOp, element: &Element) {
    let data = if op == ElementOp::Add { element.data } else { None };
    match element.key {
        Key::Range(range) => span(list, range.first(), range.last(), data),
        Key::Span(first, last) => span(list, first, last, data),
        Key::GrantPorts(pod, number, protocol, first, last) => {
            let key = |bytes: &mut Vec<u8>, port| {
                put_ip(bytes, pod);
                bytes.extend_from_slice(&number.to_be_bytes());
                put_node_port(bytes, NodePort { protocol, port });
            };
            entry(list, |w| {
                value(w, NFTA_SET_ELEM_KEY, |b| key(b, first));
                value(w, NFTA_SET_ELEM_KEY_END, |b| key(b, last));
            });
        }
        Key::Row(number, protocol, first, last) => {
            let key = |bytes: &mut Vec<u8>, port| {
                bytes.extend_from_slice(&number.to_be_bytes());
                put_node_port(bytes, NodePort { protocol, port });
            };
            entry(list, |w| {
                value(w, NFTA_SET_ELEM_KEY, |b| key(b, first));
                value(w, NFTA_SET_ELEM_KEY_END, |b| key(b, last));
                if let Some(data) = data {
                    put_data(w, data);
                }
            });
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

/// Writes a range of a set of ranges.
fn span(list: &mut AttributeWriter<'_>, first: IpAddr, last: IpAddr, data: Option<Data>) {
    entry(list, |w| {
        value(w, NFTA_SET_ELEM_KEY, |b| put_ip(b, first));
        if let Some(data) = data {
            put_data(w, data);
        }
    });
    if let Some(end) = next_ip(last) {
        entry(list, |w| {
            value(w, NFTA_SET_ELEM_KEY, |b| put_ip(b, end));
            w.u32(NFTA_SET_ELEM_FLAGS, NFT_SET_ELEM_INTERVAL_END);
        });
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
    if let Data::Number(number) = data {
        value(w, NFTA_SET_ELEM_DATA, |b| {
            b.extend_from_slice(&number.to_ne_bytes());
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

/// Writes a key that is a single value.
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
        Key::Row(number, protocol, port, _) => {
            bytes.extend_from_slice(&number.to_be_bytes());
            put_node_port(bytes, NodePort { protocol, port });
        }
        Key::Number(number) => bytes.extend_from_slice(&number.to_ne_bytes()),
        Key::Loop(pod) => {
            put_ip(bytes, pod);
            put_ip(bytes, pod);
        }
        Key::Span(first, _) => put_ip(bytes, first),
        Key::Grant(pod, number) => {
            put_ip(bytes, pod);
            bytes.extend_from_slice(&number.to_ne_bytes());
        }
        Key::GrantPort(pod, number, protocol, port)
        | Key::GrantPorts(pod, number, protocol, port, _) => {
            put_key(bytes, Key::Grant(pod, number));
            put_node_port(bytes, NodePort { protocol, port });
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

/// Returns the address behind `ip`, if there is one.
fn next_ip(ip: IpAddr) -> Option<IpAddr> {
    match ip {
        IpAddr::V4(ip) => Some(IpAddr::V4(ip.to_bits().checked_add(1)?.into())),
        IpAddr::V6(ip) => Some(IpAddr::V6(ip.to_bits().checked_add(1)?.into())),
    }
}
