//! What agents said of themselves, and which of them are connected.

pub(crate) mod holding;
mod latencies;
#[cfg(test)]
mod tests;

pub use latencies::{Latencies, LatencySummary, Programmed};

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use kplane_model::{NodeName, ServiceName};
use kplane_proto::v1::{Hello, Inspection, Report};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::interval;

use crate::hub::Hub;

use crate::trust::Trust;

/// Questions that wait for one agent; what comes on top is not asked.
const QUESTIONS: usize = 8;
/// Longest reason why a backend is deprecated, in bytes.
const MAX_DEPRECATION_BYTES: usize = 256;
/// Longest version or name of a backend that an agent may state, in bytes.
const MAX_LABEL_BYTES: usize = 64;
/// Address families that a report may have.
const FAMILIES: usize = 2;
/// Agents with names that are no Node: as many as a fleet may have, since a folder need not have Nodes.
const MAX_STRANGERS: usize = 10_000;
/// An agent that has gone, and whose name is no Node, is forgotten after this time.
const REMEMBERED: Duration = Duration::from_secs(600);
/// How often it is looked who is to be forgotten.
const SWEEP: Duration = Duration::from_secs(60);
/// Draining real servers that a report may name for each: as many as agents do.
const DRAINS: usize = 16;

/// A rival that was not heard of for so long has given up: it tries again every few seconds.
const RIVAL_REMEMBERED: Duration = Duration::from_secs(60);

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
    /// How many of them are strangers.
    strangers: usize,
}

#[derive(Debug)]
struct Agent {
    /// Shared with readers: whoever changes it copies a few words if somebody reads it just then.
    record: Arc<AgentRecord>,
    /// There was no Node of its name when that was last looked at.
    stranger: bool,
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
    /// Why users should choose another backend; empty for most.
    pub backend_deprecation: String,
    /// Its latest report.
    pub report: Option<Arc<Report>>,
    /// When the applied revision last changed.
    pub applied_at: SystemTime,
    /// When it was last heard that the agent has compared its kernel with what it should hold; by our clock.
    pub verified_at: SystemTime,
    /// How long the latest changes in the cluster took until its kernel held them.
    pub latencies: Latencies,
    /// Another agent that wanted to speak for the node while this one did.
    pub rival: Option<Rival>,
}

/// An agent that says that it is a node for which another one speaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rival {
    /// Where it comes from.
    pub peer: String,
    /// When it first wanted to.
    pub since: SystemTime,
    /// When it last wanted to.
    pub last: SystemTime,
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
    fleet: Arc<Hub>,
    node: NodeName,
    number: u64,
}

/// A stream that may speak for a node; how it learns that another one does now; and its questions.
pub type Begun = (Session, oneshot::Receiver<()>, mpsc::Receiver<Question>);

/// Why a stream may not speak for a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotBegun {
    /// There are too many agents whose names are no Nodes.
    #[error("{MAX_STRANGERS} agents are connected whose names are no Nodes: no more are taken")]
    TooMany,
    /// Another agent, which is alive, speaks for the node.
    #[error(
        "the agent at {0} speaks for this node: are two agents running with the same --node-name \
         (--hostname-override)? Stop one of them"
    )]
    Taken(String),
}

impl Fleet {
    /// Wakes up when anything changed.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The agents by node. Copies pointers only: streams wait no longer for a reader than that takes.
    #[must_use]
    pub fn records(&self) -> BTreeMap<NodeName, Arc<AgentRecord>> {
        let records: Vec<_> = {
            let agents = self.lock();
            let records = agents.by_node.iter();
            records
                .map(|(node, agent)| (node.clone(), Arc::clone(&agent.record)))
                .collect()
        };
        records.into_iter().collect()
    }

    /// What is known of the agent of a node.
    #[must_use]
    pub fn record(&self, node: &str) -> Option<Arc<AgentRecord>> {
        let agents = self.lock();
        let agent = agents.by_node.get(node)?;
        Some(Arc::clone(&agent.record))
    }

