//! Decodes elements as the kernel returns them: the inverse of `element.rs`.

// Bytes and texts from outside must not end the program.
#![deny(clippy::indexing_slicing)]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use kplane_model::{Cidr, EndpointAddr, Family, Protocol};

use super::element::{Data, Destination, Element, Key, NodePort};
use super::policy_schema::PolicySet;
use super::schema::{Carries, Field, Set};
use super::uapi::*;
use kplane_netlink::Attributes;

/// An element of one of kplane's sets that kplane would never write there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("set {} holds an element that kplane never writes", set.name())]
pub(super) struct Foreign {
    pub(super) set: Set,
}

/// A decoder for the elements of one set. They come in several messages and, for ranges, in two entries each.
#[derive(Debug)]
pub(super) struct Decoder {
    family: Family,
    set: Set,
    elements: Vec<Element>,
    /// Bounds of ranges: the address, whether it is the end of a range, and the data.
    bounds: Vec<(IpAddr, bool, Option<Data>)>,
}

impl Decoder {
    pub(super) fn new(family: Family, set: Set) -> Self {
        Self {
            family,
            set,
            elements: Vec::new(),
            bounds: Vec::new(),
        }
    }

    /// Adds the entries of one `NFTA_SET_ELEM_LIST_ELEMENTS`.
    pub(super) fn take(&mut self, list: Attributes<'_>) -> Result<(), Foreign> {
        for entry in list {
            self.entry(entry.children()).ok_or(Foreign { set: self.set })?;
        }
        Ok(())
    }

    /// Returns the elements up to now, but for those of sets of ranges, which are known at the end.
    pub(super) fn drain(&mut self) -> Vec<Element> {
        std::mem::take(&mut self.elements)
    }

    /// Returns the elements after all entries have been added.
    pub(super) fn finish(&mut self) -> Result<Vec<Element>, Foreign> {
        let set = self.set;
        let mut bounds = std::mem::take(&mut self.bounds);
        // An end that is equal to the next start comes first.
        bounds.sort_by_key(|(ip, is_end, _)| (*ip, !is_end));
        let mut bounds = bounds.into_iter().peekable();
        // nft begins every set of ranges with an end that has no start.
        let _ = bounds.next_if(|(ip, is_end, _)| *is_end && ip.is_unspecified());
        while let Some((first, is_end, data)) = bounds.next() {
            let last = match bounds.next_if(|(_, is_end, _)| *is_end) {
                Some((end, ..)) => previous_ip(end),
                None if bounds.peek().is_none() => Some(last_ip(self.family)),
                None => None,
            };
            let key = last.and_then(|last| match set {
                Set::Policy(PolicySet::Blocks | PolicySet::TierBlocks) => {
                    (first <= last).then_some(Key::Span(first, last))
                }
                _ => range(first, last).map(Key::Range),
            });
            let key = if !is_end && data.is_some() == set.is_map() { key } else { None };
            let key = key.ok_or(Foreign { set })?;
            self.elements.push(Element { set, key, data });
        }
        Ok(self.drain())
    }

    fn entry(&mut self, entry: Attributes<'_>) -> Option<()> {
        let value = |kind| Some(entry.get(kind)?.children().get(NFTA_DATA_VALUE)?.payload);
        let flags = match entry.get(NFTA_SET_ELEM_FLAGS) {
            Some(flags) => flags.as_u32()?,
            None => 0,
        };
        let key = value(NFTA_SET_ELEM_KEY)?;
        if self.set.fields().len() == 1 && self.set.is_interval() {
            let ip = self.read(key, KeyReader::ip)?;
            let is_end = match flags {
                0 => false,
                NFT_SET_ELEM_INTERVAL_END => true,
                _ => return None,
            };
            let data = match entry.get(NFTA_SET_ELEM_DATA) {
                Some(_) => self.data(entry)?,
                None => None,
            };
            self.bounds.push((ip, is_end, data));
            return Some(());
        }
        let key_end = value(NFTA_SET_ELEM_KEY_END).unwrap_or(key);
        let data = self.data(entry)?;
        if flags != 0 {
            return None;
        }
        let key = self.key(key, key_end)?;
        let set = self.set;
        self.elements.push(Element { set, key, data });
        Some(())
    }

