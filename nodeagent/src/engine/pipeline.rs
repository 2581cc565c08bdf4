//! One address family on its way to the kernel. The other one does not wait for it.
//!
//! ```text
//! behind --complete change--> in the kernel --read back--> verified
//!   ^ ^------error, later------'  |   ^ '--change--'          |
//!   '----------drift--------------+---------------------------'
//! ```

mod read_back;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kplane_model::fate::{LocalRule, Masquerade, Setup};
use kplane_model::{DesiredKey, Family, NodeFacts, ServiceKey, ServiceName};

use super::followers::Followers;
use super::now::Now;
use super::planner::{Planned, Planner};
use super::progress::{Excused, FamilyProgress};
use super::triggers::PendingTriggers;
use crate::desired::{Desired, Dirty, Position, Trigger};
use crate::report::{Failure, FamilyReport, LastingError, Repairs, Subject};
use kplane_dataplane::backend::{
    self, Applied, ApplyError, Change, Inspection, RuleCounts, ServerCounts, Side,
};
use kplane_dataplane::backoff::Backoff;
use kplane_dataplane::chain;
use kplane_dataplane::conntrack::Cleaner;
use kplane_dataplane::plan::{NodePlan, NodeSettings};

/// First and longest wait before a failed family is tried again.
pub(super) const RETRY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(30));

/// First and longest wait before a repair of another program's change. The first repair happens at once. If
/// the program keeps undoing repairs, later ones wait.
const REPAIR: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));

/// Time from a repair to a check of everything. Flows that started in between may have gone astray, and the
/// check finds changes that the kernel did not report.
const AFTER_REPAIR: Duration = Duration::from_secs(1);

/// Time without changes before a family is read back, since reading competes with writing.
const QUIET: Duration = Duration::from_secs(30);

/// Least time between two complete reads: each costs the kernel a walk over everything.
const VERIFY_INTERVAL: Duration = Duration::from_secs(60);

/// Most time between two complete reads, whatever happens. It catches changes that the kernel did not report.
pub(crate) const VERIFY_LATEST: Duration = Duration::from_secs(300);

/// The state that a pipeline borrows for one step.
pub(super) struct Context<'a> {
    pub(super) desired: &'a Desired,
    pub(super) settings: &'a NodeSettings,
    pub(super) conntrack: Option<&'a Cleaner>,
    pub(super) followers: &'a mut Followers,
}

/// The outcome of one step.
#[derive(Debug)]
pub(super) enum ApplyOutcome {
    /// The kernel took a change and holds it.
    Applied(Applied),
    /// The kernel already held everything of this family.
    Nothing,
    /// The kernel refused, or could not be reached.
    Failed,
    /// The pause after an earlier failure is not over.
    Waiting,
}

/// One family: its data path, and how far it is.
pub(super) struct Pipeline {
    family: Family,
    side: Box<dyn Side>,
    node: NodePlan,
    /// Whether the data path knows Pods by their interfaces.
    knows_pods: bool,
    local_rule: LocalRule,
    setup: Option<Setup>,
    /// Whether the kernel's state is not known, so that only a complete change will do.
    behind: bool,
    applied: Option<Position>,
    verified: Option<Position>,
    excused: Excused,
    ever_programmed: bool,
    programmed_at_ms: u64,
    /// The arrival of the oldest update that the kernel does not hold.
    behind_since: Option<Instant>,
    /// The triggers of updates that the kernel does not hold.
    triggers: PendingTriggers,
    /// A change by another program that is not repaired yet.
    drifted: Option<String>,
    failures: BTreeMap<ServiceKey, Failure>,
    error: Option<LastingError>,
    /// The number of rules, as the backend counts them.
    rules: Option<RuleCounts>,
    backoff: Backoff,
    retry_at: Option<Instant>,
    verify_at: Option<Instant>,
    /// The time when the kernel was last read back.
    read_at: Option<Instant>,
    /// The time when the kernel was last read back and equal, milliseconds since 1970; 0 = never.
    verified_at_ms: u64,
    /// The time at which to repair another program's change.
    repair_at: Option<Instant>,
    repair_backoff: Backoff,
    /// The time at which to check everything after a repair.
    recheck_at: Option<Instant>,
    repairs: Repairs,
}

