//! Asking the servers of [`crate::echo`]: single probes, distributions, connections that stay open.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{BufRead as _, BufReader, Error, ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use socket2::{Domain, Socket, Type};

use crate::netns::NetNs;

/// How long a probe waits for an answer unless told otherwise: as long as TCP waits before it
/// repeats a SYN, so that a lost packet is a failure and not a delay.
pub const TIMEOUT: Duration = Duration::from_secs(1);

/// A transport that the echo servers speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP
    Tcp,
    /// UDP
    Udp,
}

/// One question: connect (or send a datagram) and read the server's line. Every time from a fresh
/// source port.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Whom to ask.
    pub to: SocketAddr,
    /// Source address, if the kernel shall not choose.
    pub source: Option<IpAddr>,
    /// How long to wait, for connecting and for the line together.
    pub timeout: Duration,
}

/// What a server said about a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The server's name: the pod's.
    pub name: String,
    /// The source as the server saw it.
    pub peer: SocketAddr,
    /// The destination as the server saw it.
    pub local: SocketAddr,
    /// From the first packet to the line.
    pub took: Duration,
}

/// How a probe ended.
#[derive(Debug)]
pub enum Outcome {
    /// A server answered.
    Reply(Reply),
    /// A reset, or an ICMP port unreachable.
    Refused,
    /// No answer within the probe's timeout.
    TimedOut,
    /// No route, or an ICMP host or network unreachable.
    Unreachable,
    /// Anything else.
    Other(Error),
}

/// An open TCP connection to an echo server.
#[derive(Debug)]
pub struct Session {
    stream: TcpStream,
    reply: Reply,
}

impl Probe {
    /// A TCP probe with the default [`TIMEOUT`].
    #[must_use]
    pub fn tcp(to: SocketAddr) -> Self {
        Self::new(Protocol::Tcp, to)
    }

    /// A UDP probe with the default [`TIMEOUT`].
    #[must_use]
    pub fn udp(to: SocketAddr) -> Self {
        Self::new(Protocol::Udp, to)
    }

    /// A probe with the default [`TIMEOUT`].
    #[must_use]
    pub fn new(protocol: Protocol, to: SocketAddr) -> Self {
        Self {
            protocol,
            to,
            source: None,
            timeout: TIMEOUT,
        }
    }

    /// With this source address.
    #[must_use]
    pub fn source(mut self, ip: IpAddr) -> Self {
        self.source = Some(ip);
        self
    }

    /// With this timeout.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Asks once from a namespace.
    ///
    /// # Errors
    /// Only that the namespace could not be entered.
    pub fn once(&self, ns: &NetNs) -> Result<Outcome> {
        ns.run(|| Ok(self.here()))
    }

    /// Asks once from a namespace and wants an answer.
    ///
    /// # Errors
    /// Any other outcome.
    pub fn reply(&self, ns: &NetNs) -> Result<Reply> {
        match self.once(ns)? {
            Outcome::Reply(reply) => Ok(reply),
            other => Err(anyhow!("{self} from {}: {other}", ns.name())),
        }
    }

    /// Asks `n` times and counts who answered; other outcomes count as `!refused`, `!timed out`
    /// and so on ([`Outcome::label`]).
    ///
    /// # Errors
    /// Only that the namespace could not be entered.
    pub fn spread(&self, ns: &NetNs, n: usize) -> Result<BTreeMap<String, usize>> {
        ns.run(|| {
            let mut counts = BTreeMap::new();
            for _ in 0..n {
                *counts.entry(self.here().label()).or_default() += 1;
            }
            Ok(counts)
        })
    }

    /// Asks once from the calling thread's namespace.
    #[must_use]
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
    /// That no connection came about, or no line on it.
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
        let left = self.timeout.saturating_sub(start.elapsed());
        // Zero would mean for ever.
        socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        let stream = TcpStream::from(socket);
        let mut line = String::new();
        // The server sends nothing after the line unasked, so that no echo is lost in the buffer.
        BufReader::new(&stream).read_line(&mut line)?;
        let reply = parse(&line, start.elapsed())?;
        Ok(Session { stream, reply })
    }

    fn ask_udp(&self) -> Result<Reply, Error> {
        let start = Instant::now();
        let socket = UdpSocket::from(self.socket(Type::DGRAM)?);
        // Connected, so that ICMP errors arrive.
        socket.connect(self.to)?;
        socket.set_read_timeout(Some(self.timeout))?;
        socket.send(b"?")?;
        let mut line = [0; 256];
        let len = socket.recv(&mut line)?;
        let line = String::from_utf8_lossy(line.get(..len).unwrap_or_default());
        parse(&line, start.elapsed())
    }

    fn socket(&self, kind: Type) -> Result<Socket, Error> {
        let socket = Socket::new(Domain::for_address(self.to), kind, None)?;
        if let Some(ip) = self.source {
            socket.bind(&SocketAddr::new(ip, 0).into())?;
        }
        Ok(socket)
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.protocol, self.to)
    }
}

impl Outcome {
    /// The server's name, or what else happened with a `!` before it.
    #[must_use]
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
    /// What the server said at the start.
    #[must_use]
    pub fn reply(&self) -> &Reply {
        &self.reply
    }

    /// Sends a few bytes and waits for their echo.
    ///
    /// # Errors
    /// The connection is closed or broken, or there is no echo within `timeout`.
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
