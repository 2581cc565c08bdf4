//! NetworkPolicies on their way to the kernel, beside the Services' pipelines. Each family is on its own, and neither
//! waits for Services, nor these for it.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use kplane_model::{DesiredKey, Family, PolicyKey};

use super::failures::{Failing, LastingFailures};
use super::now::Now;
use super::reconciler::{Reconciler, TableOf, TableTask};
use crate::desired::{Desired, Dirty, Position};
use crate::report::{Failure, Subject};
use kplane_dataplane::conntrack::{AnyFlow, Sweeper};
use kplane_dataplane::policy::{
    Enforcer, Followed, PolicyApplied, PolicyChange, PolicyCounts, PolicyPart, Tell,
};

/// The failure of a node in a userspace mode.
const RELAYED: &str = "NetworkPolicies: the userspace proxy relays connections of Pods to Services, and policies see the node \
    instead of the Pod; choose another mode";

/// The policies of both families, and how far they are.
pub(super) struct Policies {
    enforcer: Enforcer,
    /// Whether the agent's proxy has the connections of Pods to Services.
    relays: bool,
    families: [PolicyFamily; 2],
}

/// One family's policies, and how far they are.
#[derive(Debug)]
struct PolicyFamily {
    state: Reconciler,
    /// Whether unknown Pods are cut off because nobody knows which policies there are.
    closed: bool,
    failures: LastingFailures<PolicyKey>,
    /// A change that is under way.
    begun: Option<Begun>,
    /// What is to be taken over by then, or changed meanwhile, if anything did.
    deferred: Option<Deferred>,
}

/// How far a change is, whose parts let changes of Services in between.
#[derive(Debug)]
enum Begun {
    /// The enforcer takes objects over, and the kernel has none of it.
    TakingOver,
    /// The kernel has a part of it; and where it leads.
    Sending(PolicyApplied, Position),
}

/// What changed and is not taken over.
#[derive(Debug, Default)]
struct Deferred {
    policies: VecDeque<PolicyKey>,
    node_changed: bool,
}

impl Policies {
    pub(super) fn new(enforcer: Enforcer, relays: bool) -> Self {
        Self {
            enforcer,
            relays,
            families: Family::ALL.map(|family| PolicyFamily {
                state: Reconciler::new(family, TableOf::Policies),
                closed: false,
                failures: LastingFailures::new(DesiredKey::Policy),
                begun: None,
                deferred: None,
            }),
        }
    }

    /// Returns how far the families are, and what is due.
    pub(super) fn states(&self) -> impl Iterator<Item = &Reconciler> + Clone {
        self.families.iter().map(|family| &family.state)
    }

    pub(super) fn state(&self, family: Family) -> &Reconciler {
        &self.families[family as usize].state
    }

    pub(super) fn states_mut(&mut self) -> impl Iterator<Item = &mut Reconciler> {
        self.families.iter_mut().map(|family| &mut family.state)
    }

    /// From now on, policies at which the agent died twice are set aside.
    pub(super) fn remember_deaths(&mut self, left: &str, tell: Tell) {
        self.enforcer.remember_deaths(left, tell);
    }

    /// From now on, connections end that policies deny.
    pub(super) fn cut_denied(&mut self, sweeper: Sweeper) {
        self.enforcer.cut_connections(sweeper);
    }

    /// Has those of these connections cut that policies deny now.
    pub(super) fn judge(&mut self, flows: Vec<AnyFlow>) {
        self.enforcer.judge_flows(flows);
    }

    /// Sets the Pods whose denied packets the kernel logs from the next [`Policies::sync`] on.
    pub(super) fn follow(&mut self, followed: &Followed) {
        self.enforcer.follow(followed);
    }

    /// Brings the kernel from its current state to `position`; returns whether a family failed.
    pub(super) fn sync(
        &mut self,
        dirty: &Dirty,
        position: Position,
        desired: &Desired,
        now: Now,
    ) -> bool {
        let enforcer = &mut self.enforcer;
        let outcomes = self
            .families
            .iter_mut()
            .map(|family| family.sync(enforcer, dirty, position, desired, now));
        // Each family has its turn.
        outcomes.fold(false, |any, failed| any | failed)
    }

    fn needed(&self, desired: &Desired) -> impl Iterator<Item = &PolicyFamily> {
        self.families.iter().filter(|family| family.is_needed(&self.enforcer, desired))
    }

