//! Durations from changes in the cluster until a node's kernel held them (section (h)).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use kplane_desired_state::publish::Store;
use kplane_model::{Family, ServiceKey, ServiceName};
use kplane_proto::v1 as pb;

/// Maximum number of changes remembered for one node: 56 bytes each, 3.6 kB a node, 36 MB for
/// 10,000 nodes.
const REMEMBERED: usize = 64;

/// The latest changes that a node programmed. Cheap to clone: views share them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Latencies(Arc<VecDeque<Programmed>>);

/// One change that a node's kernel holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programmed {
    /// The Service whose endpoints changed.
    pub service: ServiceName,
    /// Time at which the control plane received the report.
    pub at: Instant,
    /// Time from the change until the kernel's acknowledgement, milliseconds by two clocks; 49 days
    /// at most.
    pub latency_ms: u32,
    /// Family of the endpoints.
    pub family: Family,
}

/// A summary of [`Latencies`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatencySummary {
    /// Number of changes.
    pub count: usize,
    /// The last duration, milliseconds.
    pub last_ms: u32,
    /// The median, milliseconds.
    pub p50_ms: u32,
    /// The longest duration, milliseconds.
    pub max_ms: u32,
    /// Time at which the control plane received the last one.
    pub last_at: Instant,
}

/// Takes the programmed triggers, which are reported only once, out of a report. Triggers that this
/// control plane has forgotten, or that another control plane sent, are ignored. A Service that the
/// report lists as failed counts as not programmed.
pub(super) fn take_programmed(
    report: &mut pb::Report,
    store: &Store,
    at: Instant,
) -> Vec<Programmed> {
    let announced = std::mem::take(&mut report.triggers_programmed);
    if report.epoch != store.epoch() {
        return Vec::new();
    }
    let understand = |announced: pb::TriggerProgrammed| {
        let trigger = store.trigger(announced.id)?;
        let mut failures = report.failures.iter().filter(|failure| !failure.degraded);
        let failed = failures.any(|failure| is_of(failure, &trigger.service, trigger.family));
        (!failed).then(|| Programmed {
            service: trigger.service,
            at,
            latency_ms: u32::try_from(announced.latency_ms).unwrap_or(u32::MAX),
            family: trigger.family,
        })
    };
    // Agents send no more triggers than are remembered. If one does, it gets no more memory.
    let newest = announced.len().saturating_sub(REMEMBERED);
    announced.into_iter().skip(newest).filter_map(understand).collect()
}

impl Latencies {
    /// Remembers changes, oldest first.
    pub(super) fn remember(&mut self, programmed: Vec<Programmed>) {
        if programmed.is_empty() {
            return;
        }
        let latest = Arc::make_mut(&mut self.0);
        for one in programmed {
            if latest.len() == REMEMBERED {
                latest.pop_front();
            }
            latest.push_back(one);
        }
    }

    /// Returns the last change of a Service, if it is still remembered.
    pub fn of(&self, service: &ServiceName) -> Option<&Programmed> {
        self.0.iter().rev().find(|programmed| programmed.service == *service)
    }

    /// Returns a summary of all changes; `None` without any.
    pub fn summary(&self) -> Option<LatencySummary> {
        let last = self.0.back()?;
        let mut sorted: Vec<u32> = self.0.iter().map(|one| one.latency_ms).collect();
        sorted.sort_unstable();
        Some(LatencySummary {
            count: sorted.len(),
            last_ms: last.latency_ms,
            p50_ms: sorted[(sorted.len() - 1) / 2],
            max_ms: sorted[sorted.len() - 1],
            last_at: last.at,
        })
    }
}

fn is_of(failure: &pb::ObjectFailure, service: &ServiceName, family: Family) -> bool {
    let key = failure.key.clone().map(ServiceKey::try_from);
    matches!(key, Some(Ok(key)) if key.service == *service && key.family == family)
}

#[cfg(test)]
mod tests;
