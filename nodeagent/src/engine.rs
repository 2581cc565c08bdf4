//! The engine: one thread that owns desired state and backend.
//!
//! ```text
//! Update -> Desired -> plan -> Backend, each family on its own -> Report
//! ```
//!
//! The engine takes all updates that arrived while the kernel was busy, and programs their sum. If more than a bound waits,
//! the agent does not read the stream, and updates wait at the control plane, which keeps only the latest state of each
//! object. The engine is a thread and not a task, because netlink blocks, and because a network namespace belongs to a thread.

mod alarm;
mod assemble;
mod checkpoint;
mod confirmation;
mod core;
mod failures;
mod followers;
mod now;
mod offline_start;
mod pipeline;
mod planner;
mod policies;
mod progress;
mod reconciler;
mod triggers;
mod warnings;

#[cfg(test)]
mod tests;

pub use checkpoint::CheckpointSettings;
pub use followers::Followers;
pub use offline_start::OfflineStartSettings;

use futures_util::future::{BoxFuture, OptionFuture};
use kplane_model::{RangeDigests, ServiceName};
use tokio::sync::{mpsc, oneshot, watch};

use self::alarm::Alarm;
use self::assemble::{assemble, cannot_start};
use self::confirmation::Confirmation;
use self::core::{Core, Work};
use self::now::Now;
use crate::denials::Denials;
use crate::desired::{Refusal, Update};
use crate::pulse::Pulse;
use crate::report::Report;
use kplane_dataplane::backend::ProxyHandle;
use kplane_dataplane::backend::{Backend, Description, Inspection, OpenError, Serving};
use kplane_dataplane::conntrack::{AnyFlow, ConntrackCounts};
use kplane_dataplane::plan::{NodeSettings, Reserved};
use kplane_dataplane::policy::Followed;

/// Most updates that wait while the engine works. Everything beyond it waits at the control plane,
/// where newer state replaces older.
const QUEUE: usize = 1_024;

/// Most questions that wait while the engine works.
const QUESTIONS: usize = 1;

/// Most lots of connections that wait to be judged.
const FLOWS: usize = 4;

/// An update for the engine, and the channel for the answer whether it was taken.
pub(crate) type Command = (Update, oneshot::Sender<Result<(), Refusal>>);

/// The engine's answer to come.
pub(crate) type Answer = oneshot::Receiver<Result<(), Refusal>>;

/// Returns an update as a command, and its answer. The engine skips an update whose answer nobody awaits any more:
/// the stream that brought it is gone.
pub(crate) fn command(update: Update) -> (Command, Answer) {
    let (taken, answer) = oneshot::channel();
    ((update, taken), answer)
}

/// A question about a Service, and the channel for its answer.
#[derive(Debug)]
enum Question {
    /// The kernel's state of one Service.
    Inspect(ServiceName, oneshot::Sender<Option<Inspection>>),
    /// The digests of so many ranges of the desired state.
    Ranges(u16, oneshot::Sender<Option<RangeDigests>>),
}

/// A handle to the engine. When the last handle is gone, the engine finishes its current work and
/// stops. The rules stay in the kernel.
#[derive(Clone, Debug)]
pub struct Engine {
    commands: mpsc::Sender<Command>,
    /// The latest settings: newer ones replace those that the engine has not seen.
    settings: watch::Sender<NodeSettings>,
    questions: mpsc::Sender<Question>,
    reports: watch::Receiver<Report>,
    backend: &'static Description,
    serving: Option<Serving>,
    proxy: ProxyHandle,
    confirmation: Confirmation,
    conntrack: ConntrackCounts,
    pulse: Pulse,
    denials: Denials,
}

/// The engine's thread has ended. That is a bug, since the thread lives as long as its handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the engine has stopped")]
pub struct Stopped;

/// Opens a backend, on the engine's thread.
pub type Opener = Box<dyn FnOnce() -> Result<Backend, OpenError> + Send>;

impl Engine {
    /// Starts the thread. The backend is opened on it, so that the backend shares whatever belongs to a
    /// thread (a network namespace).
    ///
    /// # Errors
    /// What the backend lacks on this machine.
    pub async fn spawn(
        open: impl FnOnce() -> Result<Backend, OpenError> + Send + 'static,
        settings: NodeSettings,
    ) -> Result<Self, OpenError> {
        Self::spawn_with(open, settings, Followers::default()).await
    }