    /// Returns what is not enforced as written.
    pub(super) fn failures(&self, desired: &Desired) -> Vec<Failure> {
        let of_node = |reason: &str| Failure {
            about: Subject::Policies,
            reason: reason.to_owned(),
            since_ms: 0,
            degraded: true,
        };
        let relayed = self.is_relayed().then_some(RELAYED);
        let reasons = relayed.into_iter().chain(desired.policy_doubt());
        let mut failures = Vec::from_iter(reasons.map(of_node));
        for family in self.needed(desired) {
            failures.extend(family.state.error.as_ref().map(|error| Failure {
                about: Subject::Policies,
                reason: format!(
                    "NetworkPolicies ({}): {}",
                    family.state.family, error.reason
                ),
                since_ms: error.since_ms,
                degraded: false,
            }));
            failures.extend(family.failures.by_object().values().cloned());
        }
        failures
    }

    /// Returns whether the node's proxy relays what policies should judge.
    fn is_relayed(&self) -> bool {
        let isolates = || self.counts().iter().any(|counts| counts.isolated > 0);
        self.relays && isolates()
    }

    /// Returns the sizes of what each family enforces.
    pub(super) fn counts(&self) -> [PolicyCounts; 2] {
        Family::ALL.map(|family| self.enforcer.counts(family))
    }

    /// Does what a family waits for.
    pub(super) fn run(&mut self, family: Family, task: TableTask, desired: &Desired, now: Now) {
        let (enforcer, of) = (&mut self.enforcer, &mut self.families[family as usize]);
        if task == TableTask::GoOn {
            return of.go_on(enforcer, desired, now);
        }
        while matches!(of.begun, Some(Begun::TakingOver)) {
            of.go_on(enforcer, desired, now);
        }
        let outcome = match task {
            TableTask::Repair => enforcer.repair(family),
            TableTask::Retry | TableTask::GoOn | TableTask::ReadBack => enforcer.verify(family),
        };
        of.state.read_back(task, outcome, None, now);
        of.forget_begun();
    }

    /// Returns the number of the descriptor; 0 = there is none.
    pub(super) fn generation(&self) -> u64 {
        self.enforcer.generation()
    }

    /// Returns a descriptor that is readable when [`Policies::listen`] may have reports to read, if the backend's own
    /// is not enough.
    pub(super) fn readiness(&self) -> Option<OwnedFd> {
        self.enforcer.readiness()
    }

    /// Reads the kernel's reports; returns whether another program changed something.
    pub(super) fn listen(&mut self, now: Now) -> bool {
        let drifted = self.families.iter_mut().zip(self.enforcer.drifted());
        drifted
            .filter(|(_, drifted)| *drifted)
            .fold(false, |news, (family, _)| news | family.state.drifted(now))
    }
}

impl Deferred {
    fn add(&mut self, family: Family, dirty: &Dirty) {
        let is_of_other =
            |key: &&PolicyKey| matches!(key, PolicyKey::Peer(ip) if Family::of(*ip) != family);
        let keys = dirty.policies.iter().filter(|key| !is_of_other(key));
        self.policies.extend(keys.cloned());
        self.node_changed |= dirty.node_changed;
    }
}

impl PolicyFamily {
    fn sync(
        &mut self,
        enforcer: &mut Enforcer,
        dirty: &Dirty,
        position: Position,
        desired: &Desired,
        now: Now,
    ) -> bool {
        if self.begun.is_some() {
            self.deferred.get_or_insert_default().add(self.state.family, dirty);
            return false;
        }
        if self.state.is_waiting(now) {
            // The next change is complete.
            self.deferred = None;
            self.refused(enforcer, position, desired);
            return false;
        }
        let mut change = self.deferred.take().unwrap_or_default();
        change.add(self.state.family, dirty);
        let complete = self.state.behind;
        if complete && desired.knows_no_policies() {
            self.state.leave(position);
            return false;
        }
        let closed = desired.lacks_policies();
        let is_same = change.policies.is_empty() && !change.node_changed && closed == self.closed;
        if !complete && is_same {
            self.state.leave(position);
            return false;
        }
        if !complete && change.policies.len() > enforcer.lot() {
            self.take_over_later(change, now);
            return false;
        }
        self.begin(enforcer, change, position, desired, now)
    }

