//! Addresses, families and protocols.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
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
    pub fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// Returns the first value for IPv4, and the second one for IPv6.
    pub fn pick<T>(self, v4: T, v6: T) -> T {
        match self {
            Self::V4 => v4,
            Self::V6 => v6,
        }
    }

    /// Returns the name as Kubernetes writes it.
    pub fn as_str(self) -> &'static str {
        self.pick("IPv4", "IPv6")
    }

    /// Returns the address that stands for all addresses of a machine: `0.0.0.0` or `::`.
    pub fn unspecified(self) -> IpAddr {
        self.pick(Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into())
    }

    /// Returns the address of a machine for its own programs: `127.0.0.1` or `::1`.
    pub fn loopback(self) -> IpAddr {
        self.pick(Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into())
    }

    /// Returns the length of an address of this family in bytes: 4 or 16.
    pub fn address_len(self) -> usize {
        self.pick(4, 16)
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
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }

    /// Returns the protocol with this IANA number, or `None` when it is not TCP, UDP or SCTP.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|p| p.number() == number)
    }

    /// Returns the name as Kubernetes writes it.
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

impl EndpointAddr {
    /// Creates it from an address, also one that is given as its bytes.
    pub fn new(ip: impl Into<IpAddr>, port: u16) -> Self {
        let ip = ip.into();
        Self { ip, port }
    }
}

impl From<SocketAddr> for EndpointAddr {
    fn from(at: SocketAddr) -> Self {
        Self::new(at.ip(), at.port())
    }
}

impl fmt::Display for EndpointAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        SocketAddr::new(self.ip, self.port).fmt(f)
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

impl FrontendAddr {
    /// Returns the protocol.
    pub fn protocol(&self) -> Protocol {
        match *self {
            Self::Address { protocol, .. } | Self::NodePort { protocol, .. } => protocol,
        }
    }
}

impl fmt::Display for FrontendAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { ip, protocol, port } => {
                write!(f, "{}/{protocol}", EndpointAddr::new(*ip, *port))
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

/// Returns the address at which a node's userspace proxy has its sockets, on `lo`. It is valid on the node only: "kp" and
/// "kplane" in ASCII, in the ranges of link-local addresses of IPv4 and of private ones of IPv6.
pub fn proxy_address(family: Family) -> IpAddr {
    family.pick(Ipv4Addr::new(169, 254, 107, 112).into(), PROXY_V6.into())
}

const PROXY_V6: Ipv6Addr = Ipv6Addr::new(0xfd6b, 0x706c, 0x616e, 0x6500, 0, 0, 0, 1);

/// Returns the reason why traffic must never be sent to an endpoint with this address, or `None` if it may. No Pod can
/// have such an address. Behind most of them are programs of the node itself, or a cloud's metadata with the node's
/// credentials (CVE-2021-25737), also in notations that wrap an IPv4 address.
pub fn refused_endpoint_ip(ip: IpAddr) -> Option<&'static str> {
    if ip.is_loopback() && LOOPBACK.load(Relaxed) {
        return None;
    }
    match ip {
        IpAddr::V4(v4) => refused_v4(v4),
        IpAddr::V6(v6) => refused_v6(v6),
    }
}

fn refused_v4(ip: Ipv4Addr) -> Option<&'static str> {
    match ip.octets() {
        [0, ..] => Some("is in 0.0.0.0/8 (this host)"),
        [127, ..] => Some("is a loopback address"),
        [169, 254, ..] => Some("is a link-local address"),
        // Azure's agent, DHCP and DNS in every network (learn.microsoft.com, "What is IP address 168.63.129.16?").
        [168, 63, 129, 16] => Some("is Azure's own address for the node"),
        [224..=239, ..] => Some("is a multicast address"),
        [255, 255, 255, 255] => Some("is the broadcast address"),
        [240..=255, ..] => Some("is in 240.0.0.0/4 (reserved)"),
        _ => None,
    }
}

