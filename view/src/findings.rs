//! Causes and fixes, as `describe` shows them.

use super::SeverityView;
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::Span;
use crate::wire::view_of;

/// Most nodes that a line names; `-o wide` names more.
const NODES_NAMED: usize = 8;

view_of! {
    /// What is the matter with a Service, or what a reader has to know about it.
    pub struct FindingView: Finding {
        severity: SeverityView,
        /// The stable name: `docs/reasons.md` explains each.
        code: String,
        text: String,
        /// What to do; empty if nothing has to be done.
        fix: String,
        /// The nodes that it is about; empty = all.
        nodes: Vec<String>,
        /// The number of nodes that are not in `nodes`.
        nodes_omitted: u64,
    }
}

impl FindingView {
    /// Returns whether it is an error.
    pub fn is_error(&self) -> bool {
        self.severity == SeverityView::Error
    }

    /// Returns whether nothing is wrong.
    pub(crate) fn is_info(&self) -> bool {
        self.severity == SeverityView::Info
    }

    /// Returns the stable name, in the tone of the severity.
    pub(crate) fn code_span(&self) -> Span {
        let severity = self.severity.span();
        Span::new(&self.code, severity.tone)
    }

    fn notes(&self, canvas: &Canvas) -> Vec<Span> {
        let mut notes = vec![Span::plain(&self.text)];
        if !self.nodes.is_empty() {
            notes.push(Span::plain(format!("on {}", self.nodes(canvas))));
        }
        if !self.fix.is_empty() {
            notes.push(Span::new(format!("fix: {}", self.fix), Tone::Good));
        }
        notes
    }

    fn nodes(&self, canvas: &Canvas) -> String {
        let shown = if canvas.wide { self.nodes.len() } else { NODES_NAMED.min(self.nodes.len()) };
        let named = self.nodes[..shown].join(", ");
        let hidden = (self.nodes.len() - shown) as u64 + self.nodes_omitted;
        match hidden {
            0 => named,
            more => format!("{named} and {more} more"),
        }
    }
}

/// Returns a section about findings, after an empty line; an empty text when there are none.
pub fn text(findings: &[FindingView], canvas: &Canvas) -> String {
    if findings.is_empty() {
        return String::new();
    }
    let table = Table::new(findings)
        .column(Column::new("FINDING"), |finding| finding.severity.span())
        .text(Column::new("REASON"), |finding| &finding.code)
        .notes(|finding| finding.notes(canvas))
        .render(canvas);
    format!("\n{table}")
}
