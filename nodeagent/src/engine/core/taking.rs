//! The steps by which an update becomes part of the desired state.

use std::time::Instant;

use kplane_model::{DesiredKey, Family};

use super::{Core, Origin, Work};
use crate::desired::{Changes, Dirty, Refusal, Update};
use crate::engine::now::Now;
use crate::engine::pipeline::Pipeline;
use crate::engine::warnings::Warnings;

impl Core {
    /// Makes an update part of the desired state.
    pub(in crate::engine) fn take(&mut self, mut update: Update) -> Result<Work, Refusal> {
        let started = Instant::now();
        let origin = Origin {
            arrived: update.arrived,
            changed_at_ms: update.changed_at_ms,
        };
        let (epoch, confirmed_ms) = (update.position.epoch, update.arrived_at_ms);
        let (triggers, snapshot) = (std::mem::take(&mut update.triggers), update.snapshot);
        let before = self.desired.position().map(|position| position.epoch);
        let (held, stale) = (self.desired.held_services(), self.desired.is_stale());
        let dirty = self.apply(update)?;
        let now = Now::real();
        self.confirm(confirmed_ms, stale);
        self.checkpoint.taken(before.is_none(), &self.desired, &mut self.families, now);
        let released = self.desired.held_services() < held;
        let changed = self.retract(&dirty);
        // Another epoch makes another resume token.
        if released || changed || before != Some(epoch) {
            self.checkpoint.changed(released, now.instant);
        }
        for trigger in triggers {
            self.families[trigger.family as usize].triggered(epoch, trigger);
        }
        self.warn(&dirty);
        self.snapshots += u64::from(snapshot);
        self.queue(&dirty, origin, now);
        Ok(Work {
            dirty,
            origin,
            decode: started.elapsed(),
        })
    }

    fn apply(&mut self, update: Update) -> Result<Dirty, Refusal> {
        let families = &mut self.families;
        let serves = || families.iter_mut().any(Pipeline::has_services);
        self.desired.forget_if_foreign(&update.cluster, serves);
        self.desired.apply(update)
    }

    /// Notes that a control plane has confirmed the desired state.
    fn confirm(&mut self, confirmed_ms: u64, was_stale: bool) {
        self.offline_start.answered();
        self.checkpoint.confirmation().set(confirmed_ms);
        if was_stale {
            tracing::info!(
                "a control plane has answered: the node is not served from the cache file any more"
            );
        }
    }

    /// Takes back that the kernel holds the position if an update changed something without a new revision: what an
    /// agent keeps may go so. Returns whether something changed.
    fn retract(&mut self, dirty: &Dirty) -> bool {
        let changed =
            dirty.node_changed || !dirty.services.is_empty() || !dirty.policies.is_empty();
        if changed && let Some(position) = self.desired.position() {
            let services = self.families.iter_mut().map(|family| &mut family.state);
            let tables = services.chain(self.policies.states_mut());
            tables.for_each(|table| table.retract(position));
        }
        changed
    }

    /// Warns about what does not fit: the settings, and invalid objects.
    fn warn(&mut self, dirty: &Dirty) {
        if dirty.node_changed {
            Warnings::detector(&self.settings, self.desired.node());
        }
        self.settings.last_known = self.desired.last_known();
        self.warnings.about(&self.settings, &self.desired);
        for (key, reason) in &dirty.rejects {
            tracing::warn!(
                object = key.as_ref().map_or_else(String::new, named),
                reason,
                "an object is invalid: the kernel keeps what it holds of it, and gets all other objects"
            );
        }
    }

    /// Notes that the kernel is behind, and counts the changes that wait for it.
    fn queue(&mut self, dirty: &Dirty, origin: Origin, now: Now) {
        self.behind.get_or_insert(origin);
        self.unknown_kinds += dirty.unknown_kinds;
        for (pipeline, family) in self.families.iter_mut().zip(Family::ALL) {
            pipeline.queue(origin.arrived);
            let changes = dirty.changes[family as usize];
            if dirty.node_changed || changes != Changes::default() {
                self.followers.counters(family).queued(changes, now.ms);
            }
        }
    }
}

/// Returns an object's name, human-readable.
fn named(key: &DesiredKey) -> String {
    match key {
        DesiredKey::Service(key) => key.to_string(),
        DesiredKey::Local(key) => format!("endpoints of {key} on the node"),
        DesiredKey::Node => "facts of the node".to_owned(),
        DesiredKey::Policy(key) => key.to_string(),
    }
}
