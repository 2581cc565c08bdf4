//! The outcome of `kpctl freeze` and `kpctl thaw`.

use kplane_proto::v1 as pb;
use serde::Serialize;

use super::{API_VERSION, View};
use crate::style::{Canvas, Tone};
use crate::text::{Span, paragraph, plural};

/// The view of `kpctl freeze` and `kpctl thaw`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FreezeView {
    api_version: &'static str,
    kind: &'static str,
    /// Whether the nodes are thawed; otherwise they are frozen.
    thawed: bool,
    /// The nodes that the order names; `null` if it is about all.
    nodes: Option<Vec<String>>,
    /// The number of known nodes that are frozen now.
    frozen: u64,
}

impl FreezeView {
    /// Builds the view of an order.
    pub fn new(done: pb::FreezeResponse, thawed: bool) -> Self {
        Self {
            api_version: API_VERSION,
            kind: "Freeze",
            thawed,
            nodes: Some(done.nodes).filter(|nodes| !nodes.is_empty()),
            frozen: done.frozen,
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
