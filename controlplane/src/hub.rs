//! What the parts of a control plane share, and the task that owns the index.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kplane_model::{Issue, ServiceName};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::admission::Admission;
use crate::fleet::Fleet;
use crate::index::{Index, PortView, ServiceDetail, Totals};
use crate::k8s::{ObjectId, Uid};
use crate::publish::Store;
use crate::source::Batch;
use crate::source::kubernetes;
use crate::source::upstream::Upstream;

/// Questions that may wait for the index. Each is answered in milliseconds; more askers than this
/// wait at the door.
const QUERIES: usize = 16;

/// Shared by all servers of one control plane.
#[derive(Debug)]
pub struct Hub {
    /// Encoded desired state.
    pub store: Store,
    /// What agents said.
    pub fleet: Fleet,
    /// Name of the source.
    pub source: &'static str,
    /// What the source says of its own state.
    pub upstream: Upstream,
    /// When the process began to serve.
    pub started_at: SystemTime,
    /// Cancelled when the control plane ends: so do all streams.
    pub shutdown: CancellationToken,
    summary: watch::Receiver<Arc<Summary>>,
    queries: mpsc::Sender<Query>,
}

/// What the index says of itself after each batch.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Sizes.
    pub totals: Totals,
    /// Problems with the input, sorted.
    pub issues: Arc<Vec<Issue>>,
    /// When the last revision was published.
    pub revision_at: Option<SystemTime>,
    /// When the source last said anything.
    pub heard_at: Option<Instant>,
}

/// A question to the index.
#[derive(Debug)]
enum Query {
    Ports(String, oneshot::Sender<Vec<PortView>>),
    Detail(ServiceName, oneshot::Sender<Option<ServiceDetail>>),
    Uid(ObjectId, oneshot::Sender<Option<Uid>>),
}

/// The control plane is shutting down and answers no more questions.
#[derive(Debug, thiserror::Error)]
#[error("the control plane is shutting down")]
pub struct Closing;

impl Hub {
    /// A hub, and the task that owns its index. The task ends with the source.
    pub fn new(
        epoch: u64,
        source: &'static str,
        admission: Admission,
        batches: mpsc::Receiver<Batch>,
    ) -> (Arc<Self>, impl Future<Output = ()> + Send) {
        let (summary_tx, summary) = watch::channel(Arc::default());
        let (queries, queries_rx) = mpsc::channel(QUERIES);
        let started_at = SystemTime::now();
        let hub = Arc::new(Self {
            store: Store::new(epoch),
            fleet: Fleet::default(),
            source,
            upstream: Upstream::default(),
            started_at,
            shutdown: CancellationToken::new(),
            summary,
            queries,
        });
        let owner = IndexOwner {
            index: Index::new(admission).started_at(started_at),
            hub: Arc::clone(&hub),
            summary: summary_tx,
        };
        (hub, owner.run(batches, queries_rx))
    }

    /// What the index said last; wakes up when it changes.
    #[must_use]
    pub fn summary(&self) -> watch::Receiver<Arc<Summary>> {
        self.summary.clone()
    }

    /// Whether the source has all nodes there are: an agent's name must be one of them.
    #[must_use]
    pub fn names_are_nodes(&self) -> bool {
        self.source == kubernetes::NAME
    }

    /// Time for which changes at the source's origin may have been missed: since the stalest of
    /// its kinds was known to be current, or since it said anything. Zero before it begins.
    #[must_use]
    pub fn upstream_age(&self) -> Duration {
        let heard = || self.summary.borrow().heard_at.map(|at| at.elapsed());
        self.upstream.age().or_else(heard).unwrap_or_default()
    }

    /// All ServicePorts of a namespace, or of all if it is empty.
    ///
    /// # Errors
    /// [`Closing`].
    pub async fn ports(&self, namespace: String) -> Result<Vec<PortView>, Closing> {
        self.ask(|answer| Query::Ports(namespace, answer)).await
    }

    /// One Service.
    ///
    /// # Errors
    /// [`Closing`].
    pub async fn detail(&self, name: ServiceName) -> Result<Option<ServiceDetail>, Closing> {
        self.ask(|answer| Query::Detail(name, answer)).await
    }

    /// What tells a Service, or an object that has issues of its own, from others of its name.
    ///
    /// # Errors
    /// [`Closing`].
    pub async fn uid(&self, id: ObjectId) -> Result<Option<Uid>, Closing> {
        self.ask(|answer| Query::Uid(id, answer)).await
    }

    async fn ask<T>(&self, query: impl FnOnce(oneshot::Sender<T>) -> Query) -> Result<T, Closing> {
        let (answer, wait) = oneshot::channel();
        self.queries
            .send(query(answer))
            .await
            .map_err(|_| Closing)?;
        wait.await.map_err(|_| Closing)
    }
}

struct IndexOwner {
    index: Index,
    hub: Arc<Hub>,
    summary: watch::Sender<Arc<Summary>>,
}

impl IndexOwner {
    async fn run(mut self, mut batches: mpsc::Receiver<Batch>, mut queries: mpsc::Receiver<Query>) {
        loop {
            tokio::select! {
                biased;
                batch = batches.recv() => match batch {
                    Some(batch) => self.apply(batch),
                    None => break,
                },
                Some(query) = queries.recv() => self.answer(query),
            }
        }
        // The source is over (standard input, say): go on answering for what there is.
        while let Some(query) = queries.recv().await {
            self.answer(query);
        }
    }

    fn apply(&mut self, batch: Batch) {
        let outcome = self.index.apply(batch);
        let before = self.summary.borrow().clone();
        let mut summary = Summary {
            totals: self.index.totals(),
            issues: Arc::clone(&before.issues),
            revision_at: before.revision_at,
            heard_at: Some(Instant::now()),
        };
        if outcome.issues_changed {
            summary.issues = Arc::new(self.index.issues());
            for issue in new_issues(&before.issues, &summary.issues) {
                warn!(severity = %issue.severity, "{issue}");
            }
        }
        if let Some(publication) = outcome.publication {
            let before = self.hub.store.head().borrow().revision;
            let revision = self.hub.store.publish(publication);
            if revision != before {
                summary.revision_at = Some(SystemTime::now());
                let Totals {
                    services,
                    endpoints,
                } = summary.totals;
                info!(
                    revision,
                    changes = revision - before,
                    services,
                    endpoints,
                    "published"
                );
            }
        }
        if self.index.is_synced() {
            self.hub.store.set_synced();
        }
        self.summary.send_replace(Arc::new(summary));
    }

    fn answer(&self, query: Query) {
        // An asker that went away needs no answer.
        match query {
            Query::Ports(namespace, answer) => drop(answer.send(self.index.ports(&namespace))),
            Query::Detail(name, answer) => drop(answer.send(self.index.detail(&name))),
            Query::Uid(id, answer) => drop(answer.send(self.index.uid(&id))),
        }
    }
}

/// Issues of `after` that are not in `before`; both sorted.
fn new_issues<'a>(before: &[Issue], after: &'a [Issue]) -> impl Iterator<Item = &'a Issue> {
    after
        .iter()
        .filter(|issue| before.binary_search(issue).is_err())
}
