//! The agents' reports, and which agents are connected.

mod clocks;
mod competing_agent;
mod durations;
pub mod holding;
mod latencies;
mod moderation;
mod notices;
mod progress;
mod record;
mod signs;
mod size;
#[cfg(test)]
mod tests;
mod timings;
mod under_way;

pub use clocks::Clocks;
pub use competing_agent::CompetingAgent;
pub use durations::Durations;
pub use latencies::{Latencies, LatencySummary, Programmed};
use parking_lot::{Mutex, MutexGuard};
pub use progress::{Progress, Reached};
pub use record::AgentRecord;
pub use timings::{Dispatch, Hop, Timings};

pub(crate) use clocks::translate;
pub(crate) use holding::bound as bound_held;
pub(crate) use moderation::{Misbehaviour, Moderation};
pub(crate) use record::BEATS;
pub use record::{has_servers, label};
pub(crate) use size::{bound as bound_report, bound_avoided, bound_hello};

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kplane_model::NodeName;
use kplane_proto::v1::{Hello, Inspect, Inspection, Report};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant as Moment, interval};
use tokio_util::sync::CancellationToken;

use kplane_desired_state::publish::Store;
use kplane_desired_state::recorder::Recorder;
use kplane_desired_state::source::upstream::Upstream;
use kplane_desired_state::trust::Trust;
use record::verified;
use size::TooLong;

/// Reports that a fleet sends in a millisecond when all of its agents make progress, on average at most. One costs some
/// 30 us.
const REPORTS_PER_MS: u32 = 10;

/// Shortest time over which reports are spread, in milliseconds: 200 agents and fewer report at once.
const MIN_SPREAD_MS: u32 = 20;

/// Maximum number of questions that wait for one agent; further ones are dropped.
const QUESTIONS: usize = 8;
/// Maximum number of strangers: agents whose names are no Nodes. As many as a fleet may have, since a manifest
/// folder need not contain Nodes.
const MAX_STRANGERS: usize = 10_000;
/// Time after which a disconnected stranger is forgotten.
const REMEMBERED: Duration = Duration::from_secs(600);
/// Interval between two scans for strangers to forget.
const SWEEP: Duration = Duration::from_secs(60);

/// All agents by node. Their streams write the records; the status API reads them.
#[derive(Debug)]
pub struct AgentRegistry {
    agents: Mutex<Agents>,
    changes: watch::Sender<u64>,
    /// The time that changes take.
    pub timings: Timings,
    /// Limits on what each node may do.
    pub(crate) moderation: Moderation,
    /// What agents must hold.
    store: Arc<Store>,
    /// The source, which lists again if an agent keeps objects that the picture lacks.
    upstream: Upstream,
    recorder: Arc<Recorder>,
    started_at: Instant,
    shutdown: CancellationToken,
}

#[derive(Debug, Default)]
struct Agents {
    by_node: BTreeMap<NodeName, Agent>,
    sessions: u64,
    /// Number of strangers in `by_node`.
    strangers: usize,
}

#[derive(Debug)]
struct Agent {
    /// The record, shared with readers. A writer copies it (a few words) while a reader uses it.
    record: Arc<AgentRecord>,
    /// When the node reached which revision.
    progress: Progress,
    /// No Node of this name existed at the last check.
    stranger: bool,
    session: u64,
    /// Urgent questions to it, and all others.
    questions: [mpsc::Sender<Question>; 2],
    /// The sender is dropped to end the session when a newer stream takes over the node.
    _session_lives: Option<oneshot::Sender<()>>,
}

/// A question to an agent.
#[derive(Debug)]
pub struct Question {
    /// The question on the wire; its token does not count.
    pub inspect: Arc<Inspect>,
    /// Channel for the answer.
    pub answer: oneshot::Sender<Inspection>,
}

/// Returns where questions to one agent come in, and where they come out: urgent ones, and all others.
pub(crate) fn lanes() -> ([mpsc::Sender<Question>; 2], [mpsc::Receiver<Question>; 2]) {
    let ((to_urgent, urgent), (to_others, others)) =
        (mpsc::channel(QUESTIONS), mpsc::channel(QUESTIONS));
    ([to_urgent, to_others], [urgent, others])
}

