//! Clients of the servers of [`crate::echo`]: single probes, distributions, connections that stay
//! open.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{BufRead as _, BufReader, Error, ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::ops::Range;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use nix::libc;
use nix::sys::socket::getsockopt;
use nix::{getsockopt_impl, sockopt_impl};
use socket2::{Domain, Socket, Type};

use crate::netns::NetNs;

/// The default time that a probe waits for a connection, or for the answer to a datagram.
pub const TIMEOUT: Duration = Duration::from_secs(1);

/// Shortest time that a probe waits for the line of a server on a connection. The kernel has the connection by then: what
/// is missing is a processor for the server, and the machine may be busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Source ports of probes, below and above the node ports. A [load](crate::load) with its default pace uses each of
/// them every 16 s. Linux remembers a reset connection for 10 s (`nf_conntrack_tcp_timeout_close`), and now and then
/// sends a SYN from its port to the endpoint of that connection, which may have ended. With Linux' own choice of ports
/// a load returns to each after 5 s.
const PORTS: [Range<u16>; 2] = [10_000..30_000, 32_768..61_000];

sockopt_impl!(
    /// What the kernel knows of a connection (`TCP_INFO` in tcp(7)).
    TcpInformation,
    GetOnly,
    libc::IPPROTO_TCP,
    libc::TCP_INFO,
    TcpInfo
);

/// The first fields of `struct tcp_info` (linux/tcp.h). Its length differs between kernels; each fills as much as is asked.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TcpInfo {
    bytes: [u8; 8],
    /// From `tcpi_rto` to `tcpi_total_retrans`, the number of segments that were sent again.
    words: [u32; 24],
}

impl TcpInfo {
    fn total_retrans(&self) -> u32 {
        self.words[23]
    }
}

/// A transport that the echo servers speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP
    Tcp,
    /// UDP
    Udp,
}

impl Protocol {
    /// Returns the echo servers' transport of a Service's protocol; `None` for SCTP.
    pub fn of(protocol: kplane_model::Protocol) -> Option<Self> {
        match protocol {
            kplane_model::Protocol::Tcp => Some(Self::Tcp),
            kplane_model::Protocol::Udp => Some(Self::Udp),
            kplane_model::Protocol::Sctp => None,
        }
    }
}

/// One probe: connects (or sends a datagram) and reads the server's line. Every probe uses a fresh
/// source port.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// The address to probe.
    pub to: SocketAddr,
    /// The source address; `None` lets the kernel choose.
    pub source: Option<IpAddr>,
    /// The longest wait for the connection, or for the answer to a datagram.
    pub timeout: Duration,
    /// A connection whose first packet had to be repeated counts.
    pub repeats: bool,
}

/// The answer of a server about a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The server's name, which is the pod's.
    pub name: String,
    /// The source as the server saw it.
    pub peer: SocketAddr,
    /// The destination as the server saw it.
    pub local: SocketAddr,
    /// Time from the first packet to the line.
    pub took: Duration,
}

/// The outcome of a probe.
#[derive(Debug)]
pub enum Outcome {
    /// A server answered.
    Reply(Reply),
    /// A reset or an ICMP port unreachable came back.
    Refused,
    /// No answer within the probe's timeout, or the first packet had to be repeated.
    TimedOut,
    /// There is no route, or an ICMP host or network unreachable came back.
    Unreachable,
    /// Any other outcome.
    Other(Error),
}

/// An open TCP connection to an echo server.
#[derive(Debug)]
pub struct Session {
    stream: TcpStream,
    reply: Reply,
}

