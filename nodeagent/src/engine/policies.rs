//! NetworkPolicies on their way to the kernel, beside the Services' pipelines. Each family is on its own, and neither
//! waits for Services, nor these for it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use kplane_model::{DesiredKey, Family, PolicyKey, PolicyObject};

use super::now::Now;
use super::pipeline::RETRY;
use super::progress::FamilyProgress;
use crate::desired::{Desired, Dirty, Position};
use crate::report::{Failure, LastingError, Subject};
use kplane_dataplane::backend::Verification;
use kplane_dataplane::backoff::Backoff;
use kplane_dataplane::chain;
use kplane_dataplane::policy::{
    Enforcer, Flow, Followed, Hand, PolicyApplied, PolicyChange, PolicyCounts, Tell,
};

/// Time from a change to a complete read, which competes with writing.
const QUIET: Duration = Duration::from_secs(30);

/// Time from a complete read to the next one.
const VERIFY_INTERVAL: Duration = Duration::from_secs(300);

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

/// How far a family is.
#[derive(Debug)]
struct PolicyFamily {
    family: Family,
    /// Whether the kernel's state is not known, so that only a complete change will do.
    behind: bool,
    /// Whether unknown Pods are cut off because nobody knows which policies there are.
    closed: bool,
    progress: FamilyProgress,
    failures: BTreeMap<PolicyKey, Failure>,
    error: Option<LastingError>,
    backoff: Backoff,
    retry_at: Option<Instant>,
    verify_at: Option<Instant>,
    /// The time at which to repair another program's change.
    repair_at: Option<Instant>,
    /// A change of which the kernel has a part.
    begun: Option<Begun>,
    /// What changed meanwhile, if anything did.
    deferred: Option<Deferred>,
}

/// A change of which the kernel has a part.
#[derive(Debug)]
struct Begun {
    applied: PolicyApplied,
    is_new: bool,
    position: Position,
    /// The time of the next part.
    at: Instant,
}

/// What changed while an earlier change was on its way.
#[derive(Debug, Default)]
struct Deferred {
    policies: BTreeSet<PolicyKey>,
    node_changed: bool,
}

impl Policies {
    pub(super) fn new(enforcer: Enforcer, relays: bool) -> Self {
        Self {
            enforcer,
            relays,
            families: Family::ALL.map(|family| PolicyFamily {
                family,
                behind: true,
                closed: false,
                progress: FamilyProgress::default(),
                failures: BTreeMap::new(),
                error: None,
                backoff: RETRY,
                retry_at: None,
                verify_at: None,
                repair_at: None,
                begun: None,
                deferred: None,
            }),
        }
    }

    /// From now on, policies at which the agent died twice are set aside.
    pub(super) fn remember_deaths(&mut self, left: &str, tell: Tell) {
        self.enforcer.remember_deaths(left, tell);
    }

    /// Starts the thread that deletes conntrack entries of connections that policies deny.
    pub(super) fn cut_denied(&mut self, hand: Hand) -> std::io::Result<()> {
        self.enforcer.cut_connections(hand)
    }

