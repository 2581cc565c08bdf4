//! The checks of `kpctl check`: pure functions from what was read to findings. Every check has one finding, whatever
//! the others found.

pub(crate) mod before;
pub(crate) mod cluster;
pub(crate) mod dns;
pub(crate) mod external;
pub(crate) mod fleet;
mod hooks;
mod host_checks;
mod listed;
pub(crate) mod neighbours;
pub(crate) mod nodes;
mod policies;
pub(crate) mod ranges;
pub(crate) mod updates;

use kplane_proto::v1::{self as pb, NodeState};
use serde::{Deserialize, Serialize};

/// Most nodes that a finding names.
const NAMED: usize = 5;

/// The outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Outcome {
    /// All is well.
    Ok,
    /// The check does not apply here.
    Skipped,
    /// All works, and something deserves attention.
    Warning,
    /// The check could not be made.
    Unknown,
    /// Something is wrong.
    Bad,
}

/// The finding of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Finding {
    /// The name of the check, which does not change.
    pub(crate) check: String,
    pub(crate) outcome: Outcome,
    /// One line.
    pub(crate) summary: String,
    /// More lines, if something is wrong.
    pub(crate) details: Vec<String>,
    /// The command to type next; empty if all is well.
    pub(crate) remedy: String,
}

impl Finding {
    /// A check that found nothing.
    pub(crate) fn ok(check: &str, summary: impl Into<String>) -> Self {
        Self::new(check, Outcome::Ok, summary, "")
    }

    /// A check that does not apply.
    pub(crate) fn skipped(check: &str, why: impl Into<String>) -> Self {
        Self::new(check, Outcome::Skipped, why, "")
    }

    /// A check that could not be made.
    pub(crate) fn unknown(check: &str, why: impl Into<String>, remedy: &str) -> Self {
        Self::new(check, Outcome::Unknown, why, remedy)
    }

    /// A check that found something that deserves attention.
    pub(crate) fn warning(check: &str, what: impl Into<String>, remedy: &str) -> Self {
        Self::new(check, Outcome::Warning, what, remedy)
    }

    /// A check that found something wrong.
    pub(crate) fn bad(check: &str, what: impl Into<String>, remedy: &str) -> Self {
        Self::new(check, Outcome::Bad, what, remedy)
    }

    fn new(check: &str, outcome: Outcome, summary: impl Into<String>, remedy: &str) -> Self {
        Self {
            check: check.to_owned(),
            outcome,
            summary: summary.into(),
            details: Vec::new(),
            remedy: remedy.to_owned(),
        }
    }

    /// Adds details.
    pub(crate) fn with(mut self, details: Vec<String>) -> Self {
        self.details = details;
        self
    }
}

/// Returns the outcome of all findings: the worst one, and `Ok` where there is only something to note.
pub(crate) fn outcome(findings: &[Finding]) -> Outcome {
    let worst = findings.iter().map(|finding| finding.outcome).max();
    worst.filter(|worst| *worst > Outcome::Warning).unwrap_or(Outcome::Ok)
}

/// Returns some names, and the number of the others.
pub(crate) fn names(all: &[&str]) -> String {
    let named = all.iter().take(NAMED).copied().collect::<Vec<_>>();
    match all.len().saturating_sub(NAMED) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

/// Returns the nodes whose agents are connected.
fn connected(fleet: &pb::Fleet) -> impl Iterator<Item = &pb::NodeStatus> {
    // The agent of a standalone process has no address.
    let away = [
        NodeState::NoAgent,
        NodeState::Disconnected,
        NodeState::Unknown,
    ];
    fleet.nodes.iter().filter(move |node| !away.contains(&node.state()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_finding_decides() {
        let all = [
            Finding::ok("a", ""),
            Finding::warning("b", "", ""),
            Finding::skipped("c", ""),
        ];
        assert_eq!(outcome(&all), Outcome::Ok);
        let unknown = [Finding::ok("a", ""), Finding::unknown("b", "", "")];
        assert_eq!(outcome(&unknown), Outcome::Unknown);
        let bad = [Finding::unknown("a", "", ""), Finding::bad("b", "", "")];
        assert_eq!(outcome(&bad), Outcome::Bad);
    }

    #[test]
    fn a_few_are_named_and_the_others_counted() {
        assert_eq!(names(&["a", "b"]), "a, b");
        assert_eq!(names(&["a"; 7]), "a, a, a, a, a and 2 more");
    }
}