/// A stream's right to speak for a node; ends when the value is dropped.
#[derive(Debug)]
pub struct Session {
    agents: Arc<AgentRegistry>,
    node: NodeName,
    number: u64,
    dispatch: Arc<Dispatch>,
}

/// The session of a stream that may speak for a node; a receiver that fails when another stream takes over the
/// node; and the questions to the agent.
pub type Begun = (
    Session,
    oneshot::Receiver<()>,
    [mpsc::Receiver<Question>; 2],
);

/// The reason why a stream may not speak for a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotBegun {
    /// There are too many agents whose names are no Nodes.
    #[error("{MAX_STRANGERS} agents without a Node object are connected, which is the limit")]
    TooMany,
    /// Another agent, which is alive, speaks for the node.
    #[error(
        "the agent at {0} already serves this node; if two agents have the same --node-name \
         (--hostname-override), stop one of them"
    )]
    Taken(String),
}

impl AgentRegistry {
    /// Creates a registry without agents, of a control plane that started at this time and ends with this token.
    pub(crate) fn new(
        store: Arc<Store>,
        upstream: Upstream,
        recorder: Arc<Recorder>,
        started_at: Instant,
        shutdown: CancellationToken,
    ) -> Self {
        Self {
            agents: Mutex::default(),
            changes: watch::Sender::default(),
            timings: Timings::default(),
            moderation: Moderation::default(),
            store,
            upstream,
            recorder,
            started_at,
            shutdown,
        }
    }

    /// Returns a receiver that is notified of every change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Returns the agents by node. The lock is held only while pointers are copied, so streams wait no longer than
    /// that.
    pub fn records(&self) -> BTreeMap<NodeName, Arc<AgentRecord>> {
        let records: Vec<_> = {
            let agents = self.lock();
            agents
                .by_node
                .iter()
                .map(|(node, agent)| (node.clone(), Arc::clone(&agent.record)))
                .collect()
        };
        records.into_iter().collect()
    }

    /// Returns the record of a node's agent.
    pub fn record(&self, node: &str) -> Option<Arc<AgentRecord>> {
        let agents = self.lock();
        let agent = agents.by_node.get(node)?;
        Some(Arc::clone(&agent.record))
    }

    /// Returns the number of agents that are remembered.
    pub fn count(&self) -> usize {
        self.lock().by_node.len()
    }

    /// Returns the time over which agents spread reports of progress, in milliseconds; 0 = they report at once.
    pub fn report_within_ms(&self) -> u32 {
        let agents = u32::try_from(self.count()).unwrap_or(u32::MAX);
        Some(agents / REPORTS_PER_MS)
            .filter(|within| *within >= MIN_SPREAD_MS)
            .unwrap_or_default()
    }

    /// Returns whether an agent that is remembered is not connected.
    pub fn any_gone(&self) -> bool {
        let agents = self.lock();
        agents.by_node.values().any(|agent| !agent.record.connected)
    }

    /// Returns the nodes whose agents have virtual servers.
    pub fn with_servers(&self) -> Vec<NodeName> {
        let agents = self.lock();
        agents
            .by_node
            .iter()
            .filter(|(_, a)| a.record.connected && has_servers(&a.record))
            .map(|(node, _)| node.clone())
            .collect()
    }

    /// Returns the nodes whose agents serve objects that the picture does not name, sorted.
    pub fn holding(&self) -> Vec<NodeName> {
        let agents = self.lock();
        let all = agents.by_node.iter();
        let holds = |record: &AgentRecord| {
            let report = record.report.as_ref();
            record.connected && report.is_some_and(|report| report.held.is_some())
        };
        all.filter(|(_, agent)| holds(&agent.record))
            .map(|(node, _)| node.clone())
            .collect()
    }

