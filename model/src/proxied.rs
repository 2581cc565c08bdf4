//! The treatment that a Service asks of the userspace proxy (`userspace.md`, U50..U54).

use std::fmt;

use crate::cidr::Cidr;
use crate::net::EndpointAddr;

/// A Service's wish that the agents' userspace proxy serves it, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxied {
    /// The way to choose endpoints.
    pub balance: Balance,
    /// The header that passes the client's address on (U24); TCP only.
    pub header: Option<ProxyHeader>,
    /// Whether another endpoint is tried when the first does not take a connection (U52).
    pub retry: bool,
    /// Weights of the endpoints within a range of addresses, 1..=65535. The longest prefix counts; without one, the
    /// weight is 1. At most [`Proxied::MAX_WEIGHTS`].
    pub weights: Vec<(Cidr, u16)>,
}

impl Proxied {
    /// Most weights of a Service.
    pub const MAX_WEIGHTS: usize = 64;

    /// Returns the weight of an endpoint.
    pub fn weight(&self, endpoint: EndpointAddr) -> u16 {
        let ranges = self.weights.iter();
        let matching = ranges.filter(|(range, _)| range.contains(endpoint.ip));
        let longest = matching.max_by_key(|(range, _)| range.prefix_len());
        longest.map_or(1, |(_, weight)| *weight)
    }
}

impl Default for Proxied {
    fn default() -> Self {
        Self {
            balance: Balance::default(),
            header: None,
            retry: true,
            weights: Vec::new(),
        }
    }
}

/// A way to choose among endpoints (U54).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Balance {
    /// One after the other, as kube-proxy's userspace mode did.
    #[default]
    RoundRobin,
    /// The one with fewer open connections for its weight, of two that chance chooses.
    LeastConnections,
    /// In proportion to the weights, as evenly spread over time as possible.
    Weighted,
    /// The same endpoint for the same client address, as long as the endpoint exists.
    SourceHash,
}

impl Balance {
    /// All ways.
    pub const ALL: [Self; 4] = [
        Self::RoundRobin,
        Self::LeastConnections,
        Self::Weighted,
        Self::SourceHash,
    ];

    /// Returns the way with this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|way| way.as_str() == name)
    }

    /// Returns the name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::LeastConnections => "least-connections",
            Self::Weighted => "weighted",
            Self::SourceHash => "source-hash",
        }
    }
}

impl fmt::Display for Balance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A version of the PROXY protocol, as haproxy.org's `proxy-protocol.txt` defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProxyHeader {
    /// One line of text.
    V1,
    /// Binary.
    V2,
}

impl ProxyHeader {
    /// All versions.
    pub const ALL: [Self; 2] = [Self::V1, Self::V2];

    /// Returns the version with this name.
    pub fn parse(name: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|version| version.as_str() == name)
    }

    /// Returns the name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
        }
    }
}

impl fmt::Display for ProxyHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_prefix_has_the_weight() {
        let weights = ["10.1.0.0/16", "10.1.2.0/24", "10.1.2.3/32"];
        let proxied = Proxied {
            weights: weights
                .iter()
                .zip([2, 3, 4])
                .map(|(range, weight)| (range.parse().unwrap(), weight))
                .collect(),
            ..Proxied::default()
        };
        for (ip, expected) in [
            ("10.1.2.3", 4),
            ("10.1.2.4", 3),
            ("10.1.9.9", 2),
            ("10.9.9.9", 1),
        ] {
            let ip = ip.parse().unwrap();
            let weight = proxied.weight(EndpointAddr { ip, port: 80 });
            assert_eq!(weight, expected, "{ip}");
        }
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for balance in Balance::ALL {
            assert_eq!(Balance::parse(balance.as_str()), Some(balance));
        }
        for header in ProxyHeader::ALL {
            assert_eq!(ProxyHeader::parse(header.as_str()), Some(header));
        }
        assert_eq!(Balance::parse("Weighted"), None);
    }
}
