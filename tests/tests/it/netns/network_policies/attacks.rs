//! What hostile Pods try around the hook: each rule that lets a packet pass before it is known whether an end is isolated.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use anyhow::{Context as _, Result, ensure};
use kplane_model::Family;
use kplane_netlink::NfSocket;
use kplane_netlink::conntrack::{AnyFlow, Selection};
use kplane_tests::capture::Capture;
use kplane_tests::client::Probe;
use kplane_tests::netns::NetNs;
use kplane_tests::wait::{DEADLINE, eventually};
use socket2::{Domain, Protocol, Socket, Type};

use super::{SILENCE, Stage, WEB, destination, policy};

/// Pods of namespace `x` may be reached by Pods with the label `app=client` of any namespace.
const CLIENTS: &str = "in x: podSelector: {}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchLabels: {app: client}}}]}]";
/// Pods of namespace `x` may be reached by nobody and reach nobody.
const NOBODY: &str = "in x: podSelector: {}, policyTypes: [Ingress, Egress]";
/// `IPPROTO_ICMPV6`.
const ICMPV6: u8 = 58;
/// `IPPROTO_UDP`.
const UDP: u8 = 17;
/// A port that no server of the world has.
const SPARE: u16 = 9999;

/// NP20: neighbour discovery is between neighbours, so a router hands none on.
pub(crate) fn np20_neighbour_discovery_is_no_tunnel() -> Result<()> {
    const SECRET: &[u8] = b"a secret";
    let mut stage = Stage::open()?;
    stage.apply(&policy("nobody", NOBODY))?;
    for (from, to) in [("c", "a"), ("here", "a"), ("a", "c"), ("a", "here")] {
        let capture = Capture::open(stage.ns(to)?)?;
        let to = destination(to, WEB, Family::V6)?;
        let to = SocketAddr::new(to.ip(), 0);
        stage.ns(from)?.run(|| {
            let socket = Socket::new(Domain::IPV6, Type::RAW, Some(Protocol::ICMPV6))?;
            socket.set_unicast_hops_v6(255)?;
            for kind in 128..=137 {
                for code in [0, 1] {
                    socket.send_to(&[&[kind, code, 0, 0], SECRET].concat(), &to.into())?;
                }
            }
            Ok(())
        })?;
        // Behind all of them, and allowed by nobody either: what is handed on was handed on by then.
        stage.check("behind the messages", "c>a/6 no; a>c/6 no; here>here")?;
        let arrived = capture.drain()?.into_iter().filter(|packet| {
            packet.protocol == ICMPV6 && !packet.outgoing && packet.payload.ends_with(SECRET)
        });
        let kinds: Vec<_> = arrived.map(|packet| packet.payload[..2].to_vec()).collect();
        ensure!(kinds.is_empty(), "{from} to {to}: {kinds:?} arrived");
    }
    // The neighbours still find each other.
    stage.check("neighbours", "node1>a/6; here>c/6; c>here/6")
}

/// A client and a server of UDP, each of which sends when it likes.
struct Datagrams {
    client: UdpSocket,
    server: UdpSocket,
}

impl Datagrams {
    fn open(stage: &Stage, from: &str, to: &str, family: Family) -> Result<Self> {
        let bind = |at: &str| {
            let address = destination(at, SPARE, family)?;
            let socket = stage.ns(at)?.run(|| Ok(UdpSocket::bind(address)?))?;
            socket.set_read_timeout(Some(SILENCE))?;
            Ok::<_, anyhow::Error>(socket)
        };
        let (client, server) = (bind(from)?, bind(to)?);
        client.connect(server.local_addr()?)?;
        server.connect(client.local_addr()?)?;
        let datagrams = Self { client, server };
        ensure!(datagrams.asks()? && datagrams.answers()?, "{from} to {to}");
        Ok(datagrams)
    }

    fn asks(&self) -> Result<bool> {
        pass(&self.client, &self.server)
    }

    fn answers(&self) -> Result<bool> {
        pass(&self.server, &self.client)
    }
}

/// Returns whether a datagram arrives.
fn pass(from: &UdpSocket, to: &UdpSocket) -> Result<bool> {
    from.send(b"datagram")?;
    match to.recv(&mut [0; 8]) {
        Ok(_) => Ok(true),
        // The kernel does not restart calls with a timeout after a signal (signal(7)).
        Err(error) if error.kind() == ErrorKind::Interrupted => pass(from, to),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            Ok(false)
        }
        Err(error) => Err(error).context("receive a datagram"),
    }
}

/// NP13: the side that may begin connections keeps none alive that the other side may not have any more; and what is allowed
/// again goes on.
pub(crate) fn np13_a_server_that_goes_on_talking_keeps_nothing_alive() -> Result<()> {
    let mut stage = Stage::open()?;
    let clients = policy("clients", CLIENTS);
    for family in Family::ALL {
        let denied = Datagrams::open(&stage, "c", "a", family)?;
        let allowed = Datagrams::open(&stage, "here", "b", family)?;
        stage.apply(&clients)?;
        eventually(DEADLINE, "datagrams are cut", || {
            ensure!(!denied.answers()?, "answers arrive");
            Ok(())
        })?;
        for _ in 0..5 {
            ensure!(!denied.answers()?, "an answer arrives");
            ensure!(!denied.asks()?, "a question arrives");
        }
        ensure!(allowed.asks()? && allowed.answers()?, "others are cut");
        stage.apply(&policy("clients", "in x: podSelector: {}, ingress: [{}]"))?;
        ensure!(denied.asks()?, "allowed again, but no question arrives");
        ensure!(denied.answers()?, "allowed again, but no answer arrives");
        stage.apply(&clients)?;
        eventually(DEADLINE, "datagrams are cut again", || {
            ensure!(!denied.answers()?, "answers arrive");
            Ok(())
        })?;
        stage.delete(&clients)?;
        ensure!(
            denied.answers()?,
            "nobody is isolated, but no answer arrives"
        );
        ensure!(
            denied.asks()?,
            "nobody is isolated, but no question arrives"
        );
    }
    Ok(())
}

