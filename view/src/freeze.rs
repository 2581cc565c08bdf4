//! The outcome of `kpctl freeze` and `kpctl thaw`.

use kplane_proto::v1 as pb;

use super::View;
use crate::style::{Canvas, Tone};
use crate::text::{Span, paragraph, plural};
use crate::wire::view_of;

view_of! {
    /// The view of `kpctl freeze` and `kpctl thaw`.
    pub struct FreezeView: FreezeResponse as "Freeze" {
        /// Whether the nodes are thawed; otherwise they are frozen.
        thawed: bool = _,
        /// The nodes that the order names; `null` if it is about all.
        nodes: Option<Vec<String>> => |nodes: Vec<_>| Some(nodes).filter(|nodes| !nodes.is_empty()),
        /// The number of known nodes that are frozen now.
        frozen: u64,
    }
}

impl FreezeView {
    /// Builds the view of an order.
    pub fn new(done: pb::FreezeResponse, thawed: bool) -> Self {
        Self {
            thawed,
            ..done.into()
        }
    }
}

impl View for FreezeView {
    fn text(&self, canvas: &Canvas) -> String {
        let what = if self.thawed { "Thawed" } else { "Frozen" };
        let whom = match &self.nodes {
            None => "all nodes".to_owned(),
            Some(nodes) if nodes.len() == 1 => nodes.join(""),
            Some(nodes) => plural(nodes.len(), "node"),
        };
        let count = usize::try_from(self.frozen).unwrap_or(usize::MAX);
        let text = format!("{what}: {whom}. Frozen now: {}.", plural(count, "node"));
        paragraph(&Span::new(&text, Tone::Good), canvas, 0)
    }
}
