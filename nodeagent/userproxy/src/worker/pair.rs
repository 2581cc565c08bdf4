//! A client's connection and the one to its endpoint, between which data moves both ways: copied at first, and by
//! the kernel once it is much.

mod packed;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kplane_model::{EndpointAddr, ProxyConnection, ProxyStage, ServiceKey};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, getpeername, recv, send, shutdown};

use super::Owner;
use super::core::{Core, Next};
use super::pipes::Pipe;
use super::socket::reset;
use super::token::Token;
use crate::port::Port;
use crate::shares::{Link, Seat};

/// Bytes in one direction after which the kernel moves the rest.
const SPLICE_AFTER: u64 = 64 * 1024;

/// Smallest read in bytes after which the kernel moves what follows. It gains nothing for small messages (U40).
const SPLICE_FROM: usize = 16 * 1024;

/// Most calls for one direction in a step, so that one connection does not keep the thread from the rest.
const CALLS: usize = 16;

/// Time without data after which a connection ends of which one direction has ended (U11).
const HALF_OPEN: Duration = Duration::from_secs(300);

/// Data that the receiver has no room for.
enum Held {
    None,
    Bytes(Box<[u8]>, usize),
    Pipe(Pipe),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// The sender has ended; the receiver learns it once it has all data.
    Ending,
    Ended,
}

/// One direction.
struct Way {
    readable: bool,
    writable: bool,
    state: State,
    /// Whether a read must be repeated until nothing is left: the sender has ended, or the direction is plain.
    careful: bool,
    /// Whether the kernel never moves the data: the sender uses urgent data, at which a read stops short and `splice` for
    /// ever, or there were no files for a pipe.
    plain: bool,
    held: Held,
    moved: u64,
    /// Whether the kernel moves what comes next, because the last read was large.
    splices: bool,
}

/// The progress of a direction in a step.
enum Progress {
    Waits,
    Again,
}

impl Way {
    /// Starts with what the sender's socket has reported until now.
    fn new(held: Held, seen: EventFlags) -> Self {
        let mut way = Self {
            readable: false,
            writable: true,
            state: State::Open,
            careful: false,
            plain: false,
            held,
            moved: 0,
            splices: false,
        };
        way.see(seen);
        way
    }

    /// Takes note of what the sender's socket reports.
    fn see(&mut self, flags: EventFlags) {
        let ended = EventFlags::ERR | EventFlags::HUP | EventFlags::RDHUP;
        self.readable |= flags.intersects(ended | EventFlags::IN | EventFlags::PRI);
        self.plain |= flags.contains(EventFlags::PRI);
        self.careful |= self.plain || flags.intersects(ended);
    }

    /// Moves data as long as both sockets are ready. `last`: whether the other direction has ended, so that both sockets
    /// are closed when this one has.
    fn pump(
        &mut self,
        core: &mut Core,
        ends: [&OwnedFd; 2],
        counter: &AtomicU64,
        last: bool,
    ) -> rustix::io::Result<Progress> {
        let before = self.moved;
        let result = self.turns(core, ends, last);
        counter.fetch_add(self.moved - before, Relaxed);
        result
    }

    fn turns(
        &mut self,
        core: &mut Core,
        [from, to]: [&OwnedFd; 2],
        last: bool,
    ) -> rustix::io::Result<Progress> {
        for _ in 0..CALLS {
            if !self.flush(core, to)? {
                return Ok(Progress::Waits);
            }
            match self.state {
                State::Ended => return Ok(Progress::Waits),
                State::Ending => {
                    if !last {
                        // The receiver may have closed already, which its own direction shows.
                        let _ = shutdown(to, Shutdown::Write);
                    }
                    self.state = State::Ended;
                    return Ok(Progress::Waits);
                }
                State::Open if !self.readable => return Ok(Progress::Waits),
                State::Open if self.splices && !self.plain => {
                    self.splice(core, from)?;
                }
                State::Open => self.copy(core, [from, to])?,
            }
        }
        Ok(Progress::Again)
    }

