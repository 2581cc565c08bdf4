//! The proxy as a whole: its threads and its sockets.

mod handover;

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kplane_model::{Protocol, ProxyConnection, ServiceKey};
use nix::sys::resource::{Resource, getrlimit};
use parking_lot::Mutex;

use self::handover::Heir;
use crate::handover::Bundle;
use crate::limits::{Gauge, Limits};
use crate::listening::{ListenerId, Listening, Role};
use crate::table::Table;
use crate::worker::{Command, Inbox, Look, Origins, Shared, Show, Transparency, Visit, Worker};

/// Longest wait for a thread to close a socket.
const CLOSED: Duration = Duration::from_secs(1);

/// Settings of a proxy.
#[derive(Default)]
pub struct Settings {
    /// Number of threads; `None` = one for each processor that the process may use.
    pub threads: Option<usize>,
    /// Limits; `None` = those that follow from the number of files that the process may open.
    pub limits: Option<Limits>,
    /// Mark of connections to endpoints; `None` if the process may not set one.
    pub mark: Option<u32>,
    /// Time without data after which a TCP connection ends; `None` = [`Settings::TCP_IDLE`].
    pub tcp_idle: Option<Duration>,
    /// Time without a datagram after which a UDP flow ends; `None` = [`Settings::UDP_IDLE`].
    pub udp_idle: Option<Duration>,
    /// What the kernel remembers about datagrams that its rules led here.
    pub origins: Option<Box<dyn Origins>>,
    /// Whether endpoints on this node see the client's address; `None` = never.
    pub transparency: Option<Box<dyn Transparency>>,
    /// What an earlier proxy had open.
    pub inherited: Option<Bundle>,
}

impl Settings {
    /// Default of [`Settings::tcp_idle`].
    pub const TCP_IDLE: Duration = Duration::from_secs(3600);

    /// Default of [`Settings::udp_idle`].
    pub const UDP_IDLE: Duration = Duration::from_secs(30);
}