impl Pipeline {
    /// Returns the pipelines of both families of a backend.
    pub(super) fn both(
        sides: [Box<dyn Side>; 2],
        knows_pods: bool,
        local_rule: LocalRule,
    ) -> [Self; 2] {
        let [v4, v6] = sides;
        [(Family::V4, v4), (Family::V6, v6)].map(|(family, side)| Self {
            knows_pods,
            local_rule,
            ..Self::new(family, side)
        })
    }

    fn new(family: Family, side: Box<dyn Side>) -> Self {
        Self {
            family,
            side,
            node: NodePlan::default(),
            behind: true,
            applied: None,
            excused: Excused::default(),
            verified: None,
            ever_programmed: false,
            programmed_at_ms: 0,
            behind_since: None,
            triggers: PendingTriggers::default(),
            drifted: None,
            failures: BTreeMap::new(),
            error: None,
            rules: None,
            backoff: RETRY,
            retry_at: None,
            verify_at: None,
            read_at: None,
            verified_at_ms: 0,
            repair_at: None,
            repair_backoff: REPAIR,
            recheck_at: None,
            repairs: Repairs::default(),
            knows_pods: false,
            local_rule: LocalRule::default(),
            setup: None,
        }
    }

    /// Records an update that the kernel does not hold.
    pub(super) fn queue(&mut self, arrived: Instant) {
        self.behind_since.get_or_insert(arrived);
    }

    /// Records that the kernel may lack something of a position that it held.
    pub(super) fn retract(&mut self, position: Position) {
        self.excused.retract(position);
        let applied = self.applied.take_if(|applied| *applied == position);
        // What was read back of an earlier position is not what the kernel holds now.
        self.verified.take_if(|verified| applied.is_some() || *verified == position);
    }

    /// Records a change in the cluster that led to an update of this epoch.
    pub(super) fn triggered(&mut self, epoch: u64, trigger: Trigger) {
        self.triggers.push(epoch, trigger);
    }

    /// Brings the kernel from its current state to `position`.
    pub(super) fn sync(
        &mut self,
        dirty: &Dirty,
        position: Position,
        context: &mut Context<'_>,
        now: Now,
    ) -> ApplyOutcome {
        if self.retry_at.is_some_and(|at| now.instant < at) {
            self.refused(position, context.desired);
            return ApplyOutcome::Waiting;
        }
        let started = Instant::now();
        let complete = self.behind;
        let everything = complete || dirty.node_changed;
        let Planned {
            services,
            mut withheld,
        } = self.plan(dirty, everything, context);
        if services.is_empty() && !everything {
            // A comparison at the last position holds for this one as well.
            if self.verified.is_some() && self.verified == self.applied {
                self.verified = Some(position);
            }
            self.hold(position, context, now);
            return ApplyOutcome::Nothing;
        }
        let plan_time = started.elapsed();
        let change = Change {
            family: self.family,
            node: &self.node,
            services: &services,
            complete,
        };
        match self.side.apply(change) {
            Ok(mut applied) => {
                applied.plan += plan_time;
                self.rules = applied.rules;
                if let Some(conntrack) = context.conntrack {
                    conntrack.committed(&change, &applied.failures);
                }
                if let Some(what) = applied.repaired.take() {
                    self.repaired(what, now);
                }
                if let Some(what) = self.drifted.take() {
                    self.repairs.add(what, now.ms);
                }
                withheld.append(&mut applied.failures);
                self.settle(dirty, everything, withheld, now);
                self.schedule_verification(complete, now);
                self.hold(position, context, now);
                self.follow(dirty, everything, context);
                let counters = context.followers.counters(self.family);
                counters.attempted(started.elapsed(), everything, Some(&applied));
                ApplyOutcome::Applied(applied)
            }
            Err(error) => {
                self.fail(&error, now);
                self.refused(position, context.desired);
                let counters = context.followers.counters(self.family);
                counters.attempted(started.elapsed(), everything, None);
                ApplyOutcome::Failed
            }
        }
    }

