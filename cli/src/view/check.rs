//! The outcome of `kpctl check`.

use serde::Serialize;

use crate::check::{Finding, Outcome, outcome};
use kplane_view::style::{Canvas, Tone};
use kplane_view::table::{Column, Table};
use kplane_view::text::{Span, paragraph};
use kplane_view::{API_VERSION, View};

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CheckView {
    api_version: &'static str,
    kind: &'static str,
    /// `Ok`, `Bad`, or `Unknown` if something could not be checked and nothing is bad.
    pub(crate) outcome: Outcome,
    checks: Vec<Finding>,
}

impl CheckView {
    /// Builds the view.
    pub(crate) fn new(checks: Vec<Finding>) -> Self {
        Self {
            api_version: API_VERSION,
            kind: "Check",
            outcome: outcome(&checks),
            checks,
        }
    }
}

/// Length in bytes above which a summary is printed once, if several checks have it.
const LONG: usize = 60;

impl CheckView {
    /// Returns the checks; in place of a long summary that another one has before it, each names that one.
    fn reported_once(&self) -> Vec<Finding> {
        let mut checks = self.checks.clone();
        for (at, finding) in self.checks.iter().enumerate() {
            let mut before = self.checks[..at].iter();
            let same = before.find(|of| of.summary == finding.summary);
            if let Some(same) = same.filter(|same| same.summary.len() > LONG) {
                checks[at].summary = format!("as for {}", same.check);
            }
        }
        checks
    }
}

fn word(outcome: Outcome) -> Span {
    match outcome {
        Outcome::Ok => Span::new("ok", Tone::Good),
        Outcome::Skipped => Span::new("skipped", Tone::Faint),
        Outcome::Warning => Span::new("warning", Tone::Warn),
        Outcome::Unknown => Span::new("unknown", Tone::Warn),
        Outcome::Bad => Span::new("BAD", Tone::Bad),
    }
}

impl View for CheckView {
    fn text(&self, canvas: &Canvas) -> String {
        let checks = self.reported_once();
        let table = Table::new(&checks)
            .column(Column::new(""), |finding: &Finding| word(finding.outcome))
            .text(Column::new("CHECK"), |finding| &finding.check)
            .column(Column::new("FINDING").elastic(40), |finding| {
                // An error may be longer than a line: its note has the rest.
                Span::plain(&finding.summary)
            })
            .notes(|finding| notes(finding, canvas))
            .render(canvas);
        let bad = self.checks.iter().filter(|finding| finding.outcome == Outcome::Bad);
        let unknown = self.checks.iter().filter(|finding| finding.outcome == Outcome::Unknown);
        let text = match (self.outcome, bad.count(), unknown.count()) {
            (Outcome::Bad, bad, 0) => format!("{bad} of {} checks failed", self.checks.len()),
            (Outcome::Bad, bad, unknown) => format!(
                "{bad} of {} checks failed, {unknown} could not be made",
                self.checks.len()
            ),
            (Outcome::Unknown, _, unknown) => {
                format!(
                    "{unknown} of {} checks could not be made",
                    self.checks.len()
                )
            }
            _ => {
                if self.checks.iter().any(|check| check.outcome == Outcome::Warning) {
                    "No check failed; read the warnings".to_owned()
                } else {
                    "All is well".to_owned()
                }
            }
        };
        let tone = match self.outcome {
            Outcome::Bad => Tone::Bad,
            Outcome::Unknown => Tone::Warn,
            _ => Tone::Good,
        };
        format!("{table}\n{}", paragraph(&Span::new(text, tone), canvas, 0))
    }
}

fn notes(finding: &Finding, canvas: &Canvas) -> Vec<Span> {
    if finding.outcome <= Outcome::Skipped && !canvas.wide {
        return Vec::new();
    }
    let mut notes = Vec::new();
    // Room for the other columns.
    const OTHERS: usize = 30;
    if finding.summary.len() + OTHERS > canvas.columns {
        notes.push(Span::plain(&finding.summary));
    }
    notes.extend(finding.details.iter().map(Span::plain));
    if !finding.remedy.is_empty() {
        notes.push(Span::new(format!("next: {}", finding.remedy), Tone::Strong));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use kplane_view::testing::table;

    #[test]
    fn a_long_reason_is_told_once() {
        let why = "there is no cluster to ask: there is no kubeconfig. Name one with --kubeconfig and --context";
        let checks = ["agents", "taints", "dns"].map(|check| Finding::skipped(check, why));
        let text = table(&CheckView::new(checks.into()));
        assert_eq!(text.matches("no cluster").count(), 1, "{text}");
        assert_eq!(text.matches("as for agents").count(), 2, "{text}");
    }

    #[test]
    fn details_are_for_what_is_wrong() {
        let view = CheckView::new(vec![
            Finding::ok("replicas", "2 answered").with(vec!["not shown".to_owned()]),
            Finding::bad("agents", "1 of 2 nodes", "kubectl get pods")
                .with(vec!["node-2: away".to_owned()]),
        ]);
        let text = table(&view);
        assert!(!text.contains("not shown"), "{text}");
        assert!(text.contains("  node-2: away\n"), "{text}");
        assert!(text.contains("  next: kubectl get pods\n"), "{text}");
        assert!(text.ends_with("1 of 2 checks failed\n"), "{text}");
    }
}
