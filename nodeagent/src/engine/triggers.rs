//! Changes in the cluster that led to updates, until the kernel holds their results (section (h)).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::desired::Trigger;
use crate::metrics::FamilyCounters;
use crate::report::TriggerProgrammed;

/// Most triggers of a family that wait for its kernel; beyond that the oldest are forgotten. They
/// matter only for a histogram, which is no concern while a family cannot be programmed for long.
const WAITING: usize = 1_024;

/// Most results that are kept for the control plane; beyond that the oldest are forgotten.
const REMEMBERED: usize = 64;

/// Triggers of one family that the kernel has not acknowledged, oldest first.
#[derive(Debug, Default)]
pub(super) struct PendingTriggers(VecDeque<(u64, Trigger)>);

impl PendingTriggers {
    /// Adds a trigger of an update of this epoch.
    pub(super) fn push(&mut self, epoch: u64, trigger: Trigger) {
        if self.0.len() == WAITING {
            self.0.pop_front();
        }
        self.0.push_back((epoch, trigger));
    }

    /// Records that the kernel has acknowledged all of them, at `at_ms` milliseconds since 1970.
    pub(super) fn acknowledged(
        &mut self,
        at_ms: u64,
        counters: &FamilyCounters,
        results: &mut Results,
    ) {
        for (epoch, trigger) in self.0.drain(..) {
            // The clocks of two machines differ. A change that seems to be programmed before it
            // happened took no time.
            let latency_ms = at_ms.saturating_sub(trigger.at_ms);
            counters.programming.observe(Duration::from_millis(latency_ms));
            results.push(epoch, trigger.id, latency_ms);
        }
    }
}

/// The latest results, for the report.
#[derive(Debug, Default)]
pub(super) struct Results {
    /// The number of results so far.
    count: u64,
    latest: Arc<VecDeque<TriggerProgrammed>>,
}

impl Results {
    fn push(&mut self, epoch: u64, id: u64, latency_ms: u64) {
        self.count += 1;
        let latest = Arc::make_mut(&mut self.latest);
        if latest.len() == REMEMBERED {
            latest.pop_front();
        }
        latest.push_back(TriggerProgrammed {
            number: self.count,
            epoch,
            id,
            latency_ms,
        });
    }

    /// Returns the latest results, oldest first.
    pub(super) fn latest(&self) -> Arc<VecDeque<TriggerProgrammed>> {
        Arc::clone(&self.latest)
    }
}
