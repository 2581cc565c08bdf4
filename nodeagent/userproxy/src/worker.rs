//! One thread of the data path: an epoll instance, and the connections and flows that it owns.
//!
//! Sockets of connections are registered once, edge-triggered; entries remember what is readable and writable.
//! Listeners are level-triggered, and wake one thread each time.

mod accept;
mod accepted;
mod connecting;
mod core;
mod handover;
mod pair;
mod pipes;
mod shared;
mod socket;
mod timers;
mod token;
mod udp;
mod visit;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kplane_model::Protocol;
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use slab::Slab;

use self::accept::Listener;
pub(crate) use self::accepted::Accepted;
use self::connecting::Connecting;
use self::core::{Core, Next};
use self::pair::Pair;
pub(crate) use self::shared::{Inbox, Shared};
pub use self::shared::{Origins, Transparency};
use self::token::Token;
use self::udp::{Flows, UdpListener};
pub(crate) use self::visit::{Look, Show, Visit};
use crate::handover::{Bundle, Client, Connection, FlowState};
use crate::listening::{ListenerId, Listening};
use crate::port::Port;

/// Most events that are read at once.
const EVENTS: usize = 256;

/// Time for which a thread accepts nothing when a limit is reached.
const PAUSE: Duration = Duration::from_millis(20);

/// A message to a worker.
#[derive(Debug)]
pub(crate) enum Command {
    /// Accept connections, or read datagrams, of this socket.
    Listen(Arc<Listening>),
    /// Stop doing so, and report it.
    Close(ListenerId, mpsc::Sender<()>),
    /// Serve a connection that another worker accepted.
    Adopt(Accepted),
    /// Stop to accept, and give the listeners away.
    Unlisten(mpsc::Sender<Vec<Arc<Listening>>>),
    /// Give everything else away.
    Pack(mpsc::Sender<Bundle>),
    /// Continue with a connection of an earlier proxy.
    Resume(Box<Connection>, Arc<Port>),
    /// Continue with a flow of an earlier proxy.
    ResumeFlow(Box<FlowState>, Arc<Listening>, Arc<Port>),
    /// Serve a client that an earlier proxy accepted.
    Admit(Arc<Listening>, Client),
    /// Show connections and flows.
    Visit(Visit),
    /// Cut all connections and end.
    Stop,
}

/// A descriptor's owner in the epoll instance.
enum Owner {
    /// The descriptor by which commands are announced.
    Wake,
    Listener(Listener),
    UdpListener(Box<UdpListener>),
    Connecting(Box<Connecting>),
    Pair(Box<Pair>),
}

struct Slot {
    generation: u32,
    entry: Owner,
}

/// The thread's state.
pub(crate) struct Worker {
    core: Core,
    slots: Slab<Slot>,
    flows: Flows,
    generation: u32,
    /// Connections that have work left although no event will come.
    again: Vec<Token>,
    /// The end of a pause in accepting.
    paused_until: Option<Instant>,
}

impl Worker {
    /// Creates worker number `index` of the shared state.
    pub(crate) fn new(shared: Arc<Shared>, index: usize) -> io::Result<Self> {
        let mut worker = Self {
            core: Core::new(shared, index)?,
            slots: Slab::new(),
            flows: Flows::default(),
            generation: 0,
            again: Vec::new(),
            paused_until: None,
        };
        let token = worker.insert(Owner::Wake);
        worker.core.watch_inbox(token)?;
        Ok(worker)
    }

