//! Frontends of a list as strings of bits: address, protocol, port. A dispatch tree divides frontends by their
//! leading bits.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

use kplane_model::{Cidr, Family, Protocol};

use super::rule::{Match, Rule, Sense};
use crate::plan::FrontendAddr;

/// Number of bits behind the address: the protocol, then the port.
const PROTOCOL_BITS: u8 = 4;
const PORT_BITS: u8 = 16;
const REST_BITS: u8 = PROTOCOL_BITS + PORT_BITS;

/// A frontend where packets arrive, as bits, in the order of the bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Point {
    /// The address, with its last bit as the lowest; 0 for node ports.
    address: u128,
    /// Protocol and port.
    rest: u32,
}

/// The format of the points of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Space {
    pub(super) family: Family,
    /// Whether the points have an address; node ports have none.
    pub(super) addresses: bool,
}

/// A prefix: all points that begin with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Prefix {
    /// The first of these points.
    pub(super) first: Point,
    /// Number of bits.
    pub(super) len: u8,
}

impl Point {
    pub(super) fn of(at: FrontendAddr) -> Self {
        let rest = |protocol: Protocol, port: u16| {
            let protocols = Protocol::ALL.into_iter().zip(0_u32..);
            let number = protocols.into_iter().find(|(p, _)| *p == protocol);
            number.map_or(0, |(_, number)| number) << PORT_BITS | u32::from(port)
        };
        match at {
            FrontendAddr::Address { ip, protocol, port } => Self {
                address: match ip {
                    IpAddr::V4(ip) => u128::from(ip.to_bits()),
                    IpAddr::V6(ip) => ip.to_bits(),
                },
                rest: rest(protocol, port),
            },
            FrontendAddr::NodePort { protocol, port } => Self {
                address: 0,
                rest: rest(protocol, port),
            },
        }
    }

    fn protocol(self) -> Protocol {
        match self.rest >> PORT_BITS {
            0 => Protocol::Tcp,
            1 => Protocol::Udp,
            _ => Protocol::Sctp,
        }
    }

    fn port(self) -> u16 {
        // The lower 16 bits are the port.
        u16::try_from(self.rest & 0xffff).unwrap_or(0)
    }

    fn address(self, family: Family) -> IpAddr {
        match family {
            // The lower 32 bits are the address.
            Family::V4 => Ipv4Addr::from_bits(u32::try_from(self.address).unwrap_or(0)).into(),
            Family::V6 => Ipv6Addr::from_bits(self.address).into(),
        }
    }
}

impl Space {
    fn address_bits(self) -> u8 {
        match (self.addresses, self.family) {
            (false, _) => 0,
            (true, Family::V4) => 32,
            (true, Family::V6) => 128,
        }
    }

    fn bits(self) -> u8 {
        self.address_bits() + REST_BITS
    }

    /// Returns the prefix of all points.
    pub(super) fn root() -> Prefix {
        let first = Point {
            address: 0,
            rest: 0,
        };
        Prefix { first, len: 0 }
    }

    /// Returns the points with this prefix.
    pub(super) fn range(self, prefix: Prefix) -> RangeInclusive<Point> {
        let free = u32::from(self.bits() - prefix.len);
        let ones = |bits: u32| 1_u128.checked_shl(bits).map_or(u128::MAX, |one| one - 1);
        let rest = ones(free.min(u32::from(REST_BITS)));
        let last = Point {
            address: prefix.first.address | ones(free.saturating_sub(u32::from(REST_BITS))),
            // The value has at most 20 bits.
            rest: prefix.first.rest | u32::try_from(rest).unwrap_or(0),
        };
        prefix.first..=last
    }

    /// Returns whether all points of `inner` begin with `outer`.
    pub(super) fn covers(self, outer: Prefix, inner: Prefix) -> bool {
        outer.len <= inner.len && self.range(outer).contains(&inner.first)
    }

    /// Returns the prefix of all bits that both points share.
    pub(super) fn common(self, a: Point, b: Point) -> Prefix {
        let different = |bits: u32| u8::try_from(bits).unwrap_or(0);
        let address = different(u128::BITS - (a.address ^ b.address).leading_zeros());
        let rest = different(u32::BITS - (a.rest ^ b.rest).leading_zeros());
        let len = match address {
            0 => self.bits() - rest,
            _ => self.address_bits() - address,
        };
        self.prefix(a, len)
    }

    /// Returns the prefix of the first `len` bits of a point.
    pub(super) fn prefix(self, of: Point, len: u8) -> Prefix {
        let free = self.bits() - len;
        let address = u32::from(free.saturating_sub(REST_BITS));
        let rest = u32::from(free.min(REST_BITS));
        let first = Point {
            address: of.address.checked_shr(address).unwrap_or(0).checked_shl(address).unwrap_or(0),
            rest: of.rest >> rest << rest,
        };
        Prefix { first, len }
    }

    /// Returns the two halves of a prefix, with 0 and 1 as the next bit.
    pub(super) fn halves(self, of: Prefix) -> [Prefix; 2] {
        let len = of.len + 1;
        let position = u32::from(self.bits() - len);
        let mut second = of.first;
        match position.checked_sub(u32::from(REST_BITS)) {
            Some(position) => second.address |= 1 << position,
            None => second.rest |= 1 << position,
        }
        let half = |first| Prefix { first, len };
        [half(of.first), half(second)]
    }

    /// Returns whether a rule can match this prefix. A prefix may end within the address or the port, but not
    /// within the protocol.
    pub(super) fn can_match(self, prefix: Prefix) -> bool {
        let behind = prefix.len.saturating_sub(self.address_bits());
        behind == 0 || behind >= PROTOCOL_BITS
    }

    /// Limits a rule to packets whose destination has this prefix.
    pub(super) fn limit(self, rule: Rule, prefix: Prefix) -> Rule {
        let mut rule = self.limit_address(rule, prefix);
        let (first, last) = self.range(prefix).into_inner();
        let behind = prefix.len.saturating_sub(self.address_bits());
        if behind >= PROTOCOL_BITS {
            rule = rule.protocol(first.protocol());
        }
        if behind > PROTOCOL_BITS {
            rule = rule.when(Match::Ports(first.port(), last.port()));
        }
        rule
    }

    /// Limits a rule to the address of a prefix.
    pub(super) fn limit_address(self, rule: Rule, prefix: Prefix) -> Rule {
        if !self.addresses {
            return rule;
        }
        let ip = prefix.first.address(self.family);
        let range = Cidr::new(ip, prefix.len.min(self.address_bits()));
        rule.destination(Sense::Is, range.unwrap_or(Cidr::single(ip)))
    }

    /// Returns the prefix of exactly one point.
    pub(super) fn single(self, point: Point) -> Prefix {
        Prefix {
            first: point,
            len: self.bits(),
        }
    }

    /// Returns the text of a prefix in names of chains: its bits in hexadecimal, and their number.
    pub(super) fn text(self, prefix: Prefix) -> String {
        let digits = usize::from(prefix.len.div_ceil(4));
        let address = usize::from(self.address_bits() / 4);
        let mut text = String::new();
        if address > 0 {
            text = format!("{:0address$X}", prefix.first.address);
        }
        text.push_str(&format!("{:05X}", prefix.first.rest));
        text.truncate(digits);
        format!("{text}-{}", prefix.len)
    }
}
