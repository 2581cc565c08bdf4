//! What made EndpointSlices change, and when: the beginning of the network programming latency
//! (section (h)).
//!
//! The controller that writes a slice notes the time of the change that led to it, such as that of
//! a pod that became ready. Pure; what is noted belongs to the next publication.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kplane_model::{Family, ServiceName};

use crate::publish::Trigger;

/// A change may be in our future by so much: clocks of a cluster differ a little. What is further
/// ahead is not a time that anything can be measured from.
const MAX_SKEW: Duration = Duration::from_secs(5);

/// Triggers that wait for the next publication.
#[derive(Debug)]
pub(super) struct Triggers {
    /// Changes before it are not measured: most of their time passed without this process.
    started_at: SystemTime,
    pending: BTreeSet<Trigger>,
}

impl Default for Triggers {
    /// For a process that has always been there.
    fn default() -> Self {
        Self::since(UNIX_EPOCH)
    }
}

impl Triggers {
    /// For a process that started then.
    pub(super) fn since(started_at: SystemTime) -> Self {
        Self {
            started_at,
            pending: BTreeSet::new(),
        }
    }

    /// A slice of a Service was written because of a change at `at_ms`, milliseconds since 1970; 0 =
    /// nothing is known. One of several slices that were written for one change counts.
    pub(super) fn note(
        &mut self,
        service: &ServiceName,
        family: Family,
        at_ms: u64,
        observed_at: SystemTime,
    ) {
        let at = UNIX_EPOCH + Duration::from_millis(at_ms);
        if at_ms == 0 || at < self.started_at || at > observed_at + MAX_SKEW {
            return;
        }
        self.pending.insert(Trigger {
            at_ms,
            service: service.clone(),
            family,
        });
    }

    /// Those that were noted since the last call.
    pub(super) fn take(&mut self) -> Vec<Trigger> {
        std::mem::take(&mut self.pending).into_iter().collect()
    }
}

#[cfg(test)]
mod tests;
