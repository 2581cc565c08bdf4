//! Long lists of nodes, folded: healthy ones are counted, and nodes with the same problem share a row.

use std::collections::HashMap;
use std::hash::Hash;

use crate::style::{Canvas, Tone};
use crate::text::{Span, grouped};

/// Most nodes of a list that is shown in full.
const SMALL: usize = 10;

/// Most nodes with the same problem that are listed one by one.
const ALIKE: usize = 3;

/// Most rows of a folded list.
const ROWS_SHOWN: usize = 50;

/// Most nodes of a group that are named.
const NAMED: usize = 8;

/// The rows of a list, each with one node or several that are alike, and what the rows leave out.
pub(crate) struct Folded<'a, T> {
    /// The rows. None is empty.
    pub(crate) rows: Vec<Vec<&'a T>>,
    /// Nodes about which there is nothing to be said.
    pub(crate) healthy: usize,
    /// Nodes of the rows that are left out.
    pub(crate) hidden: usize,
}

impl<'a, T> Folded<'a, T> {
    /// Folds a list if it is long and the canvas does not show everything. `problem` returns what nodes of one row
    /// have in common; `None` for a healthy node. Rows are sorted by `rank`, then the larger ones come first.
    pub(crate) fn new<P: Eq + Hash, R: Ord>(
        nodes: &'a [T],
        canvas: &Canvas,
        problem: impl Fn(&T) -> Option<P>,
        rank: impl Fn(&T) -> R,
    ) -> Self {
        if canvas.all || nodes.len() <= SMALL {
            let rows = nodes.iter().map(|node| vec![node]).collect();
            return Self {
                rows,
                healthy: 0,
                hidden: 0,
            };
        }
        let mut healthy = 0;
        let mut groups: Vec<Vec<&T>> = Vec::new();
        let mut known = HashMap::new();
        for node in nodes {
            let Some(problem) = problem(node) else {
                healthy += 1;
                continue;
            };
            let at = *known.entry(problem).or_insert(groups.len());
            match groups.get_mut(at) {
                Some(group) => group.push(node),
                None => groups.push(vec![node]),
            }
        }
        let mut rows: Vec<Vec<&T>> = Vec::new();
        for group in groups {
            if group.len() <= ALIKE {
                rows.extend(group.into_iter().map(|node| vec![node]));
            } else {
                rows.push(group);
            }
        }
        rows.sort_by_key(|row| (rank(row[0]), usize::MAX - row.len()));
        let cut = rows.split_off(ROWS_SHOWN.min(rows.len()));
        Self {
            rows,
            healthy,
            hidden: cut.iter().map(Vec::len).sum(),
        }
    }

    /// Returns the lines about nodes that are left out. `what` says of the healthy nodes what they are, and `command`
    /// lists all.
    pub(crate) fn rest(&self, what: &str, command: &str) -> String {
        let mut out = String::new();
        if self.hidden > 0 {
            let hidden = nodes(self.hidden);
            out.push_str(&format!("{hidden} more: {command} --all\n"));
        }
        if self.healthy > 0 {
            let text = Tone::Good.paint(&format!("{} {what}", nodes(self.healthy)));
            out.push_str(&format!("{text}: {command} --all lists them\n"));
        }
        out
    }
}

/// Returns the first cell of a row: the name of its only node, or the number of its nodes.
pub(crate) fn name_span<T>(row: &[&T], name: impl Fn(&T) -> &str) -> Span {
    match row {
        [node] => Span::plain(name(node)),
        all => Span::new(nodes(all.len()), Tone::Strong),
    }
}

/// Returns a note with the names of a row's nodes; `None` for a single node.
pub(crate) fn names_note<T>(row: &[&T], name: impl Fn(&T) -> &str) -> Option<Span> {
    if row.len() < 2 {
        return None;
    }
    let mut names: Vec<&str> = row.iter().map(|node| name(node)).collect();
    names.sort_unstable();
    let more = names.len().saturating_sub(NAMED);
    names.truncate(NAMED);
    let names = names.join(", ");
    Some(Span::plain(match more {
        0 => names,
        more => format!("{names} and {} more", grouped(more as u64)),
    }))
}

/// Returns `1 node`, `4,807 nodes`.
fn nodes(count: usize) -> String {
    let s = if count == 1 { "" } else { "s" };
    format!("{} node{s}", grouped(count as u64))
}
