//! The task that owns the index, and the way to it.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use kplane_desired_state::freshness::Freshness;
use kplane_desired_state::index::{
    Causes, Held, Index, Outcome, ServiceDetail, Suspicions, Totals,
};
use kplane_desired_state::publish::{Publication, Staged};
use kplane_desired_state::source::{Batch, Event};
use kplane_desired_state::trust::Trust;
use kplane_model::{Issue, ServiceName};
use kplane_proto::v1::Enforcement;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant as Moment, sleep_until};
use tonic::Status;
use tracing::{info, warn};

use super::{Hub, noticing};
use crate::fleet::Hop;
use crate::publish_debounce::PublishDebounce;

/// Maximum number of questions that wait for the index. Each is answered in milliseconds; further
/// callers wait until there is room.
pub(super) const QUESTIONS: usize = 16;

/// The index's summary of its state after each batch.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Sizes.
    pub totals: Totals,
    /// Problems with the input, sorted. [`super::Hub::issues`] has those of the API server as well.
    pub issues: Arc<Vec<Issue>>,
    /// Objects that are served although the source no longer names them.
    pub held: Option<Arc<Held>>,
    /// Time at which the last revision was published.
    pub revision_at: Option<Instant>,
    /// Time of the source's last message.
    pub heard_at: Option<Instant>,
}

/// A question that the index's owner answers in its own time.
pub(super) type IndexQuestion = Box<dyn FnOnce(&mut IndexOwner) + Send>;

/// The way to the index's owner.
#[derive(Clone, Debug)]
pub struct IndexHandle {
    pub(super) questions: mpsc::Sender<IndexQuestion>,
    pub(super) summary: watch::Receiver<Arc<Summary>>,
}

/// The control plane is shutting down and answers no more questions.
#[derive(Debug, thiserror::Error)]
#[error("the control plane is shutting down")]
pub struct Closing;

impl From<Closing> for Status {
    fn from(closing: Closing) -> Self {
        Self::unavailable(closing.to_string())
    }
}

impl IndexHandle {
    /// Returns a receiver of the index's latest summary.
    pub fn summary(&self) -> watch::Receiver<Arc<Summary>> {
        self.summary.clone()
    }

    /// Returns one Service.
    ///
    /// # Errors
    /// [`Closing`].
    pub async fn detail(&self, name: ServiceName) -> Result<Option<ServiceDetail>, Closing> {
        self.ask(move |owner| owner.index.detail(&name, &owner.hub.upstream.issues()))
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
        self.ask(|owner| answer(&owner.index)).await
    }

    /// Gives the index the suspected nodes; returns when that is published.
    ///
    /// # Errors
    /// [`Closing`].
    pub async fn suspect(&self, suspicions: Suspicions) -> Result<(), Closing> {
        let change = |owner: &mut IndexOwner| {
            let outcome = owner.index.suspect(suspicions, SystemTime::now());
            owner.share(outcome, None);
        };
        self.ask(change).await
    }

    pub(super) async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut IndexOwner) -> T + Send + 'static,
    ) -> Result<T, Closing> {
        let (answer, wait) = oneshot::channel();
        // The caller may have gone; then the answer is dropped.
        let question: IndexQuestion = Box::new(|owner| drop(answer.send(question(owner))));
        self.questions.send(question).await.map_err(|_| Closing)?;
        wait.await.map_err(|_| Closing)
    }
}

pub(super) struct IndexOwner {
    pub(super) index: Index,
    /// The versions of the source up to which the index knows everything.
    freshness: Freshness,
    pub(super) hub: Arc<Hub>,
    summary: watch::Sender<Arc<Summary>>,
    publish_debounce: PublishDebounce,
    /// The latest approvals that were given here or taken, oldest first.
    pub(super) approvals: VecDeque<u64>,
}

impl IndexOwner {
    pub(super) fn new(hub: Arc<Hub>, index: Index, summary: watch::Sender<Arc<Summary>>) -> Self {
        Self {
            index,
            freshness: Freshness::default(),
            hub,
            summary,
            publish_debounce: PublishDebounce::new(Moment::now()),
            approvals: VecDeque::new(),
        }
    }

    pub(super) async fn run(
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
        self.hub.notices.tainted.follow(&batch.events);
        let waited = batch.observed_at.elapsed().unwrap_or_default();
        let started = Instant::now();
        let outcome = self.index.apply(batch);
        if outcome.publication.is_some() {
            let timings = &self.hub.agents.timings;
            timings.hop(Hop::Queue, waited);
            timings.hop(Hop::Index, started.elapsed());
        }
        if outcome.held_more {
            self.hub.upstream.look_again();
        }
        self.share(outcome, Some(Instant::now()));
    }

    /// Publishes the outcome of a step to all readers.
    pub(super) fn share(&mut self, outcome: Outcome, heard_at: Option<Instant>) {
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
        noticing::changes(&self.hub.notices.recorder, &before, &summary);
        self.summary.send_replace(Arc::new(summary));
    }

    fn publish(&mut self, publication: Publication, causes: &Causes, summary: &mut Summary) {
        let before = self.hub.store.head().borrow().revision;
        let is_watched = self.hub.notices.changed_services.is_watched();
        let watched = is_watched.then(|| services_of(&publication));
        let started = Instant::now();
        let observed_at = publication.observed_at;
        let Staged { revision, touched } = self.hub.store.stage(publication, &self.freshness);
        if let Some(services) = watched {
            self.hub.notices.changed_services.tell(services);
        }
        if revision == before {
            return self.hub.notices.recorder.changed(&touched, causes, observed_at);
        }
        if self.publish_debounce.change(Moment::now(), self.hub.agents.count()) {
            self.announce();
        }
        self.hub.agents.timings.hop(Hop::Publish, started.elapsed());
        summary.revision_at = Some(Instant::now());
        // Streams send the change already.
        self.hub.notices.recorder.changed(&touched, causes, observed_at);
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
    publication.services.iter().map(|(key, _)| key.service.clone()).collect()
}
