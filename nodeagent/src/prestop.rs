//! preStop hooks of this node's Pods: a hook is answered when no kernel leads new connections to the Pod any more.
//!
//! ```text
//! kubelet --GET POD:PORT/gone--> table kplane-departing -> Hooks -> Question -> stream -> control plane
//!         <-------200-----------                        <-       <- outcome  <-        <-
//! ```
//!
//! The engine publishes where the node's Pods are ([`Follower`]); a task of its own has the table and the listener
//! ([`Hooks`]). The engine never waits for it. An answer comes at the latest after a bound, whatever the control plane does,
//! and is never an error: kubelet would end the Pod at once.

mod answering;
mod pods;
mod problems;
mod request;

use parking_lot::Mutex;
pub use pods::Follower;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use kplane_dataplane::backend::nftables::{PrestopTable, PrestopTableError};
use kplane_http::{Acceptor, REBIND};
use kplane_model::{Cidr, Family};
use kplane_proto::v1::LeavingOutcome;
use nix::errno::Errno;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use self::answering::Answering;
use self::pods::{Known, Pods};
use self::problems::{Part, Problems};
use crate::metrics::PrestopCounters;

/// Longest time of a wait, unless the configuration or the hook has another one.
pub const WITHIN: Duration = Duration::from_secs(10);

/// Longest time of any wait.
pub const LONGEST: Duration = Duration::from_secs(300);

/// Maximum number of hooks at a time. More wait for the agent to accept their connections.
const HOOKS: usize = 4_096;
/// Maximum number of questions that wait for the stream.
const QUEUE: usize = 256;
/// Pause between two attempts to open the port. The agent before this one may have it for a moment.
const REOPEN: Duration = Duration::from_millis(500);
/// Maximum time for which an agent that is asked to end goes on, so that hooks that wait are answered.
const FAREWELL: Duration = Duration::from_secs(5);
/// Time for taking the last connections that the kernel led here.
const LAST: Duration = Duration::from_millis(100);
/// Interval at which a table is written anew that other programs may have changed.
const RENEW: Duration = Duration::from_secs(60);

/// The settings of hooks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookSettings {
    /// The port of hooks, and of the agent's listener on loopback addresses.
    pub port: u16,
    /// Longest time of a wait, unless a hook has another one.
    pub within: Duration,
    /// Ranges of the cluster's Pods, beside the Node's own.
    pub ranges: Vec<Cidr>,
}

/// What hooks want to know about a Pod.
#[derive(Clone, Debug)]
pub(crate) struct DepartureAsked {
    /// The addresses of the Pod.
    pub(crate) addresses: Vec<IpAddr>,
    /// The port of its endpoints; 0 = all.
    pub(crate) port: u16,
    /// The time until which the answer is of use.
    pub(crate) until: Instant,
    /// Longest time of the wait for a Pod that is not terminating.
    pub(crate) unless_terminating: Duration,
}

/// A question to the control plane, for the stream.
#[derive(Debug)]
pub(crate) struct DepartureQuestion {
    pub(crate) asked: DepartureAsked,
    /// The channel for the answer. The stream closes it when it ends, and hooks close it when they no longer wait.
    pub(crate) answer: oneshot::Sender<LeavingOutcome>,
}

/// The questions that a stream has to ask.
pub(crate) type Questions = mpsc::Receiver<DepartureQuestion>;

/// The task that answers hooks.
#[derive(Debug)]
pub struct Hooks {
    settings: HookSettings,
    known: watch::Receiver<Known>,
    answering: Arc<Answering>,
    problems: Problems,
    end: Farewell,
}

/// The orderly end of the task: hooks that wait are answered, and new ones wait for the next agent.
#[derive(Clone, Debug)]
pub(crate) struct Farewell {
    asked: CancellationToken,
    /// The hooks that wait, and the families whose rules lead to this agent.
    tasks: TaskTracker,
}