    /// Returns the data of an element.
    fn data(&self, entry: Attributes<'_>) -> Option<Option<Data>> {
        Some(match (self.set.carries(), entry.get(NFTA_SET_ELEM_DATA)) {
            (Carries::Endpoint, Some(data)) => {
                let value = data.children().get(NFTA_DATA_VALUE)?.payload;
                Some(Data::Endpoint(self.read(value, KeyReader::endpoint)?))
            }
            (Carries::Chain, Some(data)) => Some(verdict(data.children())?),
            (Carries::Number, Some(data)) => {
                let value = data.children().get(NFTA_DATA_VALUE)?.payload;
                Some(Data::Number(u32::from_ne_bytes(value.try_into().ok()?)))
            }
            (Carries::Nothing, None) => None,
            _ => return None,
        })
    }

    fn key(&self, key: &[u8], key_end: &[u8]) -> Option<Key> {
        let first = self.read(key, |r| r.fields(self.set.fields()))?;
        if let Set::Policy(set) = self.set {
            let last = self.read(key_end, |r| r.fields(self.set.fields()))?;
            return policy_key(set, first, last);
        }
        let node_port = NodePort {
            protocol: first.protocol.unwrap_or(Protocol::Tcp),
            port: first.port,
        };
        let destination = |ip| Destination {
            ip,
            protocol: node_port.protocol,
            port: node_port.port,
        };
        if self.set == Set::FirewallSources {
            let last = self.read(key_end, |r| r.fields(self.set.fields()))?;
            let source = range(first.source?, last.source?)?;
            let same = Fields {
                source: last.source,
                ..first
            } == last;
            return same.then_some(Key::FirewallSource(destination(first.destination?), source));
        }
        if key != key_end {
            return None;
        }
        match (first.source, first.destination, first.protocol, first.index) {
            (Some(source), Some(ip), Some(_), None) if source == ip => {
                Some(Key::Hairpin(destination(ip)))
            }
            (None, Some(ip), Some(_), Some(index)) => {
                Some(Key::ServiceSlot(destination(ip), index))
            }
            (None, None, Some(_), Some(index)) => Some(Key::NodePortSlot(node_port, index)),
            (None, Some(ip), Some(_), None) => Some(Key::Service(destination(ip))),
            (None, None, Some(_), None) => Some(Key::NodePort(node_port)),
            (None, Some(ip), None, None) => Some(Key::Ip(ip)),
            (None, None, None, None) => first.number.map(Key::Number),
            _ => None,
        }
    }

    /// Decodes all of `bytes`, no more and no less.
    fn read<'b, T>(
        &self,
        bytes: &'b [u8],
        read: impl FnOnce(&mut KeyReader<'b>) -> Option<T>,
    ) -> Option<T> {
        let family = self.family;
        let mut reader = KeyReader { bytes, family };
        let value = read(&mut reader)?;
        reader.bytes.is_empty().then_some(value)
    }
}

/// Returns the key of an element about policies.
fn policy_key(set: PolicySet, first: Fields, last: Fields) -> Option<Key> {
    let with_port = Fields {
        port: last.port,
        ..first
    };
    if with_port != last || first.port > last.port {
        return None;
    }
    let address = first.source.or(first.destination);
    let key = match (set, first.number, first.protocol) {
        (PolicySet::Loops, ..) => {
            let pod = first.source.filter(|pod| first.destination == Some(*pod));
            Key::Loop(pod?)
        }
        (PolicySet::Parents | PolicySet::RowAll, Some(number), _) => Key::Number(number),
        (PolicySet::RowPorts, Some(number), Some(protocol)) => {
            return Some(Key::Row(number, protocol, first.port, last.port));
        }
        (PolicySet::All(_) | PolicySet::Decisions(..), Some(number), _) => {
            Key::Grant(address?, number)
        }
        (PolicySet::Ports(_), Some(number), Some(protocol)) => {
            Key::GrantPort(address?, number, protocol, first.port)
        }
        (PolicySet::Ranges(_), Some(number), Some(protocol)) => {
            return Some(Key::GrantPorts(
                address?, number, protocol, first.port, last.port,
            ));
        }
        (_, None, None) => Key::Ip(address?),
        _ => return None,
    };
    (first == last).then_some(key)
}