    /// Starts the thread like [`Engine::spawn`], with followers of what is programmed.
    ///
    /// # Errors
    /// What the backend lacks on this machine.
    pub async fn spawn_with(
        open: impl FnOnce() -> Result<Backend, OpenError> + Send + 'static,
        settings: NodeSettings,
        followers: Followers,
    ) -> Result<Self, OpenError> {
        let restore = CheckpointSettings::default();
        Self::start(Box::new(open), settings, followers, restore).await
    }

    /// Starts the thread like [`Engine::spawn_with`], with a memory of what the node served. The future is boxed, so that
    /// the engine's code is generated here and not once more in each program.
    ///
    /// # Errors
    /// What the backend lacks on this machine.
    pub fn start(
        open: Opener,
        settings: NodeSettings,
        followers: Followers,
        restore: CheckpointSettings,
    ) -> BoxFuture<'static, Result<Self, OpenError>> {
        Box::pin(Self::begin(open, settings, followers, restore))
    }

    async fn begin(
        open: Opener,
        settings: NodeSettings,
        followers: Followers,
        restore: CheckpointSettings,
    ) -> Result<Self, OpenError> {
        let (commands, inbox) = mpsc::channel(QUEUE);
        let (publish, reports) = watch::channel(Report::default());
        let (settings, configured) = watch::channel(settings);
        let (questions, asked) = mpsc::channel(QUESTIONS);
        let (opened, answer) = oneshot::channel();
        let (hand, flows) = mpsc::channel(FLOWS);
        let (pulse, conntrack) = (Pulse::default(), ConntrackCounts::default());
        let denials = Denials::default();
        let (beats, counts, followed) = (pulse.clone(), conntrack.clone(), denials.followed());
        let followers = followers.with_conntrack(conntrack.clone());
        let thread = move || {
            let settings = configured.borrow().clone();
            let parts = assemble(open, settings, followers, counts, hand);
            let (mut core, proxy, runtime) = match parts {
                Ok(parts) => parts,
                Err(error) => {
                    let _ = opened.send(Err(error));
                    return;
                }
            };
            core.restore(restore);
            // The first connection resumes from what an earlier process served.
            publish.send_replace(core.report());
            // The caller may be gone. Then all handles are gone as well, and `run` returns at once.
            let _ = opened.send(Ok((
                core.backend(),
                core.serving(),
                proxy,
                core.confirmation(),
            )));
            let inputs = Inputs {
                inbox,
                configured,
                asked,
                flows,
                followed,
                pulse: beats,
            };
            runtime.block_on(run(core, inputs, &publish));
        };
        let builder = std::thread::Builder::new().name("engine".to_owned());
        builder.spawn(thread).map_err(|error| cannot_start(&error.to_string()))?;
        let (backend, serving, proxy, confirmation) = match answer.await {
            Ok(opened) => opened?,
            Err(_) => return Err(cannot_start("its thread ended while opening the backend")),
        };
        Ok(Self {
            commands,
            settings,
            questions,
            reports,
            backend,
            serving,
            proxy,
            confirmation,
            conntrack,
            pulse,
            denials,
        })
    }

    /// Replaces the settings, except for the reserved places. Everything is planned anew, and the
    /// kernel gets the differences.
    pub fn configure(&self, settings: NodeSettings) {
        self.settings.send_if_modified(|now| {
            let reserved = now.reserved.clone();
            let settings = NodeSettings {
                reserved,
                ..settings
            };
            let is_new = *now != settings;
            *now = settings;
            is_new
        });
    }

    /// Changes the reserved places, which no Service gets. If they differ, everything is planned anew.
    pub fn reserve(&self, change: impl FnOnce(&mut Reserved)) {
        self.settings.send_if_modified(|now| {
            let before = now.reserved.clone();
            change(&mut now.reserved);
            now.reserved != before
        });
    }

    /// Hands over an update; waits while the engine is busy. Returns as soon as the update is part of
    /// the desired state. The report says when the kernel holds it.
    ///
    /// # Errors
    /// [`Stopped`]; within, the reason why the update was not taken.
    pub async fn submit(&self, update: Update) -> Result<Result<(), Refusal>, Stopped> {
        let (command, answer) = command(update);
        self.place().await?.send(command);
        answer.await.map_err(|_| Stopped)
    }

    /// Waits for a place in the queue of updates.
    pub(crate) async fn place(&self) -> Result<mpsc::OwnedPermit<Command>, Stopped> {
        let place = self.commands.clone().reserve_owned().await;
        place.map_err(|_| Stopped)
    }

    /// Returns when a control plane last confirmed the state, which the stream records.
    pub(crate) fn confirmation(&self) -> &Confirmation {
        &self.confirmation
    }

    /// Returns the kernel's state of one Service as last read; `None` for backends without virtual
    /// servers. Waits while the engine is busy.
    ///
    /// # Errors
    /// [`Stopped`].
    pub async fn inspect(&self, service: ServiceName) -> Result<Option<Inspection>, Stopped> {
        self.ask(|reply| Question::Inspect(service, reply)).await
    }

    /// Returns the digests of so many ranges of the desired state, a power of two; `None` if the state cannot be
    /// compared with a control plane's. Waits while the engine is busy.
    ///
    /// # Errors
    /// [`Stopped`].
    pub async fn ranges(&self, count: u16) -> Result<Option<RangeDigests>, Stopped> {
        self.ask(|reply| Question::Ranges(count, reply)).await
    }

    async fn ask<T>(
        &self,
        question: impl FnOnce(oneshot::Sender<T>) -> Question,
    ) -> Result<T, Stopped> {
        let (reply, answer) = oneshot::channel();
        let asked = self.questions.send(question(reply)).await;
        asked.map_err(|_| Stopped)?;
        answer.await.map_err(|_| Stopped)
    }

    /// Returns a receiver of the latest report.
    pub fn reports(&self) -> watch::Receiver<Report> {
        self.reports.clone()
    }

    /// Returns the name of the backend.
    pub fn backend(&self) -> &'static Description {
        self.backend
    }

    /// Returns what the backend has in the data path.
    pub fn serving(&self) -> Option<Serving> {
        self.serving
    }

    /// Returns the way to the backend's userspace proxy.
    pub fn proxy(&self) -> ProxyHandle {
        self.proxy.clone()
    }

    /// Returns the counts of deleted stale conntrack entries.
    pub fn conntrack(&self) -> ConntrackCounts {
        self.conntrack.clone()
    }

    /// Returns the pulse, which shows whether the thread hangs.
    pub fn pulse(&self) -> Pulse {
        self.pulse.clone()
    }

    /// Returns the packets that NetworkPolicies deny.
    pub fn denials(&self) -> Denials {
        self.denials.clone()
    }

    /// Waits until the thread has ended, which happens only by a bug while a handle exists.
    pub async fn stopped(&self) {
        self.commands.closed().await;
    }
}