impl Farewell {
    /// Ends the rules, and waits some seconds for hooks.
    pub(crate) async fn say(self) {
        self.asked.cancel();
        self.tasks.close();
        if timeout(FAREWELL, self.tasks.wait()).await.is_err() {
            warn!(
                "preStop hooks still wait after {FAREWELL:?}; the agent ends, which ends their Pods"
            );
        }
    }
}

/// Creates the engine's side, the task with its end, and the questions for the stream.
pub(crate) fn channel(
    settings: HookSettings,
    counters: Arc<PrestopCounters>,
) -> (Follower, Hooks, Farewell, Questions) {
    let problems = Problems::default();
    let (follower, known) = pods::channel(&settings, problems.clone());
    let (ask, questions) = mpsc::channel(QUEUE);
    let answering = Arc::new(Answering {
        within: settings.within,
        known: known.clone(),
        ask,
        counters,
        problems: problems.clone(),
        pods: Mutex::default(),
    });
    let end = Farewell {
        asked: CancellationToken::new(),
        tasks: TaskTracker::new(),
    };
    let hooks = Hooks {
        settings,
        known,
        answering,
        problems,
        end: end.clone(),
    };
    (follower, hooks, end, questions)
}

impl Hooks {
    /// Answers hooks until the agent ends.
    pub(crate) async fn run(self) {
        let room = Arc::new(Semaphore::new(HOOKS));
        tokio::join!(
            self.serve(Family::V4, Arc::clone(&room)),
            self.serve(Family::V6, room)
        );
    }

    /// Answers the hooks of a family.
    async fn serve(&self, family: Family, room: Arc<Semaphore>) {
        let address = SocketAddr::new(family.loopback(), self.settings.port);
        let listener = listen(address, family, &self.problems).await;
        let mut acceptor = Acceptor::new(listener, "preStop hooks");
        let failures = AtomicU64::new(0);
        let mut rules = Rules {
            family,
            port: self.settings.port,
            pods: Pods::default(),
            table: None,
            complained: false,
            problems: self.problems.clone(),
        };
        let mut known = self.known.clone();
        let mut next = Instant::now();
        let (mut leads, mut left) = (Some(self.end.tasks.token()), false);
        let mut place = None;
        loop {
            tokio::select! {
                taken = Arc::clone(&room).acquire_owned(), if place.is_none() => {
                    place = taken.ok();
                    if room.available_permits() == 0 {
                        self.problems.busy(Instant::now());
                    }
                }
                (stream, _) = acceptor.accept(&failures), if place.is_some() => {
                    let place = place.take();
                    let answering = Arc::clone(&self.answering);
                    self.end.tasks.spawn(async move {
                        answering.answer(stream, family).await;
                        drop(place);
                    });
                }
                () = self.end.asked.cancelled(), if !left => {
                    rules.leave(&known).await;
                    (left, next) = (true, Instant::now() + LAST);
                }
                changed = known.changed(), if !left => {
                    if changed.is_err() {
                        return;
                    }
                    next = rules.write(&known).await;
                }
                () = sleep_until(next), if left && leads.is_some() => leads = None,
                () = sleep_until(next), if !left => next = rules.write(&known).await,
            }
        }
    }
}

/// Opens a loopback port as soon as it is free.
async fn listen(address: SocketAddr, family: Family, problems: &Problems) -> TcpListener {
    let mut reported = false;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                problems.set(Part::Port, family, None);
                return listener;
            }
            // The node has no such family, or none at all (`ipv6.disable=1`).
            Err(error)
                if error.kind() == io::ErrorKind::AddrNotAvailable
                    || error.raw_os_error() == Some(Errno::EAFNOSUPPORT as i32) => {}
            Err(error) if !std::mem::replace(&mut reported, true) => {
                let problem = format!("the agent cannot listen on {address}: {error}");
                warn!(
                    "{problem}; preStop hooks of this node's Pods at this port fail, which ends the Pods at once. Give \
                     another --pre-stop-port, on all nodes and in all hooks"
                );
                problems.set(Part::Port, family, Some(problem));
            }
            Err(_) => {}
        }
        sleep(REOPEN).await;
    }
}