    /// Informs the followers that the kernel holds something new.
    fn follow(&mut self, dirty: &Dirty, everything: bool, context: &mut Context<'_>) {
        let dirty = (!everything).then_some(dirty);
        let followers = &mut *context.followers;
        followers.programmed(
            self.family,
            &self.node,
            context.desired,
            dirty,
            &self.failures,
        );
    }

    /// Plans what was touched, or everything after a change of the node's facts or settings.
    fn plan(&mut self, dirty: &Dirty, everything: bool, context: &Context<'_>) -> Planned {
        let mut planner = Planner::new(context.desired, &context.settings.reserved);
        let ours = dirty.services.iter().filter(|key| key.family == self.family);
        if !everything {
            ours.for_each(|key| planner.port(key, context.desired.service(key)));
            return planner.finish();
        }
        let unknown = NodeFacts::default();
        let node = context.desired.node().unwrap_or(&unknown);
        self.node = NodePlan::new(self.family, node, context.settings);
        let masquerade = Masquerade {
            pods_known: self.knows_pods || !self.node.pod_sources.is_empty(),
            all: context.settings.masquerade_all,
        };
        self.setup = Some(Setup {
            masquerade,
            local: self.local_rule,
        });
        for view in context.desired.services(self.family) {
            planner.port(&view.0.port.key, Some(view));
        }
        let gone = ours.filter(|key| context.desired.service(key).is_none());
        gone.for_each(|key| planner.port(key, None));
        planner.finish()
    }

    /// Records that the kernel holds a position, which equals the last one or was just applied.
    fn hold(&mut self, position: Position, context: &mut Context<'_>, now: Now) {
        self.applied = Some(position);
        // The agent may come back to that epoch, when the kernel holds something else.
        self.verified.take_if(|verified| verified.epoch != position.epoch);
        self.ever_programmed = true;
        self.programmed_at_ms = now.ms;
        self.behind_since = None;
        let followers = &mut *context.followers;
        followers.counters(self.family).caught_up(now.ms);
        followers.acknowledged(self.family, &mut self.triggers, now.moved_on_ms());
    }

    /// Records the failures within a change that was applied.
    fn settle(
        &mut self,
        dirty: &Dirty,
        everything: bool,
        failures: Vec<backend::Failure>,
        now: Now,
    ) {
        self.behind = false;
        self.error = None;
        self.retry_at = None;
        let before = if everything {
            std::mem::take(&mut self.failures)
        } else {
            dirty
                .services
                .iter()
                .filter_map(|key| self.failures.remove_entry(key))
                .collect()
        };
        let known = |key: &ServiceKey| before.get(key).or(self.failures.get(key));
        if let Some(new) = failures.iter().find(|failure| known(&failure.key).is_none()) {
            tracing::warn!(
                service = %new.key,
                reason = new.reason,
                degraded = new.degraded,
                failing = failures.len(),
                "the kernel does not hold a ServicePort as desired. The report lists all that fail"
            );
        }
        for failure in failures {
            let old = before.get(&failure.key).or(self.failures.get(&failure.key));
            let failed = Failure {
                about: Subject::Object(DesiredKey::Service(failure.key.clone())),
                reason: failure.reason,
                since_ms: old.map_or(now.ms, |old| old.since_ms),
                degraded: failure.degraded,
            };
            self.failures.insert(failure.key, failed);
        }
    }

    fn schedule_verification(&mut self, complete: bool, now: Now) {
        let due = self.verify_at.is_some_and(|at| at <= now.instant);
        if complete {
            self.verify_at = Some(now.instant);
        } else if let Some(interval) = self.side.probe_interval() {
            self.verify_at.get_or_insert(now.instant + interval);
        } else if !due {
            let quiet = now.instant + QUIET;
            self.verify_at = Some(match self.read_at {
                None => quiet,
                Some(read) => quiet.clamp(read + VERIFY_INTERVAL, read + VERIFY_LATEST),
            });
        }
    }

