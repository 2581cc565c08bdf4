//! An agent's clock beside this process's own.
//!
//! Agents say since when something is so by the clocks of their machines. The control plane shows these times by its own
//! clock, so that ages are right whatever time it is on the node.

use std::time::Instant;

use kplane_proto::v1::Report;
use kplane_util::clock::wall_ms;

/// Difference between two pairs of clock readings that is a step of the agent's clock, in milliseconds. Smaller ones
/// are the time that a report takes.
const STEP_MS: u64 = 2_000;

/// The reading of an agent's clock when one of its reports arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clocks {
    here: Instant,
    there_ms: u64,
}

impl Clocks {
    /// Returns the readings after a report; `None` if the agent is too old to name its time. They stay the same while
    /// they agree, so that a time that is shown twice is the same.
    pub(super) fn after(before: Option<Self>, here: Instant, there_ms: u64) -> Option<Self> {
        let new = Self { here, there_ms };
        let same = |before: &Self| {
            let passed = here.saturating_duration_since(before.here).as_millis();
            let passed = u64::try_from(passed).unwrap_or(u64::MAX);
            before.there_ms.saturating_add(passed).abs_diff(there_ms) < STEP_MS
        };
        (there_ms > 0).then(|| before.filter(same).unwrap_or(new))
    }

    /// Returns a time of the agent's clock by this machine's clock, in milliseconds since 1970; 0 stays 0.
    pub fn local_ms(self, theirs_ms: u64) -> u64 {
        let here_ms = wall_ms(self.here);
        match theirs_ms {
            0 => 0,
            _ if theirs_ms > self.there_ms => here_ms.saturating_add(theirs_ms - self.there_ms),
            _ => here_ms.saturating_sub(self.there_ms - theirs_ms).max(1),
        }
    }
}

/// Changes all times of a report.
pub(crate) fn translate(report: &mut Report, local: impl Fn(u64) -> u64) {
    let failures = report.failures.iter_mut().map(|failure| &mut failure.since_ms);
    let families = report.families.iter_mut().flat_map(|family| {
        [
            &mut family.error_since_ms,
            &mut family.verified_at_ms,
            &mut family.last_repair_ms,
        ]
    });
    let sync = report.last_sync.as_mut().map(|sync| &mut sync.finished_at_ms);
    let held = report.held.as_mut().map(|held| &mut held.since_ms);
    for at in failures.chain(families).chain(sync).chain(held) {
        *at = local(*at);
    }
    report.now_ms = 0;
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use kplane_proto::v1::FamilyStatus;

    use super::*;
    use kplane_util::clock::millis;

    /// The agent's clock is an hour slow, and its kernel was compared three minutes before the report.
    #[test]
    fn ages_are_right_whatever_the_time_on_the_node() {
        let now_ms = millis(SystemTime::now());
        let there_ms = now_ms - 3_600_000;
        let here = Instant::now();
        let clocks = Clocks::after(None, here, there_ms).unwrap();
        let mut report = Report {
            families: vec![FamilyStatus {
                verified_at_ms: there_ms - 180_000,
                ..FamilyStatus::default()
            }],
            now_ms: there_ms,
            ..Report::default()
        };
        translate(&mut report, |ms| clocks.local_ms(ms));
        let age = now_ms - report.families[0].verified_at_ms;
        assert!((179_000..=181_000).contains(&age), "{age} ms");
        assert_eq!(report.families[0].error_since_ms, 0, "never");
        // The next report takes a little longer; then the agent's clock is set.
        let later = here + Duration::from_secs(60);
        let same = Clocks::after(Some(clocks), later, there_ms + 59_900);
        assert_eq!(same, Some(clocks));
        let set = Clocks::after(Some(clocks), later, now_ms + 60_000);
        assert_ne!(set, Some(clocks));
        assert_eq!(Clocks::after(Some(clocks), later, 0), None);
    }
}