    /// Has those of these connections cut that policies deny now.
    pub(super) fn judge(&mut self, flows: Vec<Flow>) {
        if let Some(family) = flows.first().map(Flow::family) {
            self.enforcer.judge_flows(family, flows);
        }
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

    /// Records that the kernel may lack something of a position that it held.
    pub(super) fn retract(&mut self, position: Position) {
        for family in &mut self.families {
            let progress = &mut family.progress;
            progress.held.take_if(|held| *held == position);
            progress.excused.retract(position);
        }
    }

    /// Returns how far the families are: nowhere while known changes of other programs are not repaired.
    pub(super) fn progress(&self) -> impl Iterator<Item = FamilyProgress> + Clone {
        self.families.iter().map(|family| FamilyProgress {
            held: if family.repair_at.is_none() { family.progress.held } else { None },
            ..family.progress
        })
    }

    fn needed(&self, desired: &Desired) -> impl Iterator<Item = &PolicyFamily> {
        self.families.iter().filter(|family| family.is_needed(desired))
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
            failures.extend(family.error.as_ref().map(|error| Failure {
                about: Subject::Policies,
                reason: format!("NetworkPolicies ({}): {}", family.family, error.reason),
                since_ms: error.since_ms,
                degraded: false,
            }));
            failures.extend(family.failures.values().cloned());
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

    /// Returns when [`Policies::tick`] has something to do.
    pub(super) fn due(&self) -> Option<Instant> {
        self.families
            .iter()
            .flat_map(|family| {
                let begun = family.begun.as_ref().map(|begun| begun.at);
                [family.retry_at, family.verify_at, family.repair_at, begun]
            })
            .flatten()
            .min()
    }

    /// Returns whether a family is to be tried again.
    pub(super) fn retry_is_due(&self, now: Now) -> bool {
        self.families.iter().any(|family| is_due(family.retry_at, now))
    }

    /// Repairs another program's changes, or reads a family back, if that is due. Returns whether it was.
    pub(super) fn tick(&mut self, now: Now) -> bool {
        let mut families = self.families.iter_mut();
        if let Some(family) = families.find(|family| is_due(family.repair_at, now)) {
            family.repair_at = None;
            let outcome = self.enforcer.repair(family.family);
            family.looked(outcome.map_err(|error| chain(&*error.source)), now);
            return true;
        }
        let mut families = self.families.iter_mut();
        if let Some(family) = families.find(|family| is_due(family.verify_at, now)) {
            family.verify_at = Some(now.instant + VERIFY_INTERVAL);
            let outcome = self.enforcer.verify(family.family);
            family.looked(outcome.map_err(|error| chain(&*error.source)), now);
            return true;
        }
        false
    }

    /// Sends the next part of a change that has begun, if there is one. Returns whether there was.
    pub(super) fn go_on(&mut self, now: Now) -> bool {
        let mut families = self.families.iter_mut();
        let enforcer = &mut self.enforcer;
        families.any(|family| family.go_on(enforcer, now))
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
            .fold(false, |news, (family, _)| news | family.drifted(now))
    }
}

impl Deferred {
    fn add(&mut self, dirty: &Dirty) {
        self.policies.extend(dirty.policies.iter().cloned());
        self.node_changed |= dirty.node_changed;
    }
}

fn is_due(at: Option<Instant>, now: Now) -> bool {
    at.is_some_and(|at| at <= now.instant)
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
            self.deferred.get_or_insert_default().add(dirty);
            return false;
        }
        if self.retry_at.is_some_and(|at| now.instant < at) {
            // The next change is complete.
            self.deferred = None;
            self.refused(position, desired);
            return false;
        }
        let mut deferred = self.deferred.take();
        if let Some(deferred) = &mut deferred {
            deferred.add(dirty);
        }
        let (keys, node_changed) = match &deferred {
            Some(deferred) => (&deferred.policies, deferred.node_changed),
            None => (&dirty.policies, dirty.node_changed),
        };
        let complete = self.behind;
        let closed = desired.lacks_policies();
        let is_same = keys.is_empty() && !node_changed && closed == self.closed;
        if !complete && is_same {
            self.progress.held = Some(position);
            return false;
        }
        let objects: Vec<(PolicyKey, Option<&PolicyObject>)> = if complete {
            desired.policies().map(|(key, object)| (key.clone(), Some(object))).collect()
        } else {
            keys.iter().map(|key| (key.clone(), desired.policy(key))).collect()
        };
        let change = PolicyChange {
            objects: &objects,
            complete,
            closed,
            pod_ranges: desired.pod_ranges(),
        };
        match enforcer.begin(self.family, change) {
            Ok(applied) => {
                // What an earlier process wrote is read back as well.
                self.closed = closed;
                let is_new = applied.operations > 0 || complete && !objects.is_empty();
                self.sent(applied, is_new, position, now);
                false
            }
            Err(error) => {
                self.fail(chain(&*error.source), now);
                self.refused(position, desired)
            }
        }
    }

    /// Sends the next part of a change that has begun, if there is one. Returns whether there was.
    fn go_on(&mut self, enforcer: &mut Enforcer, now: Now) -> bool {
        let Some(mut begun) = self.begun.take() else {
            return false;
        };
        match enforcer.go_on(self.family, &mut begun.applied) {
            Ok(()) => self.sent(begun.applied, begun.is_new, begun.position, now),
            Err(error) => self.fail(chain(&*error.source), now),
        }
        true
    }

    /// Records that the kernel has a part of a change, or all of it.
    fn sent(&mut self, applied: PolicyApplied, is_new: bool, position: Position, now: Now) {
        if applied.rest > 0 {
            let at = now.instant;
            self.begun = Some(Begun {
                applied,
                is_new,
                position,
                at,
            });
            return;
        }
        self.holds(applied, is_new, position, now);
        if self.deferred.is_some() {
            self.retry_at = Some(now.instant);
        }
    }

