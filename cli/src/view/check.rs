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
        let table = Table::new(&self.checks)
            .column(Column::new(""), |finding: &Finding| word(finding.outcome))
            .text(Column::new("CHECK"), |finding| &finding.check)
            .column(Column::new("FINDING").elastic(40), |finding| {
                // An error may be longer than a line: its note has the rest.
                Span::plain(&finding.summary)
            })
            .notes(|finding| notes(finding, canvas))
            .render(canvas);
        let bad = self
            .checks
            .iter()
            .filter(|finding| finding.outcome == Outcome::Bad);
        let unknown = self
            .checks
            .iter()
            .filter(|finding| finding.outcome == Outcome::Unknown);
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
            _ => match self
                .checks
                .iter()
                .any(|check| check.outcome == Outcome::Warning)
            {
                true => "No check failed; read the warnings".to_owned(),
                false => "All is well".to_owned(),
            },
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