fn refused_v6(ip: Ipv6Addr) -> Option<&'static str> {
    match ip.segments() {
        _ if ip.is_unspecified() => Some("is the unspecified address"),
        _ if ip.is_loopback() => Some("is a loopback address"),
        [0xfe80..=0xfebf, ..] => Some("is a link-local address"),
        [0xff00..=0xffff, ..] => Some("is a multicast address"),
        [0, 0, 0, 0, 0, 0xffff, ..] => Some("is an IPv4-mapped address"),
        // RFC 4291, 2.4: reserved, but for NAT64 (RFC 6052). IPv4-compatible and translated addresses are here.
        [0..=0xff, ..] if wrapped(ip).next().is_none() => Some("is in ::/8 (reserved)"),
        [0x2001, 0, ..] => Some("is an address of Teredo, a tunnel"),
        // Metadata, DNS and time of AWS, and metadata of Google, Oracle and Scaleway, from their documentation.
        [0xfd00, 0xec2, ..] | [0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254] => Some(CLOUD),
        [0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe] | [0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42] => {
            Some(CLOUD)
        }
        _ if ip == PROXY_V6 => Some("is the address of the node's own proxy"),
        _ if wrapped(ip).any(is_for_the_node) => Some("wraps an IPv4 address that is refused"),
        _ => None,
    }
}

const CLOUD: &str = "is an address of the cloud's own services for the node";

/// Returns whether an IPv4 address means something else on each node. Only such an address is refused when it is wrapped:
/// the other ones mean nothing behind a gateway, and look like a part of some prefixes.
fn is_for_the_node(ip: Ipv4Addr) -> bool {
    ip.is_loopback() || ip.is_link_local() || ip.octets() == [168, 63, 129, 16]
}

/// Returns the IPv4 addresses to which a gateway may translate an IPv6 address, or to which a tunnel leads: 6to4 (RFC 3056),
/// NAT64 with the well-known prefix, and with each length of the one for local use (RFC 6052, 2.2; RFC 8215).
fn wrapped(ip: Ipv6Addr) -> impl Iterator<Item = Ipv4Addr> {
    let octets = ip.octets();
    let places: &[[usize; 4]] = match ip.segments() {
        [0x2002, ..] => &[[2, 3, 4, 5]],
        [0x64, 0xff9b, 0, 0, 0, 0, ..] => &[[12, 13, 14, 15]],
        [0x64, 0xff9b, 1, ..] => &[
            [6, 7, 9, 10],
            [7, 9, 10, 11],
            [9, 10, 11, 12],
            [12, 13, 14, 15],
        ],
        _ => &[],
    };
    places.iter().map(move |at| at.map(|n| octets[n]).into())
}

/// Returns an address as a number, for arithmetic within its family.
pub fn ip_bits(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => ip.to_bits().into(),
        IpAddr::V6(ip) => ip.to_bits(),
    }
}

/// Returns the address of a number, or the family's last one if the number is too large.
pub fn ip_from_bits(family: Family, bits: u128) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(u32::try_from(bits).unwrap_or(u32::MAX).into()),
        Family::V6 => IpAddr::V6(bits.into()),
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
    fn addresses_that_no_pod_can_have_are_refused() {
        let [v4, v6] = Family::ALL.map(|family| proxy_address(family).to_string());
        for text in [
            "0.1.2.3",
            "127.0.0.1",
            "127.255.0.1",
            "169.254.169.254",
            "168.63.129.16",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::169.254.169.254",
            "::10.0.0.1",
            "::ffff:10.0.0.1",
            "::ffff:0:169.254.169.254",
            "64:ff9a::1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b::127.0.0.1",
            "64:ff9b:1::a9fe:a9fe",
            "64:ff9b:1:a9fe:a9:fe00::",
            "64:ff9b:1:a9:fe:a9fe::",
            "64:ff9b:1:0:a9:fea9:fe00:0",
            "2001:0:a9fe:a9fe::1",
            "2002:a9fe:a9fe::1",
            "2002:7f00:1::1",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "fd00:42::42",
            "fe80::1",
            "febf::1",
            "ff02::1",
            &v4,
            &v6,
        ] {
            let ip: IpAddr = text.parse().unwrap();
            assert!(refused_endpoint_ip(ip).is_some(), "{text}");
        }
    }

    #[test]
    fn addresses_that_pods_and_machines_have_are_not_refused() {
        for text in [
            "10.0.0.1",
            "1.1.1.1",
            "100.64.0.1",
            "100.100.100.200",
            "168.63.129.17",
            "fd00::1",
            "fd00:ec1::1",
            "fd6b:706c:616e:6500::2",
            "2001:db8::1",
            "2001:470::1",
            "64:ff9b::192.0.2.1",
            "64:ff9b:1::192.0.2.1",
            "64:ff9b:1:fffe::192.0.2.1",
            "2002:c000:201::1",
            "fec0::1",
        ] {
            let ip: IpAddr = text.parse().unwrap();
            assert_eq!(refused_endpoint_ip(ip), None, "{text}");
        }
    }
}