    /// Records that the kernel holds a position.
    fn holds(&mut self, applied: PolicyApplied, is_new: bool, position: Position, now: Now) {
        let read_back = if self.behind { Duration::ZERO } else { QUIET };
        if is_new {
            let at = now.instant + read_back;
            self.verify_at = Some(self.verify_at.map_or(at, |before| before.min(at)));
        }
        self.behind = false;
        self.progress = FamilyProgress {
            held: Some(position),
            ..FamilyProgress::default()
        };
        self.error = None;
        self.retry_at = None;
        self.backoff.reset();
        if let Some(what) = applied.repaired {
            self.warn_of_repair(&what);
        }
        let mut before = std::mem::take(&mut self.failures);
        for failure in applied.failures {
            let since_ms = before.remove(&failure.key).map(|old| old.since_ms);
            if since_ms.is_none() {
                tracing::warn!(
                    object = %failure.key,
                    reason = failure.reason,
                    "a NetworkPolicy is not enforced as written; nothing of it is open"
                );
            }
            let failed = Failure {
                about: Subject::Object(DesiredKey::Policy(failure.key.clone())),
                reason: failure.reason,
                since_ms: since_ms.unwrap_or(now.ms),
                degraded: true,
            };
            self.failures.insert(failure.key, failed);
        }
    }

    fn fail(&mut self, reason: String, now: Now) {
        let wait = self.backoff.half_jitter();
        if self.error.as_ref().is_none_or(|old| old.reason != reason) {
            tracing::warn!(
                family = %self.family,
                error = reason,
                ?wait,
                "cannot enforce NetworkPolicies; the kernel keeps what it held. The agent tries again with pauses of up \
                 to 30 s"
            );
        }
        self.behind = true;
        self.begun = None;
        now.stand(&mut self.error, reason);
        self.retry_at = Some(now.instant + wait);
        self.verify_at = None;
    }

    /// Records that the kernel refuses a position; returns whether the node needs the family.
    fn refused(&mut self, position: Position, desired: &Desired) -> bool {
        let is_needed = self.is_needed(desired);
        self.progress.excused.refused(position, is_needed);
        is_needed
    }

    /// Returns whether the node needs the family: a kernel without IPv6 is no problem while no Pod has such an address.
    fn is_needed(&self, desired: &Desired) -> bool {
        let mut pods = desired.local_pods();
        self.error.is_none()
            || pods.any(|pod| pod.addresses.iter().any(|ip| Family::of(*ip) == self.family))
    }

    /// Records the result of reading the kernel back.
    fn looked(&mut self, outcome: Result<Verification, String>, now: Now) {
        match outcome {
            Ok(Verification::Equal) => self.error = None,
            Ok(Verification::Repaired(what)) => self.warn_of_repair(&what),
            Ok(Verification::Outdated(what) | Verification::Drifted(what)) => {
                self.warn_of_repair(&what);
                self.behind = true;
                self.begun = None;
                self.progress.held = None;
                self.verify_at = None;
                now.stand(
                    &mut self.error,
                    format!("changed by another program: {what}"),
                );
                self.retry_at = Some(now.instant);
            }
            // What another program changed is not known any more, so everything is applied anew.
            Err(reason) => {
                self.progress.held = None;
                self.fail(format!("cannot read the kernel back: {reason}"), now);
            }
        }
    }

    fn warn_of_repair(&self, what: &str) {
        tracing::warn!(
            family = %self.family,
            what,
            "another program had changed the NetworkPolicies' table; the agent repairs it. Does another program flush or \
             edit rules on this node?"
        );
    }

    /// Schedules a repair at once after another program changed the table, however often it does: what the table no
    /// longer says is open meanwhile. Returns whether that is news.
    fn drifted(&mut self, now: Now) -> bool {
        if self.behind || self.repair_at.is_some() {
            return false;
        }
        self.repair_at = Some(now.instant);
        true
    }
}

#[cfg(test)]
mod tests {
    use kplane_dataplane::backend::nftables::PolicyTables;

    use super::*;

    #[test]
    fn repairs_of_what_restricts_do_not_pause() {
        let enforcer = Enforcer::new(PolicyTables::own(false));
        let [mut family, _] = Policies::new(enforcer, false).families;
        family.behind = false;
        for _ in 0..10 {
            let now = Now::real();
            assert!(family.drifted(now));
            assert_eq!(family.repair_at.take(), Some(now.instant));
            family.looked(Ok(Verification::Repaired("the table is gone".into())), now);
        }
    }
}
