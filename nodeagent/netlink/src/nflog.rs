//! Packets that rules log for a program (linux/netfilter/nfnetlink_log.h).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use kplane_model::{Direction, Family};
use nix::sys::socket::MsgFlags;

use super::attribute::Attribute;
use super::error::NetlinkError;
use super::message::{Message, Messages, Request};
use super::nfproto;
use super::socket::NfSocket;

/// The group to which rules log packets that NetworkPolicies deny. One program of a network namespace can have it.
pub const GROUP: u16 = 27_504;
/// Number of bytes of a packet that are logged: both headers.
pub const PACKET_BYTES: u32 = 128;

/// `NFNL_SUBSYS_ULOG << 8 | NFULNL_MSG_PACKET` and `NFULNL_MSG_CONFIG`.
const PACKET: u16 = 4 << 8;
const CONFIG: u16 = 4 << 8 | 1;
/// `enum nfulnl_attr_config`, `enum nfulnl_msg_config_cmds`.
const NFULA_CFG_CMD: u16 = 1;
const NFULNL_CFG_CMD_BIND: u8 = 1;
/// `enum nfulnl_attr_type`.
const NFULA_PAYLOAD: u16 = 9;
const NFULA_PREFIX: u16 = 10;
/// `AF_UNSPEC`.
const UNSPEC: u8 = 0;

/// `IPPROTO_TCP`, `IPPROTO_UDP`, `IPPROTO_SCTP`: protocols that begin with the ports.
const WITH_PORTS: [u8; 3] = [6, 17, 132];

/// Returns the prefix with which rules log packets that policies of a direction deny.
pub fn prefix(direction: Direction) -> &'static str {
    match direction {
        Direction::Ingress => "ingress",
        Direction::Egress => "egress",
    }
}

/// A packet that a rule logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logged {
    /// The direction of the policies that denied it.
    pub direction: Direction,
    /// The sender.
    pub source: IpAddr,
    /// The receiver.
    pub destination: IpAddr,
    /// The protocol's number.
    pub protocol: u8,
    /// Ports of the sender and the receiver, if the protocol has any and the packet is no later fragment.
    pub ports: Option<(u16, u16)>,
}

impl Logged {
    /// Reads a message; returns `None` for anything but a packet that one of kplane's rules logged.
    pub fn parse(message: Message<'_>) -> Option<Self> {
        if message.kind != PACKET {
            return None;
        }
        let attributes = message.attributes();
        let text = attributes.get(NFULA_PREFIX).and_then(Attribute::as_str)?;
        let direction = Direction::ALL.into_iter().find(|direction| prefix(*direction) == text)?;
        let packet = attributes.get(NFULA_PAYLOAD)?.payload;
        let families = Family::ALL.map(|family| (nfproto(family), family));
        let (_, family) = families.into_iter().find(|(number, _)| *number == message.family())?;
        let (source, destination, protocol, rest) = match family {
            Family::V4 => ipv4(packet)?,
            Family::V6 => ipv6(packet)?,
        };
        let ports = if WITH_PORTS.contains(&protocol) { rest.first_chunk() } else { None };
        Some(Self {
            direction,
            source,
            destination,
            protocol,
            ports: ports
                .map(|[a, b, c, d]| (u16::from_be_bytes([*a, *b]), u16::from_be_bytes([*c, *d]))),
        })
    }
}

/// Sender, receiver, protocol, and what follows the header; nothing follows in a later fragment.
type Headers<'a> = (IpAddr, IpAddr, u8, &'a [u8]);

fn ipv4(packet: &[u8]) -> Option<Headers<'_>> {
    let (header, _) = packet.split_first_chunk::<20>()?;
    let [first, .., s0, s1, s2, s3, d0, d1, d2, d3] = *header;
    let [_, _, _, _, _, _, f0, f1, _, protocol, ..] = *header;
    let length = usize::from(first & 0x0f).checked_mul(4)?;
    let is_later_fragment = u16::from_be_bytes([f0, f1]) & 0x1fff != 0;
    let rest = if is_later_fragment {
        &[]
    } else {
        packet.get(length.max(20)..).unwrap_or_default()
    };
    let address = |bytes: [u8; 4]| IpAddr::V4(Ipv4Addr::from(bytes));
    let (source, destination) = (address([s0, s1, s2, s3]), address([d0, d1, d2, d3]));
    (first >> 4 == 4).then_some((source, destination, protocol, rest))
}

/// Extension headers are not followed: such a packet has no ports.
fn ipv6(packet: &[u8]) -> Option<Headers<'_>> {
    let (header, rest) = packet.split_first_chunk::<40>()?;
    let (start, addresses) = header.split_first_chunk::<8>()?;
    let [first, _, _, _, _, _, protocol, _] = *start;
    let (source, rest_of_header) = addresses.split_first_chunk::<16>()?;
    let destination = rest_of_header.first_chunk::<16>()?;
    let address = |bytes: &[u8; 16]| IpAddr::V6(Ipv6Addr::from(*bytes));
    (first >> 4 == 6).then_some((address(source), address(destination), protocol, rest))
}

