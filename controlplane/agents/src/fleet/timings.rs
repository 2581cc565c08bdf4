//! The time that changes take: from the change until each node's kernel holds it, and at each hop on the way.
//!
//! Memory is bounded by constants: there is one histogram for each hop, and one for each of the latest publications.
//!
//! When a report moves a node's revision, the node counts in the histogram of each publication that it passes.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kplane_desired_state::publish::{Moment, Store};
use kplane_model::{NodeName, ServiceKey};
use kplane_proto::v1::{Report, Step};
use parking_lot::{Mutex, MutexGuard};
use tokio::time as clock;

use super::durations::Durations;
use super::under_way::UnderWay;
use super::{AgentRecord, AgentRegistry, Session};

/// Maximum number of publications whose durations are remembered: 200 s of 20 changes a second, in some 300 bytes each.
const REMEMBERED: usize = 4_096;

/// Longest time that a step may have taken place before its report. Agents do not wait that long.
const MAX_AGO: Duration = Duration::from_secs(10);

/// One step of a change on its way to a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hop {
    /// From the event of the source until the index begins with it.
    Queue,
    /// In the index.
    Index,
    /// Encoding, and storing for all streams.
    Publish,
    /// From there until an agent's stream takes the update.
    Send,
    /// On the network, to the agent and back as a report.
    Transfer,
    /// In the agent, without the next three.
    Agent,
    /// Planning and comparing.
    Plan,
    /// Encoding for the kernel.
    Encode,
    /// In the kernel.
    Kernel,
}

impl Hop {
    /// All hops, in the order of a change.
    const ALL: [Self; 9] = [
        Self::Queue,
        Self::Index,
        Self::Publish,
        Self::Send,
        Self::Transfer,
        Self::Agent,
        Self::Plan,
        Self::Encode,
        Self::Kernel,
    ];

    /// Returns the name in metrics.
    fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Index => "index",
            Self::Publish => "publish",
            Self::Send => "send",
            Self::Transfer => "transfer",
            Self::Agent => "agent",
            Self::Plan => "plan",
            Self::Encode => "encode",
            Self::Kernel => "kernel",
        }
    }
}

/// The durations of all hops and of the latest changes.
#[derive(Debug, Default)]
pub struct Timings(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    hops: [Durations; Hop::ALL.len()],
    /// Durations until kernels held a change, of all nodes and changes.
    programmed: Durations,
    /// The same by the publication's first revision.
    changes: BTreeMap<u64, Durations>,
}

/// The last update that a stream took.
#[derive(Clone, Copy, Debug)]
struct LastUpdate {
    revision: u64,
    at: Instant,
}

/// The record of what a stream sent: the stream writes it, and the stream's session measures reports by it.
#[derive(Debug)]
pub struct Dispatch {
    agents: Arc<AgentRegistry>,
    last: Mutex<Option<LastUpdate>>,
    under_way: Mutex<UnderWay>,
}

impl Timings {
    /// Adds the duration of one hop.
    pub fn hop(&self, hop: Hop, duration: Duration) {
        self.lock().hops[hop as usize].add(duration);
    }

    /// Returns the durations of each hop, by its name in metrics.
    pub fn hops(&self) -> Vec<(&'static str, Durations)> {
        let kept = self.lock();
        Hop::ALL
            .into_iter()
            .zip(&kept.hops)
            .map(|(hop, durations)| (hop.name(), durations.clone()))
            .collect()
    }

    /// Returns the durations until kernels held a change, of all nodes and changes.
    pub fn programmed(&self) -> Durations {
        self.lock().programmed.clone()
    }

    /// Returns the durations of one publication, by its first revision; `None` if no node was measured, or the
    /// publication is forgotten.
    pub fn of_change(&self, first_revision: u64) -> Option<Durations> {
        self.lock().changes.get(&first_revision).cloned()
    }

