//! What keeps the agent from answering hooks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kplane_model::{Family, Reason, Severity};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::host_checks::Finding;

/// A part of the answers that can be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// The port on the loopback address.
    Port,
    /// The rules that lead hooks there.
    Rules,
}

/// Time for which it is reported that a hook had no place.
const REPORTED: Duration = Duration::from_secs(600);

/// The problems of now, shared by the task and the engine's side.
#[derive(Clone, Debug, Default)]
pub(super) struct Problems(Arc<Mutex<HookTroubles>>);

#[derive(Debug, Default)]
struct HookTroubles {
    parts: BTreeMap<(Part, Family), String>,
    /// The last time at which a hook had no place.
    busy: Option<Instant>,
}

impl Problems {
    /// Sets the problem of a part, human-readable; `None` = it works.
    pub(super) fn set(&self, part: Part, family: Family, problem: Option<String>) {
        let mut all = self.0.lock();
        match problem {
            Some(problem) => drop(all.parts.insert((part, family), problem)),
            None => drop(all.parts.remove(&(part, family))),
        }
    }

    /// Notes that a hook has no place.
    pub(super) fn busy(&self, now: Instant) {
        self.0.lock().busy = Some(now);
    }

    /// Returns a finding of each problem.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let all = self.0.lock();
        let finding = |problem: &String| {
            Finding {
            code: Reason::HooksFail,
            severity: Severity::Warning,
            text: format!(
                "{problem}; preStop hooks of this node's Pods fail, which ends the Pods at once"
            ),
            fix: "free the port, or give all agents and hooks another one (--pre-stop-port); 0 = no hooks".to_owned(),
        }
        };
        let busy = all.busy.filter(|at| at.elapsed() < REPORTED).map(|_| Finding {
            code: Reason::HooksFail,
            severity: Severity::Warning,
            text: "preStop hooks found no place, at the agent or the control plane, and waited for their whole time"
                .to_owned(),
            fix: "find the Pods that ask too often, such as by probes at the port of hooks (kpctl get departures)"
                .to_owned(),
        });
        all.parts.values().map(finding).chain(busy).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_is_found_until_it_is_solved() {
        let problems = Problems::default();
        assert!(problems.findings().is_empty());
        let of = |part, problem: Option<&str>| {
            problems.set(part, Family::V4, problem.map(str::to_owned));
        };
        of(Part::Port, Some("127.0.0.1:7468 is taken"));
        of(Part::Rules, Some("no rules"));
        of(Part::Rules, Some("still no rules"));
        let texts: Vec<String> = problems.findings().into_iter().map(|of| of.text).collect();
        assert_eq!(texts.len(), 2);
        assert!(
            texts[0].starts_with("127.0.0.1:7468 is taken; "),
            "{texts:?}"
        );
        assert!(texts[1].starts_with("still no rules; "), "{texts:?}");
        of(Part::Port, None);
        of(Part::Rules, None);
        assert!(problems.findings().is_empty());
    }
}
