//! How far the kernel is, over both families, Services and NetworkPolicies; and what NetworkPolicies cut, log and hear.

use std::os::fd::OwnedFd;

use kplane_dataplane::conntrack::{AnyFlow, Sweeper};
use kplane_dataplane::policy::Followed;

use super::Core;
use crate::desired::{Dirty, Position};
use crate::engine::now::Now;
use crate::engine::progress::common;
use crate::engine::reconciler::Reconciler;

impl Core {
    /// From now on, connections end that NetworkPolicies no longer allow.
    pub(in crate::engine) fn cut_denied(&mut self, sweeper: Sweeper) {
        self.policies.cut_denied(sweeper);
    }

    /// Has those of these connections cut that NetworkPolicies deny now.
    pub(in crate::engine) fn judge(&mut self, flows: Vec<AnyFlow>) {
        self.policies.judge(flows);
    }

    /// Has the kernel log the denied packets of these Pods.
    pub(in crate::engine) fn follow(&mut self, followed: &Followed, now: Now) {
        self.policies.follow(followed);
        if let Some(position) = self.desired.position()
            && !self.checkpoint.hands_off()
        {
            // As if the node had changed. What the kernel refuses now comes with the next attempt.
            let dirty = Dirty {
                node_changed: true,
                ..Dirty::default()
            };
            self.policies.sync(&dirty, position, &self.desired, now);
        }
    }

    /// Returns the number of the descriptor for NetworkPolicies; 0 = there is none.
    pub(in crate::engine) fn policy_generation(&self) -> u64 {
        self.policies.generation()
    }

    /// Returns a descriptor that is readable when there may be notifications about NetworkPolicies, if the backend's own one is
    /// not enough.
    pub(in crate::engine) fn policy_readiness(&self) -> Option<OwnedFd> {
        self.policies.readiness()
    }

    /// Returns the position that the kernel holds, of Services and NetworkPolicies.
    pub(super) fn applied(&self) -> Option<Position> {
        common(self.tables().map(Reconciler::progress), self.epoch())
    }

    /// Returns the position that was read back from the kernel, of Services and NetworkPolicies; none while it is not known
    /// what the kernel holds.
    pub(super) fn verified(&self) -> Option<Position> {
        self.applied()?;
        common(self.tables().map(Reconciler::read_progress), self.epoch())
    }

    fn epoch(&self) -> Option<u64> {
        self.desired.position().map(|position| position.epoch)
    }
}
