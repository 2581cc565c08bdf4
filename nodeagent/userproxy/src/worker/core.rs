//! The part of a worker that all entries use: its epoll instance, clock, timers and buffers.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use super::Command;
use super::accepted::Accepted;
use super::pipes::Pipes;
use super::shared::Shared;
use super::timers::Timers;
use super::token::Token;
use crate::limits::BUFFER;

/// The fate of an entry after a step.
pub(super) enum Next<E> {
    /// It waits for its next event.
    Keep,
    /// It has work left, and takes another step when the other entries had theirs.
    Again,
    /// It becomes another entry, which takes a step at once.
    Become(E),
    /// It ends.
    End,
}

/// The part of a worker that entries use.
pub(super) struct Core {
    pub(super) shared: Arc<Shared>,
    /// The worker's number.
    pub(super) index: usize,
    pub(super) epoll: OwnedFd,
    /// The time of the current events.
    pub(super) now: Instant,
    pub(super) timers: Timers,
    pub(super) buffer: Box<[u8]>,
    pub(super) pipes: Pipes,
    /// Connections that listeners brought.
    pub(super) accepted: Vec<Accepted>,
    /// Whether a limit is reached, so that no more connections are accepted for a while.
    pub(super) full: bool,
}

impl Core {
    pub(super) fn new(shared: Arc<Shared>, index: usize) -> io::Result<Self> {
        let pipes = Pipes::new(shared.pipes.clone(), shared.limits.pipes());
        Ok(Self {
            shared,
            index,
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            now: Instant::now(),
            timers: Timers::default(),
            buffer: vec![0; BUFFER].into_boxed_slice(),
            pipes,
            accepted: Vec::new(),
            full: false,
        })
    }

    /// Has the socket of a connection report all changes, once each.
    pub(super) fn watch(&self, socket: impl AsFd, token: Token) -> io::Result<()> {
        let flags =
            EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::PRI | EventFlags::ET;
        self.add(socket, token, flags)
    }

    /// Has a socket wake this thread as long as there is something to read.
    pub(super) fn watch_level(&self, socket: impl AsFd, token: Token) -> io::Result<()> {
        self.add(socket, token, EventFlags::IN)
    }

    /// Has a listener wake one of the threads that watch it for each connection.
    pub(super) fn watch_listener(&self, socket: impl AsFd, token: Token) -> io::Result<()> {
        self.add(socket, token, EventFlags::IN | EventFlags::EXCLUSIVE)
    }

    fn add(&self, socket: impl AsFd, token: Token, flags: EventFlags) -> io::Result<()> {
        Ok(epoll::add(
            &self.epoll,
            socket,
            EventData::new_u64(token.into()),
            flags,
        )?)
    }

    pub(super) fn unwatch(&self, socket: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, socket)?)
    }

    /// Watches the descriptor by which commands are announced.
    pub(super) fn watch_inbox(&self, token: Token) -> io::Result<()> {
        self.watch_level(&self.shared.inboxes[self.index].wake, token)
    }

    pub(super) fn take_commands(&self) -> Vec<Command> {
        self.shared.inboxes[self.index].take()
    }

    /// Counts a connection as this thread's own.
    pub(super) fn enter(&self) {
        self.shared.inboxes[self.index].open.fetch_add(1, Relaxed);
    }

    /// Counts the end of a connection of this thread.
    pub(super) fn leave(&self) {
        self.shared.inboxes[self.index].open.fetch_sub(1, Relaxed);
        self.shared.connections.leave();
    }
}
