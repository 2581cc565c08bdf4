//! Addresses, families and protocols.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// An address family. Each family is an independent pipeline (behaviour Z2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both families, in the order in which they are programmed.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// Returns the family of an address.
    #[must_use]
    pub fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// Returns the name as Kubernetes writes it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }

    /// Returns the length of an address of this family in bytes: 4 or 16.
    #[must_use]
    pub fn address_len(self) -> usize {
        match self {
            Self::V4 => 4,
            Self::V6 => 16,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A transport protocol that a Service port may use (behaviour A3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP, IP protocol number 6.
    Tcp,
    /// UDP, IP protocol number 17.
    Udp,
    /// SCTP, IP protocol number 132.
    Sctp,
}

impl Protocol {
    /// All protocols.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// Returns the IANA protocol number, as found in `/etc/protocols` and in packets.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }

    /// Returns the protocol with this IANA number, or `None` when it is not TCP, UDP or SCTP.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|p| p.number() == number)
    }

    /// Returns the name as Kubernetes writes it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The error for a protocol name that is not TCP, UDP or SCTP.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown protocol {0:?}: use TCP, UDP or SCTP")]
pub struct UnknownProtocol(pub String);

impl FromStr for Protocol {
    type Err = UnknownProtocol;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|p| p.as_str() == s)
            .ok_or_else(|| UnknownProtocol(s.to_owned()))
    }
}

/// An address and a port that packets are sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointAddr {
    /// The pod's address.
    pub ip: IpAddr,
    /// The pod's port, 1..=65535.
    pub port: u16,
}

impl fmt::Display for EndpointAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::net::SocketAddr::new(self.ip, self.port).fmt(f)
    }
}

/// A place where packets for a ServicePort arrive. At most one ServicePort owns a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FrontendAddr {
    /// An address and port, wherever the packet enters.
    Address {
        /// ClusterIP, externalIP or load-balancer address.
        ip: IpAddr,
        /// The protocol.
        protocol: Protocol,
        /// The Service's port.
        port: u16,
    },
    /// A port on the node's own addresses (A21).
    NodePort {
        /// The protocol.
        protocol: Protocol,
        /// The port.
        port: u16,
    },
}

impl fmt::Display for FrontendAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { ip, protocol, port } => {
                write!(
                    f,
                    "{}/{protocol}",
                    EndpointAddr {
                        ip: *ip,
                        port: *port
                    }
                )
            }
            Self::NodePort { protocol, port } => write!(f, "node port {port}/{protocol}"),
        }
    }
}

/// The error for text that is not an IP address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an IP address")]
pub struct ParseIpError(pub String);

/// Parses an IP address as Kubernetes does (behaviour A4). IPv4 octets may have leading zeros and
/// are always decimal, never octal. An IPv4-mapped IPv6 address becomes the IPv4 address.
///
/// # Errors
/// [`ParseIpError`] with the text when it is not an address.
pub fn parse_ip(text: &str) -> Result<IpAddr, ParseIpError> {
    let error = || ParseIpError(text.to_owned());
    if text.contains(':') {
        return text
            .parse::<Ipv6Addr>()
            .map(|ip| IpAddr::V6(ip).to_canonical())
            .map_err(|_| error());
    }
    let mut octets = [0_u8; 4];
    let mut parts = text.split('.');
    for octet in &mut octets {
        let part = parts.next().ok_or_else(error)?;
        if part.is_empty() || !part.bytes().all(|b| b.is_ascii_digit()) {
            return Err(error());
        }
        *octet = part.parse().map_err(|_| error())?;
    }
    match parts.next() {
        None => Ok(IpAddr::V4(Ipv4Addr::from(octets))),
        Some(_) => Err(error()),
    }
}

/// Whether endpoints may have loopback addresses in this process.
static LOOPBACK: AtomicBool = AtomicBool::new(false);

/// Allows endpoints with loopback addresses, for the whole process. Only for an agent whose Services come from the files of
/// the user who runs it, and who has no rights that these files could abuse.
pub fn allow_loopback_endpoints() {
    LOOPBACK.store(true, Relaxed);
}

/// Returns the reason why traffic must never be sent to an endpoint with this address, or `None` if
/// it may. Loopback, link-local and multicast endpoints would reach programs on the node itself
/// (CVE-2021-25737).
#[must_use]
pub fn refused_endpoint_ip(ip: IpAddr) -> Option<&'static str> {
    if ip.is_loopback() && LOOPBACK.load(Relaxed) {
        return None;
    }
    match ip {
        IpAddr::V4(v4) => match v4.octets() {
            [0, ..] => Some("is in 0.0.0.0/8 (this host)"),
            [127, ..] => Some("is a loopback address"),
            [169, 254, ..] => Some("is a link-local address"),
            [224..=239, ..] => Some("is a multicast address"),
            [255, 255, 255, 255] => Some("is the broadcast address"),
            _ => None,
        },
        IpAddr::V6(v6) => {
            if v6.is_unspecified() {
                Some("is the unspecified address")
            } else if v6.is_loopback() {
                Some("is a loopback address")
            } else if v6.segments()[0] & 0xffc0 == 0xfe80 {
                Some("is a link-local address")
            } else if v6.is_multicast() {
                Some("is a multicast address")
            } else if v6.to_ipv4_mapped().is_some() {
                Some("is an IPv4-mapped address")
            } else {
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a4_leading_zeros_are_decimal() {
        assert_eq!(
            parse_ip("172.030.0.041").unwrap(),
            IpAddr::from([172, 30, 0, 41])
        );
        assert_eq!(
            parse_ip("::ffff:10.0.0.1").unwrap(),
            IpAddr::from([10, 0, 0, 1])
        );
    }

    #[test]
    fn text_that_is_no_address_is_refused() {
        for text in [
            "",
            "1.2.3",
            "1.2.3.4.5",
            "256.1.1.1",
            "1..2.3",
            "+1.2.3.4",
            "1.2.3.4 ",
            "::g",
            "fe80::1%eth0",
            "1.2.3.0x4",
        ] {
            assert!(parse_ip(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn endpoints_on_the_node_itself_are_refused() {
        for text in [
            "0.1.2.3",
            "127.0.0.1",
            "127.255.0.1",
            "169.254.169.254",
            "224.0.0.1",
            "239.255.255.255",
            "255.255.255.255",
            "::",
            "::1",
            "fe80::1",
            "febf::1",
            "ff02::1",
        ] {
            let ip: IpAddr = text.parse().unwrap();
            assert!(refused_endpoint_ip(ip).is_some(), "{text}");
        }
        let mapped: IpAddr = "::ffff:10.0.0.1".parse().unwrap();
        assert!(refused_endpoint_ip(mapped).is_some());
        for text in ["10.0.0.1", "1.1.1.1", "fd00::1", "2001:db8::1", "fec0::1"] {
            let ip: IpAddr = text.parse().unwrap();
            assert_eq!(refused_endpoint_ip(ip), None, "{text}");
        }
    }
}
