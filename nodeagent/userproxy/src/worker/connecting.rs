//! A client's connection on its way to an endpoint (U52): the next endpoint at once when one refuses, another one
//! beside an endpoint that does not answer, the first answer wins.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use kplane_model::{EndpointAddr, ProxyConnection, ProxyStage, ServiceKey};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{SocketType, connect, sockopt};
use socket2::SockRef;

use super::accepted::Accepted;
use super::core::{Core, Next};
use super::pair::Pair;
use super::token::Token;
use super::{Owner, socket};
use crate::counters::Failure;
use crate::handover::Client;
use crate::listening::keepalive;
use crate::picker::{Choice, Pool};
use crate::port::Options;
use crate::shares::Link;

/// Time in which an endpoint must answer (U52).
const DEADLINE: Duration = Duration::from_secs(5);

/// Most attempts for one connection.
const ATTEMPTS: u8 = 12;

/// An attempt that is not decided.
struct Attempt {
    socket: OwnedFd,
    endpoint: EndpointAddr,
    since: Instant,
    patience: Duration,
    /// The number of its socket in the entry's tokens.
    side: u8,
    link: Link,
}

/// A client's connection, and the attempts to reach an endpoint for it.
pub(super) struct Connecting {
    accepted: Accepted,
    pool: Pool,
    options: Options,
    deadline: Instant,
    tried: Vec<EndpointAddr>,
    attempts: Vec<Attempt>,
    /// The choice for the first attempt.
    first: Option<Choice>,
    /// What the client's socket has reported.
    seen: EventFlags,
}

/// The failure of a system call on an attempt.
enum Obstacle {
    /// The endpoint cannot be reached.
    Endpoint,
    /// This process or machine lacks something.
    Own(Errno),
    /// Client and endpoint have too many connections between them.
    Limit,
}

impl From<Errno> for Obstacle {
    fn from(errno: Errno) -> Self {
        if socket::is_own(errno) { Self::Own(errno) } else { Self::Endpoint }
    }
}

impl Connecting {
    /// Chooses an endpoint for a connection; if there is none, the client gets a reset.
    pub(super) fn new(mut accepted: Accepted, core: &Core) -> Option<Self> {
        let (client, local) = (accepted.client.ip(), accepted.local.ip());
        let table = &core.shared.table;
        let (pool, first, options) = table.choose(&mut accepted.route, client, local, core.now);
        core.enter();
        if first.is_none() {
            accepted.refuse(Failure::NoEndpoint);
            core.leave();
            return None;
        }
        Some(Self {
            deadline: core.now + DEADLINE,
            accepted,
            pool,
            options,
            tried: Vec::new(),
            attempts: Vec::new(),
            first,
            seen: EventFlags::empty(),
        })
    }

    /// Gives the client's connection away, of which nothing was read. The attempts end.
    pub(super) fn pack(mut self, core: &Core) -> Option<Client> {
        let socket = self.accepted.take()?;
        // The first step of an entry has it watched.
        let _ = core.unwatch(&socket);
        core.leave();
        Some(Client {
            listener: self.accepted.listener,
            address: self.accepted.client,
            socket,
        })
    }

    /// Returns the ServicePort.
    pub(super) fn key(&self) -> &ServiceKey {
        &self.accepted.route.port.key
    }

    /// Returns what operators see of it; `None` if no endpoint is asked now.
    pub(super) fn shown(&self, core: &Core) -> Option<ProxyConnection> {
        let latest = self.attempts.last()?;
        Some(ProxyConnection {
            client: self.accepted.client,
            endpoint: latest.endpoint,
            stage: ProxyStage::Unanswered,
            age: Some(core.now.duration_since(self.accepted.at)),
            bytes: Some([0, 0]),
        })
    }

    /// Makes the first attempt.
    pub(super) fn start(&mut self, core: &mut Core, token: Token) -> Next<Owner> {
        let watched = self.accepted.socket.as_ref().map(|socket| core.watch(socket, token));
        if let Some(Err(error)) = watched {
            tracing::debug!(%error, "a connection cannot be watched");
            return self.give_up(core, Failure::Limit);
        }
        let first = self.first.take();
        self.advance(core, token, first)
    }

    /// Starts an attempt; while endpoints cannot even be asked, goes on with the next.
    fn advance(
        &mut self,
        core: &mut Core,
        token: Token,
        mut choice: Option<Choice>,
    ) -> Next<Owner> {
        while let Some(next) = choice {
            self.tried.push(next.endpoint);
            match self.attempt(core, token, next) {
                Ok(()) => return Next::Keep,
                Err(Obstacle::Own(errno)) => {
                    tracing::debug!(%errno, endpoint = %next.endpoint, "cannot connect");
                    core.full = true;
                    break;
                }
                Err(Obstacle::Limit) if self.attempts.is_empty() => {
                    return self.give_up(core, Failure::Limit);
                }
                Err(Obstacle::Limit) => return Next::Keep,
                Err(Obstacle::Endpoint) => self.accepted.route.port.failed(next.endpoint, core.now),
            }
            choice = self.another(core);
        }
        if !self.attempts.is_empty() {
            Next::Keep
        } else if core.full {
            self.give_up(core, Failure::Limit)
        } else {
            self.give_up(core, Failure::Refused)
        }
    }

