//! When the agent reports.
//!
//! A change reaches all nodes of a fleet at the same time. If all of them reported at once, the reports would hold up
//! the change itself on its way to the last ones. So agents of a large fleet spread reports that tell of progress only,
//! over a time that the control plane names. Anything that a person may have to know is reported at once.

use std::collections::VecDeque;
use std::time::Duration;

use kplane_proto::v1 as pb;
use tokio::time::Instant;

use crate::desired::Position;
use crate::report::{Report, micros};

/// Longest time over which a control plane may spread reports.
const MAX_WITHIN: Duration = Duration::from_secs(5);

/// Most steps that a report names. Older ones count as done with the oldest that is named.
const MAX_STEPS: usize = 64;

#[derive(Debug, Default)]
pub(super) struct ReportPacing {
    /// The time over which reports of progress are spread; zero = they are sent at once.
    within: Duration,
    /// The last report that was sent.
    sent: Option<Report>,
    sent_at: Option<Instant>,
    due: Option<Instant>,
    /// The positions that the kernel has reached since the last report, oldest first.
    steps: VecDeque<(Position, Instant)>,
}

impl ReportPacing {
    /// Sets the time over which reports of progress are spread.
    pub(super) fn spread_over(&mut self, within_ms: u32) {
        self.within = Duration::from_millis(within_ms.into()).min(MAX_WITHIN);
    }

    /// Takes notice of the engine's latest report; returns whether to send it at once.
    pub(super) fn observe(&mut self, latest: &Report) -> bool {
        if let Some(applied) = latest.applied
            && self.reached() != Some(applied)
        {
            if self.steps.len() == MAX_STEPS {
                self.steps.pop_front();
            }
            self.steps.push_back((applied, Instant::now()));
        }
        let sent = self.sent.as_ref();
        sent.is_none_or(|sent| is_urgent(sent, latest)) || self.progress()
    }

    /// Takes notice of progress; returns whether to report it at once.
    pub(super) fn progress(&mut self) -> bool {
        if self.within.is_zero() {
            return true;
        }
        let now = Instant::now();
        let after_last = self.sent_at.map_or(now, |at| at + self.within);
        let spread = now + rand::random_range(Duration::ZERO..=self.within);
        self.due.get_or_insert(spread.max(after_last));
        false
    }

    /// Returns when a report is due.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Notes that a report is being sent; returns the steps of its epoch that took place some time ago.
    pub(super) fn send(&mut self, latest: &Report) -> Vec<pb::Step> {
        self.observe(latest);
        let now = Instant::now();
        let epoch = latest.held.map(|held| held.epoch);
        let steps = self.steps.drain(..);
        let here = steps.filter(|(at, _)| Some(at.epoch) == epoch);
        let steps = here
            .map(|(at, since)| pb::Step {
                revision: at.revision,
                ago_us: micros(now.saturating_duration_since(since)),
            })
            .collect();
        (self.due, self.sent_at) = (None, Some(now));
        self.sent = Some(latest.clone());
        steps
    }

    /// Returns the last position that the kernel is known to have reached.
    fn reached(&self) -> Option<Position> {
        let sent = self.sent.as_ref().and_then(|sent| sent.applied);
        self.steps.back().map_or(sent, |(at, _)| Some(*at))
    }
}

/// Returns whether a report contains more than progress.
fn is_urgent(sent: &Report, latest: &Report) -> bool {
    let epoch = |at: Option<Position>| at.map(|at| at.epoch);
    let went_back = match (sent.applied, latest.applied) {
        (Some(before), Some(now)) => now.revision < before.revision,
        (before, _) => before.is_some(),
    };
    let families = || sent.families.iter().zip(&latest.families);
    went_back
        || epoch(sent.held) != epoch(latest.held)
        || sent.failures != latest.failures
        || sent.keeps != latest.keeps
        || sent.partial != latest.partial
        || families().any(|(sent, now)| sent.error != now.error || sent.repairs != now.repairs)
}

#[cfg(test)]
mod tests;
