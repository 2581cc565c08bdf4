//! Real servers as the kernel lists them: all at once in `/proc/net/ip_vs`, or those of one virtual
//! server over netlink. The parsers accept any text and any bytes.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use kplane_model::{EndpointAddr, Family, Protocol};

use super::{ATTR_DEST, FORWARD_LOCAL, FORWARD_MASK, FORWARD_MASQ, dest};
use super::{ServerKey, host_u32, parse_union};
use crate::Message;

/// A real server as the kernel has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Real {
    /// The virtual server to which it belongs.
    pub server: ServerKey,
    /// The address and port.
    pub at: EndpointAddr,
    /// Whether packets are translated, and not tunnelled or routed.
    pub translated: bool,
    /// The weight; with 0 the server gets no new connections.
    pub weight: u32,
    /// The number of connections in use.
    pub active: u64,
    /// The number of connections that are ending, and of UDP flows.
    pub inactive: u64,
}

impl Real {
    /// Reads one message of the list of a virtual server's real servers.
    pub fn parse(server: ServerKey, message: Message<'_>) -> Option<Self> {
        let dest = message.attributes().get(ATTR_DEST)?.children();
        let number = |kind| dest.get(kind).and_then(host_u32);
        let ip = parse_union(Family::of(server.ip), dest.get(dest::ADDR)?)?;
        let port = u16::from_be_bytes(dest.get(dest::PORT)?.payload.try_into().ok()?);
        let method = number(dest::FWD_METHOD)? & FORWARD_MASK;
        Some(Self {
            server,
            at: EndpointAddr { ip, port },
            translated: matches!(method, FORWARD_MASQ | FORWARD_LOCAL),
            weight: number(dest::WEIGHT)?,
            active: number(dest::ACTIVE_CONNS)?.into(),
            inactive: number(dest::INACT_CONNS)?.into(),
        })
    }
}

/// A list of virtual servers that are identified by address, protocol and port, with their real
/// servers. The real servers of each listed virtual server are complete.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// The virtual servers.
    pub servers: HashSet<ServerKey>,
    /// Their real servers.
    pub reals: Vec<Real>,
}

impl Listing {
    /// Parses the part of the list that belongs to a family.
    pub fn parse(text: &str, family: Family) -> Self {
        let mut server = None;
        let mut listing = Self::default();
        for line in text.lines() {
            let mut words = line.split_ascii_whitespace();
            match words.next() {
                Some("->") => {
                    let real = server.and_then(|server| parse_real(server, words));
                    listing.reals.extend(real);
                }
                Some(protocol) => {
                    let key = parse_key(protocol, words.next().unwrap_or_default());
                    server = key.filter(|key| Family::of(key.ip) == family);
                    listing.servers.extend(server);
                }
                None => {}
            }
        }
        listing
    }
}

fn parse_key(protocol: &str, place: &str) -> Option<ServerKey> {
    let protocol = match protocol {
        "TCP" => Protocol::Tcp,
        "UDP" => Protocol::Udp,
        "SCTP" => Protocol::Sctp,
        _ => return None,
    };
    let EndpointAddr { ip, port } = parse_place(place)?;
    Some(ServerKey { ip, protocol, port })
}

fn parse_real<'a>(server: ServerKey, mut words: impl Iterator<Item = &'a str>) -> Option<Real> {
    let at = parse_place(words.next()?)?;
    let method = words.next()?;
    Some(Real {
        server,
        at,
        // Some kernels list a real server on the node itself as `Local`.
        translated: matches!(method, "Masq" | "Local"),
        weight: words.next()?.parse().ok()?,
        active: words.next()?.parse().ok()?,
        inactive: words.next()?.parse().ok()?,
    })
}

/// Reads `0A600001:0050` or `[fd00:0000:0000:0000:0000:0000:0000:0001]:0050`.
fn parse_place(text: &str) -> Option<EndpointAddr> {
    let (ip, port) = text.rsplit_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let ip = match ip.strip_prefix('[') {
        Some(ip) => IpAddr::from(ip.strip_suffix(']')?.parse::<Ipv6Addr>().ok()?),
        None => IpAddr::from(Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?)),
    };
    Some(EndpointAddr { ip, port })
}
