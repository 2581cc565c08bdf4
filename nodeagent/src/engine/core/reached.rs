//! How far the kernel is, over both families, Services and NetworkPolicies; and what NetworkPolicies cut and log.

use kplane_dataplane::policy::{Flow, Followed, Hand};

use super::Core;
use crate::desired::{Position, Touched};
use crate::engine::now::Now;
use crate::engine::pipeline::Pipeline;

impl Core {
    /// From now on, connections end that NetworkPolicies no longer allow.
    pub(in crate::engine) fn cut_denied(&mut self, hand: Hand) -> std::io::Result<()> {
        self.policies.cut_denied(hand)
    }

    /// Has those of these connections cut that NetworkPolicies deny now.
    pub(in crate::engine) fn judge(&mut self, flows: Vec<Flow>) {
        self.policies.judge(flows);
    }

    /// Has the kernel log the denied packets of these Pods.
    pub(in crate::engine) fn follow(&mut self, followed: &Followed, now: Now) {
        self.policies.follow(followed);
        if let Some(position) = self.desired.position()
            && !self.keeping.hands_off()
        {
            // As if the node had changed. What the kernel refuses now comes with the next attempt.
            let touched = Touched {
                node_changed: true,
                ..Touched::default()
            };
            self.policies.sync(&touched, position, &self.desired, now);
        }
    }

    /// Returns the position that the kernel holds.
    pub(super) fn applied(&self) -> Option<Position> {
        let services = self.common(Pipeline::applied)?;
        let policies: Option<Vec<_>> = self.policies.applied(&self.desired).collect();
        let reached = policies?.into_iter().chain([services]);
        reached.min_by_key(|at| self.progress(*at))
    }

    /// Returns a position as a number that grows. A family that is still in another epoch is behind every family in
    /// this one.
    fn progress(&self, at: Position) -> (bool, u64) {
        let epoch = self.desired.position().map(|position| position.epoch);
        (Some(at.epoch) == epoch, at.revision)
    }

    /// Returns the position that all families of Services have reached. A family that its kernel refuses has also reached
    /// positions that do not need it, but none before these.
    pub(super) fn common(&self, of: fn(&Pipeline) -> Option<Position>) -> Option<Position> {
        let furthest = |family: &Pipeline| {
            let excused = family.excused().map(|(_, last)| last);
            let both = [of(family), excused].into_iter().flatten();
            both.max_by_key(|at| self.progress(*at))
        };
        let reached: Option<Vec<_>> = self.families.iter().map(furthest).collect();
        let reached = reached?.into_iter().min_by_key(|at| self.progress(*at))?;
        let is_past = |at: Position| self.progress(at) >= self.progress(reached);
        let holds = |family: &Pipeline| {
            let excused = family.excused();
            let is_excused =
                excused.is_some_and(|(first, _)| self.progress(first) <= self.progress(reached));
            is_excused || of(family).is_some_and(is_past)
        };
        self.families.iter().all(holds).then_some(reached)
    }
}