/// A proxy that cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The kernel refused what each thread needs.
    #[error("cannot create what a thread of the userspace proxy needs: {0}")]
    Parts(#[source] io::Error),
    /// The kernel refused a thread.
    #[error("cannot start a thread of the userspace proxy: {0}")]
    Thread(#[source] io::Error),
}

/// A userspace proxy that runs. It ends, and cuts all connections, when it is dropped.
pub struct Proxy {
    pub(crate) shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    next: AtomicU64,
    /// Listeners of an earlier proxy that are not served yet.
    pub(crate) inherited: Mutex<Vec<Heir>>,
}

impl Proxy {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(settings: Settings) -> Result<Self, StartError> {
        let threads = settings
            .threads
            .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        let inboxes: Result<Vec<Inbox>, _> = (0..threads.max(1)).map(|_| Inbox::new()).collect();
        let shared = Arc::new(Shared {
            table: Table::default(),
            limits: settings.limits.unwrap_or_else(|| Limits::of_files(files())),
            connections: Gauge::default(),
            between: Arc::default(),
            pipes: Arc::default(),
            flows: Gauge::default(),
            mark: settings.mark,
            tcp_idle: settings.tcp_idle.unwrap_or(Settings::TCP_IDLE),
            udp_idle: settings.udp_idle.unwrap_or(Settings::UDP_IDLE),
            origins: settings.origins,
            transparency: settings.transparency,
            inboxes: inboxes.map_err(|errno| StartError::Parts(errno.into()))?,
        });
        let mut proxy = Self {
            shared,
            threads: Vec::new(),
            next: AtomicU64::new(0),
            inherited: Mutex::default(),
        };
        for index in 0..threads.max(1) {
            proxy.threads.push(start(proxy.shared.clone(), index)?);
        }
        if let Some(bundle) = settings.inherited {
            let ids = bundle.listeners.iter().map(|listening| listening.id.0);
            let after = ids.max().map_or(0, |last| last.wrapping_add(1));
            proxy.next = AtomicU64::new(after);
            proxy.resume(bundle);
        }
        Ok(proxy)
    }

    /// Returns the ServicePorts.
    pub fn table(&self) -> &Table {
        &self.shared.table
    }

    /// Returns the numbers of open connections and flows.
    pub fn open(&self) -> [usize; 2] {
        [self.shared.connections.get(), self.shared.flows.get()]
    }

    /// Returns whether each thread came to its work within a time.
    pub fn is_alive(&self, within: Duration) -> bool {
        self.shared.inboxes.iter().all(|inbox| inbox.is_alive(within))
    }

    /// Returns whether there is room for further connections and flows of all Services: a sixteenth is free of each.
    pub fn has_room(&self) -> bool {
        let limits = &self.shared.limits;
        let [connections, flows] = self.open();
        let is_free = |open: usize, most: usize| most.saturating_sub(open) > most / 16;
        is_free(connections, limits.connections) && is_free(flows, limits.flows)
    }

    /// Shows each connection and flow of some ServicePorts, with the index of its ServicePort. The threads show theirs at
    /// the same time, a few at a time. Returns whether all were shown within a time.
    pub fn show(
        &self,
        keys: Vec<ServiceKey>,
        within: Duration,
        each: impl Fn(usize, ProxyConnection) + Send + Sync + 'static,
    ) -> bool {
        let (done, all) = mpsc::channel();
        let until = Instant::now() + within;
        let each: Show = Box::new(each);
        let look = Arc::new(Look { keys, until, each });
        for inbox in &self.shared.inboxes {
            inbox.send(Command::Visit(Visit {
                look: look.clone(),
                from: 0,
                _done: done.clone(),
            }));
        }
        drop(done);
        // Nothing is sent: the threads drop the sender when they have come to their ends.
        let ended = all.recv_timeout(within);
        ended == Err(mpsc::RecvTimeoutError::Disconnected) && Instant::now() < until
    }

    /// Opens a socket for clients, or continues with that of an earlier proxy. Returns its number, and its address, which the kernel completes if the port is 0.
    ///
    /// # Errors
    /// Those of `socket`, `bind` and `listen`; `Unsupported` for SCTP.
    pub fn listen(
        &self,
        at: SocketAddr,
        protocol: Protocol,
        role: Role,
    ) -> io::Result<(ListenerId, SocketAddr)> {
        if let Some(inherited) = self.claim(at, protocol, role) {
            return Ok(inherited);
        }
        let id = ListenerId(self.next.fetch_add(1, Relaxed));
        let listening = Arc::new(Listening::open(
            id,
            role,
            at,
            protocol,
            self.shared.inboxes.len(),
        )?);
        let at = listening.at;
        for inbox in &self.shared.inboxes {
            inbox.send(Command::Listen(listening.clone()));
        }
        Ok((id, at))
    }

    /// Closes a socket for clients, and waits until its address is free. Connections go on; flows end.
    pub fn close(&self, id: ListenerId) {
        self.disinherit(id);
        let (closed, all) = mpsc::channel();
        for inbox in &self.shared.inboxes {
            inbox.send(Command::Close(id, closed.clone()));
        }
        drop(closed);
        // Each thread answers, or drops the sender when it ends.
        while all.recv_timeout(CLOSED).is_ok() {}
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        for inbox in &self.shared.inboxes {
            inbox.send(Command::Stop);
        }
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

/// Starts a worker on a thread of its own.
fn start(shared: Arc<Shared>, index: usize) -> Result<JoinHandle<()>, StartError> {
    let (started, outcome) = mpsc::channel();
    let work = move || {
        let worker = match Worker::new(shared, index) {
            Ok(worker) => worker,
            Err(error) => return drop(started.send(Err(error))),
        };
        // The caller waits for it.
        let _ = started.send(Ok(()));
        if let Err(error) = worker.run() {
            tracing::error!(%error, "a thread of the userspace proxy ended: it cannot wait for events");
        }
    };
    let thread = std::thread::Builder::new()
        .name(format!("proxy-{index}"))
        .spawn(work)
        .map_err(StartError::Thread)?;
    let outcome = outcome.recv().unwrap_or_else(|_| Err(io::Error::other("the thread panicked")));
    outcome.map_err(StartError::Parts)?;
    Ok(thread)
}

/// Returns how many files the process may open, or the kernel's usual limit if the kernel does not report it.
fn files() -> u64 {
    const USUAL: u64 = 1024;
    getrlimit(Resource::RLIMIT_NOFILE).map_or(USUAL, |(soft, _)| soft)
}
