//! The handles that the parts of a control plane share.

mod approving;
mod changed_services;
mod index;
mod noticing;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use kplane_desired_state::admission::Admission;
use kplane_desired_state::index::{CliffGuard, Index};
use kplane_desired_state::publish::Store;
use kplane_desired_state::recorder::Recorder;
use kplane_desired_state::source::upstream::Upstream;
use kplane_desired_state::source::{Batch, kubernetes};
use kplane_desired_state::tainted::Tainted;
use kplane_model::{Issue, NodeName};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::draining::Draining;
use crate::fleet::AgentRegistry;
use crate::overrides::OverrideStore;
use crate::peers::Listed;
use crate::prestop::PrestopQuestions;
use crate::snapshots::Snapshots;
use crate::suspects::Suspects;
use crate::traffic::Traffic;

pub use self::approving::{Approvals, Approved, HeldMore, Seen};
use self::changed_services::ChangedServices;
pub use self::changed_services::Missed;
pub use self::index::{Closing, IndexHandle, Summary};
use self::index::{IndexOwner, QUESTIONS};

/// The handles of one control plane. Each leads to one part of its state.
#[derive(Debug)]
pub struct Hub {
    store: Arc<Store>,
    index: IndexHandle,
    upstream: Upstream,
    notices: Notices,
    agents: Arc<AgentRegistry>,
    streams: StreamControls,
    overrides: OverrideStore,
    suspects: Suspects,
    replica: ReplicaInfo,
    shutdown: CancellationToken,
}

/// Facts about this replica. The wiring sets each cell once.
#[derive(Debug)]
pub struct ReplicaInfo {
    /// Name of the source.
    pub source: &'static str,
    /// Whether nodes enforce NetworkPolicies.
    pub network_policies: bool,
    /// Start time of the process's service.
    pub started_at: Instant,
    /// Ports that other machines reach in plain text, human-readable.
    pub plain_text_ports: OnceLock<Vec<String>>,
    /// The Node on which this replica runs, if that is known.
    pub own_node: OnceLock<NodeName>,
    /// Addresses at which all replicas serve agents, if they are known.
    pub listed: OnceLock<Listed>,
    /// The cluster's name from `--cluster-name`, if it was given.
    pub cluster_name: OnceLock<String>,
}

/// Notices of what each batch of the source changed.
#[derive(Debug, Default)]
pub struct Notices {
    /// The record of what changed.
    pub recorder: Arc<Recorder>,
    /// Names of Services that may have changed, for watches.
    pub changed_services: ChangedServices,
    /// The Nodes that have the start-up taint.
    pub tainted: Tainted,
}

/// State that all streams to agents share.
#[derive(Debug, Default)]
pub struct StreamControls {
    /// Whether agents are asked to leave, because the control plane is about to end.
    pub draining: Draining,
    /// Admission of agents that need a snapshot.
    pub snapshots: Snapshots,
    /// Counters of what streams have sent to agents.
    pub traffic: Arc<Traffic>,
    /// Pods that wait to end.
    pub departures: PrestopQuestions,
}

impl Hub {
    /// Creates a hub and the task that owns its index. The task ends with the source.
    pub fn new(
        epoch: u64,
        source: &'static str,
        admission: Admission,
        guard: CliffGuard,
        batches: mpsc::Receiver<Batch>,
    ) -> (Arc<Self>, impl Future<Output = ()> + Send) {
        let (sender, summary) = watch::channel(Arc::default());
        let (questions, asked) = mpsc::channel(QUESTIONS);
        let store = Arc::new(Store::new(epoch));
        let (upstream, notices) = (Upstream::default(), Notices::default());
        let replica = ReplicaInfo {
            source,
            network_policies: admission.enforces(),
            started_at: Instant::now(),
            plain_text_ports: OnceLock::new(),
            own_node: OnceLock::new(),
            listed: OnceLock::new(),
            cluster_name: OnceLock::new(),
        };
        let shutdown = CancellationToken::new();
        let hub = Arc::new(Self {
            agents: Arc::new(AgentRegistry::new(
                Arc::clone(&store),
                upstream.clone(),
                Arc::clone(&notices.recorder),
                replica.started_at,
                shutdown.clone(),
            )),
            store,
            index: IndexHandle { questions, summary },
            upstream,
            notices,
            streams: StreamControls::default(),
            overrides: OverrideStore::default(),
            suspects: Suspects::default(),
            replica,
            shutdown,
        });
        let index = Index::new(admission).guarded(guard).started_at(SystemTime::now());
        let owner = IndexOwner::new(Arc::clone(&hub), index, sender);
        (hub, owner.run(batches, asked))
    }

