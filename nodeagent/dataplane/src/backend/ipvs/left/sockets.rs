//! Local addresses of the node's own TCP connections, as `/proc` lists them (proc(5)).

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use kplane_netlink::{Errno, NetlinkError};

/// Lists of the sockets of this thread's network namespace.
const LISTS: [&str; 2] = ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"];
/// States of sockets without a connection that could be lost: `TCP_TIME_WAIT`, `TCP_CLOSE`, `TCP_LISTEN`.
const IDLE: [&str; 3] = ["06", "07", "0A"];

/// Reads the local addresses of all TCP connections.
///
/// # Errors
/// A list could not be read. The list of a family that the kernel lacks may be missing.
pub(super) fn addresses() -> Result<HashSet<IpAddr>, NetlinkError> {
    let mut found = HashSet::new();
    for list in LISTS {
        match File::open(list).and_then(|file| read(BufReader::new(file), &mut found)) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                let errno = error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
                return Err(NetlinkError::Socket { what: list, errno });
            }
            Ok(()) => {}
        }
    }
    Ok(found)
}

/// Reads a list line by line, because it may have a million lines.
fn read(mut list: impl BufRead, found: &mut HashSet<IpAddr>) -> io::Result<()> {
    let mut line = String::new();
    while list.read_line(&mut line)? > 0 {
        found.extend(parse(&line));
        line.clear();
    }
    Ok(())
}

/// Parses the local address of a line; returns `None` for the heading.
fn parse(line: &str) -> Option<IpAddr> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let (local, _remote, state) = (words.next()?, words.next()?, words.next()?);
    let ip = address(local.split_once(':')?.0)?;
    (!IDLE.contains(&state)).then_some(ip)
}

/// Parses an address: groups of 32 bits, each printed as a number in this machine's byte order.
fn address(hex: &str) -> Option<IpAddr> {
    let group = |at: usize| {
        let digits = hex.get(at * 8..at * 8 + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    match hex.len() {
        8 => Some(Ipv4Addr::from(group(0)?).into()),
        32 => {
            let groups = [group(0)?, group(1)?, group(2)?, group(3)?];
            let mut bytes = [0; 16];
            for (to, from) in bytes.chunks_exact_mut(4).zip(groups) {
                to.copy_from_slice(&from);
            }
            // A socket of both families has IPv4 connections too.
            Some(Ipv6Addr::from(bytes).to_canonical())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_endian = "little")]
    #[test]
    fn connections_are_told_from_what_is_none() {
        let text = "  sl  local_address rem_address   st tx_queue rx_queue\n   \
            0: 0100600A:D431 01F40A0A:1F90 01 00000000:00000000\n   \
            1: 0200600A:D431 01F40A0A:1F90 06 00000000:00000000\n   \
            2: 0300600A:0050 00000000:0000 0A 00000000:00000000\n   \
            3: 0000000000000000FFFF00000400600A:0050 0:0 01 0:0\n   \
            4: 960000FD000000000000000001000000:0050 0:0 08 0:0\n   \
            5: zz:0050 0:0 01 0:0\n";
        let mut found = HashSet::new();
        read(text.as_bytes(), &mut found).unwrap();
        let wanted = ["10.96.0.1", "10.96.0.4", "fd00:96::1"];
        assert_eq!(found, wanted.map(|ip| ip.parse().unwrap()).into());
    }

    #[test]
    fn own_connections_are_found() {
        let server = std::net::TcpListener::bind("127.77.0.1:0").unwrap();
        let _client = std::net::TcpStream::connect(server.local_addr().unwrap()).unwrap();
        assert!(addresses().unwrap().contains(&IpAddr::from([127, 77, 0, 1])));
    }
}
