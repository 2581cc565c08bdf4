//! The connections of IPVS, as the kernel prints them in /proc/net/ip_vs_conn (net/netfilter/ipvs/ip_vs_conn.c).

use std::fs::File;
use std::io::{BufRead as _, BufReader, Error, ErrorKind, Read as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Instant;

use kplane_model::Protocol;
use kplane_netlink::conntrack::Stage;

/// The file, for the network namespace of the calling thread.
const FILE: &str = "/proc/thread-self/net/ip_vs_conn";
/// Longest line that is read, in bytes; the kernel's have some 170.
const LINE: u64 = 4096;

/// A connection, or a template: what persistence remembers of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Connection {
    /// The protocol; `None` = a template for all ports.
    pub(crate) protocol: Option<Protocol>,
    /// The client. A template has port 0.
    pub(crate) client: SocketAddr,
    /// The virtual server.
    pub(crate) server: SocketAddr,
    /// The real server.
    pub(crate) endpoint: SocketAddr,
    /// The part of its life.
    pub(crate) stage: Stage,
    /// Time until the kernel forgets it, in seconds.
    pub(crate) expires_s: u64,
}

impl Connection {
    /// Returns whether this is what persistence remembers.
    pub(crate) fn is_template(&self) -> bool {
        self.client.port() == 0
    }

    /// Reads a line; `None` for the headings, and for what is no connection.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let mut next = || words.next();
        let protocol = next()?.parse().ok();
        let client = at(next()?, next()?)?;
        let server = at(next()?, next()?)?;
        let endpoint = at(next()?, next()?)?;
        let stage = stage(next()?);
        Some(Self {
            protocol,
            client,
            server,
            endpoint,
            stage,
            expires_s: next()?.parse().ok()?,
        })
    }
}

/// Returns the part of a connection's life that a state names (ip_vs_proto_tcp.c, ip_vs_proto_sctp.c). UDP has one state.
fn stage(state: &str) -> Stage {
    match state {
        "TIME_WAIT" | "CLOSE" | "CLOSED" => Stage::Closed,
        "SYN_SENT" | "SYN_RECV" | "SYNACK" | "INIT1" | "INIT" | "COOKIE_SENT"
        | "COOKIE_REPLIED" | "COOKIE_WAIT" | "COOKIE" | "COOKIE_ECHOED" => Stage::Handshake,
        "FIN_WAIT" | "CLOSE_WAIT" | "LAST_ACK" | "SHUTDOWN_SENT" | "SHUTDOWN_RECEIVED"
        | "SHUTDOWN_ACK_SENT" | "REJECTED" => Stage::Closing,
        _ => Stage::Established,
    }
}

/// Reads an address and a port. IPv4 addresses are one number.
fn at(ip: &str, port: &str) -> Option<SocketAddr> {
    let ip = if ip.contains(':') {
        IpAddr::V6(ip.parse().ok()?)
    } else {
        IpAddr::V4(Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?))
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

/// Passes on each connection. Returns the number of lines, or `None` when the time was over before the end.
pub(crate) fn each(until: Instant, mut each: impl FnMut(Connection)) -> Result<Option<u64>, Error> {
    let file = File::open(FILE).map_err(|error| {
        let text = format!("cannot open {FILE}: {error}; the module ip_vs must be loaded");
        Error::new(error.kind(), text)
    })?;
    let mut file = BufReader::with_capacity(64 << 10, file);
    let (mut line, mut read) = (String::new(), 0);
    loop {
        line.clear();
        if (&mut file).take(LINE).read_line(&mut line)? == 0 {
            return Ok(Some(read));
        }
        if !line.ends_with('\n') {
            return Err(Error::new(
                ErrorKind::InvalidData,
                format!("{FILE}: a line is too long"),
            ));
        }
        read += 1;
        if let Some(connection) = Connection::parse(&line) {
            each(connection);
        }
        if read % 1024 == 0 && Instant::now() >= until {
            return Ok(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_both_families_are_read() {
        let v4 = "TCP C0A80002 D2F6 0A600001 0050 0A000005 1F90 ESTABLISHED     899\n";
        let read = Connection::parse(v4).unwrap();
        assert_eq!(read.protocol, Some(Protocol::Tcp));
        assert_eq!(read.client, "192.168.0.2:54006".parse().unwrap());
        assert_eq!(read.server, "10.96.0.1:80".parse().unwrap());
        assert_eq!(read.endpoint, "10.0.0.5:8080".parse().unwrap());
        assert_eq!(read.stage, Stage::Established);
        assert!(!read.is_template());
        assert_eq!(read.expires_s, 899);
        let v6 = "UDP fd00:0000:0000:0000:0000:0000:0000:0002 0000 fd00:0000:0000:0000:0000:0000:0000:0001 0035 \
                  fd00:0000:0000:0000:0000:0000:0000:0005 0035 NONE             12\n";
        let read = Connection::parse(v6).unwrap();
        assert!(read.is_template() && read.client.is_ipv6());
        assert_eq!((read.expires_s, read.protocol), (12, Some(Protocol::Udp)));
        for (state, stage) in [
            ("TIME_WAIT", Stage::Closed),
            ("SYN_RECV", Stage::Handshake),
            ("FIN_WAIT", Stage::Closing),
        ] {
            let line = v4.replace("ESTABLISHED", state);
            assert_eq!(Connection::parse(&line).unwrap().stage, stage, "{line}");
        }
        for wrong in [
            "Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData",
            "",
            "TCP",
            "TCP zz 0 0 0 0 0 NONE 1",
        ] {
            assert_eq!(Connection::parse(wrong), None, "{wrong}");
        }
    }
}
