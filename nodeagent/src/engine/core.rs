//! The engine's logic without its thread: every step is a call, and time is an argument.

mod reached;
mod taking;

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use kplane_model::{Family, NodeFacts, RangeDigests, ServiceName};

use super::checkpoint::{Checkpoint, CheckpointSettings};
use super::confirmation::Confirmation;
use super::followers::Followers;
use super::now::Now;
use super::offline_start::OfflineStart;
use super::pipeline::{ApplyOutcome, Context, Pipeline};
use super::policies::Policies;
use super::reconciler::{Reconciler, TableTask};
use super::warnings::Warnings;
use crate::desired::{Confidence, Counts, Desired, Dirty, Position, now_ms};
use crate::report::{Failure, NodeState, Report, Sync, micros, time};
use kplane_dataplane::backend::{
    Applied, Backend, Description, Inspection, Notifications, Serving,
};
use kplane_dataplane::conntrack::Sweeper;
use kplane_dataplane::plan::NodeSettings;
use kplane_dataplane::policy::Enforcer;

/// Work for the kernel, and its origin.
#[derive(Debug)]
pub(super) struct Work {
    dirty: Dirty,
    origin: Origin,
    /// The time spent on decoding and comparing with the previous desired state.
    decode: Duration,
}

impl Work {
    /// Returns this work and a later one as one work.
    pub(super) fn and(mut self, later: Self) -> Self {
        self.dirty.services.extend(later.dirty.services);
        self.dirty.policies.extend(later.dirty.policies);
        self.dirty.node_changed |= later.dirty.node_changed;
        self.decode += later.decode;
        self
    }
}

/// The time when work began to wait.
#[derive(Clone, Copy, Debug)]
struct Origin {
    arrived: Instant,
    changed_at_ms: u64,
}

pub(super) struct Core {
    desired: Desired,
    checkpoint: Checkpoint,
    offline_start: OfflineStart,
    backend: &'static Description,
    serving: Option<Serving>,
    /// The kernel's reports of changes by other programs.
    notifications: Option<Box<dyn Notifications>>,
    /// Deletes the conntrack entries that the backend's changes make stale.
    conntrack: Option<Sweeper>,
    settings: NodeSettings,
    followers: Followers,
    families: [Pipeline; 2],
    policies: Policies,
    /// The origin of the oldest update that the kernel does not hold in full.
    behind: Option<Origin>,
    last_sync: Option<Sync>,
    syncs_ok: u64,
    syncs_failed: u64,
    unknown_kinds: u64,
    snapshots: u64,
    warnings: Warnings,
}

impl Core {
    pub(super) fn new(backend: Backend, settings: NodeSettings, followers: Followers) -> Self {
        Self {
            desired: Desired::default(),
            checkpoint: Checkpoint::default(),
            offline_start: OfflineStart::default(),
            backend: backend.description,
            serving: backend.serving,
            notifications: backend.notifications,
            conntrack: None,
            settings,
            followers,
            families: Pipeline::both(backend.sides, backend.knows_pods, backend.local_rule),
            policies: Policies::new(
                Enforcer::new(backend.policies),
                backend.description.is_proxy,
            ),
            behind: None,
            last_sync: None,
            syncs_ok: 0,
            syncs_failed: 0,
            unknown_kinds: 0,
            snapshots: 0,
            warnings: Warnings::default(),
        }
    }

    /// From now on, conntrack entries are deleted that become stale.
    pub(super) fn delete_stale(&mut self, sweeper: Sweeper) {
        self.conntrack = Some(sweeper);
    }

    /// Loads what an earlier process served. Called before the first update.
    pub(super) fn restore(&mut self, restore: CheckpointSettings) {
        let offline_start = restore.offline_start;
        let suspects;
        (self.desired, self.checkpoint, suspects) = restore.begin();
        if let Some((left, tell)) = suspects {
            self.policies.remember_deaths(&left, tell);
        }
        self.settings.last_known = self.desired.last_known();
        self.offline_start = OfflineStart::begin(offline_start, &self.desired, Now::real().instant);
    }

    /// Returns when a control plane last confirmed the desired state.
    pub(super) fn confirmation(&self) -> Confirmation {
        self.checkpoint.confirmation().clone()
    }

