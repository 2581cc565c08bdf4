//! State that the parts of a control plane share, and the task that owns the index.

mod approving;
mod changed_services;
mod noticing;

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use kplane_desired_state::admission::Admission;
use kplane_desired_state::freshness::Freshness;
use kplane_desired_state::index::{
    Causes, CliffGuard, Held, Index, Outcome, Page, Selection, ServiceDetail, Suspicions, Totals,
};
use kplane_desired_state::k8s::{ObjectId, Uid};
use kplane_desired_state::publish::{Publication, Staged, Store};
use kplane_desired_state::recorder::Recorder;
use kplane_desired_state::source::upstream::Upstream;
use kplane_desired_state::source::{Batch, Event, kubernetes};
use kplane_desired_state::tainted::Tainted;
use kplane_desired_state::trust::Trust;
use kplane_model::{Issue, NodeName, ServiceName};
use kplane_policy::Policies;
use kplane_proto::v1::Enforcement;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant as Moment, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::draining::Draining;
use crate::fleet::{Fleet, Hop};
use crate::orders::Board;
use crate::peers::Listed;
use crate::prestop::PrestopQuestions;
use crate::publish_debounce::PublishDebounce;
use crate::snapshots::Snapshots;
use crate::suspects::Suspects;
use crate::traffic::Traffic;

pub use self::approving::{Approvals, Approved, HeldMore, Seen};
use self::changed_services::ChangedServices;
pub use self::changed_services::Missed;

/// Maximum number of questions that wait for the index. Each is answered in milliseconds; further
/// callers wait until there is room.
const QUESTIONS: usize = 16;

/// State shared by all servers of one control plane.
#[derive(Debug)]
pub struct Hub {
    /// Encoded desired state.
    pub store: Arc<Store>,
    /// The agents' reports.
    pub fleet: Arc<Fleet>,
    /// Name of the source.
    pub source: &'static str,
    /// Whether nodes enforce NetworkPolicies.
    pub network_policies: bool,
    /// The source's own state.
    pub upstream: Upstream,
    /// Start time of the process's service.
    pub started_at: Instant,
    /// Ports that other machines reach in plain text, human-readable; the wiring sets them once.
    pub plain_text_ports: OnceLock<Vec<String>>,
    /// Whether agents are asked to leave, because the control plane is about to end.
    pub draining: Draining,
    /// Admission of agents that need a snapshot.
    pub snapshots: Snapshots,
    /// Standing orders of operators.
    pub orders: Board,
    /// The Node on which this replica runs, if that is known.
    pub own_node: OnceLock<NodeName>,
    /// Where all replicas serve agents, if this one knows it.
    pub listed: OnceLock<Listed>,
    /// The cluster's name from `--cluster-name`, if it was given.
    pub cluster_name: OnceLock<String>,
    /// The Nodes that have the start-up taint.
    pub tainted: Tainted,
    /// Nodes that are probably dead.
    pub suspects: Suspects,
    /// What streams have sent to agents.
    pub traffic: Arc<Traffic>,
    /// Pods that wait to end.
    pub departures: PrestopQuestions,
    /// Names of Services that may have changed, for watches.
    pub changed_services: ChangedServices,
    /// The record of what changed.
    pub recorder: Arc<Recorder>,
    /// Token that is cancelled when the control plane ends; all streams end with it.
    pub shutdown: CancellationToken,
    /// Approvals of the picture.
    pub approvals: Approvals,
    summary: watch::Receiver<Arc<Summary>>,
    index: IndexHandle,
}

/// The index's summary of its state after each batch.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Sizes.
    pub totals: Totals,
    /// Problems with the input, sorted. [`Hub::issues`] has those of the API server as well.
    pub issues: Arc<Vec<Issue>>,
    /// Objects that are served although the source no longer names them.
    pub held: Option<Arc<Held>>,
    /// Time at which the last revision was published.
    pub revision_at: Option<Instant>,
    /// Time of the source's last message.
    pub heard_at: Option<Instant>,
}

/// A question that the index's owner answers in its own time.
type IndexQuestion = Box<dyn FnOnce(&mut IndexOwner) + Send>;

/// The way to the index's owner.
#[derive(Clone, Debug)]
struct IndexHandle(mpsc::Sender<IndexQuestion>);

