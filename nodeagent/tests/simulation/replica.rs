//! A replica of the control plane: its hub, index, store and sessions are real, and its source is scripted.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kplane_agents::hub::{Hub, Seen};
use kplane_agents::identity::{self, AuditLog, Authenticator};
use kplane_agents::streams::AgentServer;
use kplane_agents::{failure_detector, suspects};
use kplane_desired_state::admission::Admission;
use kplane_desired_state::index::{CliffGuard, Guarded};
use kplane_desired_state::k8s::Kind;
use kplane_desired_state::source::{Batch, kubernetes};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use crate::ledger::{Shared, lock};
use crate::links::{self, SharedLinks};
use crate::source::{CLIFF, Lacking, Said, Source, View};
use crate::truth::{KINDS, Truth};
use crate::wire::Listener;

/// The time that a first list takes. It takes none where snapshots are rare: agents that wait for the last list would
/// compete for them, and the runtime's order of these is random.
const LISTING: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) hub: Arc<Hub>,
    pub(crate) listener: Listener,
    pub(crate) view: View,
    source: Source,
    batches: mpsc::Sender<Batch>,
    ledger: Shared,
    /// Snapshots a second that are admitted.
    snapshots: u32,
    /// Its watches say nothing.
    pub(crate) lags: bool,
    pub(crate) cut_off: bool,
    /// A list lacked objects that exist.
    misled: bool,
}

impl Replica {
    /// Starts a replica whose source has listed nothing yet.
    pub(crate) fn start(
        epoch: u64,
        snapshots: u32,
        watched: Option<(SharedLinks, u8)>,
        ledger: Shared,
    ) -> Self {
        let (batches, inbox) = mpsc::channel(1);
        let guard = CliffGuard {
            deletions: Guarded::Absence,
            share: u8::try_from(CLIFF.0).unwrap_or(100),
            minimum: CLIFF.1,
        };
        let (hub, index) = Hub::new(epoch, kubernetes::NAME, Admission::default(), guard, inbox);
        tokio::spawn(index);
        hub.streams().snapshots.limit(snapshots);
        hub.upstream().set_cluster_id("simulated".to_owned());
        Kind::ALL.iter().for_each(|kind| hub.upstream().begin(*kind));
        if let Some((links, nodes)) = watched {
            hub.suspects().set_mode(suspects::Mode::Observe);
            let (watched, stop) = (Arc::clone(&hub), hub.shutdown().clone());
            tokio::spawn(async move {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => {}
                    () = failure_detector::watch(watched, None) => {}
                }
            });
            tokio::spawn(links::check(
                Arc::clone(&hub),
                links,
                nodes,
                Arc::clone(&ledger),
            ));
        }
        let config = identity::AuthenticatorConfig {
            audit: AuditLog::Off,
            ..identity::AuthenticatorConfig::default()
        };
        let authenticator = Authenticator::open(&config, Arc::clone(&hub), None).unwrap();
        let server = AgentServer::new(Arc::clone(&hub), authenticator);
        let listener = Listener {
            server,
            epoch,
            open: hub.shutdown().child_token(),
        };
        Self {
            hub,
            listener,
            view: View::default(),
            source: Source::default(),
            batches,
            ledger,
            snapshots,
            lags: false,
            cut_off: false,
            misled: false,
        }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.hub.streams().draining.is_on()
    }

    /// Delivers the first lists.
    pub(crate) async fn begin(&mut self, truth: &Truth, late: u64, lacking: Lacking, doubt: bool) {
        self.misled |= lacking != Lacking::default();
        if doubt {
            self.hear(truth, vec![Said::Doubts(true)]).await;
        }
        let version = truth.head().saturating_sub(late);
        for said in self.source.begin(truth, version, lacking) {
            self.hear(truth, said).await;
            if self.snapshots > 1 {
                sleep(LISTING).await;
            }
        }
        self.touch();
    }

    /// Delivers what the watch of a kind has to say.
    pub(crate) async fn watch(&mut self, truth: &Truth, kind: Kind, most: usize) {
        let said = self.source.watch(truth, kind, most);
        self.hear(truth, said).await;
    }

    /// Delivers everything that all watches have to say.
    pub(crate) async fn catch_up(&mut self, truth: &Truth) {
        if self.lags || self.cut_off {
            return;
        }
        for kind in KINDS {
            self.watch(truth, kind, usize::MAX).await;
        }
        self.touch();
    }

    /// Delivers another list of Services and slices.
    pub(crate) async fn list(&mut self, truth: &Truth, lacking: Lacking) {
        if self.cut_off {
            return;
        }
        self.misled |= lacking != Lacking::default();
        for kind in [Kind::Service, Kind::EndpointSlice] {
            let said = self.source.list(truth, kind, lacking);
            self.hear(truth, said).await;
        }
    }

    /// Ends the doubts of the source.
    pub(crate) async fn believe(&mut self, truth: &Truth) {
        self.hear(truth, vec![Said::Doubts(false)]).await;
    }

    pub(crate) async fn approve(&mut self, truth: &Truth) {
        let seen = Seen {
            services: usize::MAX,
            without_endpoints: usize::MAX,
        };
        let approved = self.hub.index().approvals().approve(seen).await;
        assert!(
            approved.is_ok_and(|approved| approved.is_ok()),
            "an approval"
        );
        self.view.approve();
        self.published(truth);
    }

    async fn hear(&mut self, truth: &Truth, said: Vec<Said>) {
        if said.is_empty() {
            return;
        }
        let batch = Batch {
            events: said.iter().map(Said::to_event).collect(),
            observed_at: SystemTime::now(),
        };
        self.batches.send(batch).await.unwrap();
        // The index answers in the order of what it gets, so it has the batch now.
        drop(self.hub.index().look(|_| ()).await);
        self.view.hear(&said);
        self.published(truth);
    }

    /// Notes what the store must have now. No agent has any of it yet, because the network takes time.
    fn published(&self, truth: &Truth) {
        if !self.view.is_synced() {
            return;
        }
        let revision = self.hub.store().head().borrow().revision;
        let truth = self.misled.then_some(truth);
        lock(&self.ledger).publish((self.hub.store().epoch(), revision), &self.view, truth);
    }

    /// The source has heard from the API server.
    pub(crate) fn touch(&self) {
        if !self.cut_off {
            touch(&self.hub);
        }
    }
}

fn touch(hub: &Hub) {
    for kind in Kind::ALL {
        hub.upstream().update(kind, |state| {
            state.current_at = Some(Instant::now());
            state.synced = true;
        });
    }
}
