//! A `ping` that goes on: echo requests of one ICMP identifier, so the kernel counts them as one connection.

use std::io::{Error, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::libc;
use socket2::{Domain, Protocol, Socket, Type};

use crate::netns::NetNs;

/// A ping's socket. The kernel gives it an identifier, and computes the checksums.
#[derive(Debug)]
pub struct Ping {
    socket: Socket,
    kind: u8,
    sequence: u16,
}

impl Ping {
    /// Opens a ping from a namespace to an address.
    ///
    /// # Errors
    /// The kernel has no such sockets, or there is no way to the address.
    pub fn open(ns: &NetNs, to: IpAddr) -> Result<Self> {
        ns.sysctl(&[("net.ipv4.ping_group_range", "0 0")])?;
        let (domain, protocol, kind) = match to {
            IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4, 8),
            IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6, 128),
        };
        let socket = ns.run(|| {
            let socket = Socket::new(domain, Type::DGRAM, Some(protocol))?;
            socket.connect(&SocketAddr::new(to, 0).into())?;
            Ok(socket)
        });
        Ok(Self {
            socket: socket.with_context(|| format!("ping {to} from {}", ns.name()))?,
            kind,
            sequence: 0,
        })
    }

    /// Sends an echo request, and waits for its reply.
    ///
    /// # Errors
    /// No reply came in time.
    pub fn echo(&mut self, timeout: Duration) -> Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let [high, low] = self.sequence.to_be_bytes();
        // What a middle box answers to the request before is no reason to send nothing.
        let _ = self.socket.take_error();
        self.socket
            .send(&[self.kind, 0, 0, 0, 0, 0, high, low])
            .context("send an echo request")?;
        let until = Instant::now() + timeout;
        loop {
            let left =
                until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            self.socket.set_read_timeout(Some(left))?;
            let mut reply = [0_u8; 8];

            let length = std::io::Read::read(&mut &self.socket, &mut reply)
                .map_err(|error| match error.raw_os_error() {
                    Some(libc::EAGAIN) => Error::from(ErrorKind::TimedOut),
                    _ => error,
                })
                .context("receive an echo reply")?;
            if length == reply.len() && reply[6..] == [high, low] {
                return Ok(());
            }
        }
    }
}
