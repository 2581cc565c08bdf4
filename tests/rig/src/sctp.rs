//! SCTP without an SCTP stack (the test kernel has none): sends a real INIT, and checks which pod
//! receives it.

use std::collections::BTreeMap;
use std::io::{Error, ErrorKind, Read as _};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use socket2::{Domain, Protocol, Socket, Type};

use crate::capture::{Capture, Packet};
use crate::netns::NetNs;
use crate::wait::eventually;

/// IANA number of SCTP.
const SCTP: u8 = 132;
/// Bytes of a common header (12) and an INIT chunk without parameters (20).
const INIT_LEN: usize = 32;
/// Distinguishes the probes of this process; an initiate tag is never 0.
static NEXT_TAG: AtomicU32 = AtomicU32::new(1);

/// The outcome of an SCTP probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A pod received the INIT.
    Arrived(Arrival),
    /// An ICMP port unreachable came back.
    Refused,
    /// There is no route, or an ICMP host or network unreachable came back.
    Unreachable,
    /// Nothing arrived or came back in time.
    TimedOut,
}

/// An INIT as it reached a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Name of the pod's namespace.
    pub pod: String,
    /// The source as the pod saw it.
    pub src: SocketAddr,
    /// The destination as the pod saw it.
    pub dst: SocketAddr,
    /// Whether the CRC32c is correct for the packet as it arrived.
    pub checksum_valid: bool,
}

/// A capture of what reaches some pods. Opening is cheap, but to close it the kernel waits some 10
/// ms for each pod: keep it for many probes. Several threads may probe at the same time.
#[derive(Debug)]
pub struct Watch {
    captures: Vec<(String, Capture)>,
    /// The INITs that arrived and that no probe has taken yet, by initiate tag.
    arrived: Mutex<BTreeMap<u32, Arrival>>,
}

impl Watch {
    /// Begins to watch.
    ///
    /// # Errors
    /// A capture could not be opened.
    pub fn open<'a>(pods: impl IntoIterator<Item = &'a NetNs>) -> Result<Self> {
        let capture = |pod: &NetNs| Ok((pod.name().to_owned(), Capture::open(pod)?));
        Ok(Self {
            captures: pods.into_iter().map(capture).collect::<Result<_>>()?,
            arrived: Mutex::default(),
        })
    }

    /// Sends an INIT from `client` to `dst`, from a new source port. The pods do not answer it,
    /// apart from their kernel's ICMP protocol unreachable.
    ///
    /// # Errors
    /// A raw socket could not be opened or used.
    pub fn probe(&self, client: &NetNs, dst: SocketAddr, timeout: Duration) -> Result<Outcome> {
        self.probe_from(client, None, dst, timeout)
    }

    /// Sends an INIT like [`Watch::probe`], from one of the client's addresses; `None` lets the
    /// kernel choose.
    ///
    /// # Errors
    /// As [`Watch::probe`].
    pub fn probe_from(
        &self,
        client: &NetNs,
        source: Option<IpAddr>,
        dst: SocketAddr,
        timeout: Duration,
    ) -> Result<Outcome> {
        let tag = NEXT_TAG.fetch_add(1, Ordering::Relaxed);
        // Other traffic may have filled the captures since.
        drop(self.collect());
        let sent = client.run(|| Ok(send(source, dst, &init(tag, dst.port()))))?;
        let mut socket = match sent {
            Ok(socket) => socket,
            Err(error) if is_unreachable(error.kind()) => return Ok(Outcome::Unreachable),
            Err(error) => return Err(error).context("send an SCTP INIT"),
        };
        let seen = eventually(timeout, "SCTP INIT", || {
            let arrived = self.collect().remove(&tag);
            arrived
                .map(Outcome::Arrived)
                .or_else(|| icmp_error(&mut socket))
                .ok_or_else(String::new)
        });
        Ok(seen.unwrap_or(Outcome::TimedOut))
    }

    /// Takes the packets of the captures.
    fn collect(&self) -> MutexGuard<'_, BTreeMap<u32, Arrival>> {
        let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        for (pod, capture) in &self.captures {
            // A failing capture yields nothing more, which ends as a timeout.
            let packets = capture.drain().unwrap_or_default();
            arrived.extend(packets.iter().filter_map(|packet| arrival(pod, packet)));
        }
        arrived
    }
}