fn verdict(data: Attributes<'_>) -> Option<Data> {
    let verdict = data.get(NFTA_DATA_VERDICT)?.children();
    let code = verdict.get(NFTA_VERDICT_CODE)?.payload.try_into().ok()?;
    let chain = verdict.get(NFTA_VERDICT_CHAIN)?.as_str()?;
    Data::from_verdict(i32::from_be_bytes(code), chain)
}

/// The fields of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Fields {
    source: Option<IpAddr>,
    destination: Option<IpAddr>,
    protocol: Option<Protocol>,
    port: u16,
    index: Option<u32>,
    number: Option<u32>,
}

/// A reader of the fields of a key, from front to back.
pub(super) struct KeyReader<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) family: Family,
}

impl KeyReader<'_> {
    fn fields(&mut self, fields: &[Field]) -> Option<Fields> {
        let mut found = Fields::default();
        for field in fields {
            match field {
                Field::Source => found.source = Some(self.ip()?),
                Field::Destination => found.destination = Some(self.ip()?),
                Field::Protocol => {
                    let number = u8::from_be_bytes(self.padded()?);
                    found.protocol = Some(Protocol::from_number(number)?);
                }
                Field::Port => found.port = u16::from_be_bytes(self.padded()?),
                Field::Index => found.index = Some(u32::from_ne_bytes(self.padded()?)),
                Field::Number => found.number = Some(u32::from_ne_bytes(self.padded()?)),
                Field::NetworkNumber => found.number = Some(u32::from_be_bytes(self.padded()?)),
            }
        }
        Some(found)
    }

    fn endpoint(&mut self) -> Option<EndpointAddr> {
        Some(EndpointAddr {
            ip: self.ip()?,
            port: u16::from_be_bytes(self.padded()?),
        })
    }

    pub(super) fn ip(&mut self) -> Option<IpAddr> {
        Some(match self.family {
            Family::V4 => IpAddr::V4(Ipv4Addr::from(self.padded::<4>()?)),
            Family::V6 => IpAddr::V6(Ipv6Addr::from(self.padded::<16>()?)),
        })
    }

    /// Reads `N` bytes and their padding, which must be zero.
    fn padded<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (padded, rest) = self.bytes.split_at_checked(N.next_multiple_of(4))?;
        let (value, padding) = padded.split_first_chunk()?;
        self.bytes = rest;
        padding.iter().all(|byte| *byte == 0).then_some(*value)
    }
}

/// Returns the prefix from `first` to `last`, if they are the bounds of one.
fn range(first: IpAddr, last: IpAddr) -> Option<Cidr> {
    let common_bits = match (first, last) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => return None,
    };
    let prefix = Cidr::new(first, u8::try_from(common_bits).ok()?)?;
    (prefix.first() == first && prefix.last() == last).then_some(prefix)
}

fn previous_ip(ip: IpAddr) -> Option<IpAddr> {
    match ip {
        IpAddr::V4(ip) => Some(IpAddr::V4(ip.to_bits().checked_sub(1)?.into())),
        IpAddr::V6(ip) => Some(IpAddr::V6(ip.to_bits().checked_sub(1)?.into())),
    }
}

fn last_ip(family: Family) -> IpAddr {
    Cidr::everything(family).last()
}