/// The control plane is shutting down and answers no more questions.
#[derive(Debug, thiserror::Error)]
#[error("the control plane is shutting down")]
pub struct Closing;

impl Hub {
    /// Creates a hub and the task that owns its index. The task ends with the source.
    pub fn new(
        epoch: u64,
        source: &'static str,
        admission: Admission,
        guard: CliffGuard,
        batches: mpsc::Receiver<Batch>,
    ) -> (Arc<Self>, impl Future<Output = ()> + Send) {
        let (summary_tx, summary) = watch::channel(Arc::default());
        let (questions, questions_rx) = mpsc::channel(QUESTIONS);
        let index = IndexHandle(questions);
        let started_at = Instant::now();
        let store = Arc::new(Store::new(epoch));
        let (upstream, recorder) = (Upstream::default(), Arc::<Recorder>::default());
        let shutdown = CancellationToken::new();
        let hub = Arc::new(Self {
            fleet: Arc::new(Fleet::new(
                Arc::clone(&store),
                upstream.clone(),
                Arc::clone(&recorder),
                started_at,
                shutdown.clone(),
            )),
            store,
            source,
            network_policies: admission.enforces(),
            upstream,
            started_at,
            plain_text_ports: OnceLock::new(),
            draining: Draining::default(),
            snapshots: Snapshots::default(),
            orders: Board::default(),
            own_node: OnceLock::new(),
            listed: OnceLock::new(),
            cluster_name: OnceLock::new(),
            tainted: Tainted::default(),
            suspects: Suspects::default(),
            traffic: Arc::default(),
            departures: PrestopQuestions::default(),
            changed_services: ChangedServices::default(),
            recorder,
            shutdown,
            approvals: Approvals::new(index.clone()),
            summary,
            index,
        });
        let owner = IndexOwner {
            index: Index::new(admission).guarded(guard).started_at(SystemTime::now()),
            freshness: Freshness::default(),
            hub: Arc::clone(&hub),
            summary: summary_tx,
            publish_debounce: PublishDebounce::new(Moment::now()),
            approvals: VecDeque::new(),
        };
        (hub, owner.run(batches, questions_rx))
    }

    /// Returns a receiver of the index's latest summary.
    pub fn summary(&self) -> watch::Receiver<Arc<Summary>> {
        self.summary.clone()
    }

    /// Returns the problems with the input and with the API server that it comes from, sorted.
    pub fn issues(&self) -> Arc<Vec<Issue>> {
        let input = Arc::clone(&self.summary.borrow().issues);
        let upstream = self.upstream.issues();
        let own = self.orders.issue().into_iter().chain(self.suspects.issues());
        let own: Vec<_> = own.chain(crate::panicked::issues()).collect();
        if upstream.is_empty() && own.is_empty() {
            return input;
        }
        let mut all: Vec<_> = upstream.iter().chain(&*input).cloned().collect();
        all.extend(own);
        all.sort();
        Arc::new(all)
    }

    /// Returns whether the source knows all nodes. If so, an agent's name must be a Node's.
    pub fn names_are_nodes(&self) -> bool {
        self.source == kubernetes::NAME
    }

    /// Returns whether a name is certainly no Node: all Nodes are known, and none has it.
    pub fn lacks_node(&self, name: &str) -> bool {
        let knows_all = self.names_are_nodes() && self.store.head().borrow().synced;
        knows_all && !self.store.knows(name)
    }

    /// Returns where all replicas serve agents, as far as that is known.
    pub(crate) fn replicas(&self) -> Vec<String> {
        self.listed.get().map(Listed::places).unwrap_or_default()
    }

    /// Returns whether this replica runs in the zone of a node; `None` if either zone is not known.
    pub fn is_in_zone_of(&self, node: &str) -> Option<bool> {
        let own = self.store.zone(self.own_node.get()?)?;
        Some(self.store.zone(node)? == own)
    }

    /// Returns the time for which changes at the source's origin may have been missed: since the
    /// stalest kind was known to be current, or since the source's last message. Zero before the
    /// source begins.
    pub fn upstream_age(&self) -> Duration {
        let heard = || self.summary.borrow().heard_at.map(|at| at.elapsed());
        self.upstream.age().or_else(heard).unwrap_or_default()
    }