/// Engines without a thread of their own, for simulations and tests.
impl Engine {
    /// Creates an engine whose work the caller does.
    pub(crate) fn scripted() -> (Self, mpsc::Receiver<Command>, watch::Sender<Report>) {
        let (commands, inbox) = mpsc::channel(QUEUE);
        let (publish, reports) = watch::channel(Report::default());
        let backend = kplane_dataplane::backend::Kind::Noop.describe();
        let engine = Self {
            commands,
            settings: watch::Sender::default(),
            questions: mpsc::channel(QUESTIONS).0,
            reports,
            backend,
            serving: None,
            proxy: ProxyHandle::default(),
            confirmation: Confirmation::default(),
            conntrack: ConntrackCounts::default(),
            pulse: Pulse::default(),
            denials: Denials::default(),
        };
        (engine, inbox, publish)
    }

    /// Creates an engine, and its work as a future for the caller's runtime, whose time may stand still.
    pub fn local(
        backend: Backend,
        restore: CheckpointSettings,
    ) -> (Self, impl Future<Output = ()> + Send) {
        let (mut engine, inbox, publish) = Self::scripted();
        let mut core = Core::new(backend, NodeSettings::default(), Followers::default());
        core.restore(restore);
        publish.send_replace(core.report());
        engine.backend = core.backend();
        engine.confirmation = core.confirmation();
        let (questions, asked) = mpsc::channel(QUESTIONS);
        engine.questions = questions;
        let inputs = Inputs {
            inbox,
            configured: engine.settings.subscribe(),
            asked,
            flows: mpsc::channel(1).1,
            followed: engine.denials.followed(),
            pulse: engine.pulse(),
        };
        let work = async move { run(core, inputs, &publish).await };
        (engine, work)
    }
}