    pub(super) fn backend(&self) -> &'static Description {
        self.backend
    }

    pub(super) fn serving(&self) -> Option<Serving> {
        self.serving
    }

    pub(super) fn followers(&mut self) -> &mut Followers {
        &mut self.followers
    }

    /// Brings the kernel up to the desired state, each family on its own.
    pub(super) fn program(&mut self, work: &Work, now: Now) {
        let Some(position) = self.desired.position() else {
            return;
        };
        if self.checkpoint.hands_off() {
            return;
        }
        let mut sum = Applied {
            plan: work.decode,
            ..Applied::default()
        };
        // A Pod's policies are there before a Service leads to it.
        let mut failed = self.policies.sync(&work.dirty, position, &self.desired, now);
        for pipeline in &mut self.families {
            let mut context = Context {
                desired: &self.desired,
                settings: &self.settings,
                conntrack: self.conntrack.as_ref(),
                followers: &mut self.followers,
            };
            match pipeline.sync(&work.dirty, position, &mut context, now) {
                ApplyOutcome::Applied(applied) => add(&mut sum, &applied),
                ApplyOutcome::Failed => failed = true,
                ApplyOutcome::Nothing | ApplyOutcome::Waiting => {}
            }
        }
        if failed {
            self.syncs_failed += 1;
        } else {
            self.syncs_ok += 1;
        }
        self.finish(work, position, &sum);
    }

    /// Takes new settings and plans everything anew, as after a change of the node itself.
    pub(super) fn configure(&mut self, settings: NodeSettings, now: Now) {
        let last_known = self.desired.last_known();
        self.settings = NodeSettings {
            last_known,
            ..settings
        };
        self.warnings.about(&self.settings, &self.desired);
        self.plan_anew(now);
    }

    /// Brings the kernel up to the desired state, of which everything is planned anew.
    fn plan_anew(&mut self, now: Now) {
        Warnings::detector(&self.settings, self.desired.node());
        let work = Work {
            dirty: Dirty {
                node_changed: true,
                ..Dirty::default()
            },
            origin: Origin {
                arrived: now.instant,
                changed_at_ms: 0,
            },
            decode: Duration::ZERO,
        };
        self.program(&work, now);
    }

    /// Serves from the cache file if it is time for that.
    fn serve_alone(&mut self, now: Now) {
        let families = &mut self.families;
        let serving = || families.iter_mut().any(Pipeline::has_services);
        if !self.offline_start.decide(now.instant, serving) {
            return;
        }
        self.desired.serve_restored();
        let (counts, as_of) = (self.counts(), self.confirmation().get());
        tracing::warn!(
            services = counts.services,
            endpoints = counts.endpoints,
            stale_since = time(as_of),
            "no control plane answers: serving from the cache file what this node served before"
        );
        self.warnings.about(&self.settings, &self.desired);
        self.plan_anew(now);
    }

    fn finish(&mut self, work: &Work, position: Position, sum: &Applied) {
        let finished_at_ms = now_ms();
        let complete = self.applied() == Some(position);
        self.checkpoint.served |= complete;
        if complete {
            self.behind = None;
        }
        let changed_at_ms = Some(work.origin.changed_at_ms).filter(|at| complete && *at != 0);
        let sync = Sync {
            revision: position.revision,
            finished_at_ms,
            total: work.origin.arrived.elapsed(),
            plan: sum.plan,
            encode: sum.encode,
            kernel: sum.kernel,
            operations: sum.operations,
            bytes: sum.bytes,
            end_to_end_ms: changed_at_ms.map_or(0, |at| finished_at_ms.saturating_sub(at)),
        };
        let counts = self.counts();
        tracing::info!(
            revision = sync.revision,
            dirty = work.dirty.services.len(),
            services = counts.services,
            endpoints = counts.endpoints,
            operations = sync.operations,
            bytes = sync.bytes,
            took_us = micros(sync.total),
            "{}",
            if complete { "update applied" } else { "update applied in part" }
        );
        let mut errors = self.families.iter().filter_map(Pipeline::error);
        let error = errors.next().unwrap_or_default();
        self.followers.record(sync.clone(), &work.dirty, complete, error);
        self.last_sync = Some(sync);
    }

    /// Returns when [`Core::tick`] has something to do.
    pub(super) fn due(&self) -> Option<Instant> {
        self.next_task()
            .map(|(at, ..)| at)
            .into_iter()
            .chain(self.checkpoint.due())
            .chain(self.offline_start.due())
            .min()
    }

    /// Returns how far each table is, and what it waits for; those that restrict come first.
    fn tables(&self) -> impl Iterator<Item = &Reconciler> + Clone {
        let services = self.families.iter().map(|family| &family.state);
        self.policies.states().chain(services)
    }

    /// Returns what has waited for longest, or comes next: its time, what it is, and the place of its table.
    fn next_task(&self) -> Option<(Instant, TableTask, usize)> {
        let of = |(place, table): (usize, &Reconciler)| {
            let (at, task) = table.next()?;
            Some((at, task, place))
        };
        self.tables().enumerate().filter_map(of).min()
    }

    /// Returns a descriptor that is readable when [`Core::listen`] may have notifications to read.
    pub(super) fn readiness(&self) -> Option<OwnedFd> {
        self.notifications.as_ref()?.readiness()
    }

    /// Reads notifications of other programs' changes, and returns whether any of kplane's objects changed.
    /// [`Core::tick`] repairs those.
    pub(super) fn listen(&mut self, now: Now) -> bool {
        let reports = self.notifications.as_mut();
        let drifted = reports.map_or([false; 2], |reports| reports.read());
        let families = self.families.iter_mut().zip(drifted);
        let news = families.filter(|(_, drifted)| *drifted).fold(false, |news, (pipeline, _)| {
            news | pipeline.state.drifted(now)
        });
        // Their reports may have come with those.
        self.policies.listen(now) | news
    }

    /// Does one thing that is due: serves from the cache file, or does what a table has waited for longest, or writes the
    /// cache file.
    pub(super) fn tick(&mut self, now: Now) {
        if self.offline_start.is_due(now.instant) {
            return self.serve_alone(now);
        }
        match self.next_task() {
            Some((at, task, place)) if at <= now.instant => self.run(task, place, now),
            _ if self.checkpoint.is_due(now) => {
                self.checkpoint.hand_over(&self.desired, now.instant);
            }
            _ => {}
        }
    }

    fn run(&mut self, task: TableTask, place: usize, now: Now) {
        let conntrack = self.conntrack.as_ref();
        match (task, place.checked_sub(Family::ALL.len())) {
            (TableTask::Retry, _) => self.try_again(now),
            (_, None) => self.policies.run(Family::ALL[place], task, &self.desired, now),
            (_, Some(family)) => self.families[family].read_back(task, conntrack, now),
        }
    }

    fn try_again(&mut self, now: Now) {
        let origin = self.behind.unwrap_or(Origin {
            arrived: now.instant,
            changed_at_ms: 0,
        });
        let work = Work {
            dirty: Dirty::default(),
            origin,
            decode: Duration::ZERO,
        };
        self.program(&work, now);
    }

    /// Writes the cache file if it is not up to date.
    pub(super) fn close(mut self) {
        self.checkpoint.close(&self.desired);
    }

    pub(super) fn report(&self) -> Report {
        let rejects = self.desired.rejects();
        let rejected = rejects.map(|(key, reject)| Failure::rejected(key, reject));
        let failed = self
            .families
            .iter()
            .flat_map(Pipeline::failures)
            .chain(self.policies.failures(&self.desired));
        let deaf = self.followers.failures();
        let stale_since_ms = self.desired.is_stale().then(|| self.confirmation().get());
        let stale = stale_since_ms.map(Failure::stale);
        let [v4, v6] = &self.families;
        Report {
            resume: self.desired.resume(),
            held: self.desired.position(),
            applied: self.applied(),
            verified: self.verified(),
            stale_since_ms,
            cluster: self.desired.cluster(),
            freshness: self.desired.freshness().clone(),
            failures: stale.into_iter().chain(rejected).chain(failed).chain(deaf).collect(),
            last_sync: self.last_sync.clone(),
            counts: self.counts(),
            keeps: self.checkpoint.held(&self.desired),
            partial: self.desired.confidence().0 == Confidence::Partial,
            families: [v4, v6].map(|family| {
                family.report(&self.desired, self.policies.state(family.state.family))
            }),
            servers: [v4, v6].map(Pipeline::servers),
            unknown_kinds: self.unknown_kinds,
            snapshots: self.snapshots,
            syncs_ok: self.syncs_ok,
            syncs_failed: self.syncs_failed,
            node: self.node().map(NodeState::from),
            triggers: self.followers.triggers(),
            canary: self.followers.canary(),
            findings: self.followers.findings(&self.desired, &self.settings),
            avoided: self.followers.avoided(),
            ended: self.followers.ended(),
            policies: self.policies.counts(),
        }
    }

    /// Returns the kernel's state of one Service, for backends that have virtual servers.
    pub(super) fn inspect(&self, service: &ServiceName) -> Option<Inspection> {
        self.families
            .iter()
            .filter_map(|family| family.inspect(service))
            .reduce(Inspection::and)
    }

    /// Returns the digests of so many ranges of the desired state, if it can be compared with a control plane's.
    pub(super) fn ranges(&self, count: u16) -> Option<RangeDigests> {
        self.desired.ranges(count)
    }

    /// Returns the facts of the node. Facts from the cache file count when its content is in effect.
    fn node(&self) -> Option<&NodeFacts> {
        self.desired.position().and_then(|_| self.desired.node())
    }

    fn counts(&self) -> Counts {
        if self.desired.position().is_none() {
            return Counts::default();
        }
        let [v4, v6] = Family::ALL.map(|family| self.desired.counts(family));
        Counts {
            services: v4.services + v6.services,
            endpoints: v4.endpoints + v6.endpoints,
        }
    }
}

fn add(sum: &mut Applied, applied: &Applied) {
    sum.operations += applied.operations;
    sum.bytes += applied.bytes;
    sum.plan += applied.plan;
    sum.encode += applied.encode;
    sum.kernel += applied.kernel;
}