    /// Returns a page of the ServicePorts that a selection wants.
    ///
    /// # Errors
    /// [`Closing`].
    pub async fn ports(&self, selection: Selection) -> Result<Page, Closing> {
        self.look(move |index| index.ports(&selection)).await
    }

    /// Returns one Service.
    ///
    /// # Errors
    /// [`Closing`].
    pub async fn detail(&self, name: ServiceName) -> Result<Option<ServiceDetail>, Closing> {
        let upstream = self.upstream.clone();
        self.look(move |index| index.detail(&name, &upstream.issues())).await
    }

    /// Returns the UID of a Service, or of an object that has issues of its own.
    ///
    /// # Errors
    /// [`Closing`].
    pub async fn uid(&self, id: ObjectId) -> Result<Option<Uid>, Closing> {
        self.look(move |index| index.uid(&id)).await
    }

    /// Returns the UID of a Node; `None` if the Node is unknown or the source gives it no UID.
    ///
    /// # Errors
    /// [`Closing`].
    pub async fn node_uid(&self, node: NodeName) -> Result<Option<Uid>, Closing> {
        self.look(move |index| index.node_uid(&node)).await
    }

    /// Returns an answer about the NetworkPolicies; `None` if nodes enforce none. The second argument are the index's
    /// issues, worked out if they are called for.
    ///
    /// # Errors
    /// [`Closing`].
    pub async fn policies<T: Send + 'static>(
        &self,
        answer: impl FnOnce(&Policies, &dyn Fn() -> Vec<Issue>) -> T + Send + 'static,
    ) -> Result<Option<T>, Closing> {
        self.look(move |index| {
            let policies = index.policies();
            policies.map(|policies| answer(policies, &|| index.issues()))
        })
        .await
    }

    /// Returns an answer about the index. All that the index knows is published then.
    ///
    /// # Errors
    /// [`Closing`].
    pub async fn look<T: Send + 'static>(
        &self,
        answer: impl FnOnce(&Index) -> T + Send + 'static,
    ) -> Result<T, Closing> {
        self.index.ask(|owner| answer(&owner.index)).await
    }

    /// Gives the index the suspected nodes; returns when that is published.
    ///
    /// # Errors
    /// [`Closing`].
    pub(crate) async fn suspect(&self, suspicions: Suspicions) -> Result<(), Closing> {
        let change = |owner: &mut IndexOwner| {
            let outcome = owner.index.suspect(suspicions, SystemTime::now());
            owner.share(outcome, None);
        };
        self.index.ask(change).await
    }
}

impl IndexHandle {
    async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut IndexOwner) -> T + Send + 'static,
    ) -> Result<T, Closing> {
        let (answer, wait) = oneshot::channel();
        // The caller may have gone; then the answer is dropped.
        let question: IndexQuestion = Box::new(|owner| drop(answer.send(question(owner))));
        self.0.send(question).await.map_err(|_| Closing)?;
        wait.await.map_err(|_| Closing)
    }
}

struct IndexOwner {
    index: Index,
    /// The versions of the source up to which the index knows everything.
    freshness: Freshness,
    hub: Arc<Hub>,
    summary: watch::Sender<Arc<Summary>>,
    publish_debounce: PublishDebounce,
    /// The latest approvals that were given here or taken, oldest first.
    approvals: VecDeque<u64>,
}

impl IndexOwner {
    async fn run(
        mut self,
        mut batches: mpsc::Receiver<Batch>,
        mut questions: mpsc::Receiver<IndexQuestion>,
    ) {
        loop {
            let due = self.publish_debounce.due();
            tokio::select! {
                biased;
                () = sleep_until(due.unwrap_or_else(Moment::now)), if due.is_some() => self.announce(),
                batch = batches.recv() => match batch {
                    Some(batch) => self.apply(batch),
                    None => break,
                },
                Some(question) = questions.recv() => question(&mut self),
            }
        }
        self.announce();
        // The source has ended (standard input, for example). The task continues to answer
        // questions.
        while let Some(question) = questions.recv().await {
            question(&mut self);
        }
    }