    fn take_over_later(&mut self, change: Deferred, now: Now) {
        self.deferred = Some(change);
        self.begun = Some(Begun::TakingOver);
        self.state.begun(now);
    }

    /// Sends the first part of a change, whose last objects the enforcer takes over; returns whether that failed.
    fn begin(
        &mut self,
        enforcer: &mut Enforcer,
        change: Deferred,
        position: Position,
        desired: &Desired,
        now: Now,
    ) -> bool {
        let (complete, closed) = (self.state.behind, desired.lacks_policies());
        let objects: Vec<PolicyPart<'_>> = if complete {
            desired.policies().map(|(key, object)| (key.clone(), Some(object))).collect()
        } else {
            parts(change.policies, desired)
        };
        let change = PolicyChange {
            objects: &objects,
            complete,
            closed,
            pod_ranges: desired.pod_ranges(),
        };
        match enforcer.begin(self.state.family, change) {
            Ok(applied) => {
                self.closed = closed;
                self.sent(applied, position, now);
                false
            }
            Err(error) => {
                self.state.fail(&error, now);
                self.refused(enforcer, position, desired)
            }
        }
    }

    /// Goes on with a change that has begun.
    fn go_on(&mut self, enforcer: &mut Enforcer, desired: &Desired, now: Now) {
        match self.begun.take() {
            None => {}
            Some(Begun::TakingOver) => self.take_over(enforcer, desired, now),
            Some(Begun::Sending(mut applied, position)) => {
                match enforcer.go_on(self.state.family, &mut applied) {
                    Ok(()) => self.sent(applied, position, now),
                    Err(error) => self.state.fail(&error, now),
                }
            }
        }
    }

    /// Has the enforcer take over the next objects.
    fn take_over(&mut self, enforcer: &mut Enforcer, desired: &Desired, now: Now) {
        let Some(position) = desired.position() else {
            return;
        };
        let mut change = self.deferred.take().unwrap_or_default();
        if self.state.behind || change.policies.len() <= enforcer.lot() {
            self.begin(enforcer, change, position, desired, now);
            return;
        }
        let lot = change.policies.drain(..enforcer.lot());
        enforcer.take_over(self.state.family, &parts(lot, desired));
        self.take_over_later(change, now);
    }

    /// Records that the kernel has a part of a change, or all of it.
    fn sent(&mut self, applied: PolicyApplied, position: Position, now: Now) {
        if applied.rest > 0 {
            self.begun = Some(Begun::Sending(applied, position));
            return self.state.begun(now);
        }
        self.state.settled(None, now);
        if let Some(what) = applied.repaired {
            self.state.repaired(what, now);
        }
        self.state.hold(position, true);
        let failing = applied.failures.into_iter().map(|failure| Failing {
            key: failure.key,
            reason: failure.reason,
            degraded: true,
        });
        self.failures.settle(None::<std::iter::Empty<_>>, failing, now);
        if self.deferred.is_some() {
            self.state.follow_up(now);
        }
    }

    /// Forgets a change that has begun once only a complete one will do.
    fn forget_begun(&mut self) {
        if self.state.behind {
            self.begun = None;
        }
    }

    /// Records that the kernel refuses a position; returns whether the node needs the family.
    fn refused(&mut self, enforcer: &Enforcer, position: Position, desired: &Desired) -> bool {
        let is_needed = self.is_needed(enforcer, desired);
        self.state.refused(position, is_needed);
        is_needed
    }

    /// Returns whether the node needs the family: a kernel without IPv6 is no problem while no Pod has such an address, and no
    /// new one gets one (NP19). What the kernel still enforces has to go with the policies.
    fn is_needed(&self, enforcer: &Enforcer, desired: &Desired) -> bool {
        let (family, mut pods) = (self.state.family, desired.local_pods());
        let mut ranges = desired.pod_ranges().iter();
        let is_judged = desired.has_policies() || desired.lacks_policies();
        self.state.error.is_none()
            || enforcer.may_have_table(family)
            || pods.any(|pod| pod.addresses.iter().any(|ip| Family::of(*ip) == family))
            || is_judged && ranges.any(|range| range.family() == family)
    }
}

/// Returns objects as they are now.
fn parts(keys: impl IntoIterator<Item = PolicyKey>, desired: &Desired) -> Vec<PolicyPart<'_>> {
    let part = |key| {
        let object = desired.policy(&key);
        (key, object)
    };
    keys.into_iter().map(part).collect()
}
