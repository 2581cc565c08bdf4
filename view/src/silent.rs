//! Nodes whose agents did not answer a question.

use std::collections::BTreeMap;

use kplane_proto::v1::NodesAsked;

use crate::replicas::{MissingReplicaView, missing_text};
use crate::style::{Canvas, Tone};
use crate::text::{Span, grouped, paragraph};
use crate::wire::{FromWire, view_of};

/// Most nodes that a line names.
const NAMED: usize = 8;

view_of! {
    /// A node without an answer.
    pub(crate) struct SilentView: SilentNode {
        node: String,
        reason: String,
    }
}

/// Returns `n1, n2 and 3 more`.
pub(crate) fn names<'a>(nodes: impl IntoIterator<Item = &'a str>, omitted: u64) -> String {
    let nodes: Vec<&str> = nodes.into_iter().collect();
    let shown = nodes.iter().take(NAMED).copied().collect::<Vec<_>>();
    let more = (nodes.len() - shown.len()) as u64 + omitted;
    let shown = shown.join(", ");
    match more {
        0 => shown,
        more => format!("{shown} and {} more", grouped(more)),
    }
}

view_of! {
    /// The agents that were asked, and those without an answer.
    pub(crate) struct AskedView: NodesAsked {
        asked: u64,
        answered: u64,
        /// Nodes that did not answer, or could not do what they were asked to.
        silent: Vec<SilentView>,
        silent_omitted: u64 = more_silent,
        missing_replicas: Vec<MissingReplicaView>,
    }
}

impl FromWire<Option<NodesAsked>> for AskedView {
    fn from_wire(asked: Option<NodesAsked>) -> Self {
        asked.unwrap_or_default().into()
    }
}

impl AskedView {
    /// Returns whether all nodes answered.
    pub(crate) fn is_complete(&self) -> bool {
        let all = self.asked == self.answered && self.asked > 0;
        all && self.missing_replicas.is_empty()
    }

    /// Returns how many nodes answered.
    pub(crate) fn summary(&self) -> String {
        let (asked, answered) = (grouped(self.asked), grouped(self.answered));
        format!("{answered} of {asked} nodes answered")
    }

    /// Returns what a list lacks, after an empty line, and who did not answer.
    pub(crate) fn below(&self, lacks: &[(String, Tone)], canvas: &Canvas) -> String {
        let lines: String = lacks
            .iter()
            .map(|(text, tone)| paragraph(&Span::new(text, *tone), canvas, 0))
            .collect();
        let empty = if lines.is_empty() { "" } else { "\n" };
        format!("{empty}{lines}{}", self.text(canvas))
    }

    /// Returns who did not answer, after an empty line; an empty text when all did.
    pub(crate) fn text(&self, canvas: &Canvas) -> String {
        text(&self.silent, self.silent_omitted, canvas)
            + &missing_text(&self.missing_replicas, canvas)
    }
}

/// Returns a line for all nodes with the same reason, after an empty line; an empty text when there are none.
fn text(silent: &[SilentView], more: u64, canvas: &Canvas) -> String {
    let mut by_reason = BTreeMap::<&str, Vec<&str>>::new();
    for SilentView { node, reason } in silent {
        by_reason.entry(reason).or_default().push(node);
    }
    let mut lines: Vec<String> = by_reason
        .into_iter()
        .map(|(reason, nodes)| {
            let which = match nodes.as_slice() {
                [node] => (*node).to_owned(),
                nodes => {
                    let count = grouped(nodes.len() as u64);
                    format!("{count} nodes ({})", names(nodes.iter().copied(), 0))
                }
            };
            format!("Unknown: {which}: {reason}")
        })
        .collect();
    if more > 0 {
        lines.push(format!("Unknown: {} more nodes", grouped(more)));
    }
    let lines: String = lines
        .iter()
        .map(|line| paragraph(&Span::new(line, Tone::Bad), canvas, 0))
        .collect();
    if lines.is_empty() { lines } else { format!("\n{lines}") }
}
