//! The state that the threads of the data path share.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};

use super::Command;
use crate::limits::{Gauge, Limits};
use crate::picker::Choice;
use crate::shares::Between;
use crate::table::Table;

/// What the kernel remembers about datagrams that its rules led to the proxy. `local` is the address at which the proxy
/// gets them.
pub trait Origins: Send + Sync {
    /// Returns the address that a client wanted.
    fn find(&self, client: SocketAddr, local: SocketAddr) -> Option<SocketAddr>;

    /// Has the rules decide about a client's next datagram, since the proxy does not serve the place any more.
    fn forget(&self, client: SocketAddr, local: SocketAddr);
}

/// What the kernel does with the packets of connections that keep the client's address.
pub trait Transparency: Send + Sync {
    /// Returns whether an endpoint on this node may see a client's own address: whether its answers, which go to that
    /// address, reach the proxy.
    fn keeps(&self, client: IpAddr, endpoint: IpAddr) -> bool;
}

/// The state of the whole proxy.
pub(crate) struct Shared {
    pub(crate) table: Table,
    pub(crate) limits: Limits,
    /// TCP connections of clients.
    pub(crate) connections: Gauge,
    /// Connections between the same two addresses.
    pub(crate) between: Arc<Between>,
    pub(crate) pipes: Arc<Gauge>,
    /// UDP flows.
    pub(crate) flows: Gauge,
    /// The mark of connections to endpoints, if the process may set one.
    pub(crate) mark: Option<u32>,
    /// Time without data after which a connection ends.
    pub(crate) tcp_idle: Duration,
    /// Time without a datagram after which a flow ends.
    pub(crate) udp_idle: Duration,
    /// What the kernel remembers about datagrams that its rules led here.
    pub(crate) origins: Option<Box<dyn Origins>>,
    /// Whether endpoints on this node see the client's address; `None` = never.
    pub(crate) transparency: Option<Box<dyn Transparency>>,
    /// The way to each worker.
    pub(crate) inboxes: Vec<Inbox>,
}

impl Shared {
    /// Returns the address with which an endpoint sees a client, unless it is this machine's.
    pub(crate) fn source(&self, client: IpAddr, choice: Choice) -> Option<IpAddr> {
        let transparency = self.transparency.as_ref()?;
        let keeps = choice.is_here && transparency.keeps(client, choice.endpoint.ip);
        keeps.then_some(client)
    }
}

/// The way to a worker, and how much it has to do.
#[derive(Debug)]
pub(crate) struct Inbox {
    commands: Mutex<Vec<Command>>,
    /// Readable while there are commands.
    pub(crate) wake: OwnedFd,
    pub(crate) open: AtomicUsize,
    /// When the worker was woken; `None` if it has taken its commands since.
    woken: Mutex<Option<Instant>>,
}

impl Inbox {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        Ok(Self {
            commands: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            open: AtomicUsize::new(0),
            woken: Mutex::default(),
        })
    }

    /// Returns the number of the worker's connections.
    pub(crate) fn open(&self) -> usize {
        self.open.load(Relaxed)
    }

    pub(crate) fn send(&self, command: Command) {
        let mut commands = self.commands.lock();
        commands.push(command);
        drop(commands);
        self.wake();
    }

    fn wake(&self) {
        self.woken().get_or_insert_with(Instant::now);
        // The descriptor counts up to 2^64: a write does not fail.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn woken(&self) -> MutexGuard<'_, Option<Instant>> {
        self.woken.lock()
    }

    /// Returns whether the worker came to its commands within a time. Asks it to come again.
    pub(crate) fn is_alive(&self, most: Duration) -> bool {
        let woken = *self.woken();
        match woken {
            Some(since) => since.elapsed() < most,
            None => {
                self.wake();
                true
            }
        }
    }

    /// Returns the commands, for the worker. The descriptor is read first: who wakes the worker later does so once more.
    pub(crate) fn take(&self) -> Vec<Command> {
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        *self.woken() = None;
        let mut commands = self.commands.lock();
        std::mem::take(&mut commands)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    /// A worker that has nothing to do is asked whether it is alive while it takes its commands.
    #[test]
    fn a_worker_is_woken_as_often_as_it_is_asked() {
        const DEADLINE: Duration = Duration::from_secs(10);
        let (inbox, ended) = (Inbox::new().unwrap(), AtomicBool::new(false));
        let work = || {
            while !ended.load(Relaxed) {
                let mut wake = [PollFd::new(&inbox.wake, PollFlags::IN)];
                if poll(&mut wake, Some(&Timespec::default())).unwrap() > 0 {
                    inbox.take();
                }
            }
        };
        let is_woken = || {
            let since = Instant::now();
            inbox.is_alive(DEADLINE);
            while inbox.woken().is_some() {
                if since.elapsed() > DEADLINE {
                    return false;
                }
            }
            true
        };
        let all = thread::scope(|scope| {
            scope.spawn(work);
            let all = (0..50_000).all(|_| is_woken());
            ended.store(true, Relaxed);
            all
        });
        assert!(all, "the worker is not woken any more");
    }
}