/// Returns an ICMP error that quotes a datagram, with bytes behind it that a tunnel would carry.
fn error_about(from: SocketAddr, to: SocketAddr, more: &[u8]) -> Vec<u8> {
    let length = u16::try_from(8 + more.len()).unwrap_or(u16::MAX).to_be_bytes();
    let (kind, code, mut header) = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let start = [0x45, 0, 0, 64, 0, 1, 0, 0, 64, UDP, 0, 0];
            let mut header = [&start[..], &from.octets(), &to.octets()].concat();
            let sum = checksum(&header);
            header[10..12].copy_from_slice(&sum);
            (3, 3, header)
        }
        (from, to) => {
            let start = [0x60, 0, 0, 0, length[0], length[1], UDP, 64];
            let bytes = |ip: IpAddr| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                IpAddr::V6(ip) => ip.octets(),
            };
            (1, 4, [&start[..], &bytes(from), &bytes(to)].concat())
        }
    };
    let ports = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
    header.extend([&ports[..], &length, &[0, 0], more].concat());
    let mut message = [&[kind, code, 0, 0, 0, 0, 0, 0], &header[..]].concat();
    // The kernel fills in that of ICMPv6.
    let sum = checksum(&message);
    message[2..4].copy_from_slice(&sum);
    message
}

/// Returns the checksum of RFC 1071.
fn checksum(bytes: &[u8]) -> [u8; 2] {
    let words = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or_default()));
    let sum: u32 = words.sum();
    let sum = (sum >> 16) + (sum & 0xffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    u16::try_from(!sum & 0xffff).unwrap_or_default().to_be_bytes()
}

/// NP20: only errors about connections that live pass: none about one that never was, and none about one that is cut.
pub(crate) fn np20_errors_about_no_connection_are_no_tunnel() -> Result<()> {
    const SECRET: &[u8] = b"a secret";
    let mut stage = Stage::open()?;
    let clients = policy("clients", CLIENTS);
    for family in Family::ALL {
        let datagrams = Datagrams::open(&stage, "c", "a", family)?;
        let (client, server) = (
            datagrams.client.local_addr()?,
            datagrams.server.local_addr()?,
        );
        let capture = Capture::open(stage.ns("a")?)?;
        let is_reported = |stage: &Stage, of: SocketAddr| {
            capture.drain()?;
            let message = error_about(server, of, SECRET);
            let (domain, protocol) = family.pick(
                (Domain::IPV4, Protocol::ICMPV4),
                (Domain::IPV6, Protocol::ICMPV6),
            );
            stage.ns("c")?.run(|| {
                let socket = Socket::new(domain, Type::RAW, Some(protocol))?;
                let to = SocketAddr::new(server.ip(), 0);
                Ok(socket.send_to(&message, &to.into())?)
            })?;
            // What was handed on was handed on before this is answered.
            stage.check("behind the error", "here>a")?;
            let mut packets = capture.drain()?.into_iter();
            Ok::<_, anyhow::Error>(packets.any(|packet| packet.payload.ends_with(SECRET)))
        };
        ensure!(
            is_reported(&stage, client)?,
            "the error does not arrive while all is allowed"
        );
        stage.apply(&clients)?;
        eventually(DEADLINE, "datagrams are cut", || {
            ensure!(!datagrams.answers()?, "answers arrive");
            Ok(())
        })?;
        ensure!(
            !is_reported(&stage, client)?,
            "an error about a cut connection arrives"
        );
        let mut never = client;
        never.set_port(SPARE + 1);
        ensure!(
            !is_reported(&stage, never)?,
            "an error about no connection arrives"
        );
        stage.delete(&clients)?;
    }
    Ok(())
}

/// Has the kernel of a namespace forget its connections, as `conntrack -F` does.
fn forget(ns: &NetNs) -> Result<()> {
    ns.run(|| {
        let mut socket = NfSocket::open()?;
        for family in Family::ALL {
            let mut requests = Vec::new();
            socket.dump_each(Selection::Any.request(family), |message| {
                requests.extend(AnyFlow::parse(message).map(|flow| flow.delete()));
            })?;
            socket.request_all(&requests)?;
        }
        Ok(())
    })
}

/// A connection that the kernel does not know any more ends at once, on both sides, whether policies allow it or not:
/// nobody waits for nothing.
pub(crate) fn np13_a_connection_that_was_forgotten_ends_at_once() -> Result<()> {
    let mut stage = Stage::open()?;
    stage.apply(&policy("clients", CLIENTS))?;
    for (from, to) in [
        ("there", "a"),
        ("here", "a"),
        ("here", "svc1"),
        ("there", "svc1"),
    ] {
        for family in Family::ALL {
            let mut session = Probe::tcp(destination(to, WEB, family)?).open(stage.ns(from)?)?;
            session.echo(DEADLINE)?;
            forget(stage.ns("node1")?)?;
            let error = session.echo(DEADLINE).err().context("it goes on")?;
            let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
            ensure!(
                kind == Some(ErrorKind::ConnectionReset),
                "{from} to {to}, {family}: {error:#}"
            );
        }
    }
    stage.check("new connections", "here>a; there>svc1; c>a no")
}
