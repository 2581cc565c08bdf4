//! The sockets on which clients arrive.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use kplane_model::{FrontendAddr, Protocol};
use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Socket, Type};

/// Connections that the kernel holds until a thread accepts them.
const BACKLOG: i32 = 4096;

/// The number of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerId(pub(crate) u64);

/// The way to find the ServicePort of what arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// All of it is for this place.
    Place(FrontendAddr),
    /// Rules of the kernel lead it here, and know the address that the client wanted.
    Captured,
}

/// A socket, or one for each thread, on which clients arrive.
#[derive(Debug)]
pub(crate) struct Listening {
    pub(crate) id: ListenerId,
    pub(crate) role: Role,
    /// The address of the socket.
    pub(crate) at: SocketAddr,
    /// TCP: the socket, which all threads watch.
    pub(crate) socket: OwnedFd,
    /// UDP: a socket for each thread. The kernel gives each client one of them.
    pub(crate) datagrams: Vec<OwnedFd>,
}

impl Listening {
    /// Opens a socket at an address.
    ///
    /// # Errors
    /// Those of `socket`, `bind` and `listen`.
    pub(crate) fn open(
        id: ListenerId,
        role: Role,
        at: SocketAddr,
        protocol: Protocol,
        threads: usize,
    ) -> io::Result<Self> {
        match protocol {
            Protocol::Tcp => Self::tcp(id, role, at),
            Protocol::Udp => Self::udp(id, role, at, threads),
            Protocol::Sctp => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the userspace proxy has no SCTP",
            )),
        }
    }

    fn tcp(id: ListenerId, role: Role, at: SocketAddr) -> io::Result<Self> {
        let socket = Socket::new(Domain::for_address(at), Type::STREAM.nonblocking(), None)?;
        only_v6(&socket, at)?;
        socket.set_reuse_address(true)?;
        // Sockets of connections inherit these.
        socket.set_tcp_nodelay(true)?;
        socket.set_out_of_band_inline(true)?;
        socket.set_keepalive(true)?;
        socket.bind(&at.into())?;
        socket.listen(BACKLOG)?;
        let at = bound(&socket, at)?;
        Ok(Self {
            id,
            role,
            at,
            socket: socket.into(),
            datagrams: Vec::new(),
        })
    }

    fn udp(id: ListenerId, role: Role, mut at: SocketAddr, threads: usize) -> io::Result<Self> {
        let mut sockets = Vec::with_capacity(threads);
        // A socket without leave to share its address finds out whether another process has it.
        let probe = Socket::new(Domain::for_address(at), Type::DGRAM, None)?;
        only_v6(&probe, at)?;
        probe.bind(&at.into())?;
        at = bound(&probe, at)?;
        drop(probe);
        for _ in 0..threads.max(1) {
            let socket = Socket::new(Domain::for_address(at), Type::DGRAM.nonblocking(), None)?;
            only_v6(&socket, at)?;
            socket.set_reuse_port(true)?;
            if at.ip().is_unspecified() {
                // Answers must come from the address that the client wanted.
                match at.is_ipv4() {
                    true => setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)?,
                    false => setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true)?,
                }
            }
            socket.bind(&at.into())?;
            sockets.push(OwnedFd::from(socket));
        }
        let first = sockets[0].try_clone()?;
        Ok(Self {
            id,
            role,
            at,
            socket: first,
            datagrams: sockets,
        })
    }

    /// Continues with the sockets of an earlier proxy, of which there is at least one.
    pub(crate) fn inherited(
        id: ListenerId,
        role: Role,
        at: SocketAddr,
        protocol: Protocol,
        sockets: Vec<OwnedFd>,
    ) -> Option<Self> {
        let (socket, datagrams) = match protocol {
            Protocol::Udp => (sockets.first()?.try_clone().ok()?, sockets),
            _ => (sockets.into_iter().next()?, Vec::new()),
        };
        Some(Self {
            id,
            role,
            at,
            socket,
            datagrams,
        })
    }

    pub(crate) fn protocol(&self) -> Protocol {
        match self.datagrams.is_empty() {
            true => Protocol::Tcp,
            false => Protocol::Udp,
        }
    }

    /// Returns the numbers of the sockets for datagrams that a thread serves. After a handover there may be more
    /// or fewer sockets than threads.
    pub(crate) fn numbers(&self, thread: usize, threads: usize) -> impl Iterator<Item = usize> {
        (thread..self.datagrams.len()).step_by(threads.max(1))
    }
}

fn only_v6(socket: &Socket, at: SocketAddr) -> io::Result<()> {
    match at.is_ipv6() {
        true => socket.set_only_v6(true),
        false => Ok(()),
    }
}

/// Returns the address of a socket, which the kernel completes if the port is 0.
fn bound(socket: &Socket, at: SocketAddr) -> io::Result<SocketAddr> {
    Ok(socket.local_addr()?.as_socket().unwrap_or(at))
}
