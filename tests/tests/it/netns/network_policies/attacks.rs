//! What hostile Pods try around the hook: each rule that lets a packet pass before it is known whether an end is isolated.

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kplane_model::Family;
use kplane_netlink::NfSocket;
use kplane_netlink::conntrack::AnyFlow;
use kplane_tests::capture::Capture;
use kplane_tests::client::Probe;
use kplane_tests::netns::NetNs;
use kplane_tests::wait::eventually;
use socket2::{Domain, Protocol, Socket, Type};

use super::{SILENCE, SOON, Stage, WEB, destination, policy};

/// Pods of namespace `x` may be reached by Pods with the label `app=client` of any namespace.
const CLIENTS: &str = "in x: podSelector: {}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchLabels: {app: client}}}]}]";
/// Pods of namespace `x` may be reached by nobody and reach nobody.
const NOBODY: &str = "in x: podSelector: {}, policyTypes: [Ingress, Egress]";
/// `IPPROTO_ICMPV6`.
const ICMPV6: u8 = 58;
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
        eventually(SOON, "datagrams are cut", || {
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
        eventually(SOON, "datagrams are cut again", || {
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

/// Has the kernel of a namespace forget its connections, as `conntrack -F` does.
fn forget(ns: &NetNs) -> Result<()> {
    ns.run(|| {
        let mut socket = NfSocket::open()?;
        for family in Family::ALL {
            let mut requests = Vec::new();
            socket.dump_each(AnyFlow::list(family), |message| {
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
            session.echo(SOON)?;
            forget(stage.ns("node1")?)?;
            let began = Instant::now();
            let error = session.echo(SOON).err().context("it goes on")?;
            let kind = error
                .downcast_ref::<std::io::Error>()
                .map(std::io::Error::kind);
            ensure!(
                kind == Some(ErrorKind::ConnectionReset)
                    && began.elapsed() < Duration::from_secs(2),
                "{from} to {to}, {family}: {error:#} after {:?}",
                began.elapsed()
            );
        }
    }
    stage.check("new connections", "here>a; there>svc1; c>a no")
}
