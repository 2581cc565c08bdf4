//! The datagrams between one client and one endpoint.

mod packed;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use kplane_model::{EndpointAddr, ProxyConnection, ProxyStage};
use nix::libc::{in_addr, in_pktinfo, in6_addr, in6_pktinfo};
use nix::sys::socket::{ControlMessage, MsgFlags, SockaddrStorage, sendmsg};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketType, connect, recv, send, sendto};

use super::super::core::Core;
use super::super::socket;
use super::super::token::Token;
use super::UdpListener;
use super::replies::Replies;
use crate::counters::Failure;
use crate::listening::Listening;
use crate::picker::{Choice, Pool};
use crate::port::Port;
use crate::shares::Seat;
use crate::table::Route;

/// Largest first datagram that is kept until the endpoint answers, in bytes: with it another endpoint is tried.
const KEPT: usize = 2048;

/// Bytes from which on a datagram is one of many, so that more are read at once.
const BULK: usize = 1000;

/// Most datagrams of one flow in a step.
const BATCH: usize = 16;

/// Whether a flow goes on.
pub(super) enum Outcome {
    Keep,
    End,
}

pub(super) struct Flow {
    pub(super) token: Token,
    pub(super) listening: Arc<Listening>,
    thread: usize,
    /// The place of the listener's socket for its answers.
    answers: usize,
    /// Its place in the shares of its Service and namespace.
    _seat: Seat,
    /// The client, and the address of this machine that the client wanted, if the socket has more than one.
    pub(super) client: (SocketAddr, Option<IpAddr>),
    socket: OwnedFd,
    pub(super) port: Arc<Port>,
    pool: Pool,
    pub(super) endpoint: EndpointAddr,
    /// The configuration of the ServicePort that the flow knows.
    version: u64,
    /// The first datagram, until the endpoint answers.
    first: Option<Box<[u8]>>,
    tried: Vec<EndpointAddr>,
    started: Instant,
    pub(super) touched: Instant,
}

impl Flow {
    /// Starts a flow with its first datagram. If there is no endpoint, the datagram is dropped.
    pub(super) fn open(
        core: &mut Core,
        token: Token,
        listener: &UdpListener,
        client: (SocketAddr, Option<IpAddr>),
        mut route: Arc<Route>,
        seat: Seat,
        bytes: &[u8],
    ) -> Option<Self> {
        let from = client.0.ip();
        let local = client.1.unwrap_or(listener.listening.at.ip());
        let table = &core.shared.table;
        let (pool, choice, options) = table.choose(&mut route, from, local, core.now);
        let port = &route.port;
        let Some(choice @ Choice { endpoint, .. }) = choice else {
            port.fail(Failure::NoEndpoint);
            super::forget(core, &listener.listening, client.0, client.1);
            return None;
        };
        let socket = match outgoing(core, from, choice, token) {
            Ok(socket) => socket,
            Err(errno) => {
                let why = if socket::is_own(errno) { Failure::Limit } else { Failure::Refused };
                port.fail(why);
                core.full |= why == Failure::Limit;
                return None;
            }
        };
        let keeps = options.retry && bytes.len() <= KEPT;
        port.opened(endpoint, from, Duration::ZERO, core.now);
        let mut flow = Self {
            token,
            listening: listener.listening.clone(),
            thread: listener.thread,
            answers: listener.listening.answer_place(listener.thread, &port.key.service),
            _seat: seat,
            client,
            socket,
            port: port.clone(),
            pool,
            endpoint,
            version: port.version(),
            first: keeps.then(|| bytes.into()),
            tried: vec![endpoint],
            started: core.now,
            touched: core.now,
        };
        // A failure shows up as an event of the socket, too.
        let _ = flow.send(core, bytes);
        Some(flow)
    }

    /// Returns what operators see of it. Without further attempts it is not known whether the endpoint has answered.
    pub(super) fn shown(&self, core: &Core) -> ProxyConnection {
        // A flow of an earlier proxy has tried nothing here.
        let is_own = !self.tried.is_empty();
        ProxyConnection {
            client: self.client.0,
            endpoint: self.endpoint,
            stage: match self.first {
                Some(_) => ProxyStage::Unanswered,
                None => ProxyStage::Open,
            },
            age: is_own.then(|| core.now.duration_since(self.started)),
            bytes: None,
        }
    }

    /// Returns whether the endpoint serves no more since the ServicePort was configured anew (F1, F2).
    pub(super) fn is_stale(&mut self) -> bool {
        let version = self.port.version();
        if version == self.version {
            return false;
        }
        self.version = version;
        !self.port.serves(self.endpoint)
    }