/// The table of a family.
struct Rules {
    family: Family,
    port: u16,
    pods: Pods,
    table: Option<PrestopTable>,
    complained: bool,
    problems: Problems,
}

impl Rules {
    /// Brings the table up to date; returns when to do so again.
    async fn write(&mut self, known: &watch::Receiver<Known>) -> Instant {
        let now = Instant::now();
        let addresses = self.pods.note(&known.borrow(), self.family, now);
        let (family, port, table) = (self.family, self.port, self.table.take());
        // The kernel may be busy with a large transaction.
        let written = spawn_blocking(move || {
            let changed = table.map(|mut table| table.set(&addresses).map(|()| table));
            match changed {
                Some(Ok(table)) => Ok(table),
                // Another program may have deleted it.
                _ => PrestopTable::create(family, port, &addresses),
            }
        });
        match written.await {
            Ok(Ok(table)) => {
                let renew = if table.is_owned() { Duration::MAX } else { RENEW };
                if std::mem::take(&mut self.complained) {
                    info!(%family, "the kernel takes the rules for preStop hooks now");
                    self.problems.set(Part::Rules, family, None);
                }
                self.table = Some(table);
                let forget = self.pods.forgets_at();
                let renew = now.checked_add(renew).into_iter().chain(forget).min();
                renew.unwrap_or(now + RENEW * 60)
            }
            Ok(Err(error)) => self.failed(&error, now),
            // A bug, which the panic's own message names.
            Err(_) => now + REBIND,
        }
    }

    /// Replaces the table by one that has hooks wait for the next agent.
    async fn leave(&mut self, known: &watch::Receiver<Known>) {
        let addresses = self.pods.note(&known.borrow(), self.family, Instant::now());
        let (port, table) = (self.port, self.table.take());
        let Some(table) = table else { return };
        let left = spawn_blocking(move || table.leave(port, &addresses));
        if let Ok(Err(error)) = left.await {
            warn!(
                family = %self.family,
                error = kplane_dataplane::chain(&error),
                "the kernel refuses the rules for the time until the next agent; until then preStop hooks fail"
            );
        }
    }

    fn failed(&mut self, error: &PrestopTableError, now: Instant) -> Instant {
        if !std::mem::replace(&mut self.complained, true) {
            let (family, port, reason) = (self.family, self.port, kplane_dataplane::chain(error));
            warn!(
                %family,
                "the kernel refuses the rules for preStop hooks, so hooks of this node's Pods at port {port} fail, which \
                 ends the Pods at once; trying again every {REBIND:?}: {reason}"
            );
            let problem =
                format!("the kernel refuses the rules of {family} for port {port}: {reason}");
            self.problems.set(Part::Rules, family, Some(problem));
        }
        now + REBIND
    }
}

/// Returns the destination that a client on this node wanted; `None` if it was the listener itself.
fn original(stream: &TcpStream, family: Family) -> Option<IpAddr> {
    use nix::sys::socket::{getsockopt, sockopt};
    let to: SocketAddr = match family {
        Family::V4 => {
            let at = getsockopt(stream, sockopt::OriginalDst).ok()?;
            let ip = std::net::Ipv4Addr::from(u32::from_be(at.sin_addr.s_addr));
            SocketAddr::from((ip, u16::from_be(at.sin_port)))
        }
        Family::V6 => {
            let at = getsockopt(stream, sockopt::Ip6tOriginalDst).ok()?;
            let ip = std::net::Ipv6Addr::from(at.sin6_addr.s6_addr);
            SocketAddr::from((ip, u16::from_be(at.sin6_port)))
        }
    };
    (stream.local_addr().ok()? != to).then(|| to.ip())
}