    fn fail(&mut self, error: &ApplyError, now: Now) {
        let wait = self.backoff.half_jitter();
        let reason = chain(&*error.source);
        let family = self.family;
        if self.error.as_ref().is_some_and(|old| old.reason == reason) {
            tracing::debug!(%family, error = reason, ?wait, "still cannot program the kernel");
        } else {
            tracing::warn!(
                %family,
                error = reason,
                ?wait,
                "cannot program the kernel, which keeps what it held; the other family goes on. The agent tries again \
                 with pauses of up to 30 s"
            );
        }
        self.behind = true;
        now.stand(&mut self.error, reason);
        self.retry_at = Some(now.instant + wait);
        self.verify_at = None;
    }

    /// Returns whether the data path has Services of an earlier process. May read all of it.
    pub(super) fn has_services(&mut self) -> bool {
        self.side.has_services()
    }

    /// Returns the virtual servers as last read, for backends that have some.
    pub(super) fn servers(&self) -> Option<ServerCounts> {
        self.side.servers()
    }

    /// Returns the virtual servers of one Service as last read, for backends that have some.
    pub(super) fn inspect(&self, service: &ServiceName) -> Option<Inspection> {
        self.side.inspect(service)
    }

    pub(super) fn repair_is_due(&self, now: Now) -> bool {
        self.repair_at.is_some_and(|at| at <= now.instant)
    }

    /// Schedules a check of everything if that is due: the next [`Pipeline::sync`] does it.
    pub(super) fn recheck_if_due(&mut self, now: Now) -> bool {
        let due = self.recheck_at.is_some_and(|at| at <= now.instant);
        if due {
            self.recheck_at = None;
            self.behind = true;
        }
        due
    }

    pub(super) fn retry_is_due(&self, now: Now) -> bool {
        self.retry_at.is_some_and(|at| at <= now.instant)
    }

    pub(super) fn verify_is_due(&self, now: Now) -> bool {
        self.verify_at.is_some_and(|at| at <= now.instant)
    }

    pub(super) fn due(&self) -> Option<Instant> {
        let times = [
            self.retry_at,
            self.verify_at,
            self.repair_at,
            self.recheck_at,
        ];
        times.into_iter().flatten().min()
    }

    /// Returns the position that the kernel holds; `None` while known changes of other programs are not
    /// repaired.
    pub(super) fn applied(&self) -> Option<Position> {
        if self.repair_at.is_none() { self.applied } else { None }
    }

    pub(super) fn progress(&self) -> FamilyProgress {
        FamilyProgress {
            held: self.applied(),
            excused: self.excused,
        }
    }

    pub(super) fn verified(&self) -> Option<Position> {
        if self.repair_at.is_none() { self.verified } else { None }
    }

    pub(super) fn failures(&self) -> impl Iterator<Item = Failure> {
        self.failures.values().cloned()
    }

    /// Returns the problem because of which the family is not programmed.
    pub(super) fn error(&self) -> Option<String> {
        self.error.as_ref().map(|error| error.reason.clone())
    }

    /// Returns whether the node needs this family, or the family works. A kernel without IPv6 is no problem
    /// while no Service has IPv6 addresses.
    pub(super) fn is_needed(&self, desired: &Desired) -> bool {
        let in_use = desired.counts(self.family).services > 0;
        in_use || self.ever_programmed || self.error.is_none()
    }

    fn refused(&mut self, position: Position, desired: &Desired) {
        let is_needed = self.is_needed(desired);
        self.excused.refused(position, is_needed);
    }

    pub(super) fn report(&self, desired: &Desired) -> FamilyReport {
        FamilyReport {
            programmed: self.applied().is_some() && self.applied() == desired.position(),
            needed: self.is_needed(desired),
            ever_programmed: self.ever_programmed,
            programmed_at_ms: self.programmed_at_ms,
            behind_since: self.behind_since,
            error: self.error.clone(),
            rules: self.rules,
            verified_at_ms: self.verified_at_ms,
            repairs: self.repairs.clone(),
            setup: self.setup,
        }
    }
}