/// Repeats a call that a signal interrupts. A call with a timeout is not restarted after a handler has run
/// (signal(7)), and programs that a test of this process started end with SIGCHLD.
///
/// # Errors
/// Those of the call, but [`ErrorKind::Interrupted`].
pub fn uninterrupted<T>(mut call: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

impl Probe {
    /// Creates a TCP probe with the default [`TIMEOUT`].
    pub fn tcp(to: SocketAddr) -> Self {
        Self::new(Protocol::Tcp, to)
    }

    /// Creates a UDP probe with the default [`TIMEOUT`].
    pub fn udp(to: SocketAddr) -> Self {
        Self::new(Protocol::Udp, to)
    }

    /// Creates a probe with the default [`TIMEOUT`].
    pub fn new(protocol: Protocol, to: SocketAddr) -> Self {
        Self {
            protocol,
            to,
            source: None,
            timeout: TIMEOUT,
            repeats: false,
        }
    }

    /// Sets the source address.
    #[must_use]
    pub fn source(mut self, ip: IpAddr) -> Self {
        self.source = Some(ip);
        self
    }

    /// Sets the timeout.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Lets connections count whose first packet had to be repeated.
    #[must_use]
    pub fn repeating(self) -> Self {
        Self {
            repeats: true,
            ..self
        }
    }

    /// Probes once from a namespace.
    ///
    /// # Errors
    /// The namespace could not be entered. No other error is possible.
    pub fn once(&self, ns: &NetNs) -> Result<Outcome> {
        ns.run(|| Ok(self.here()))
    }

    /// Probes once from a namespace and requires an answer.
    ///
    /// # Errors
    /// Any other outcome.
    pub fn reply(&self, ns: &NetNs) -> Result<Reply> {
        match self.once(ns)? {
            Outcome::Reply(reply) => Ok(reply),
            other => Err(anyhow!("{self} from {}: {other}", ns.name())),
        }
    }

    /// Probes `n` times and counts the answers by server; other outcomes count as `!refused`,
    /// `!timed out` and so on ([`Outcome::label`]).
    ///
    /// # Errors
    /// The namespace could not be entered. No other error is possible.
    pub fn spread(&self, ns: &NetNs, n: usize) -> Result<BTreeMap<String, usize>> {
        ns.run(|| {
            let mut counts = BTreeMap::new();
            for _ in 0..n {
                *counts.entry(self.here().label()).or_default() += 1;
            }
            Ok(counts)
        })
    }

    /// Probes once from the calling thread's namespace.
    pub fn here(&self) -> Outcome {
        let result = match self.protocol {
            Protocol::Tcp => self.ask_tcp().map(|session| session.reply.clone()),
            Protocol::Udp => self.ask_udp(),
        };
        result.map_or_else(Outcome::from, Outcome::Reply)
    }

    /// Opens a TCP connection from a namespace and keeps it.
    ///
    /// # Errors
    /// No connection was made, or no line came on it.
    pub fn open(&self, ns: &NetNs) -> Result<Session> {
        ns.run(|| Ok(self.ask_tcp()?))
            .with_context(|| format!("{self} from {}", ns.name()))
    }

    fn ask_tcp(&self) -> Result<Session, Error> {
        let start = Instant::now();
        let socket = self.socket(Type::STREAM)?;
        // Closing resets, so that no port stays in TIME_WAIT for a minute.
        socket.set_linger(Some(Duration::ZERO))?;
        socket.connect_timeout(&self.to.into(), self.timeout)?;
        // A lost packet is a failure, and no delay. The kernel knows, while clocks show how busy the machine is, too.
        if !self.repeats && getsockopt(&socket, TcpInformation)?.total_retrans() > 0 {
            return Err(ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(self.timeout.max(PATIENCE)))?;
        let stream = TcpStream::from(socket);
        let mut line = String::new();
        // The server sends nothing unasked after the line, so no echo is lost in the buffer.
        BufReader::new(&stream).read_line(&mut line)?;
        let reply = parse(&line, start.elapsed())?;
        Ok(Session { stream, reply })
    }

    fn ask_udp(&self) -> Result<Reply, Error> {
        let start = Instant::now();
        let socket = UdpSocket::from(self.socket(Type::DGRAM)?);
        // The socket is connected, so that ICMP errors arrive.
        socket.connect(self.to)?;
        socket.set_read_timeout(Some(self.timeout))?;
        socket.send(b"?")?;
        let mut line = [0; 256];
        let len = uninterrupted(|| socket.recv(&mut line))?;
        let line = String::from_utf8_lossy(line.get(..len).unwrap_or_default());
        parse(&line, start.elapsed())
    }

    fn socket(&self, kind: Type) -> Result<Socket, Error> {
        let socket = Socket::new(Domain::for_address(self.to), kind, None)?;
        let any = match self.to {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        bind_fresh(&socket, self.source.unwrap_or(any))?;
        Ok(socket)
    }
}

/// Binds to a port that this process has used least recently. IPVS takes a SYN from the port of a closed
/// connection to the endpoint of that connection, whatever the client's affinity says by then
/// (`is_new_conn_expected` of Linux); random ports would meet such a port now and then.
fn bind_fresh(socket: &Socket, ip: IpAddr) -> Result<(), Error> {
    static USED: AtomicUsize = AtomicUsize::new(0);
    let [low, high] = PORTS;
    let mut tries = 100;
    loop {
        let used = USED.fetch_add(1, Ordering::Relaxed) % (low.len() + high.len());
        let port = low.clone().chain(high.clone()).nth(used).unwrap_or_default();
        match socket.bind(&SocketAddr::new(ip, port).into()) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && tries > 0 => tries -= 1,
            bound => return bound,
        }
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.protocol, self.to)
    }
}

impl Outcome {
    /// Returns the server's name, or another outcome with a `!` before it.
    pub fn label(&self) -> String {
        match self {
            Self::Reply(reply) => reply.name.clone(),
            other => format!("!{other}"),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reply(reply) => write!(f, "answered by {}", reply.name),
            Self::Refused => f.write_str("refused"),
            Self::TimedOut => f.write_str("timed out"),
            Self::Unreachable => f.write_str("unreachable"),
            Self::Other(error) => error.fmt(f),
        }
    }
}

impl From<Error> for Outcome {
    fn from(error: Error) -> Self {
        match error.kind() {
            ErrorKind::ConnectionRefused => Self::Refused,
            ErrorKind::TimedOut | ErrorKind::WouldBlock => Self::TimedOut,
            ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => Self::Unreachable,
            _ => Self::Other(error),
        }
    }
}

impl Session {
    /// Returns the server's answer at the start.
    pub fn reply(&self) -> &Reply {
        &self.reply
    }

    /// Sends a few bytes and waits for their echo.
    ///
    /// # Errors
    /// The connection is closed or broken, or no echo came within `timeout`.
    pub fn echo(&mut self, timeout: Duration) -> Result<()> {
        self.stream.set_read_timeout(Some(timeout))?;
        self.stream.write_all(b"ping").context("send")?;
        self.stream.read_exact(&mut [0; 4]).context("receive")
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
        })
    }
}

fn parse(line: &str, took: Duration) -> Result<Reply, Error> {
    let invalid = || Error::new(ErrorKind::InvalidData, format!("answer {line:?}"));
    let [name, peer_ip, peer_port, local_ip, local_port] =
        line.split_whitespace().collect::<Vec<_>>()[..]
    else {
        return Err(if line.is_empty() {
            Error::new(ErrorKind::UnexpectedEof, "closed without an answer")
        } else {
            invalid()
        });
    };
    let address = |ip: &str, port: &str| {
        let (ip, port) = IpAddr::from_str(ip).ok().zip(port.parse().ok())?;
        Some(SocketAddr::new(ip, port))
    };
    let reply = || {
        Some(Reply {
            name: name.to_owned(),
            peer: address(peer_ip, peer_port)?,
            local: address(local_ip, local_port)?,
            took,
        })
    };
    reply().ok_or_else(invalid)
}