    /// Works until it is stopped.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            events.clear();
            let timeout = self.timeout().map(timespec);
            match epoll::wait(
                &self.core.epoll,
                spare_capacity(&mut events),
                timeout.as_ref(),
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            self.core.now = Instant::now();
            for event in events.drain(..) {
                let token = Token::from(event.data.u64());
                if !self.event(token, event.flags) {
                    return Ok(());
                }
            }
            self.flows.flush();
            self.time();
            for token in std::mem::take(&mut self.again) {
                self.step(token, |entry, core| entry.again(core, token));
            }
            self.arrivals();
        }
    }

    fn timeout(&mut self) -> Option<Duration> {
        if !self.again.is_empty() {
            return Some(Duration::ZERO);
        }
        let due = [
            self.core.timers.next(),
            self.flows.next(&self.core),
            self.paused_until,
        ]
        .into_iter()
        .flatten()
        .min()?;
        Some(due.saturating_duration_since(Instant::now()))
    }

    /// Handles an event; returns false when the thread shall end.
    fn event(&mut self, token: Token, flags: epoll::EventFlags) -> bool {
        if token.is_flow() {
            self.flows.answer(&mut self.core, token);
            return true;
        }
        self.flows.flush();
        let entry = self.slots.get_mut(token.key()).map(|slot| &mut slot.entry);
        match entry {
            Some(Owner::Wake) => return self.commands(),
            Some(Owner::UdpListener(listener)) => self.flows.read(&mut self.core, listener),
            _ => self.step(token, |entry, core| entry.event(core, token, flags)),
        }
        true
    }

    /// Lets an entry take a step, unless another one has its place meanwhile.
    fn step(&mut self, token: Token, step: impl FnOnce(&mut Owner, &mut Core) -> Next<Owner>) {
        let Some(slot) = self.slots.get_mut(token.key()) else {
            return;
        };
        if slot.generation != token.generation() {
            return;
        }
        let mut next = step(&mut slot.entry, &mut self.core);
        while let Next::Become(entry) = next {
            slot.entry = entry;
            next = slot.entry.again(&mut self.core, token);
        }
        match next {
            Next::Keep | Next::Become(_) => {}
            Next::Again => self.again.push(token.side(0)),
            Next::End => drop(self.slots.remove(token.key())),
        }
    }

    fn insert(&mut self, entry: Owner) -> Token {
        self.generation = self.generation.wrapping_add(1) & Token::GENERATIONS;
        let generation = self.generation;
        Token::new(self.slots.insert(Slot { generation, entry }), generation)
    }

    /// Does what is due by now.
    fn time(&mut self) {
        while let Some(token) = self.core.timers.due(self.core.now) {
            self.step(token, |entry, core| entry.timer(core, token));
        }
        self.flows.expire(&mut self.core);
        if self.paused_until.is_some_and(|until| until <= self.core.now) {
            self.paused_until = None;
            self.core.full = false;
            self.each_listener(|core, listening, token| core.watch_listener(listening, token));
        }
    }

    /// Starts what listeners brought, and pauses them when a limit is reached.
    fn arrivals(&mut self) {
        for accepted in std::mem::take(&mut self.core.accepted) {
            self.adopt(accepted);
        }
        if self.core.full && self.paused_until.is_none() {
            self.paused_until = Some(self.core.now + PAUSE);
            self.each_listener(|core, listening, _| core.unwatch(listening));
            self.flows.shed(&mut self.core);
        }
    }

    fn adopt(&mut self, accepted: Accepted) {
        let Some(connecting) = Connecting::new(accepted, &self.core) else {
            return;
        };
        let token = self.insert(Owner::Connecting(Box::new(connecting)));
        self.step(token, |entry, core| entry.again(core, token));
    }

    fn each_listener(&mut self, act: impl Fn(&mut Core, &OwnedFd, Token) -> io::Result<()>) {
        for (key, slot) in &mut self.slots {
            if let Owner::Listener(listener) = &slot.entry {
                let token = Token::new(key, slot.generation);
                if let Err(error) = act(&mut self.core, listener.socket(), token) {
                    tracing::warn!(%error, at = %listener.at(), "a listener of the userspace proxy cannot be watched");
                }
            }
        }
    }

    /// Carries out commands; returns false when the thread shall end.
    fn commands(&mut self) -> bool {
        for command in self.core.take_commands() {
            match command {
                Command::Listen(listening) => self.listen(&listening),
                Command::Close(id, closed) => {
                    self.close(id);
                    // The caller may have stopped to wait.
                    let _ = closed.send(());
                }
                Command::Adopt(accepted) => self.adopt(accepted),
                // The receiver may have stopped to wait.
                Command::Unlisten(listeners) => drop(listeners.send(self.unlisten())),
                Command::Pack(bundles) => drop(bundles.send(self.pack())),
                Command::Resume(connection, port) => self.resume(*connection, port),
                Command::ResumeFlow(flow, listening, port) => {
                    self.resume_flow(*flow, listening, port);
                }
                Command::Admit(listening, client) => self.admit(listening, client),
                Command::Visit(visit) => self.visit(visit),
                Command::Stop => return false,
            }
        }
        true
    }

    fn listen(&mut self, listening: &Arc<Listening>) {
        let at = listening.at;
        let result = match listening.protocol() {
            Protocol::Udp => self.listen_for_datagrams(listening),
            _ => {
                let token = self.insert(Owner::Listener(Listener::new(listening.clone())));
                match self.paused_until {
                    None => self.core.watch_listener(&listening.socket, token),
                    Some(_) => Ok(()),
                }
            }
        };
        if let Err(error) = result {
            tracing::error!(%error, %at, "the userspace proxy cannot serve a socket: it cannot be watched");
        }
    }

    fn listen_for_datagrams(&mut self, listening: &Arc<Listening>) -> io::Result<()> {
        let threads = self.core.shared.inboxes.len();
        for number in listening.numbers(self.core.index, threads) {
            let listener = UdpListener::new(listening.clone(), number);
            let token = self.insert(Owner::UdpListener(Box::new(listener)));
            self.core.watch_level(&listening.datagrams[number], token)?;
        }
        Ok(())
    }

    fn close(&mut self, id: ListenerId) {
        self.flows.leave(&mut self.core, id);
        let is_closed = |slot: &Slot| slot.entry.listener().is_some_and(|(own, _)| own.id == id);
        while let Some((key, _)) = self.slots.iter().find(|(_, slot)| is_closed(slot)) {
            let slot = self.slots.remove(key);
            // Other threads still have the socket open, so that closing it here would not end its events.
            let listener = slot.entry.listener();
            let unwatched = listener.map(|(_, socket)| self.core.unwatch(socket));
            if let Some(Err(error)) = unwatched {
                tracing::debug!(%error, "a closed listener was not watched");
            }
        }
    }
}