    /// Returns the encoded desired state.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Returns the way to the index.
    pub fn index(&self) -> &IndexHandle {
        &self.index
    }

    /// Returns the source's own state.
    pub fn upstream(&self) -> &Upstream {
        &self.upstream
    }

    /// Returns the notices of what changed.
    pub fn notices(&self) -> &Notices {
        &self.notices
    }

    /// Returns the agents and their reports.
    pub fn agents(&self) -> &Arc<AgentRegistry> {
        &self.agents
    }

    /// Returns the state that all streams to agents share.
    pub fn streams(&self) -> &StreamControls {
        &self.streams
    }

    /// Returns the operators' overrides.
    pub fn overrides(&self) -> &OverrideStore {
        &self.overrides
    }

    /// Returns the nodes that are probably dead.
    pub fn suspects(&self) -> &Suspects {
        &self.suspects
    }

    /// Returns the facts about this replica.
    pub fn replica(&self) -> &ReplicaInfo {
        &self.replica
    }

    /// Returns the token that is cancelled when the control plane ends; all streams end with it.
    pub fn shutdown(&self) -> &CancellationToken {
        &self.shutdown
    }

    /// Returns the problems with the input and with the API server that it comes from, sorted.
    pub fn issues(&self) -> Arc<Vec<Issue>> {
        let input = Arc::clone(&self.index.summary.borrow().issues);
        let upstream = self.upstream.issues();
        let own: Vec<_> = self
            .overrides
            .issue()
            .into_iter()
            .chain(self.suspects.issues())
            .chain(crate::panicked::issues())
            .collect();
        if upstream.is_empty() && own.is_empty() {
            return input;
        }
        let mut all: Vec<_> = upstream.iter().chain(&*input).cloned().collect();
        all.extend(own);
        all.sort();
        Arc::new(all)
    }

    /// Returns whether a name is certainly no Node: all Nodes are known, and none has it.
    pub fn lacks_node(&self, name: &str) -> bool {
        let knows_all = self.replica.names_are_nodes() && self.store.head().borrow().synced;
        knows_all && !self.store.knows(name)
    }

    /// Returns whether this replica runs in the zone of a node; `None` if either zone is not known.
    pub fn is_in_zone_of(&self, node: &str) -> Option<bool> {
        let own = self.store.zone(self.replica.own_node.get()?)?;
        Some(self.store.zone(node)? == own)
    }

    /// Returns the time for which changes at the source's origin may have been missed: since the
    /// stalest kind was known to be current, or since the source's last message. Zero before the
    /// source begins.
    pub fn upstream_age(&self) -> Duration {
        let heard = || self.index.summary.borrow().heard_at.map(|at| at.elapsed());
        self.upstream.age().or_else(heard).unwrap_or_default()
    }
}

impl ReplicaInfo {
    /// Returns whether the source knows all nodes. If so, an agent's name must be a Node's.
    pub fn names_are_nodes(&self) -> bool {
        self.source == kubernetes::NAME
    }

    /// Returns where all replicas serve agents, as far as that is known.
    pub(crate) fn replicas(&self) -> Vec<String> {
        self.listed.get().map(Listed::places).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
