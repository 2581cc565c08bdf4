//! Captures every IP packet that passes the links of a namespace, as on the wire: before the
//! firewall on the way in, after it on the way out.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd as _, OwnedFd};

use anyhow::{Context as _, Result};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, socket,
};

use crate::netns::NetNs;

/// IANA numbers of the protocols that begin with two ports: TCP, UDP, SCTP.
const WITH_PORTS: [u8; 3] = [6, 17, 132];
/// `PACKET_OUTGOING` of `linux/if_packet.h`.
const OUTGOING: u8 = 4;

/// An open capture of the packets that pass after [`Capture::open`].
#[derive(Debug)]
pub struct Capture {
    socket: OwnedFd,
}

/// An IPv4 or IPv6 packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Source; port 0 where the protocol has none.
    pub src: SocketAddr,
    /// Destination; port 0 where the protocol has none.
    pub dst: SocketAddr,
    /// IANA number of the protocol after the IP header, such as 6 for TCP.
    pub protocol: u8,
    /// Whether this namespace sent the packet; otherwise it received the packet.
    pub outgoing: bool,
    /// The bytes after the IP header.
    pub payload: Vec<u8>,
}

impl Capture {
    /// Begins to capture on all links of a namespace.
    ///
    /// # Errors
    /// The socket could not be opened (`CAP_NET_RAW`).
    pub fn open(ns: &NetNs) -> Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let (family, all) = (AddressFamily::Packet, SockProtocol::EthAll);
        let socket = ns
            .run(|| Ok(socket(family, SockType::Datagram, flags, all)?))
            .with_context(|| format!("capture in {}", ns.name()))?;
        Ok(Self { socket })
    }

    /// Returns the packets captured since the last call. Packets other than IP are left out. Under
    /// heavy traffic the kernel drops what does not fit its buffer (about 200 packets).
    ///
    /// # Errors
    /// The socket failed.
    pub fn drain(&self) -> Result<Vec<Packet>> {
        let mut packets = Vec::new();
        let mut buffer = [0; 2048];
        loop {
            match recvfrom::<LinkAddr>(self.socket.as_raw_fd(), &mut buffer) {
                Ok((len, from)) => {
                    let outgoing = from.is_some_and(|link| link.pkttype() == OUTGOING);
                    let bytes = buffer.get(..len).unwrap_or(&buffer);
                    packets.extend(Packet::parse(bytes, outgoing));
                }
                Err(Errno::EAGAIN) => return Ok(packets),
                // A link that goes down reports this once.
                Err(Errno::ENETDOWN) => {}
                Err(error) => return Err(error).context("read captured packets"),
            }
        }
    }
}

impl Packet {
    fn parse(bytes: &[u8], outgoing: bool) -> Option<Self> {
        let (src, dst, protocol, payload): (IpAddr, IpAddr, _, _) = match bytes.first()? >> 4 {
            4 => {
                let src = Ipv4Addr::from(*bytes.get(12..)?.first_chunk::<4>()?);
                let dst = Ipv4Addr::from(*bytes.get(16..)?.first_chunk::<4>()?);
                let header = usize::from(bytes[0] & 15) * 4;
                (src.into(), dst.into(), bytes[9], bytes.get(header..)?)
            }
            6 => {
                let src = Ipv6Addr::from(*bytes.get(8..)?.first_chunk::<16>()?);
                let dst = Ipv6Addr::from(*bytes.get(24..)?.first_chunk::<16>()?);
                (src.into(), dst.into(), bytes[6], bytes.get(40..)?)
            }
            _ => return None,
        };
        let (src_port, dst_port) = match payload {
            &[a, b, c, d, ..] if WITH_PORTS.contains(&protocol) => {
                (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]))
            }
            _ => (0, 0),
        };
        Some(Self {
            src: SocketAddr::new(src, src_port),
            dst: SocketAddr::new(dst, dst_port),
            protocol,
            outgoing,
            payload: payload.to_vec(),
        })
    }
}