    /// Asks an agent. The receiver fails if the agent has too many questions, or has gone.
    pub fn ask(&self, node: &NodeName, inspect: Arc<Inspect>) -> oneshot::Receiver<Inspection> {
        let (answer, answered) = oneshot::channel();
        let question = Question { inspect, answer };
        if let Some(agent) = self.lock().by_node.get(node) {
            // On failure the question is dropped, and with it the answer's sender.
            let [urgent, others] = &agent.questions;
            let lane = if question.inspect.urgent { urgent } else { others };
            let _ = lane.try_send(question);
        }
        answered
    }

    /// Forgets strangers that have been gone for a long time and still have no Node.
    fn sweep(&self, now: Instant, is_node: impl Fn(&str) -> bool) {
        let mut agents = self.lock();
        let before = agents.by_node.len();
        agents.by_node.retain(|name, agent| {
            agent.stranger = !is_node(name);
            let since = now.saturating_duration_since(agent.record.since);
            !agent.stranger || agent.record.connected || since < REMEMBERED
        });
        agents.strangers = agents.by_node.values().filter(|a| a.stranger).count();
        let forgotten = before - agents.by_node.len();
        drop(agents);
        if forgotten > 0 {
            self.changed();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Agents> {
        // Records are replaced as a whole, so a panic elsewhere leaves them usable.
        self.agents.lock()
    }

    /// Makes watches answer again, because something about nodes changed.
    pub fn changed(&self) {
        self.changes.send_modify(|n| *n = n.wrapping_add(1));
    }
}

impl Agents {
    /// Makes room for one more stranger by forgetting the one that has been gone for longest.
    fn make_room(&mut self) -> Result<(), NotBegun> {
        if self.strangers < MAX_STRANGERS {
            return Ok(());
        }
        let gone = self
            .by_node
            .iter()
            .filter(|(_, agent)| agent.stranger && !agent.record.connected);
        let oldest = gone
            .min_by_key(|(_, agent)| agent.record.since)
            .map(|(name, _)| name.clone())
            .ok_or(NotBegun::TooMany)?;
        self.by_node.remove(&oldest);
        self.strangers -= 1;
        Ok(())
    }
}

/// Keeps the fleet's memory bounded until the control plane ends.
pub async fn forget_strangers(registry: Arc<AgentRegistry>) {
    let mut look = interval(SWEEP);
    loop {
        tokio::select! {
            _ = look.tick() => {}
            () = registry.shutdown.cancelled() => return,
        }
        registry.sweep(Instant::now(), |name| registry.store.knows(name));
    }
}

impl Session {
    /// Starts a stream's session for a node and ends the previous session: its receiver fails. The other receiver
    /// yields questions to the agent.
    ///
    /// # Errors
    /// [`NotBegun`].
    pub fn begin(
        registry: &Arc<AgentRegistry>,
        node: &NodeName,
        hello: &Hello,
        peer: String,
    ) -> Result<Begun, NotBegun> {
        let now = Instant::now();
        let (lives, superseded) = oneshot::channel();
        let (questions, asked) = lanes();
        let stranger = !registry.store.knows(node);
        let mut agents = registry.lock();
        agents
            .refuse_competing_agent(node, hello, &peer, now, &registry.moderation)
            .inspect_err(|_| registry.changed())?;
        if stranger && !agents.by_node.contains_key(node) {
            agents.make_room()?;
        }
        let was_connected = agents.by_node.get(node).map(|agent| agent.record.connected);
        notices::connected(
            &registry.recorder,
            node,
            was_connected,
            &peer,
            registry.started_at,
        );
        agents.sessions += 1;
        let number = agents.sessions;
        let before = agents.by_node.remove(node);
        agents.strangers -= usize::from(before.as_ref().is_some_and(|before| before.stranger));
        agents.strangers += usize::from(stranger);
        if before.as_ref().is_some_and(|b| b.record.connected) {
            tracing::info!(%node, "the agent opened a new stream; its older stream ends");
        }
        // The old stream's report stays visible until the new stream reports.
        let (record, progress) = before
            .map(|before| (Arc::unwrap_or_clone(before.record), before.progress))
            .unzip();
        let (report, clocks, latencies, measured_to) = record
            .map(|old| (old.report, old.clocks, old.latencies, old.measured_to))
            .unwrap_or_default();
        let record = AgentRecord {
            report,
            clocks,
            latencies,
            measured_to,
            ..AgentRecord::begin(hello, peer, now)
        };
        agents.by_node.insert(
            node.clone(),
            Agent {
                record: Arc::new(record),
                progress: progress.unwrap_or_default(),
                stranger,
                session: number,
                questions,
                _session_lives: Some(lives),
            },
        );
        drop(agents);
        registry.changed();
        let session = Self {
            agents: Arc::clone(registry),
            node: node.clone(),
            number,
            dispatch: Dispatch::new(registry),
        };
        Ok((session, superseded, asked))
    }

    /// Returns where the stream notes what it sends.
    pub fn dispatch(&self) -> Arc<Dispatch> {
        Arc::clone(&self.dispatch)
    }

    /// Records that a message arrived from the agent.
    pub fn heard(&self) {
        self.update(|record| {
            record.last_heard = Instant::now();
            record.sign = Moment::now();
        });
    }

    /// Stores the agent's new report. Returns whether the agent's stream, which waits until the agent has received
    /// more, should look again.
    pub fn report(&self, mut report: Report) -> bool {
        let goes_on = self.dispatch.arrived(&report);
        let steps = std::mem::take(&mut report.steps);
        let programmed =
            latencies::take_programmed(&mut report, &self.agents.store, Instant::now());
        if let Some(too_long) = size::bound(&mut report) {
            self.tell_too_long(Misbehaviour::Report, too_long);
        }
        // Listing again does not resolve a doubt: the source does that on its own, or the operator must.
        if report.held.is_some() && self.agents.store.trust() == Trust::Whole {
            self.agents.upstream.look_again();
        }
        let report = Arc::new(report);
        let applied = timings::applied(&report, &self.agents.store);
        let mut advanced = None;
        let mut earlier = None;
        self.update(|record| {
            advanced = applied.and_then(|a| Some((timings::advance(record, a)?, a)));
            record.latencies.remember(programmed);
            let applied = |r: &Report| (r.epoch, r.applied_revision);
            if record.report.as_deref().map(applied) != Some(applied(&report)) {
                record.applied_at = Instant::now();
            }
            earlier.clone_from(&record.report);
            if record.report.as_deref().map(verified) != Some(verified(&report)) {
                record.verified_at = Instant::now();
            }
            record.clocks = Clocks::after(record.clocks, Instant::now(), report.now_ms);
            record.report = Some(Arc::clone(&report));
        });
        notices::reported(&self.agents.recorder, &self.node, earlier.as_ref(), &report);
        if let Some(applied) = applied {
            self.note_progress(&steps, applied);
        }
        if let Some((before, applied)) = advanced {
            self.measure(&report, &steps, before, applied);
        }
        self.agents.changed();
        goes_on
    }

    /// Logs that the agent's message exceeds a limit.
    pub(crate) fn tell_too_long(&self, problem: Misbehaviour, too_long: TooLong) {
        self.tell(problem, || {
            format!("the agent says more than kplane's agents do: {too_long}; find out who has the agent's key")
        });
    }

    /// Logs a problem with the agent, not too often.
    pub(crate) fn tell(&self, problem: Misbehaviour, text: impl FnOnce() -> String) {
        let moderation = &self.agents.moderation;
        moderation.tell(&self.node, problem, text);
    }

    fn update(&self, change: impl FnOnce(&mut AgentRecord)) {
        let mut agents = self.agents.lock();
        let agent = agents.by_node.get_mut(&self.node);
        if let Some(agent) = agent.filter(|agent| agent.session == self.number) {
            change(Arc::make_mut(&mut agent.record));
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let mut lost = false;
        self.update(|record| {
            record.connected = false;
            record.since = Instant::now();
            record.sign = Moment::now();
            lost = true;
        });
        if lost && !self.agents.shutdown.is_cancelled() {
            notices::lost(&self.agents.recorder, &self.node);
        }
        self.agents.changed();
    }
}