    /// Adds publications that a node's kernel has reached by these steps, or else `now`.
    fn reached(&self, passed: &[Moment], steps: &[Step], now: SystemTime) {
        let mut kept = self.lock();
        for moment in passed {
            let step = steps.iter().find(|step| step.revision >= moment.first);
            let since_observed = now.duration_since(moment.observed_at).unwrap_or_default();
            let took = since_observed.saturating_sub(step.map_or(Duration::ZERO, ago));
            kept.programmed.add(took);
            kept.changes.entry(moment.first).or_default().add(took);
            if kept.changes.len() > REMEMBERED {
                kept.changes.pop_first();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        // Each write leaves it usable.
        self.0.lock()
    }
}

/// Returns the revision of this control plane that a report says to be in the kernel.
pub(super) fn applied(report: &Report, store: &Store) -> Option<u64> {
    let newest = store.head().borrow().revision;
    (report.epoch == store.epoch()).then(|| report.applied_revision.min(newest))
}

/// Moves a record's mark to the newest revision that the kernel holds, and returns the mark before. The mark never
/// goes back: a revision that the agent takes back and applies again is measured once. The first revision only sets
/// the mark, because nobody knows since when the kernel holds it.
pub(super) fn advance(record: &mut AgentRecord, applied: u64) -> Option<u64> {
    let before = record.measured_to;
    record.measured_to = before.max(applied);
    (before > 0 && applied > before).then_some(before)
}

impl Dispatch {
    pub(super) fn new(registry: &Arc<AgentRegistry>) -> Arc<Self> {
        Arc::new(Self {
            agents: Arc::clone(registry),
            last: Mutex::default(),
            under_way: Mutex::default(),
        })
    }

    /// Notes that the stream takes the end of an update to this revision.
    pub fn sent(&self, revision: u64) {
        let at = Instant::now();
        self.under_way().sent(revision, clock::Instant::now());
        let before = self.lock().replace(LastUpdate { revision, at });
        // The first update of a stream may be a snapshot, and says nothing about changes.
        let lacked = before.filter(|sent| sent.revision < revision);
        let published = lacked.and_then(|sent| self.agents.store.moment_of(sent.revision + 1));
        if let Some(moment) = published {
            let waited = at.saturating_duration_since(moment.published_at);
            self.agents.timings.hop(Hop::Send, waited);
        }
    }

    /// Returns whether the stream should wait until the agent has received more of what was sent.
    pub fn is_full(&self) -> bool {
        let spread = || Duration::from_millis(self.agents.report_within_ms().into());
        self.under_way().is_full(spread, clock::Instant::now())
    }

    /// Notes what a report says to have arrived. Returns whether a stream that waits should look again.
    pub(super) fn arrived(&self, report: &Report) -> bool {
        let received = report.received_revision.max(report.applied_revision);
        report.epoch == self.agents.store.epoch() && self.under_way().arrived(received)
    }

    fn under_way(&self) -> MutexGuard<'_, UnderWay> {
        self.under_way.lock()
    }

    fn lock(&self) -> MutexGuard<'_, Option<LastUpdate>> {
        self.last.lock()
    }
}

impl Session {
    /// Measures what a report says to be new in the kernel, and since when.
    pub(super) fn measure(&self, report: &Report, steps: &[Step], before: u64, applied: u64) {
        let timings = &self.agents.timings;
        let passed = passed(&self.agents.store, &self.node, report, before, applied);
        timings.reached(&passed, steps, SystemTime::now());
        // Steps of an update that brought nothing for the node say nothing about changes.
        let stats = report.last_sync.as_ref().filter(|sync| sync.revision == applied);
        if passed.is_empty() {
            return;
        }
        let Some(stats) = stats else {
            return;
        };
        let parts = [
            (Hop::Plan, stats.plan_us),
            (Hop::Encode, stats.encode_us),
            (Hop::Kernel, stats.kernel_us),
        ];
        let of_parts = parts.iter().fold(0_u64, |sum, (_, us)| sum.saturating_add(*us));
        for (hop, us) in parts {
            timings.hop(hop, Duration::from_micros(us));
        }
        let rest = stats.total_us.saturating_sub(of_parts);
        timings.hop(Hop::Agent, Duration::from_micros(rest));
        let sent = *self.dispatch.lock();
        if let Some(sent) = sent.filter(|sent| sent.revision == applied) {
            let waited = steps.last().map_or(Duration::ZERO, ago);
            let inside = Duration::from_micros(stats.total_us) + waited;
            timings.hop(Hop::Transfer, sent.at.elapsed().saturating_sub(inside));
        }
    }
}

/// Returns the time since a step, as an agent says.
pub(super) fn ago(step: &Step) -> Duration {
    Duration::from_micros(step.ago_us).min(MAX_AGO)
}

/// Returns the publications that a node's kernel holds since this report, without ServicePorts that failed.
fn passed(
    store: &Store,
    node: &NodeName,
    report: &Report,
    before: u64,
    applied: u64,
) -> Vec<Moment> {
    let failures = report.failures.iter().filter(|failure| !failure.degraded);
    let keys = failures.filter_map(|failure| failure.key.clone());
    let failed: HashSet<ServiceKey> = keys.filter_map(|key| key.try_into().ok()).collect();
    store.passed(node, before, applied, &failed)
}

#[cfg(test)]
mod tests;
