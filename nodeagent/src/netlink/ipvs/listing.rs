//! Real servers as `/proc/net/ip_vs` lists them: all at once, where netlink takes a question for
//! each virtual server. Takes any text.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use kplane_model::{EndpointAddr, Family, Protocol};

use super::ServerKey;

/// A real server as the kernel has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Real {
    /// Whose it is.
    pub server: ServerKey,
    /// Where it is.
    pub at: EndpointAddr,
    /// Packets are translated, not tunnelled or routed.
    pub translated: bool,
    /// 0 gets no new connections.
    pub weight: u32,
    /// Connections in use.
    pub active: u64,
    /// Connections that are ending, or UDP.
    pub inactive: u64,
}

/// All real servers of a family, of virtual servers known by address, protocol and port.
#[must_use]
pub fn reals(text: &str, family: Family) -> Vec<Real> {
    let mut server = None;
    let mut reals = Vec::new();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            Some("->") => {
                let real = server.and_then(|server| parse_real(server, words));
                reals.extend(real);
            }
            Some(protocol) => {
                let key = parse_key(protocol, words.next().unwrap_or_default());
                server = key.filter(|key| Family::of(key.ip) == family);
            }
            None => {}
        }
    }
    reals
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
        // A real server on the node itself is told as `Local` by some kernels.
        translated: matches!(method, "Masq" | "Local"),
        weight: words.next()?.parse().ok()?,
        active: words.next()?.parse().ok()?,
        inactive: words.next()?.parse().ok()?,
    })
}

/// `0A600001:0050`, `[fd00:0000:0000:0000:0000:0000:0000:0001]:0050`.
fn parse_place(text: &str) -> Option<EndpointAddr> {
    let (ip, port) = text.rsplit_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let ip = match ip.strip_prefix('[') {
        Some(ip) => IpAddr::from(ip.strip_suffix(']')?.parse::<Ipv6Addr>().ok()?),
        None => IpAddr::from(Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?)),
    };
    Some(EndpointAddr { ip, port })
}
