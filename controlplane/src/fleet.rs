//! What agents said of themselves, and which of them are connected.

pub(crate) mod holding;
mod latencies;

pub use latencies::{Latencies, LatencySummary, Programmed};

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use kplane_model::{NodeName, ServiceName};
use kplane_proto::v1::{Hello, Inspection, Report};
use tokio::sync::{mpsc, oneshot, watch};

/// Questions that wait for one agent; what comes on top is not asked.
const QUESTIONS: usize = 8;
/// Address families that a report may have.
const FAMILIES: usize = 2;
/// Draining real servers that a report may name for each: as many as agents do.
const DRAINS: usize = 16;

/// All agents by node. Written by their streams, read by the status API.
#[derive(Debug, Default)]
pub struct Fleet {
    agents: Mutex<Agents>,
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Agents {
    by_node: BTreeMap<NodeName, Agent>,
    sessions: u64,
}

#[derive(Debug)]
struct Agent {
    record: AgentRecord,
    session: u64,
    questions: mpsc::Sender<Question>,
    /// Dropped to end the session when a newer one takes the node over.
    _session_lives: Option<oneshot::Sender<()>>,
}

/// What is known of the agent of one node.
#[derive(Clone, Debug)]
pub struct AgentRecord {
    /// Has a stream at the moment.
    pub connected: bool,
    /// When it connected, or when the stream ended.
    pub since: SystemTime,
    /// When anything was heard of it.
    pub last_heard: SystemTime,
    /// Random number of the process.
    pub instance: u64,
    /// It held nothing when it connected: it had just begun.
    pub began_empty: bool,
    /// Where the stream comes from; empty in process.
    pub peer: String,
    /// Version of the program.
    pub version: String,
    /// Name of its backend.
    pub backend: String,
    /// Its latest report.
    pub report: Option<Report>,
    /// When the applied revision last changed.
    pub applied_at: SystemTime,
    /// How long the latest changes in the cluster took until its kernel held them.
    pub latencies: Latencies,
}

/// A question to an agent about one Service.
#[derive(Debug)]
pub struct Question {
    /// The Service.
    pub service: ServiceName,
    /// Where to answer it.
    pub answer: oneshot::Sender<Inspection>,
}

/// A stream's right to speak for a node: ends with the value.
#[derive(Debug)]
pub struct Session {
    fleet: Arc<crate::hub::Hub>,
    node: NodeName,
    number: u64,
}

impl Fleet {
    /// Wakes up when anything changed.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The agents by node.
    #[must_use]
    pub fn records(&self) -> BTreeMap<NodeName, AgentRecord> {
        let agents = self.lock();
        let records = agents.by_node.iter();
        records
            .map(|(node, agent)| (node.clone(), agent.record.clone()))
            .collect()
    }

    /// The nodes whose agents have virtual servers.
    #[must_use]
    pub fn with_servers(&self) -> Vec<NodeName> {
        let agents = self.lock();
        let all = agents.by_node.iter();
        let with = all.filter(|(_, a)| a.record.connected && has_servers(&a.record));
        with.map(|(node, _)| node.clone()).collect()
    }

    /// Asks an agent what virtual servers there are for a Service. The answer fails to come if the agent
    /// has too many questions, or has gone.
    #[must_use]
    pub fn ask(&self, node: &NodeName, service: &ServiceName) -> oneshot::Receiver<Inspection> {
        let (answer, answered) = oneshot::channel();
        let service = service.clone();
        if let Some(agent) = self.lock().by_node.get(node) {
            // The answer's sender is dropped with the question.
            let _ = agent.questions.try_send(Question { service, answer });
        }
        answered
    }

    fn lock(&self) -> MutexGuard<'_, Agents> {
        // Records are replaced as a whole, so a panic elsewhere leaves them usable.
        self.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.send_modify(|n| *n = n.wrapping_add(1));
    }
}

/// Its last report says that it has virtual servers; then it understands questions about them.
fn has_servers(record: &AgentRecord) -> bool {
    let report = record.report.as_ref();
    report.is_some_and(|report| {
        report
            .families
            .iter()
            .any(|family| family.servers.is_some())
    })
}

/// Cuts off what no agent of ours reports, so that none has more memory here.
fn bound(report: &mut Report) {
    report.families.truncate(FAMILIES);
    let servers = report.families.iter_mut();
    for stats in servers.filter_map(|family| family.servers.as_mut()) {
        stats.drains.truncate(DRAINS);
    }
    holding::bound(report);
}

impl Session {
    /// A stream begins to speak for a node. Whoever spoke for it before is told to stop: the
    /// receiver of that session fails. Questions to the agent come by the other receiver.
    pub fn begin(
        hub: &Arc<crate::hub::Hub>,
        node: &NodeName,
        hello: &Hello,
        peer: String,
    ) -> (Self, oneshot::Receiver<()>, mpsc::Receiver<Question>) {
        let now = SystemTime::now();
        let (lives, superseded) = oneshot::channel();
        let (questions, asked) = mpsc::channel(QUESTIONS);
        let mut agents = hub.fleet.lock();
        agents.sessions += 1;
        let number = agents.sessions;
        let before = agents.by_node.remove(node);
        if let Some(before) = before.as_ref().filter(|b| b.record.connected) {
            let same_process = before.record.instance == hello.instance;
            tracing::warn!(%node, same_process, "a new stream takes the node over from an older one");
        }
        // What the old stream reported stays visible until the new one reports.
        let (report, latencies) = before
            .map(|before| (before.record.report, before.record.latencies))
            .unwrap_or_default();
        let record = AgentRecord {
            connected: true,
            since: now,
            last_heard: now,
            instance: hello.instance,
            began_empty: hello.resume.is_none(),
            peer,
            version: hello.agent_version.clone(),
            backend: hello.backend.clone(),
            report,
            applied_at: now,
            latencies,
        };
        agents.by_node.insert(
            node.clone(),
            Agent {
                record,
                session: number,
                questions,
                _session_lives: Some(lives),
            },
        );
        drop(agents);
        hub.fleet.changed();
        let session = Self {
            fleet: Arc::clone(hub),
            node: node.clone(),
            number,
        };
        (session, superseded, asked)
    }

    /// Anything arrived from the agent.
    pub fn heard(&self) {
        self.update(|record| record.last_heard = SystemTime::now());
    }

    /// The agent's new report.
    pub fn report(&self, mut report: Report) {
        let programmed =
            latencies::take_programmed(&mut report, &self.fleet.store, SystemTime::now());
        bound(&mut report);
        self.update(|record| {
            record.latencies.remember(programmed);
            let applied = |r: &Report| (r.epoch, r.applied_revision);
            if record.report.as_ref().map(applied) != Some(applied(&report)) {
                record.applied_at = SystemTime::now();
            }
            record.report = Some(report);
        });
        self.fleet.fleet.changed();
    }

    fn update(&self, change: impl FnOnce(&mut AgentRecord)) {
        let mut agents = self.fleet.fleet.lock();
        let agent = agents.by_node.get_mut(&self.node);
        if let Some(agent) = agent.filter(|agent| agent.session == self.number) {
            change(&mut agent.record);
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.update(|record| {
            record.connected = false;
            record.since = SystemTime::now();
        });
        self.fleet.fleet.changed();
    }
}
