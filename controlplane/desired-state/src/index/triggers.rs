//! The causes of EndpointSlice changes and their times: the start of the network programming
//! latency (section (h)).
//!
//! The controller that writes a slice records the time of the change that led to it, such as the
//! time at which a pod became ready. Pure; recorded triggers belong to the next publication.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kplane_model::{Family, ServiceName};

use crate::publish::Trigger;

/// Maximum time that a change may lie in the future, since the clocks of a cluster differ a little.
/// A time further ahead is useless for measurements.
const MAX_SKEW: Duration = Duration::from_secs(5);

/// Triggers that wait for the next publication.
#[derive(Debug)]
pub(super) struct Triggers {
    /// Start of this process. Changes before it are not measured, because most of their time passed
    /// without this process.
    started_at: SystemTime,
    pending: BTreeSet<Trigger>,
}

impl Default for Triggers {
    /// Measures all changes, whatever their time.
    fn default() -> Self {
        Self::since(UNIX_EPOCH)
    }
}

impl Triggers {
    /// Leaves out changes before `started_at`.
    pub(super) fn since(started_at: SystemTime) -> Self {
        Self {
            started_at,
            pending: BTreeSet::new(),
        }
    }

    /// Records that a slice of a Service was written because of a change at `at_ms`, milliseconds
    /// since 1970; 0 = unknown. Several slices that were written for one change count once.
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

    /// Returns the triggers recorded since the last call.
    pub(super) fn take(&mut self) -> Vec<Trigger> {
        std::mem::take(&mut self.pending).into_iter().collect()
    }
}

#[cfg(test)]
mod tests;