/// The socket that gets the packets of [`GROUP`], until it is closed. Reading never blocks.
#[derive(Debug)]
pub struct PacketLog(NfSocket);

impl PacketLog {
    /// Opens the socket in this thread's network namespace.
    ///
    /// # Errors
    /// [`NetlinkError`]; `EPERM` or `EBUSY` if another socket has the group, `EPERM` without `CAP_NET_ADMIN`.
    pub fn open() -> Result<Self, NetlinkError> {
        let mut socket = NfSocket::open()?;
        socket.execute(bind())?;
        Ok(Self(socket))
    }

    /// Passes on the packets of some datagrams that wait. Returns whether none was lost before the last of them.
    pub fn read(&mut self, most: usize, mut each: impl FnMut(Logged)) -> bool {
        let mut whole = true;
        for _ in 0..most {
            match self.0.receive(MsgFlags::MSG_DONTWAIT) {
                Ok(()) => Messages(&self.0.datagram).filter_map(Logged::parse).for_each(&mut each),
                Err(nix::errno::Errno::EAGAIN) => break,
                Err(_) => whole = false,
            }
        }
        whole
    }
}

fn bind() -> Request {
    let what = "bind to the log of packets";
    Request::for_resource(what, CONFIG, (UNSPEC, GROUP), |w| {
        w.u8(NFULA_CFG_CMD, NFULNL_CFG_CMD_BIND);
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn logged(family: Family, text: &str, packet: &[u8]) -> Option<Logged> {
        let request = Request::new("packet", PACKET, nfproto(family), |w| {
            w.str(NFULA_PREFIX, text);
            w.bytes(NFULA_PAYLOAD, packet);
        });
        Messages(&request.bytes).next().and_then(Logged::parse)
    }

    fn tcp_packet() -> Vec<u8> {
        let mut packet = vec![
            0x45, 0, 0, 40, 0, 1, 0x40, 0, 63, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ];
        packet.extend([0x12, 0x34, 0, 80, 0, 0, 0, 0]);
        packet
    }

    #[test]
    fn headers_of_both_families_are_read() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let expected = Logged {
            direction: Direction::Ingress,
            source: ip("10.0.0.1"),
            destination: ip("10.0.0.2"),
            protocol: 6,
            ports: Some((0x1234, 80)),
        };
        let mut packet = tcp_packet();
        assert_eq!(logged(Family::V4, "ingress", &packet), Some(expected));
        assert_eq!(logged(Family::V4, "another program's", &packet), None);
        assert_eq!(logged(Family::V6, "ingress", &packet), None);
        // A later fragment, and a header longer than the packet.
        packet[7] = 1;
        let without = Logged {
            ports: None,
            ..expected
        };
        assert_eq!(logged(Family::V4, "ingress", &packet), Some(without));
        packet[7] = 0;
        packet[0] = 0x4f;
        assert_eq!(logged(Family::V4, "ingress", &packet), Some(without));
        let mut packet = vec![0x60, 0, 0, 0, 0, 8, 17, 64];
        packet.extend("fd00::1".parse::<Ipv6Addr>().unwrap().octets());
        packet.extend("fd00::2".parse::<Ipv6Addr>().unwrap().octets());
        packet.extend([0, 53, 0x12, 0x34]);
        let expected = Logged {
            direction: Direction::Egress,
            source: ip("fd00::1"),
            destination: ip("fd00::2"),
            protocol: 17,
            ports: Some((53, 0x1234)),
        };
        assert_eq!(logged(Family::V6, "egress", &packet), Some(expected));
    }

    #[test]
    fn the_request_binds_the_group() {
        let request = bind();
        // struct nlmsghdr; AF_UNSPEC, NFNETLINK_V0, the group; NFULA_CFG_CMD with NFULNL_CFG_CMD_BIND.
        let behind = &request.bytes[16..];
        let group = GROUP.to_be_bytes();
        assert_eq!(behind[..4], [0, 0, group[0], group[1]]);
        assert_eq!(behind[4..], [5, 0, 1, 0, 1, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn rubbish_is_no_packet(bytes in prop::collection::vec(any::<u8>(), 0..160), v6: bool) {
            let family = if v6 { Family::V6 } else { Family::V4 };
            logged(family, "ingress", &bytes);
        }

        #[test]
        fn a_packet_that_is_cut_gives_no_wrong_ports(end in 0_usize..28) {
            let packet = tcp_packet();
            let cut = logged(Family::V4, "ingress", &packet[..end]);
            prop_assert_eq!(cut.is_some(), end >= 20);
            let ports = cut.and_then(|cut| cut.ports);
            prop_assert_eq!(ports, (end >= 24).then_some((0x1234, 80)));
        }
    }
}
