//! The Services of one family on their way to the kernel. The other family does not wait for them.

use std::time::Instant;

use kplane_model::fate::{LocalRule, Masquerade, Setup};
use kplane_model::{DesiredKey, Family, NodeFacts, ServiceKey, ServiceName};

use super::failures::{Failing, LastingFailures};
use super::followers::Followers;
use super::now::Now;
use super::planner::{Planned, Planner};
use super::reconciler::{Reconciler, TableOf, TableTask};
use super::triggers::PendingTriggers;
use crate::desired::{Desired, Dirty, Position, Trigger};
use crate::report::{Failure, FamilyReport};
use kplane_dataplane::backend::{
    Applied, Change, Inspection, RuleCounts, ServerCounts, Side, Verification,
};
use kplane_dataplane::conntrack::Sweeper;
use kplane_dataplane::plan::{NodePlan, NodeSettings};

/// The state that a pipeline borrows for one step.
pub(super) struct Context<'a> {
    pub(super) desired: &'a Desired,
    pub(super) settings: &'a NodeSettings,
    pub(super) conntrack: Option<&'a Sweeper>,
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
    pub(super) state: Reconciler,
    side: Box<dyn Side>,
    node: NodePlan,
    /// Whether the data path knows Pods by their interfaces.
    knows_pods: bool,
    local_rule: LocalRule,
    setup: Option<Setup>,
    ever_programmed: bool,
    programmed_at_ms: u64,
    /// The arrival of the oldest update that the kernel does not hold.
    behind_since: Option<Instant>,
    /// The triggers of updates that the kernel does not hold.
    triggers: PendingTriggers,
    failures: LastingFailures<ServiceKey>,
    /// The number of rules, as the backend counts them.
    rules: Option<RuleCounts>,
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
            state: Reconciler::new(family, TableOf::Services),
            side,
            node: NodePlan::default(),
            knows_pods,
            local_rule,
            setup: None,
            ever_programmed: false,
            programmed_at_ms: 0,
            behind_since: None,
            triggers: PendingTriggers::default(),
            failures: LastingFailures::new(DesiredKey::Service),
            rules: None,
        })
    }

    /// Records an update that the kernel does not hold.
    pub(super) fn queue(&mut self, arrived: Instant) {
        self.behind_since.get_or_insert(arrived);
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
        if self.state.is_waiting(now) {
            self.refused(position, context.desired);
            return ApplyOutcome::Waiting;
        }
        let started = Instant::now();
        let complete = self.state.behind;
        let everything = complete || dirty.node_changed;
        let Planned {
            services,
            mut withheld,
        } = self.plan(dirty, everything, context);
        if services.is_empty() && !everything {
            self.hold(position, false, context, now);
            return ApplyOutcome::Nothing;
        }
        let plan_time = started.elapsed();
        let change = Change {
            family: self.state.family,
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
                self.state.settled(self.side.probe_interval(), now);
                if let Some(what) = applied.repaired.take() {
                    self.repaired(what, context.conntrack, now);
                }
                withheld.append(&mut applied.failures);
                self.settle(dirty, everything, withheld, now);
                self.hold(position, true, context, now);
                self.follow(dirty, everything, context);
                let counters = context.followers.counters(self.state.family);
                counters.attempted(started.elapsed(), everything, Some(&applied));
                ApplyOutcome::Applied(applied)
            }
            Err(error) => {
                self.state.fail(&error, now);
                self.refused(position, context.desired);
                let counters = context.followers.counters(self.state.family);
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
            self.state.family,
            &self.node,
            context.desired,
            dirty,
            self.failures.by_object(),
        );
    }

    /// Plans what was touched, or everything after a change of the node's facts or settings.
    fn plan(&mut self, dirty: &Dirty, everything: bool, context: &Context<'_>) -> Planned {
        let mut planner = Planner::new(context.desired, &context.settings.reserved);
        let ours = dirty.services.iter().filter(|key| key.family == self.state.family);
        if !everything {
            ours.for_each(|key| planner.port(key, context.desired.service(key)));
            return planner.finish();
        }
        let unknown = NodeFacts::default();
        let node = context.desired.node().unwrap_or(&unknown);
        self.node = NodePlan::new(self.state.family, node, context.settings);
        let masquerade = Masquerade {
            pods_known: self.knows_pods || !self.node.pod_sources.is_empty(),
            all: context.settings.masquerade_all,
        };
        self.setup = Some(Setup {
            masquerade,
            local: self.local_rule,
        });
        for view in context.desired.services(self.state.family) {
            planner.port(&view.0.port.key, Some(view));
        }
        let gone = ours.filter(|key| context.desired.service(key).is_none());
        gone.for_each(|key| planner.port(key, None));
        planner.finish()
    }

    /// Records that the kernel holds a position, which equals the last one or was just applied.
    fn hold(&mut self, position: Position, changed: bool, context: &mut Context<'_>, now: Now) {
        self.state.hold(position, changed);
        self.ever_programmed = true;
        self.programmed_at_ms = now.ms;
        self.behind_since = None;
        let followers = &mut *context.followers;
        followers.counters(self.state.family).caught_up(now.ms);
        followers.acknowledged(self.state.family, &mut self.triggers, now.moved_on_ms());
    }

    /// Records the failures within a change that was applied.
    fn settle(
        &mut self,
        dirty: &Dirty,
        everything: bool,
        failures: Vec<kplane_dataplane::backend::Failure>,
        now: Now,
    ) {
        let failing = failures.into_iter().map(|failure| Failing {
            key: failure.key,
            reason: failure.reason,
            degraded: failure.degraded,
        });
        let of = (!everything).then(|| dirty.services.iter());
        self.failures.settle(of, failing, now);
    }

    /// Repairs another program's change, or reads the kernel back.
    pub(super) fn read_back(&mut self, task: TableTask, conntrack: Option<&Sweeper>, now: Now) {
        let outcome = match task {
            TableTask::Repair => self.side.repair(),
            _ => self.side.verify(),
        };
        if let Ok(Verification::Repaired(_)) = outcome {
            self.doubt_flows(conntrack);
        }
        let interval = self.side.probe_interval();
        self.state.read_back(task, outcome, interval, now);
    }

    fn repaired(&mut self, what: String, conntrack: Option<&Sweeper>, now: Now) {
        self.doubt_flows(conntrack);
        self.state.repaired(what, now);
    }

    /// Has flows scanned that may have begun while another program's change was in effect.
    fn doubt_flows(&self, conntrack: Option<&Sweeper>) {
        if let Some(conntrack) = conntrack {
            conntrack.doubt(self.state.family);
        }
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

    pub(super) fn failures(&self) -> impl Iterator<Item = Failure> {
        self.failures.by_object().values().cloned()
    }

    /// Returns the problem because of which the family is not programmed.
    pub(super) fn error(&self) -> Option<String> {
        self.state.error.as_ref().map(|error| error.reason.clone())
    }

    /// Returns whether the node needs this family, or the family works. A kernel without IPv6 is no problem
    /// while no Service has IPv6 addresses.
    pub(super) fn is_needed(&self, desired: &Desired) -> bool {
        let in_use = desired.counts(self.state.family).services > 0;
        in_use || self.ever_programmed || self.state.error.is_none()
    }

    fn refused(&mut self, position: Position, desired: &Desired) {
        let is_needed = self.is_needed(desired);
        self.state.refused(position, is_needed);
    }

    /// Returns the family's report. `policies` is about its other table.
    pub(super) fn report(&self, desired: &Desired, policies: &Reconciler) -> FamilyReport {
        let held = self.state.held();
        FamilyReport {
            programmed: held.is_some() && held == desired.position(),
            needed: self.is_needed(desired),
            ever_programmed: self.ever_programmed,
            programmed_at_ms: self.programmed_at_ms,
            behind_since: self.behind_since,
            error: self.state.error.clone(),
            rules: self.rules,
            verified_at_ms: self.state.verified_at_ms,
            repairs: self.state.repairs.and(&policies.repairs),
            setup: self.setup,
        }
    }
}
