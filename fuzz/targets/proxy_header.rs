//! Headers of the PROXY protocol: whatever the addresses are, a receiver reads the same ones.

#![no_main]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use kplane_model::ProxyHeader;
use kplane_userproxy::proxy_header;
use libfuzzer_sys::fuzz_target;

/// Longest line of version 1, with its end.
const LONGEST_LINE: usize = 107;

/// Bytes of version 2 before the addresses.
const FIXED: usize = 16;

fuzz_target!(|input: (bool, [u8; 16], u16, bool, [u8; 16], u16)| {
    let (from_v4, from, from_port, to_v4, to, to_port) = input;
    let from = SocketAddr::new(address(from_v4, from), from_port);
    let to = SocketAddr::new(address(to_v4, to), to_port);
    let plain = |at: SocketAddr| SocketAddr::new(at.ip().to_canonical(), at.port());
    let sent = (plain(from), plain(to));
    let sent = (sent.0.is_ipv4() == sent.1.is_ipv4()).then_some(sent);
    assert_eq!(line(&proxy_header(ProxyHeader::V1, from, to)), sent);
    assert_eq!(binary(&proxy_header(ProxyHeader::V2, from, to)), sent);
});

fn address(is_v4: bool, bytes: [u8; 16]) -> IpAddr {
    match is_v4 {
        true => Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]).into(),
        false => Ipv6Addr::from(bytes).into(),
    }
}

/// Reads version 1 as a receiver does.
fn line(header: &[u8]) -> Option<(SocketAddr, SocketAddr)> {
    assert!(header.len() <= LONGEST_LINE);
    let text = std::str::from_utf8(header).expect("a line of text");
    let line = text.strip_suffix("\r\n").expect("the end of the line");
    let words: Vec<&str> = line.split(' ').collect();
    let [_, family, from, to, from_port, to_port] = words[..] else {
        assert_eq!(line, "PROXY UNKNOWN");
        return None;
    };
    let at = |ip: &str, port: &str| {
        let ip: IpAddr = ip.parse().expect("an address");
        assert_eq!(family, if ip.is_ipv4() { "TCP4" } else { "TCP6" });
        SocketAddr::new(ip, port.parse().expect("a port"))
    };
    Some((at(from, from_port), at(to, to_port)))
}

/// Reads version 2 as a receiver does.
fn binary(header: &[u8]) -> Option<(SocketAddr, SocketAddr)> {
    let (fixed, rest) = header.split_at(FIXED);
    assert_eq!(&fixed[..13], b"\r\n\r\n\0\r\nQUIT\n\x21");
    let len = u16::from_be_bytes([fixed[14], fixed[15]]);
    assert_eq!(usize::from(len), rest.len());
    let size = match fixed[13] {
        0x11 => 4,
        0x21 => 16,
        family => {
            assert_eq!((family, rest.len()), (0, 0));
            return None;
        }
    };
    let ip = |bytes: &[u8]| match <[u8; 4]>::try_from(bytes) {
        Ok(bytes) => IpAddr::from(bytes),
        Err(_) => IpAddr::from(<[u8; 16]>::try_from(bytes).expect("an address")),
    };
    let port = |bytes: &[u8]| u16::from_be_bytes([bytes[0], bytes[1]]);
    let (ips, ports) = rest.split_at(2 * size);
    let from = SocketAddr::new(ip(&ips[..size]), port(&ports[..2]));
    Some((from, SocketAddr::new(ip(&ips[size..]), port(&ports[2..]))))
}
