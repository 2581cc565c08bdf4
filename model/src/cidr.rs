//! Address prefixes.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use crate::net::{Family, parse_ip};

/// An address prefix such as `10.0.0.0/8`, host bits cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cidr {
    base: IpAddr,
    prefix_len: u8,
}

/// The error for text that is not an address prefix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an address prefix such as 10.0.0.0/8 or fd00::/8")]
pub struct ParseCidrError(pub String);

impl Cidr {
    /// Returns the prefix of `prefix_len` bits, with host bits of `ip` cleared. `None` if the
    /// length exceeds the family's 32 or 128 bits.
    pub fn new(ip: IpAddr, prefix_len: u8) -> Option<Self> {
        let base = match ip {
            IpAddr::V4(v4) => {
                let host = 32_u32.checked_sub(u32::from(prefix_len))?;
                let mask = u32::MAX.checked_shl(host).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() & mask))
            }
            IpAddr::V6(v6) => {
                let host = 128_u32.checked_sub(u32::from(prefix_len))?;
                let mask = u128::MAX.checked_shl(host).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & mask))
            }
        };
        Some(Self { base, prefix_len })
    }

    /// Returns the prefix that contains every address of a family: `0.0.0.0/0` or `::/0`.
    pub fn everything(family: Family) -> Self {
        Self {
            base: family.unspecified(),
            prefix_len: 0,
        }
    }

    /// Returns the prefix that contains one address only.
    pub fn single(ip: IpAddr) -> Self {
        let prefix_len = match ip {
            IpAddr::V4(_) => 32,
            IpAddr::V6(_) => 128,
        };
        Self {
            base: ip,
            prefix_len,
        }
    }

    /// Returns the first address.
    pub fn first(self) -> IpAddr {
        self.base
    }

    /// Returns the last address.
    pub fn last(self) -> IpAddr {
        let prefix = u32::from(self.prefix_len);
        match self.base {
            IpAddr::V4(v4) => {
                let host = u32::MAX.checked_shr(prefix).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() | host))
            }
            IpAddr::V6(v6) => {
                let host = u128::MAX.checked_shr(prefix).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() | host))
            }
        }
    }

    /// Returns the number of leading bits that are fixed: 0..=32 or 0..=128.
    pub fn prefix_len(self) -> u8 {
        self.prefix_len
    }

    /// Returns the family of the prefix.
    pub fn family(self) -> Family {
        Family::of(self.base)
    }

    /// Returns whether `ip` is inside; false for the other family.
    pub fn contains(self, ip: IpAddr) -> bool {
        Family::of(ip) == self.family() && self.first() <= ip && ip <= self.last()
    }

    /// Returns whether every address of `other` is inside.
    pub fn covers(self, other: Self) -> bool {
        self.prefix_len <= other.prefix_len && self.contains(other.base)
    }
}

/// Returns the number of addresses of a family that an API server gives to Services: of each range not the first one, and in
/// IPv4 not the last one (KEP-1880). A range inside another one adds none.
pub fn service_addresses(ranges: &BTreeSet<Cidr>, family: Family) -> u128 {
    let (bits, kept) = family.pick((32, 2), (128, 1));
    let size = |range: &Cidr| {
        1_u128
            .checked_shl(bits - u32::from(range.prefix_len))
            .unwrap_or(u128::MAX)
            .saturating_sub(kept)
    };
    let is_inside = |range: &Cidr| {
        ranges.iter().filter(|other| *other != range).any(|other| other.covers(*range))
    };
    ranges
        .iter()
        .filter(|range| range.family() == family)
        .filter(|range| !is_inside(range))
        .map(size)
        .fold(0, u128::saturating_add)
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.prefix_len)
    }
}

impl FromStr for Cidr {
    type Err = ParseCidrError;

    /// Parses a prefix as Kubernetes does. White space around it is trimmed (A8); IPv4 octets with
    /// leading zeros are decimal (A4).
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (ip, len) = text.trim().split_once('/')?;
            if !len.bytes().all(|b| b.is_ascii_digit()) {
                return None;
            }
            Self::new(parse_ip(ip).ok()?, len.parse().ok()?)
        };
        parse().ok_or_else(|| ParseCidrError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    #[test]
    fn bounds_and_membership() {
        let c = cidr("10.1.2.3/16");
        assert_eq!(c.to_string(), "10.1.0.0/16");
        assert_eq!(c.last(), IpAddr::from([10, 1, 255, 255]));
        assert!(c.contains(IpAddr::from([10, 1, 9, 9])));
        assert!(!c.contains(IpAddr::from([10, 2, 0, 0])));
        assert!(!c.contains("fd00::1".parse().unwrap()));
        assert_eq!(cidr("::/0"), Cidr::everything(Family::V6));
        assert_eq!(cidr("0.0.0.0/0").last(), IpAddr::from([255; 4]));
        assert!(cidr("10.0.0.0/8").covers(cidr("10.3.0.0/16")));
        assert!(!cidr("10.0.0.0/16").covers(cidr("10.0.0.0/8")));
        assert_eq!(
            Cidr::single(IpAddr::from([1, 2, 3, 4])).to_string(),
            "1.2.3.4/32"
        );
    }

    #[test]
    fn services_get_what_is_left_of_ranges() {
        let count = |ranges: &[&str], family| {
            let ranges = ranges.iter().map(|text| cidr(text)).collect();
            service_addresses(&ranges, family)
        };
        let ranges = ["10.96.0.0/28", "10.96.0.0/29", "10.97.0.0/30", "fd00::/112"];
        assert_eq!(count(&ranges, Family::V4), 14 + 2);
        assert_eq!(count(&ranges, Family::V6), 65_535);
        assert_eq!(count(&["10.0.0.1/32"], Family::V4), 0);
        assert_eq!(count(&["::/0"], Family::V6), u128::MAX - 1);
    }

    #[test]
    fn a4_a8_text_forms() {
        assert_eq!(cidr(" 192.168.000.064/26 ").to_string(), "192.168.0.64/26");
        for text in [
            "10.0.0.0",
            "10.0.0.0/33",
            "10.0.0.0/-1",
            "10.0.0.0/+8",
            "fd00::/129",
            "/8",
            "x/8",
        ] {
            assert!(text.parse::<Cidr>().is_err(), "{text}");
        }
    }
}