impl Owner {
    /// Returns a listener, and its socket of this thread; `None` for other entries.
    fn listener(&self) -> Option<(&Arc<Listening>, &OwnedFd)> {
        match self {
            Self::Listener(listener) => Some((listener.listening(), listener.socket())),
            Self::UdpListener(listener) => Some((listener.listening(), listener.socket())),
            Self::Wake | Self::Connecting(_) | Self::Pair(_) => None,
        }
    }

    fn event(&mut self, core: &mut Core, token: Token, flags: epoll::EventFlags) -> Next<Self> {
        match self {
            Self::Wake | Self::UdpListener(_) => Next::Keep,
            Self::Listener(listener) => {
                listener.accept(core);
                Next::Keep
            }
            Self::Connecting(connecting) => connecting.event(core, token, flags),
            Self::Pair(pair) => pair.event(core, token, flags),
        }
    }

    fn again(&mut self, core: &mut Core, token: Token) -> Next<Self> {
        match self {
            Self::Connecting(connecting) => connecting.start(core, token),
            Self::Pair(pair) => pair.again(core, token),
            _ => Next::Keep,
        }
    }

    fn timer(&mut self, core: &mut Core, token: Token) -> Next<Self> {
        match self {
            Self::Connecting(connecting) => connecting.timer(core, token),
            Self::Pair(pair) => pair.timer(core, token),
            _ => Next::Keep,
        }
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec::try_from(time).unwrap_or(Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    })
}