    /// Announces everything that is published.
    fn announce(&mut self) {
        self.hub.store.announce();
        self.publish_debounce.announced(Moment::now());
    }

    fn apply(&mut self, batch: Batch) {
        for event in &batch.events {
            if let Event::Version(kind, versions) = event {
                self.freshness.set(*kind, *versions);
            }
        }
        self.hub.tainted.follow(&batch.events);
        let waited = batch.observed_at.elapsed().unwrap_or_default();
        let started = Instant::now();
        let outcome = self.index.apply(batch);
        if outcome.publication.is_some() {
            let timings = &self.hub.fleet.timings;
            timings.hop(Hop::Queue, waited);
            timings.hop(Hop::Index, started.elapsed());
        }
        if outcome.held_more {
            self.hub.upstream.look_again();
        }
        self.share(outcome, Some(Instant::now()));
    }

    /// Publishes the outcome of a step to all readers.
    fn share(&mut self, outcome: Outcome, heard_at: Option<Instant>) {
        let before = self.summary.borrow().clone();
        let mut summary = Summary {
            totals: self.index.totals(),
            heard_at: heard_at.or(before.heard_at),
            ..Summary::clone(&before)
        };
        if outcome.issues_changed {
            summary.issues = Arc::new(self.index.issues());
            self.hub.upstream.log_new(&before.issues, &summary.issues);
        }
        if outcome.held_changed {
            summary.held = self.index.held().map(Arc::new);
            if summary.held.is_none() && before.held.is_some() {
                info!("no held objects remain");
            }
        }
        // Doubts are published before the objects, so that no agent takes an incomplete picture for
        // a complete one.
        let trust = self.index.trust();
        if trust.is_partial() {
            self.believe(trust.clone());
        }
        let enforcement = self.index.enforcement();
        if enforcement != Enforcement::On {
            self.hub.store.set_enforcement(enforcement);
        }
        if let Some(publication) = outcome.publication {
            self.publish(publication, &outcome.causes, &mut summary);
        }
        self.believe(trust);
        self.hub.store.set_enforcement(enforcement);
        if self.index.is_synced() {
            // The objects of these versions are published now, or are as before.
            self.hub.store.set_freshness(&self.freshness);
            self.hub.store.set_synced();
        }
        self.hub.notice_changes(&before, &summary);
        self.summary.send_replace(Arc::new(summary));
    }

    fn publish(&mut self, publication: Publication, causes: &Causes, summary: &mut Summary) {
        let before = self.hub.store.head().borrow().revision;
        let is_watched = self.hub.changed_services.is_watched();
        let watched = is_watched.then(|| services_of(&publication));
        let started = Instant::now();
        let observed_at = publication.observed_at;
        let Staged { revision, touched } = self.hub.store.stage(publication, &self.freshness);
        if let Some(services) = watched {
            self.hub.changed_services.tell(services);
        }
        if revision == before {
            return self.hub.recorder.changed(&touched, causes, observed_at);
        }
        if self.publish_debounce.change(Moment::now(), self.hub.fleet.agents()) {
            self.announce();
        }
        self.hub.fleet.timings.hop(Hop::Publish, started.elapsed());
        summary.revision_at = Some(Instant::now());
        // Streams send the change already.
        self.hub.recorder.changed(&touched, causes, observed_at);
        let Totals {
            services,
            endpoints,
            ..
        } = summary.totals;
        info!(
            revision,
            changes = revision - before,
            services,
            endpoints,
            "published"
        );
    }

    /// Publishes the trust in the picture to agents, and logs a change of it.
    fn believe(&self, trust: Trust) {
        if self.hub.store.trust() == trust {
            return;
        }
        match &trust {
            Trust::Partial(doubt) => warn!(
                "the source was not read completely, so objects that are missing from it are kept: \
                 {doubt}"
            ),
            Trust::Whole => info!("the source was read completely"),
            Trust::Confirmed => info!("the state of the source is confirmed"),
        }
        self.hub.store.set_trust(trust);
    }
}

/// Returns the Services that may have changed, also where nodes have nothing to do about it.
fn services_of(publication: &Publication) -> BTreeSet<ServiceName> {
    let services = publication.services.iter();
    services.map(|(key, _)| key.service.clone()).collect()
}

#[cfg(test)]
mod tests;