    /// Passes a datagram of the client on.
    pub(super) fn send(&mut self, core: &Core, bytes: &[u8]) -> Outcome {
        self.touched = core.now;
        match send(&self.socket, bytes, SendFlags::NOSIGNAL) {
            Ok(count) => {
                let counter = &self.port.counters.to_endpoints;
                counter.fetch_add(count as u64, Relaxed);
                Outcome::Keep
            }
            // The network has no room: a datagram may be lost.
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR | Errno::MSGSIZE) => Outcome::Keep,
            Err(_) => self.failed(core),
        }
    }

    /// Passes answers of the endpoint on. Small ones go together with those of other flows.
    pub(super) fn answer(&mut self, core: &mut Core, replies: &mut Replies) -> Outcome {
        for _ in 0..BATCH {
            let count = match recv(&self.socket, &mut *core.buffer, RecvFlags::empty()) {
                Ok((count, _)) => count,
                Err(Errno::AGAIN | Errno::INTR) => return Outcome::Keep,
                Err(_) => return self.failed(core),
            };
            if self.first.take().is_some() {
                let took = core.now.duration_since(self.started);
                self.port.answered(self.endpoint, took, core.now);
            }
            self.touched = core.now;
            let bytes = &core.buffer[..count];
            if count < BULK {
                self.reply_together(replies, bytes);
                return Outcome::Keep;
            }
            replies.flush();
            self.reply(bytes);
        }
        Outcome::Keep
    }

    /// Has a datagram sent to the client with others.
    fn reply_together(&self, replies: &mut Replies, bytes: &[u8]) {
        let socket = (&self.listening, self.answers);
        match self.client {
            (client, None) => replies.add(socket, client, &self.port, bytes),
            // The kernel needs the address that the client knows.
            (_, Some(_)) => self.reply(bytes),
        }
    }

    /// Sends a datagram to the client, from the address that the client knows.
    fn reply(&self, bytes: &[u8]) {
        let socket = self.listening.answer(self.answers);
        let (client, local) = self.client;
        let sent = match local {
            None => sendto(socket, bytes, SendFlags::NOSIGNAL, &client).is_ok(),
            Some(local) => send_from(socket, bytes, client, local),
        };
        let counters = &self.port.counters;
        if sent {
            counters.to_clients.fetch_add(bytes.len() as u64, Relaxed)
        } else {
            counters.lost.fetch_add(1, Relaxed)
        };
    }

    /// Sends the first datagram to another endpoint, if this one has never answered.
    fn failed(&mut self, core: &Core) -> Outcome {
        let Some(first) = self.first.take() else {
            return Outcome::End;
        };
        self.port.failed(self.endpoint, core.now);
        while let Some(choice) = self.port.another(self.pool, &self.tried, core.now) {
            self.tried.push(choice.endpoint);
            let Ok(socket) = outgoing(core, self.client.0.ip(), choice, self.token) else {
                continue;
            };
            if send(&socket, &first, SendFlags::NOSIGNAL).is_err() {
                self.port.failed(choice.endpoint, core.now);
                continue;
            }
            self.socket = socket;
            self.port.closed(self.endpoint);
            self.endpoint = choice.endpoint;
            let waited = core.now.duration_since(self.started);
            self.port.opened(self.endpoint, self.client.0.ip(), waited, core.now);
            self.first = Some(first);
            return Outcome::Keep;
        }
        self.port.fail(Failure::Refused);
        Outcome::End
    }
}

/// Opens a client's socket to an endpoint, and watches it.
fn outgoing(core: &Core, client: IpAddr, choice: Choice, token: Token) -> Result<OwnedFd, Errno> {
    let endpoint = choice.endpoint;
    let source = core.shared.source(client, choice);
    let socket = socket::outgoing(endpoint, SocketType::DGRAM, core.shared.mark, source)?;
    connect(&socket, &SocketAddr::new(endpoint.ip, endpoint.port))?;
    core.watch_level(&socket, token).map_err(|_| Errno::NOMEM)?;
    Ok(socket)
}

/// Sends a datagram from one of this machine's addresses.
fn send_from(socket: &OwnedFd, bytes: &[u8], to: SocketAddr, from: IpAddr) -> bool {
    let data = [std::io::IoSlice::new(bytes)];
    let to = SockaddrStorage::from(to);
    let fd = socket.as_raw_fd();
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    match from {
        IpAddr::V4(ip) => {
            let source = in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: in_addr {
                    s_addr: u32::from_ne_bytes(ip.octets()),
                },
                ipi_addr: in_addr { s_addr: 0 },
            };
            sendmsg(
                fd,
                &data,
                &[ControlMessage::Ipv4PacketInfo(&source)],
                flags,
                Some(&to),
            )
            .is_ok()
        }
        IpAddr::V6(ip) => {
            let source = in6_pktinfo {
                ipi6_addr: in6_addr {
                    s6_addr: ip.octets(),
                },
                ipi6_ifindex: 0,
            };
            sendmsg(
                fd,
                &data,
                &[ControlMessage::Ipv6PacketInfo(&source)],
                flags,
                Some(&to),
            )
            .is_ok()
        }
    }
}
