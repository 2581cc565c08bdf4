//! The sockets on which clients arrive.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use kplane_model::{FrontendAddr, Protocol, ServiceName};
use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Socket, TcpKeepalive, Type};

/// Connections that the kernel holds until a thread accepts them.
const BACKLOG: i32 = 4096;

/// Sockets for answers.
const ANSWERS: usize = 8;

/// Room for datagrams in each direction of a socket, in bytes. A client that is gone takes up to 208 KiB of it, as long as
/// the kernel looks for the client's link address.
const ROOM: usize = 4 << 20;

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
    /// UDP of all Services: further sockets for answers. What waits in one of them, for clients that are gone, does not
    /// hold up the answers of most other Services.
    answers: Vec<OwnedFd>,
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
        socket.set_tcp_keepalive(&keepalive())?;
        socket.bind(&at.into())?;
        socket.listen(BACKLOG)?;
        let at = bound(&socket, at)?;
        Ok(Self {
            id,
            role,
            at,
            socket: socket.into(),
            datagrams: Vec::new(),
            answers: Vec::new(),
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
        let mut all_answers = Vec::new();
        for _ in 0..threads.max(1) {
            let socket = datagrams(at)?;
            if at.ip().is_unspecified() {
                // Answers must come from the address that the client wanted.
                if at.is_ipv4() {
                    setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)?;
                } else {
                    setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true)?;
                }
            }
            socket.bind(&at.into())?;
            sockets.push(OwnedFd::from(socket));
            // The kernel passes a client over to the next socket that takes it. So those for answers lie between the others.
            if role == Role::Captured {
                all_answers.extend(answers(at, ANSWERS.div_ceil(threads.max(1)))?);
            }
        }
        let first = sockets[0].try_clone()?;
        Ok(Self {
            id,
            role,
            at,
            socket: first,
            datagrams: sockets,
            answers: all_answers,
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
        // Without further sockets, answers take those on which datagrams arrive.
        let count = match (role, protocol) {
            (Role::Captured, Protocol::Udp) => ANSWERS,
            _ => 0,
        };
        let answers = answers(at, count).unwrap_or_default();
        Some(Self {
            id,
            role,
            at,
            socket,
            datagrams,
            answers,
        })
    }

    pub(crate) fn protocol(&self) -> Protocol {
        if self.datagrams.is_empty() { Protocol::Tcp } else { Protocol::Udp }
    }

    /// Returns the place of the socket for a Service's answers, for clients that came to a socket of this number.
    pub(crate) fn answer_place(&self, number: usize, service: &ServiceName) -> usize {
        let mut hash = DefaultHasher::new();
        service.hash(&mut hash);
        let sockets = self.answers.len() as u64;
        let place = hash.finish().checked_rem(sockets);
        place.and_then(|place| place.try_into().ok()).unwrap_or(number)
    }

    /// Returns the socket at a place.
    pub(crate) fn answer(&self, place: usize) -> &OwnedFd {
        let place = self.answers.get(place).or(self.datagrams.get(place));
        place.unwrap_or(&self.socket)
    }

    /// Returns the numbers of the sockets for datagrams that a thread serves. After a handover there may be more
    /// or fewer sockets than threads.
    pub(crate) fn numbers(&self, thread: usize, threads: usize) -> impl Iterator<Item = usize> {
        (thread..self.datagrams.len()).step_by(threads.max(1))
    }
}

/// Gives a socket for datagrams more room, as far as the process may.
fn enlarge(socket: &Socket) {
    // The forced kind needs CAP_NET_ADMIN.
    if setsockopt(socket, sockopt::SndBufForce, &ROOM).is_err() {
        let _ = socket.set_send_buffer_size(ROOM);
    }
    if setsockopt(socket, sockopt::RcvBufForce, &ROOM).is_err() {
        let _ = socket.set_recv_buffer_size(ROOM);
    }
}

/// Opens a socket for datagrams at an address that others share.
fn datagrams(at: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(at), Type::DGRAM.nonblocking(), None)?;
    only_v6(&socket, at)?;
    socket.set_reuse_port(true)?;
    enlarge(&socket);
    Ok(socket)
}

/// Opens sockets for answers. Each is connected to itself, so that no client's datagram reaches it.
fn answers(at: SocketAddr, count: usize) -> io::Result<Vec<OwnedFd>> {
    (0..count)
        .map(|_| {
            let socket = datagrams(at)?;
            socket.bind(&at.into())?;
            socket.connect(&at.into())?;
            Ok(OwnedFd::from(socket))
        })
        .collect()
}

/// Returns when the kernel asks an end that is silent whether it is still there, and ends the connection if it is not:
/// after three minutes in all.
pub(crate) fn keepalive() -> TcpKeepalive {
    TcpKeepalive::new()
        .with_time(Duration::from_secs(120))
        .with_interval(Duration::from_secs(20))
        .with_retries(3)
}

fn only_v6(socket: &Socket, at: SocketAddr) -> io::Result<()> {
    if at.is_ipv6() { socket.set_only_v6(true) } else { Ok(()) }
}

/// Returns the address of a socket, which the kernel completes if the port is 0.
fn bound(socket: &Socket, at: SocketAddr) -> io::Result<SocketAddr> {
    Ok(socket.local_addr()?.as_socket().unwrap_or(at))
}