/// Runs one [`Watch::probe`] with a new watch.
///
/// # Errors
/// As [`Watch::open`] and [`Watch::probe`].
pub fn init_probe(
    client: &NetNs,
    pods: &[&NetNs],
    dst: SocketAddr,
    timeout: Duration,
) -> Result<Outcome> {
    Watch::open(pods.iter().copied())?.probe(client, dst, timeout)
}

/// Sends a packet by a raw socket. The socket is connected, so it gets only the ICMP errors about
/// `dst`.
fn send(source: Option<IpAddr>, dst: SocketAddr, packet: &[u8]) -> Result<Socket, Error> {
    let kind = Some(Protocol::from(i32::from(SCTP)));
    let socket = Socket::new(Domain::for_address(dst), Type::RAW, kind)?;
    socket.set_nonblocking(true)?;
    // A raw socket's addresses have no ports.
    if let Some(source) = source {
        socket.bind(&SocketAddr::new(source, 0).into())?;
    }
    socket.connect(&SocketAddr::new(dst.ip(), 0).into())?;
    socket.send(packet)?;
    Ok(socket)
}

/// Returns the INIT that a packet carries, with its initiate tag.
fn arrival(pod: &str, packet: &Packet) -> Option<(u32, Arrival)> {
    let is_init = packet.protocol == SCTP && !packet.outgoing;
    let tag = packet.payload.get(16..20).filter(|_| is_init)?;
    let arrival = Arrival {
        pod: pod.to_owned(),
        src: packet.src,
        dst: packet.dst,
        checksum_valid: is_valid(&packet.payload),
    };
    Some((u32::from_be_bytes(tag.try_into().ok()?), arrival))
}

fn icmp_error(socket: &mut Socket) -> Option<Outcome> {
    match socket.read(&mut [0; 256]) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Some(Outcome::Refused),
        Err(error) if is_unreachable(error.kind()) => Some(Outcome::Unreachable),
        _ => None,
    }
}

fn is_unreachable(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable
    )
}

/// Builds an INIT packet (RFC 9260, 3.3.2): common header, then an INIT chunk.
fn init(tag: u32, dst_port: u16) -> [u8; INIT_LEN] {
    /// Receiver window in bytes: the least the RFC allows.
    const WINDOW: u32 = 1500;
    let src_port = 32_768 | (tag & 0x7fff) as u16;
    let fields: [&[u8]; 10] = [
        &src_port.to_be_bytes(),
        &dst_port.to_be_bytes(),
        // Verification tag: 0 in a packet with an INIT. Checksum: filled in below.
        &[0; 4],
        &[0; 4],
        // INIT, no flags, length of the chunk.
        &[1, 0, 0, 20],
        &tag.to_be_bytes(),
        &WINDOW.to_be_bytes(),
        // One stream each way.
        &[0, 1],
        &[0, 1],
        // Initial TSN: any.
        &tag.to_be_bytes(),
    ];
    let mut packet = [0; INIT_LEN];
    packet.copy_from_slice(&fields.concat());
    let checksum = crc32c(&packet);
    packet[8..12].copy_from_slice(&checksum.to_le_bytes());
    packet
}

fn is_valid(packet: &[u8]) -> bool {
    let mut zeroed = packet.to_vec();
    let Some(field) = zeroed.get_mut(8..12) else {
        return false;
    };
    field.fill(0);
    packet[8..12] == crc32c(&zeroed).to_le_bytes()
}

/// Computes the CRC32c (RFC 9260, appendix A); the reflected polynomial, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            let polynomial = if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
            (crc >> 1) ^ polynomial
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_of_the_check_string() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn an_init_is_valid_and_a_changed_one_is_not() {
        let mut packet = init(7, 132);
        assert!(is_valid(&packet));
        packet[0] ^= 1;
        assert!(!is_valid(&packet));
        assert!(!is_valid(&[]));
    }
}