/// The inputs of the engine's thread.
struct Inputs {
    inbox: mpsc::Receiver<Command>,
    configured: watch::Receiver<NodeSettings>,
    asked: mpsc::Receiver<Question>,
    /// Connections that NetworkPolicies may deny now.
    flows: mpsc::Receiver<Vec<AnyFlow>>,
    followed: watch::Receiver<Followed>,
    /// Records when the thread works and when it waits for an input.
    pulse: Pulse,
}

async fn run(mut core: Core, inputs: Inputs, reports: &watch::Sender<Report>) {
    let Inputs {
        mut inbox,
        mut configured,
        mut asked,
        mut flows,
        mut followed,
        pulse,
    } = inputs;
    let mut alarm = Alarm::new(core.readiness());
    let mut policy_alarm = Alarm::new(None);
    loop {
        // The descriptor is there while a policy is.
        policy_alarm.follow(core.policy_generation(), || core.policy_readiness());
        let due = core.due().map(|at| tokio::time::sleep_until(at.into()));
        let timer = OptionFuture::from(due);
        // Updates come last: while they arrive faster than the kernel takes them, read-backs, repairs and questions
        // have their turns too. After each repair updates have a turn, since those of NetworkPolicies do not pause.
        tokio::select! {
            biased;
            // An error means that the handles are gone, which the end of the inbox shows too.
            Ok(()) = configured.changed() => {
                let _busy = pulse.busy();
                let settings = configured.borrow_and_update().clone();
                core.configure(settings, Now::real());
                reports.send_replace(core.report());
            }
            Some(()) = timer => {
                let _busy = pulse.busy();
                core.tick(Now::real());
                reports.send_if_modified(|report| core.report().replace(report));
                if let Ok(first) = inbox.try_recv() {
                    take(&mut core, first, &mut inbox, reports);
                }
            }
            () = alarm.ring() => {}
            () = policy_alarm.ring() => {}
            () = core.followers().changed() => {
                reports.send_replace(core.report());
            }
            Some(question) = asked.recv() => answer(&core, question),
            Some(lot) = flows.recv() => core.judge(lot),
            Ok(()) = followed.changed() => core.follow(&followed.borrow_and_update(), Now::real()),
            command = inbox.recv() => match command {
                Some(first) => {
                    let _busy = pulse.busy();
                    take(&mut core, first, &mut inbox, reports);
                }
                None => return core.close(),
            },
        }
        // The alarm does not ring again for notifications that the backend read along the way.
        if core.listen(Now::real()) {
            reports.send_replace(core.report());
        }
        if !inbox.is_empty() || core.due().is_some_and(|at| at <= Now::real().instant) {
            // Without a pause the runtime would not poll timers and descriptors while changes wait, or parts of one.
            tokio::task::yield_now().await;
        }
    }
}

/// Answers a question. The receiver is gone if the stream is.
fn answer(core: &Core, question: Question) {
    match question {
        Question::Inspect(service, reply) => drop(reply.send(core.inspect(&service))),
        Question::Ranges(count, reply) => drop(reply.send(core.ranges(count))),
    }
}

/// Takes an update and all that wait behind it now, and programs their sum. Updates that arrive meanwhile wait for the
/// next time, so that no stream of them keeps the kernel waiting.
fn take(
    core: &mut Core,
    first: Command,
    inbox: &mut mpsc::Receiver<Command>,
    reports: &watch::Sender<Report>,
) {
    let mut sum: Option<Work> = None;
    let waiting = inbox.len();
    let behind = std::iter::from_fn(|| inbox.try_recv().ok()).take(waiting);
    for (update, taken) in std::iter::once(first).chain(behind) {
        if taken.is_closed() {
            continue;
        }
        let work = core.take(update);
        // The receiver is gone if the stream is.
        let _ = taken.send(work.as_ref().map(drop).map_err(Clone::clone));
        sum = match (sum, work.ok()) {
            (Some(sum), Some(work)) => Some(sum.and(work)),
            (sum, work) => sum.or(work),
        };
    }
    if let Some(work) = sum {
        reports.send_replace(core.report());
        core.program(&work, Now::real());
        reports.send_replace(core.report());
    }
}