    /// The nodes whose agents have virtual servers.
    #[must_use]
    pub fn with_servers(&self) -> Vec<NodeName> {
        let agents = self.lock();
        let all = agents.by_node.iter();
        let with = all.filter(|(_, a)| a.record.connected && has_servers(&a.record));
        with.map(|(node, _)| node.clone()).collect()
    }

    /// Nodes whose agents serve what the picture does not name, sorted.
    #[must_use]
    pub fn holding(&self) -> Vec<NodeName> {
        let agents = self.lock();
        let all = agents.by_node.iter();
        let holds = |record: &AgentRecord| {
            let report = record.report.as_ref();
            record.connected && report.is_some_and(|report| report.held.is_some())
        };
        let holding = all.filter(|(_, agent)| holds(&agent.record));
        holding.map(|(node, _)| node.clone()).collect()
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

    /// Forgets agents that have been gone for long and whose names are no Nodes (any more).
    fn sweep(&self, now: SystemTime, is_node: impl Fn(&str) -> bool) {
        let mut agents = self.lock();
        let before = agents.by_node.len();
        agents.by_node.retain(|name, agent| {
            agent.stranger = !is_node(name);
            let since = now.duration_since(agent.record.since).unwrap_or_default();
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
        self.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.send_modify(|n| *n = n.wrapping_add(1));
    }
}

impl Agents {
    /// Refuses an agent that is another process than the one that speaks for the node at the moment: which
    /// of them is right nobody can tell, and the first one serves. One that has ended, or was not heard of
    /// for as long as streams may be silent, has no stream any more.
    fn refuse_rival(
        &mut self,
        node: &NodeName,
        hello: &Hello,
        peer: &str,
        now: SystemTime,
    ) -> Result<(), NotBegun> {
        let Some(agent) = self.by_node.get_mut(node) else {
            return Ok(());
        };
        if !agent.record.connected || agent.record.instance == hello.instance {
            return Ok(());
        }
        let record = Arc::make_mut(&mut agent.record);
        let before = record
            .rival
            .take()
            .filter(|rival| rival.peer_ip() == peer_ip(peer));
        if before.is_none() {
            tracing::warn!(
                %node,
                agent = record.peer,
                other = peer,
                "two agents say that they are this node: the second is refused. Is --node-name the same on two \
                 nodes?"
            );
        }
        record.rival = Some(Rival {
            peer: peer.to_owned(),
            since: before.map_or(now, |rival| rival.since),
            last: now,
        });
        Err(NotBegun::Taken(record.peer.clone()))
    }

    /// Makes room for one more stranger; the one that has been gone for longest is forgotten.
    fn make_room(&mut self) -> Result<(), NotBegun> {
        if self.strangers < MAX_STRANGERS {
            return Ok(());
        }
        let gone = self.by_node.iter();
        let gone = gone.filter(|(_, agent)| agent.stranger && !agent.record.connected);
        let oldest = gone.min_by_key(|(_, agent)| agent.record.since);
        let oldest = oldest
            .map(|(name, _)| name.clone())
            .ok_or(NotBegun::TooMany)?;
        self.by_node.remove(&oldest);
        self.strangers -= 1;
        Ok(())
    }
}

/// Keeps the fleet's memory in bounds until the control plane ends.
pub async fn forget_strangers(hub: Arc<Hub>) {
    let mut look = interval(SWEEP);
    loop {
        tokio::select! {
            _ = look.tick() => {}
            () = hub.shutdown.cancelled() => return,
        }
        hub.fleet
            .sweep(SystemTime::now(), |name| hub.store.knows(name));
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

/// When a report says that the kernel was last compared, milliseconds since 1970 by the agent's clock; `None`
/// = it was not, or the agent does not say. Of several families the one for which it is longest ago.
fn verified(report: &Report) -> Option<u64> {
    let families = report.families.iter().map(|family| family.verified_at_ms);
    families.filter(|at| *at > 0).min()
}

impl Rival {
    fn peer_ip(&self) -> &str {
        peer_ip(&self.peer)
    }

    /// It has not given up.
    #[must_use]
    pub fn is_there(&self, now: SystemTime) -> bool {
        now.duration_since(self.last).unwrap_or_default() < RIVAL_REMEMBERED
    }
}

/// The address of a peer, without the port that is another one each time.
fn peer_ip(peer: &str) -> &str {
    peer.rsplit_once(':').map_or(peer, |(ip, _)| ip)
}

impl AgentRecord {
    /// For how long nothing was heard of the agent comparing its kernel with what it should hold; `None` for
    /// agents that do not tell.
    #[must_use]
    pub fn unverified_for(&self, now: SystemTime) -> Option<Duration> {
        self.report.as_deref().and_then(verified)?;
        Some(now.duration_since(self.verified_at).unwrap_or_default())
    }
}

/// A short text that an agent says of itself, for people: what no agent of ours says is cut off.
fn label(text: &str, max_bytes: usize) -> String {
    let mut label: String = text.chars().filter(|c| !c.is_control()).collect();
    label.truncate(label.floor_char_boundary(max_bytes));
    label
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
    ///
    /// # Errors
    /// [`NotBegun`].
    pub fn begin(
        hub: &Arc<Hub>,
        node: &NodeName,
        hello: &Hello,
        peer: String,
    ) -> Result<Begun, NotBegun> {
        let now = SystemTime::now();
        let (lives, superseded) = oneshot::channel();
        let (questions, asked) = mpsc::channel(QUESTIONS);
        let stranger = !hub.store.knows(node);
        let mut agents = hub.fleet.lock();
        agents
            .refuse_rival(node, hello, &peer, now)
            .inspect_err(|_| hub.fleet.changed())?;
        if stranger && !agents.by_node.contains_key(node) {
            agents.make_room()?;
        }
        agents.sessions += 1;
        let number = agents.sessions;
        let before = agents.by_node.remove(node);
        agents.strangers -= usize::from(before.as_ref().is_some_and(|before| before.stranger));
        agents.strangers += usize::from(stranger);
        if before.as_ref().is_some_and(|b| b.record.connected) {
            tracing::info!(%node, "the agent opened a new stream; the older one ends");
        }
        // What the old stream reported stays visible until the new one reports.
        let (report, latencies) = before
            .map(|before| {
                (
                    before.record.report.clone(),
                    before.record.latencies.clone(),
                )
            })
            .unwrap_or_default();
        let record = AgentRecord {
            connected: true,
            since: now,
            last_heard: now,
            instance: hello.instance,
            began_empty: hello.resume.is_none(),
            peer,
            version: label(&hello.agent_version, MAX_LABEL_BYTES),
            backend: label(&hello.backend, MAX_LABEL_BYTES),
            backend_deprecation: label(&hello.backend_deprecation, MAX_DEPRECATION_BYTES),
            report,
            applied_at: now,
            verified_at: now,
            latencies,
            rival: None,
        };
        agents.by_node.insert(
            node.clone(),
            Agent {
                record: Arc::new(record),
                stranger,
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
        Ok((session, superseded, asked))
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
        // A doubt is not answered by looking again: the source does so by itself, or a person must.
        if report.held.is_some() && self.fleet.store.trust() == Trust::Whole {
            self.fleet.upstream.look_again();
        }
        self.update(|record| {
            record.latencies.remember(programmed);
            let applied = |r: &Report| (r.epoch, r.applied_revision);
            if record.report.as_deref().map(applied) != Some(applied(&report)) {
                record.applied_at = SystemTime::now();
            }
            if record.report.as_deref().map(verified) != Some(verified(&report)) {
                record.verified_at = SystemTime::now();
            }
            record.report = Some(Arc::new(report));
        });
        self.fleet.fleet.changed();
    }

    fn update(&self, change: impl FnOnce(&mut AgentRecord)) {
        let mut agents = self.fleet.fleet.lock();
        let agent = agents.by_node.get_mut(&self.node);
        if let Some(agent) = agent.filter(|agent| agent.session == self.number) {
            change(Arc::make_mut(&mut agent.record));
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
