//! The part of a pipeline that reads the kernel back, and repairs what other programs changed.

use std::time::Duration;

use super::{AFTER_REPAIR, Pipeline, VERIFY_INTERVAL, VERIFY_LATEST};
use crate::engine::now::Now;
use kplane_dataplane::backend::{ApplyError, Side, Verification};
use kplane_dataplane::chain;
use kplane_model::chance;

impl Pipeline {
    /// Compares the kernel with what it should hold. Drift is reported first and repaired next.
    pub(in crate::engine) fn verify(&mut self, now: Now) {
        self.read_at = Some(now.instant);
        let outcome = self.side.verify();
        self.verify_at = Some(now.instant + next_look(&*self.side, outcome.is_err()));
        if matches!(outcome, Ok(Verification::Equal)) {
            self.verified = self.applied;
            self.verified_at_ms = now.ms;
            self.error = None;
            self.backoff.reset();
            self.repair_backoff.reset();
        }
        self.looked(outcome, now);
    }

    /// Schedules a repair after another program changed kplane's objects: at once, unless the program keeps
    /// changing them. Returns whether that is news.
    pub(in crate::engine) fn drifted(&mut self, now: Now) -> bool {
        // The kernel's state is not known anyway, and everything is about to be applied.
        if self.behind || self.repair_at.is_some() {
            return false;
        }
        let fresh = self.repair_backoff.is_fresh();
        let wait = self.repair_backoff.half_jitter();
        let wait = if fresh { Duration::ZERO } else { wait };
        self.repair_at = Some(now.instant + wait);
        true
    }

    /// Repairs the changes of other programs.
    pub(in crate::engine) fn repair(&mut self, now: Now) {
        self.repair_at = None;
        match self.side.repair() {
            // What another program changed is not known any more, so everything is applied anew.
            Err(error) => {
                (self.applied, self.verified) = (None, None);
                self.fail(&error, now);
            }
            outcome => self.looked(outcome, now),
        }
    }

    /// Records the result of reading the kernel back.
    fn looked(&mut self, outcome: Result<Verification, ApplyError>, now: Now) {
        match outcome {
            Ok(Verification::Equal) => {}
            Ok(Verification::Repaired(what)) => self.repaired(what, now),
            Ok(Verification::Outdated(what)) => {
                tracing::info!(family = %self.family, what, "planning everything anew");
                self.verify_at = None;
                self.behind = true;
                self.retry_at = Some(now.instant);
            }
            Ok(Verification::Drifted(what)) => self.drift(what, now),
            Err(error) => {
                let reason = chain(&*error.source);
                tracing::warn!(family = %self.family, error = reason, "cannot read the kernel back");
                now.stand(
                    &mut self.error,
                    format!("cannot read the kernel back: {reason}"),
                );
            }
        }
    }

    pub(super) fn repaired(&mut self, what: String, now: Now) {
        tracing::warn!(
            family = %self.family,
            what,
            "another program had changed kplane's rules; the agent has repaired them. Does another program flush or \
             edit rules on this node?"
        );
        self.repairs.add(what, now.ms);
        self.error = None;
        self.recheck_at.get_or_insert(now.instant + AFTER_REPAIR);
    }

    fn drift(&mut self, what: String, now: Now) {
        tracing::warn!(
            family = %self.family,
            what,
            "another program changed kplane's rules; the agent repairs them. Does another program flush or edit rules \
             on this node?"
        );
        self.verify_at = None;
        self.behind = true;
        self.applied = None;
        self.verified = None;
        now.stand(
            &mut self.error,
            format!("changed by another program: {what}"),
        );
        self.drifted = Some(what);
        // The retry comes at once, unless another program keeps undoing it.
        let fresh = self.backoff.is_fresh();
        let wait = self.backoff.half_jitter();
        self.retry_at = Some(now.instant + if fresh { Duration::ZERO } else { wait });
    }
}

/// Returns the time to the next check of everything. It is spread, so that nodes that started together do not
/// check together for ever.
fn next_look(side: &dyn Side, failed: bool) -> Duration {
    let spread = || {
        if failed {
            VERIFY_INTERVAL
        } else {
            chance::between(VERIFY_LATEST * 4 / 5, VERIFY_LATEST)
        }
    };
    side.probe_interval().unwrap_or_else(spread)
}
