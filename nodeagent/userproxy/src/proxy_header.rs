//! The header by which a proxy passes the client's address on: the PROXY protocol, versions 1 and 2, as
//! haproxy.org's `proxy-protocol.txt` defines it.

use std::net::{IpAddr, SocketAddr};

use kplane_model::ProxyHeader;

/// The first bytes of version 2.
const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";

/// Version 2, command PROXY.
const PROXY: u8 = 0x21;

/// Returns the header of a connection of a client to `to`, the address that the client used. An IPv4 address within IPv6
/// counts as IPv4; addresses of two families are left out.
pub fn encode(version: ProxyHeader, from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let (from, to) = (plain(from), plain(to));
    match version {
        ProxyHeader::V1 => line(from, to).into_bytes(),
        ProxyHeader::V2 => binary(from, to),
    }
}

/// Returns an IPv4 address that is written as an IPv6 address as itself.
fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn line(from: SocketAddr, to: SocketAddr) -> String {
    let family = match (from, to) {
        (SocketAddr::V4(_), SocketAddr::V4(_)) => "TCP4",
        (SocketAddr::V6(_), SocketAddr::V6(_)) => "TCP6",
        _ => return "PROXY UNKNOWN\r\n".to_owned(),
    };
    let (source, destination) = (from.ip(), to.ip());
    format!(
        "PROXY {family} {source} {destination} {} {}\r\n",
        from.port(),
        to.port()
    )
}

fn binary(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let mut addresses = Vec::with_capacity(36);
    let family: u8 = match (from.ip(), to.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            addresses.extend(source.octets());
            addresses.extend(destination.octets());
            0x11
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            addresses.extend(source.octets());
            addresses.extend(destination.octets());
            0x21
        }
        _ => 0,
    };
    if family != 0 {
        addresses.extend(from.port().to_be_bytes());
        addresses.extend(to.port().to_be_bytes());
    }
    let mut header = Vec::with_capacity(16 + addresses.len());
    header.extend(SIGNATURE);
    header.extend([PROXY, family, 0]);
    // At most 36 bytes.
    header.push(u8::try_from(addresses.len()).unwrap_or_default());
    header.extend(addresses);
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn version_1_is_a_line() {
        let header = encode(ProxyHeader::V1, at("192.0.2.1:4000"), at("10.96.0.1:80"));
        assert_eq!(header, b"PROXY TCP4 192.0.2.1 10.96.0.1 4000 80\r\n");
        let header = encode(
            ProxyHeader::V1,
            at("[2001:db8::1]:4000"),
            at("[fd00::1]:80"),
        );
        assert_eq!(header, b"PROXY TCP6 2001:db8::1 fd00::1 4000 80\r\n");
        let header = encode(ProxyHeader::V1, at("192.0.2.1:4000"), at("[fd00::1]:80"));
        assert_eq!(header, b"PROXY UNKNOWN\r\n");
    }

    #[test]
    fn version_2_is_binary() {
        let header = encode(
            ProxyHeader::V2,
            at("[::ffff:192.0.2.1]:4000"),
            at("10.96.0.1:80"),
        );
        assert_eq!(header[..12], SIGNATURE);
        assert_eq!(header[12..16], [0x21, 0x11, 0, 12]);
        assert_eq!(header[16..], [192, 0, 2, 1, 10, 96, 0, 1, 15, 160, 0, 80]);
        let header = encode(
            ProxyHeader::V2,
            at("[2001:db8::1]:4000"),
            at("[fd00::1]:80"),
        );
        assert_eq!((header[13], header[15], header.len()), (0x21, 36, 52));
    }
}
