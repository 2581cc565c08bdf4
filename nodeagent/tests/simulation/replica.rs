//! A replica of the control plane: its hub, index, store and sessions are real, and its source is scripted.

use std::sync::Arc;
use std::time::SystemTime;

use kplane_agents::hub::{Hub, Seen};
use kplane_agents::identity::{self, AuditLog, Authenticator};
use kplane_agents::overrides::{Backend, Overrides};
use kplane_agents::streams::AgentServer;
use kplane_agents::{failure_detector, suspects};
use kplane_desired_state::admission::{Admission, Enforce};
use kplane_desired_state::index::{CliffGuard, Guarded, Index, Suspicion, Suspicions};
use kplane_desired_state::k8s::Kind;
use kplane_desired_state::source::{Batch, kubernetes};
use kplane_policy::End;
use kplane_status_api::server::prestop;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::ledger::{N3, Shared, lock};
use crate::links::{self, SharedLinks};
use crate::plan::Flags;
use crate::reference::{Cluster, Packet};
use crate::source::{Lacking, Said, Source, View};
use crate::truth::{KINDS, Truth, node_name};
use crate::wire::Listener;

/// Packets about which the control plane is asked after a change.
const ASKED: usize = 3;

#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) hub: Arc<Hub>,
    pub(crate) listener: Listener,
    pub(crate) view: View,
    /// Nodes enforce NetworkPolicies.
    policies: bool,
    pub(crate) flags: Flags,
    /// Operators freeze nodes.
    ordered: bool,
    source: Source,
    batches: mpsc::Sender<Batch>,
    ledger: Shared,
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
        flags: Flags,
        ordered: bool,
        watched: Option<(SharedLinks, u8)>,
        ledger: Shared,
    ) -> Self {
        let (batches, inbox) = mpsc::channel(1);
        let guard = CliffGuard {
            deletions: Guarded::Absence,
            share: u8::try_from(flags.cliff.0).unwrap_or(100),
            minimum: flags.cliff.1,
        };
        let policies = flags.policies == Some(Enforce::On);
        let admission = Admission {
            network_policies: flags.policies,
            ..Admission::default()
        };
        let (hub, index) = Hub::new(epoch, kubernetes::NAME, admission, guard, inbox);
        tokio::spawn(index);
        hub.streams().snapshots.limit(snapshots);
        if epoch.is_multiple_of(2) {
            hub.store().remember_deletions(0);
        }
        if ordered {
            // Orders are unknown until the document was read.
            hub.overrides().keep_in(Backend::File("orders".into()));
        }
        hub.upstream().set_cluster_id("simulated".to_owned());
        kinds(policies).iter().for_each(|kind| hub.upstream().begin(*kind));
        if let Some((links, nodes)) = watched {
            hub.suspects().set_mode(suspects::Mode::Observe, suspects::Connections::End);
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
        tokio::spawn(answer_hooks(Arc::clone(&hub)));
        let listener = Listener {
            server,
            epoch,
            lacks: flags.lacks,
            open: hub.shutdown().child_token(),
        };
        Self {
            hub,
            listener,
            view: View::new(flags),
            policies,
            flags,
            ordered,
            source: Source::new(policies, epoch.is_multiple_of(3)),
            batches,
            ledger,
            lags: false,
            cut_off: false,
            misled: false,
        }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.hub.streams().draining.is_on()
    }

    /// Returns the first lists.
    pub(crate) fn begin(
        &mut self,
        truth: &Truth,
        late: u64,
        lacking: Lacking,
        doubt: bool,
    ) -> Vec<Vec<Said>> {
        self.misled |= lacking != Lacking::default();
        let version = truth.head().saturating_sub(late);
        let reverse = self.listener.epoch.is_multiple_of(2);
        let lists = self.source.begin(truth, version, lacking, reverse);
        let doubts = doubt.then(|| vec![Said::Doubts(true)]);
        doubts.into_iter().chain(lists).collect()
    }

    /// Delivers what the watch of a kind has to say.
    pub(crate) async fn watch(&mut self, truth: &Truth, kind: Kind, most: usize) {
        let said = self.source.watch(truth, kind, most);
        self.hear(truth, said).await;
    }

    /// Delivers everything that all watches have to say, and the orders of operators.
    pub(crate) async fn catch_up(&mut self, truth: &Truth, orders: &Overrides) {
        if self.ordered && !self.cut_off {
            self.hub.overrides().take(orders.clone());
        }
        if self.lags || self.cut_off {
            return;
        }
        for kind in KINDS {
            self.watch(truth, kind, usize::MAX).await;
        }
        self.touch();
    }

    /// Delivers another list of each kind but nodes.
    pub(crate) async fn list(&mut self, truth: &Truth, lacking: Lacking) {
        if self.cut_off {
            return;
        }
        self.misled |= lacking != Lacking::default();
        for kind in self.source.confirming() {
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

    /// Finds some nodes out of reach, by their bits, and some of them dead.
    pub(crate) async fn mark(&mut self, truth: &Truth, suspected: u8, dead: u8) {
        let named = |mask: u8| (0..8).filter(move |node| mask >> node & 1 == 1).map(node_name);
        let suspicion = Suspicion {
            since: SystemTime::UNIX_EPOCH,
            missed: 5,
            asked: 5,
        };
        let suspicions = Suspicions {
            nodes: named(suspected).map(|node| (node, suspicion.clone())).collect(),
            act: true,
            dead: named(suspected & dead).collect(),
        };
        self.hub.index().suspect(suspicions).await.unwrap();
        self.view.mark(suspected, dead);
        self.published(truth);
    }

    pub(crate) async fn hear(&mut self, truth: &Truth, said: Vec<Said>) {
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
        let before = self.view.policy_change;
        self.view.hear(&said);
        self.published(truth);
        if before != self.view.policy_change && self.view.has_policies() {
            self.ask().await;
        }
    }

    /// Asks the control plane about some packets.
    async fn ask(&self) {
        let packets = Arc::clone(lock(&self.ledger).packets());
        let from = usize::try_from(self.view.policy_change).unwrap_or(0) % packets.len();
        let asked: Vec<_> = packets.iter().cycle().skip(from).take(ASKED).copied().collect();
        let of_index = asked.clone();
        let judge = move |index: &Index| {
            let policies = index.policies()?;
            let judge = |packet: &Packet| {
                let [from, to] = [packet.from, packet.to].map(End::Address);
                policies.judge(&from, &to, packet.protocol, packet.port)
            };
            Some(of_index.iter().map(judge).collect::<Vec<_>>())
        };
        let judged = self.hub.index().look(judge).await.ok().flatten().unwrap_or_default();
        let cluster = Cluster::of(&self.view.objects);
        let mut answers = asked.iter().zip(&judged);
        if let Some(text) = answers.find_map(|(packet, judged)| cluster.compare(packet, judged)) {
            lock(&self.ledger).break_invariant(N3, text);
        }
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
            for kind in kinds(self.policies) {
                self.hub.upstream().update(*kind, |state| {
                    state.current_at = Some(Instant::now());
                    state.synced = true;
                });
            }
        }
    }
}

/// Answers hooks until the replica ends.
async fn answer_hooks(hub: Arc<Hub>) {
    let stop = hub.shutdown().clone();
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = prestop::serve(hub, None) => {}
    }
}

fn kinds(policies: bool) -> &'static [Kind] {
    if policies { &Kind::WITH_POLICIES } else { &Kind::ALL }
}