    /// Sends what is held; returns whether nothing is held any more.
    fn flush(&mut self, core: &mut Core, to: &OwnedFd) -> rustix::io::Result<bool> {
        loop {
            if matches!(self.held, Held::None) {
                return Ok(true);
            }
            if !self.writable {
                return Ok(false);
            }
            let sent = match &mut self.held {
                Held::None => return Ok(true),
                Held::Bytes(bytes, at) => send(to, &bytes[*at..], SendFlags::NOSIGNAL),
                Held::Pipe(pipe) => pipe.empty(to),
            };
            match sent {
                Ok(count) => self.sent(core, count),
                Err(Errno::AGAIN) => self.writable = false,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn sent(&mut self, core: &mut Core, count: usize) {
        self.held = match std::mem::replace(&mut self.held, Held::None) {
            Held::Bytes(bytes, at) if at + count < bytes.len() => Held::Bytes(bytes, at + count),
            Held::Pipe(pipe) if pipe.held > 0 => Held::Pipe(pipe),
            Held::Pipe(pipe) => {
                core.pipes.give(pipe);
                Held::None
            }
            Held::Bytes(..) | Held::None => Held::None,
        };
    }

    /// Reads once, and sends what was read.
    fn copy(&mut self, core: &mut Core, [from, to]: [&OwnedFd; 2]) -> rustix::io::Result<()> {
        let count = match recv(from, &mut *core.buffer, RecvFlags::empty()) {
            Ok((0, _)) => {
                self.state = State::Ending;
                return Ok(());
            }
            Ok((count, _)) => count,
            Err(Errno::AGAIN) => {
                self.readable = false;
                self.careful = self.plain;
                return Ok(());
            }
            Err(Errno::INTR) => return Ok(()),
            Err(error) => return Err(error),
        };
        self.readable = count == core.buffer.len() || self.careful;
        self.moved += count as u64;
        self.splices = self.moved >= SPLICE_AFTER && count >= SPLICE_FROM;
        let data = &core.buffer[..count];
        let sent = match send(to, data, SendFlags::NOSIGNAL) {
            Ok(sent) => sent,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(error) => return Err(error),
        };
        if sent < count {
            self.held = Held::Bytes(data[sent..].into(), 0);
        }
        Ok(())
    }

    /// Moves data into a pipe, from which the next turn sends it.
    fn splice(&mut self, core: &mut Core, from: &OwnedFd) -> rustix::io::Result<()> {
        let Ok(mut pipe) = core.pipes.take() else {
            // Without files for pipes, the data is copied as before.
            self.plain = true;
            return Ok(());
        };
        match pipe.fill(from) {
            Ok(0) => self.state = State::Ending,
            Ok(count) => {
                self.moved += count as u64;
                self.splices = count >= SPLICE_FROM;
                self.held = Held::Pipe(pipe);
                return Ok(());
            }
            Err(Errno::AGAIN) => self.readable = false,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        core.pipes.give(pipe);
        Ok(())
    }
}

/// Two connections, and the data between them.
pub(super) struct Pair {
    /// The client's, and the endpoint's.
    ends: [OwnedFd; 2],
    /// To the endpoint, and to the client.
    ways: [Way; 2],
    port: Arc<Port>,
    endpoint: EndpointAddr,
    /// When the client came; `None` if an earlier proxy accepted it.
    began: Option<Instant>,
    /// The last time with data.
    touched: Instant,
    /// Its places in shares and limits.
    _places: Places,
}

/// The places of a connection in the shares of its owners, and among those between the same addresses.
type Places = (Option<Seat>, Option<Link>);

impl Pair {
    /// Joins a client's connection and one to an endpoint. `seen`: what the sockets
    /// have reported, when the client came, and the time.
    pub(super) fn new(
        ends: [OwnedFd; 2],
        port: Arc<Port>,
        endpoint: EndpointAddr,
        (seen, began, now): ([EventFlags; 2], Instant, Instant),
        places: Places,
    ) -> Self {
        Self {
            ends,
            ways: seen.map(|seen| Way::new(Held::None, seen)),
            port,
            endpoint,
            began: Some(began),
            touched: now,
            _places: places,
        }
    }

    pub(super) fn event(
        &mut self,
        core: &mut Core,
        token: Token,
        flags: EventFlags,
    ) -> Next<Owner> {
        let side = usize::from(token.number() != 0);
        let broken = EventFlags::ERR | EventFlags::HUP;
        self.ways[side].see(flags);
        self.ways[1 - side].writable |= flags.intersects(broken | EventFlags::OUT);
        self.again(core, token)
    }

    /// Moves data both ways.
    pub(super) fn again(&mut self, core: &mut Core, token: Token) -> Next<Owner> {
        self.touched = core.now;
        let half_open = self.half_open();
        let [client, endpoint] = &self.ends;
        let [there, back] = &mut self.ways;
        let counters = &self.port.counters;
        let last = back.state == State::Ended;
        let ends = [client, endpoint];
        let to_endpoint = there.pump(core, ends, &counters.to_endpoints, last);
        let last = there.state == State::Ended;
        let ends = [endpoint, client];
        let to_client = back.pump(core, ends, &counters.to_clients, last);
        match (to_endpoint, to_client) {
            (Err(_), _) | (_, Err(_)) => self.end(core, true),
            _ if self.ways.iter().all(|way| way.state == State::Ended) => self.end(core, false),
            (Ok(Progress::Again), _) | (_, Ok(Progress::Again)) => Next::Again,
            _ => {
                if self.half_open() && !half_open {
                    core.timers.add(core.now + HALF_OPEN, token);
                }
                Next::Keep
            }
        }
    }

    /// Returns the ServicePort.
    pub(super) fn key(&self) -> &ServiceKey {
        &self.port.key
    }

    /// Returns what operators see of it; `None` if the client has just gone.
    pub(super) fn shown(&self, core: &Core) -> Option<ProxyConnection> {
        let client = getpeername(&self.ends[0]).ok().flatten()?;
        Some(ProxyConnection {
            client: SocketAddr::try_from(client).ok()?,
            endpoint: self.endpoint,
            stage: if self.half_open() { ProxyStage::Closing } else { ProxyStage::Open },
            age: self.began.map(|began| core.now.duration_since(began)),
            bytes: Some([self.ways[0].moved, self.ways[1].moved]),
        })
    }

    fn half_open(&self) -> bool {
        self.ways.iter().any(|way| way.state == State::Ended)
    }

    /// Ends a connection that has moved nothing for too long.
    pub(super) fn timer(&mut self, core: &mut Core, token: Token) -> Next<Owner> {
        let most = if self.half_open() {
            HALF_OPEN.min(core.shared.tcp_idle)
        } else {
            core.shared.tcp_idle
        };
        let until = self.touched + most;
        if until > core.now {
            core.timers.add(until, token);
            return Next::Keep;
        }
        self.end(core, true)
    }

    /// Ends both connections. After an error both peers get a reset, so that neither takes the data for complete.
    fn end(&mut self, core: &mut Core, is_broken: bool) -> Next<Owner> {
        if is_broken {
            self.ends.iter().for_each(reset);
        }
        for way in &mut self.ways {
            if let Held::Pipe(pipe) = std::mem::replace(&mut way.held, Held::None) {
                core.pipes.give(pipe);
            }
        }
        self.port.closed(self.endpoint);
        core.leave();
        Next::End
    }
}