    fn another(&self, core: &Core) -> Option<Choice> {
        if !self.options.retry || self.tried.len() >= usize::from(ATTEMPTS) {
            return None;
        }
        let port = &self.accepted.route.port;
        port.another(self.pool, &self.tried, core.now)
    }

    /// Starts to connect to an endpoint. The event that ends it comes in every case.
    fn attempt(&mut self, core: &mut Core, token: Token, choice: Choice) -> Result<(), Obstacle> {
        let endpoint = choice.endpoint;
        let client = self.accepted.client.ip();
        let (between, most) = (&core.shared.between, core.shared.limits.of_pair);
        let link = between.enter((client, endpoint.ip), most).ok_or(Obstacle::Limit)?;
        let source = core.shared.source(client, choice);
        let socket = outgoing(endpoint, core.shared.mark, source)?;
        // Sockets of attempts are 1..=ATTEMPTS.
        let side = u8::try_from(self.tried.len()).unwrap_or(ATTEMPTS);
        match connect(&socket, &SocketAddr::new(endpoint.ip, endpoint.port)) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(errno) => return Err(errno.into()),
        }
        let watched = core.watch(&socket, token.side(side));
        watched.map_err(|_| Obstacle::Own(Errno::NOMEM))?;
        core.timers.add((core.now + choice.patience).min(self.deadline), token);
        self.attempts.push(Attempt {
            socket,
            endpoint,
            since: core.now,
            patience: choice.patience,
            side,
            link,
        });
        Ok(())
    }

    pub(super) fn event(
        &mut self,
        core: &mut Core,
        token: Token,
        flags: EventFlags,
    ) -> Next<Owner> {
        let is_broken = flags.intersects(EventFlags::ERR | EventFlags::HUP);
        let side = token.number();
        if side == 0 {
            // What the client sends meanwhile is read later.
            self.seen |= flags;
            return if is_broken { self.end(core) } else { Next::Keep };
        }
        let Some(index) = self.attempts.iter().position(|attempt| attempt.side == side) else {
            return Next::Keep;
        };
        if is_broken {
            let attempt = self.attempts.swap_remove(index);
            self.accepted.route.port.failed(attempt.endpoint, core.now);
            let choice = self.another(core);
            return self.advance(core, token, choice);
        }
        if flags.contains(EventFlags::OUT) {
            return self.won(core, token, index, flags);
        }
        Next::Keep
    }

    /// Joins the client to the endpoint that answered. Endpoints that were asked before and still do not answer have
    /// failed if their time was over.
    fn won(
        &mut self,
        core: &mut Core,
        token: Token,
        index: usize,
        flags: EventFlags,
    ) -> Next<Owner> {
        let now = core.now;
        let winner = self.attempts.swap_remove(index);
        let port = self.accepted.route.port.clone();
        for late in self.attempts.drain(..) {
            if now.duration_since(late.since) >= late.patience {
                port.failed(late.endpoint, now);
            }
        }
        let client = self.accepted.client;
        port.answered(winner.endpoint, now.duration_since(winner.since), now);
        port.opened(
            winner.endpoint,
            client.ip(),
            now.duration_since(self.accepted.at),
            now,
        );
        let Some(socket) = self.accepted.take() else {
            return Next::End;
        };
        let ends = [socket, winner.socket];
        let seen = ([self.seen, flags], self.accepted.at, now);
        let places = (self.accepted.seat.take(), Some(winner.link));
        let pair = Pair::new(ends, port, winner.endpoint, seen, places);
        core.timers.add(now + core.shared.tcp_idle, token);
        Next::Become(Owner::Pair(Box::new(pair)))
    }

    /// Asks another endpoint beside those that do not answer, or gives up.
    pub(super) fn timer(&mut self, core: &mut Core, token: Token) -> Next<Owner> {
        if core.now >= self.deadline {
            for late in &self.attempts {
                self.accepted.route.port.failed(late.endpoint, core.now);
            }
            return self.give_up(core, Failure::Silent);
        }
        let latest = self.attempts.iter().map(|attempt| attempt.since + attempt.patience).max();
        if latest.is_some_and(|at| at > core.now) {
            return Next::Keep;
        }
        core.timers.add(self.deadline, token);
        match self.another(core) {
            Some(choice) => self.advance(core, token, Some(choice)),
            None => Next::Keep,
        }
    }

    fn give_up(&mut self, core: &Core, why: Failure) -> Next<Owner> {
        self.accepted.refuse(why);
        self.end(core)
    }

    fn end(&mut self, core: &Core) -> Next<Owner> {
        core.leave();
        Next::End
    }
}

/// Opens a socket for a connection to an endpoint.
fn outgoing(
    endpoint: EndpointAddr,
    mark: Option<u32>,
    source: Option<IpAddr>,
) -> Result<OwnedFd, Errno> {
    let socket = socket::outgoing(endpoint, SocketType::STREAM, mark, source)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    // Urgent data stays in its place. The kernel would drop it otherwise.
    sockopt::set_socket_oobinline(&socket, true)?;
    // The connection works without, too.
    let _ = SockRef::from(&socket).set_tcp_keepalive(&keepalive());
    Ok(socket)
}
