//! The socket at which a successor asks, and the conversation.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kplane_model::Protocol;
use nix::unistd::geteuid;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    getpeername, getsockname, listen, socket_with, sockopt,
};

use super::channel::{Channel, MOST_FDS};
use super::wire::{self, EncodedWay, Message, VERSION};
use super::{Bundle, Client, Connection, FlowState, Unsent, WayState};
use crate::listening::Listening;

/// Longest wait for the first message of a successor, which it sends at once.
const GREETING: Duration = Duration::from_secs(2);

/// Longest wait for a message of a predecessor, which may be in a large transaction with the kernel.
const PATIENCE: Duration = Duration::from_secs(30);

/// Successors that wait to be accepted.
const BACKLOG: i32 = 4;

/// A handover that did not happen.
#[derive(Debug, thiserror::Error)]
pub enum HandoverError {
    /// A system call failed, or the other process ended or was silent.
    #[error("cannot exchange messages with the other agent: {0}")]
    Io(#[from] io::Error),
    /// The other process belongs to another user.
    #[error("the other process runs as user {uid}, and not as this one")]
    Stranger {
        /// The other process' user.
        uid: u32,
    },
    /// The predecessor gives nothing.
    #[error("the running agent refused: {0}")]
    Refused(String),
    /// The other process sent something else than it should.
    #[error("the other process sent a message that has no place here")]
    Protocol,
}

impl From<Errno> for HandoverError {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// A socket at which a successor asks for a proxy's sockets and connections.
#[derive(Debug)]
pub struct HandoverListener(OwnedFd);

impl HandoverListener {
    /// Opens the socket at a path, in place of one that an earlier process left. The folder is created if it is missing.
    ///
    /// # Errors
    /// The file system's or the kernel's; `ENAMETOOLONG` for paths of more than 107 bytes.
    pub fn open(path: &Path) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        if let Some(folder) = path.parent() {
            let mut builder = std::fs::DirBuilder::new();
            builder.recursive(true).mode(0o700).create(folder)?;
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = unix_socket(SocketFlags::NONBLOCK)?;
        bind(&socket, &address)?;
        listen(&socket, BACKLOG)?;
        Ok(Self(socket))
    }

    /// Returns the next process that asks; `None` if none waits.
    ///
    /// # Errors
    /// [`HandoverError`] if the process is no successor.
    pub fn accept(&self) -> Result<Option<Successor>, HandoverError> {
        let socket = match accept_with(&self.0, SocketFlags::CLOEXEC) {
            Err(Errno::AGAIN) => return Ok(None),
            accepted => accepted?,
        };
        check_user(&socket)?;
        let mut channel = Channel::new(socket)?;
        let refused = match channel.receive(GREETING)? {
            (Message::Hello { version, .. }, _) if version != VERSION => {
                format!(
                    "it hands over in version {VERSION} of the format, and was asked for version {version}"
                )
            }
            (Message::Hello { namespace, .. }, _) if namespace != own_namespace()? => {
                "it serves another network namespace".to_owned()
            }
            (Message::Hello { .. }, _) => return Ok(Some(Successor(channel))),
            _ => return Err(HandoverError::Protocol),
        };
        channel.send(&Message::Refused(refused.clone()), &[])?;
        Err(HandoverError::Refused(refused))
    }
}

impl AsFd for HandoverListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for HandoverListener {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A successor that has asked.
#[derive(Debug)]
pub struct Successor(Channel);

impl Successor {
    /// Gives nothing, and says why.
    ///
    /// # Errors
    /// The successor has ended, or reads nothing.
    pub fn refuse(self, why: &str) -> Result<(), HandoverError> {
        Ok(self.0.send(&Message::Refused(why.to_owned()), &[])?)
    }

