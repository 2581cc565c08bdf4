//! Nodes whose agents did not answer a question.

use std::collections::BTreeMap;

use crate::style::{Canvas, Tone};
use crate::text::{Span, grouped, paragraph};
use crate::wire::view_of;

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

/// Returns a line for all nodes with the same reason, after an empty line; an empty text when there are none.
pub(crate) fn text(silent: &[SilentView], more: u64, canvas: &Canvas) -> String {
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
    match lines.is_empty() {
        true => lines,
        false => format!("\n{lines}"),
    }
}