    /// Gives everything, and waits until the successor confirms it. If that fails, the successor has moved no data, and
    /// the bundle is still whole. May block for seconds.
    ///
    /// # Errors
    /// The bundle, and the reason.
    pub fn give(mut self, bundle: Bundle) -> Result<(), (Bundle, HandoverError)> {
        match give(&mut self.0, &bundle) {
            Ok(()) => Ok(()),
            Err(error) => Err((bundle, error)),
        }
    }
}

/// Asks the agent whose socket is at a path for everything; `None` if there is no such agent. May block for a minute.
///
/// # Errors
/// [`HandoverError`]: the other process has everything still.
pub fn ask(path: &Path) -> Result<Option<Bundle>, HandoverError> {
    let address = SocketAddrUnix::new(path)?;
    let socket = unix_socket(SocketFlags::empty())?;
    match connect(&socket, &address) {
        // The process that had the socket has ended.
        Err(Errno::NOENT | Errno::CONNREFUSED) => return Ok(None),
        connected => connected?,
    }
    check_user(&socket)?;
    let mut channel = Channel::new(socket)?;
    let hello = Message::Hello {
        version: VERSION,
        namespace: own_namespace()?,
    };
    channel.send(&hello, &[])?;
    let mut bundle = Bundle::default();
    let mut count = 0;
    loop {
        match channel.receive(PATIENCE)? {
            (Message::End(sent), _) if sent == count => break,
            (Message::Refused(why), _) => return Err(HandoverError::Refused(why)),
            (message, fds) => add(&mut bundle, message, fds).ok_or(HandoverError::Protocol)?,
        }
        count += 1;
    }
    channel.send(&Message::Taken(count), &[])?;
    Ok(Some(bundle))
}

fn unix_socket(flags: SocketFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | SocketFlags::CLOEXEC;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

fn check_user(socket: &OwnedFd) -> Result<(), HandoverError> {
    let peer = sockopt::socket_peercred(socket)?;
    let uid = peer.uid.as_raw();
    if uid == geteuid().as_raw() {
        Ok(())
    } else {
        Err(HandoverError::Stranger { uid })
    }
}

/// Returns the number of this thread's network namespace.
fn own_namespace() -> io::Result<u64> {
    Ok(std::fs::metadata("/proc/thread-self/ns/net")?.ino())
}

fn give(channel: &mut Channel, bundle: &Bundle) -> Result<(), HandoverError> {
    let mut count = 0;
    let mut send = |message: &Message, fds: &[BorrowedFd<'_>]| {
        count += 1;
        channel.send(message, fds)
    };
    for listening in &bundle.listeners {
        let fds: Vec<BorrowedFd<'_>> = if listening.datagrams.is_empty() {
            vec![listening.socket.as_fd()]
        } else {
            listening.datagrams.iter().map(AsFd::as_fd).collect()
        };
        let message = Message::Listener {
            id: listening.id,
            role: listening.role,
            at: listening.at,
            protocol: listening.protocol(),
        };
        send(&message, &fds[..fds.len().min(MOST_FDS)])?;
    }
    for connection in &bundle.connections {
        let (message, fds) = connection.message();
        send(&message, &fds)?;
    }
    for client in &bundle.clients {
        let (listener, address) = (client.listener, client.address);
        let message = Message::Client { listener, address };
        send(&message, &[client.socket.as_fd()])?;
    }
    for flow in &bundle.flows {
        let message = Message::Flow {
            listener: flow.listener,
            number: u32::try_from(flow.number).unwrap_or(u32::MAX),
            key: flow.key.clone(),
            endpoint: flow.endpoint,
            client: flow.client,
        };
        send(&message, &[flow.socket.as_fd()])?;
    }
    channel.send(&Message::End(count), &[])?;
    match channel.receive(PATIENCE)? {
        (Message::Taken(taken), _) if taken == count => Ok(()),
        _ => Err(HandoverError::Protocol),
    }
}

impl Connection {
    fn message(&self) -> (Message, Vec<BorrowedFd<'_>>) {
        let mut fds: Vec<BorrowedFd<'_>> = self.ends.iter().map(AsFd::as_fd).collect();
        for way in &self.ways {
            if let Unsent::Pipe(ends, _) = &way.unsent {
                fds.extend(ends.iter().map(AsFd::as_fd));
            }
        }
        let ways = self.ways.each_ref().map(|way| EncodedWay {
            has_ended: way.has_ended,
            is_plain: way.is_plain,
            unsent: match &way.unsent {
                Unsent::None => wire::EncodedUnsent::None,
                Unsent::Bytes(bytes) => wire::EncodedUnsent::Bytes(bytes.to_vec()),
                Unsent::Pipe(_, held) => wire::EncodedUnsent::Pipe(*held as u64),
            },
        });
        let (key, endpoint) = (self.key.clone(), self.endpoint);
        let message = Message::Connection {
            key,
            endpoint,
            ways,
        };
        (message, fds)
    }
}

/// Adds what a message brings; `None` if it has no place here, or if its descriptors are not what it says.
fn add(bundle: &mut Bundle, message: Message, fds: Vec<OwnedFd>) -> Option<()> {
    let mut fds = fds.into_iter();
    match message {
        Message::Listener {
            id,
            role,
            at,
            protocol,
        } => {
            let sockets: Vec<OwnedFd> = fds.by_ref().collect();
            let is_right = |socket: &OwnedFd| is_listener(socket, at, protocol);
            (!sockets.is_empty() && sockets.iter().all(is_right)).then_some(())?;
            let listening = Listening::inherited(id, role, at, protocol, sockets)?;
            bundle.listeners.push(Arc::new(listening));
        }
        Message::Connection {
            key,
            endpoint,
            ways,
        } => {
            let ends = [stream(fds.next()?)?, stream(fds.next()?)?];
            let [there, back] = ways;
            let ways = [received(there, &mut fds)?, received(back, &mut fds)?];
            bundle.connections.push(Connection {
                key,
                endpoint,
                ends,
                ways,
            });
        }
        Message::Client { listener, address } => bundle.clients.push(Client {
            listener,
            address,
            socket: stream(fds.next()?)?,
        }),
        Message::Flow {
            listener,
            number,
            key,
            endpoint,
            client,
        } => {
            let socket = fds.next()?;
            (sockopt::socket_type(&socket) == Ok(SocketType::DGRAM)).then_some(())?;
            getpeername(&socket).ok()?;
            bundle.flows.push(FlowState {
                listener,
                number: usize::try_from(number).ok()?,
                key,
                endpoint,
                client,
                socket,
            });
        }
        Message::Hello { .. } | Message::Refused(_) | Message::End(_) | Message::Taken(_) => {
            return None;
        }
    }
    fds.next().is_none().then_some(())
}

/// Returns a socket if it is one of a TCP connection. The peer may have reset it meanwhile.
fn stream(socket: OwnedFd) -> Option<OwnedFd> {
    let is_stream = sockopt::socket_type(&socket) == Ok(SocketType::STREAM)
        && sockopt::socket_acceptconn(&socket) == Ok(false);
    is_stream.then_some(socket)
}

fn is_listener(socket: &OwnedFd, at: SocketAddr, protocol: Protocol) -> bool {
    let kind = match protocol {
        Protocol::Tcp => SocketType::STREAM,
        Protocol::Udp => SocketType::DGRAM,
        Protocol::Sctp => return false,
    };
    let own = getsockname(socket).ok();
    let own = own.and_then(|own| SocketAddr::try_from(own).ok());
    sockopt::socket_type(socket) == Ok(kind)
        && sockopt::socket_acceptconn(socket) == Ok(protocol == Protocol::Tcp)
        && own.is_some_and(|own| (own.ip(), own.port()) == (at.ip(), at.port()))
}

/// Returns the state of a direction, with the pipe that holds its data.
fn received(way: EncodedWay, fds: &mut impl Iterator<Item = OwnedFd>) -> Option<WayState> {
    Some(WayState {
        has_ended: way.has_ended,
        is_plain: way.is_plain,
        unsent: match way.unsent {
            wire::EncodedUnsent::None => Unsent::None,
            wire::EncodedUnsent::Bytes(bytes) => Unsent::Bytes(bytes.into()),
            wire::EncodedUnsent::Pipe(held) => {
                let ends = [fds.next()?, fds.next()?];
                // A pipe that holds less would keep the connection from its end.
                let there = rustix::io::ioctl_fionread(&ends[0]).ok()?;
                (there == held).then_some(())?;
                Unsent::Pipe(ends, usize::try_from(held).ok()?)
            }
        },
    })
}
