//! The Services that wait for a person's approval, and the outcome.

use kplane_proto::v1 as pb;
use serde::Serialize;

use super::nodes::HeldView;
use super::replicas::{MissingReplicaView, missing_text, not_approved_text};
use super::{API_VERSION, View};
use crate::style::{Canvas, Tone};
use crate::text::{Span, field, long_field, paragraph, plural};
use crate::time::Time;
use crate::wire::FromWire;

/// Most nodes that are named; the rest is counted.
const NODES_NAMED: usize = 5;

/// The view of `kpctl approve`: what is held or in doubt, where, and whether it was approved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ApprovalView {
    api_version: &'static str,
    kind: &'static str,
    /// Whether the person approved. False while approval is pending, and if there was nothing to
    /// approve.
    pub(crate) approved: bool,
    /// The Services that the control plane holds, or held.
    pub(crate) held: Option<HeldView>,
    /// The reason why the control plane's data is, or was, incomplete; `null` when it is complete.
    pub(crate) doubt: Option<String>,
    /// The nodes that hold something, or held.
    pub(crate) nodes: Vec<String>,
    /// The revision of this state.
    pub(crate) revision: u64,
    /// Replicas that did not answer.
    pub(crate) missing_replicas: Vec<MissingReplicaView>,
    #[serde(skip)]
    now: Option<Time>,
}

impl From<pb::Fleet> for ApprovalView {
    /// Builds the view of what can be approved.
    fn from(fleet: pb::Fleet) -> Self {
        let status = fleet.control_plane.unwrap_or_default();
        let holds = |node: &pb::NodeStatus| node.report.as_ref().is_some_and(|r| r.held.is_some());
        let nodes = fleet.nodes.into_iter().filter(holds).map(|node| node.name);
        Self {
            now: Time::from_wire(status.now_ms),
            missing_replicas: FromWire::from_wire(fleet.missing_replicas),
            ..Self::new(
                false,
                status.held,
                status.doubt,
                nodes.collect(),
                status.revision,
            )
        }
    }
}

impl From<pb::ApproveResponse> for ApprovalView {
    /// Builds the view of what was approved.
    fn from(done: pb::ApproveResponse) -> Self {
        let mut view = Self::new(true, done.released, done.doubt, done.nodes, done.revision);
        view.missing_replicas = FromWire::from_wire(done.missing_replicas);
        view.approved = !view.is_empty();
        view
    }
}

impl ApprovalView {
    fn new(
        approved: bool,
        held: Option<pb::Held>,
        doubt: String,
        nodes: Vec<String>,
        revision: u64,
    ) -> Self {
        Self {
            api_version: API_VERSION,
            kind: "Approval",
            approved,
            held: held.map(HeldView::from),
            doubt: Some(doubt).filter(|doubt| !doubt.is_empty()),
            nodes,
            revision,
            missing_replicas: Vec::new(),
            now: None,
        }
    }

    /// Returns whether there is nothing to approve.
    pub fn is_empty(&self) -> bool {
        self.held.is_none() && self.doubt.is_none() && self.nodes.is_empty()
    }

    /// Returns the request to approve exactly what the person has seen.
    pub fn request(&self) -> pb::ApproveRequest {
        let held = self.held.as_ref();
        pb::ApproveRequest {
            services: held.map_or(0, |held| held.services),
            without_endpoints: held.map_or(0, |held| held.without_endpoints),
        }
    }
}

impl View for ApprovalView {
    fn text(&self, canvas: &Canvas) -> String {
        let missing = if self.approved {
            not_approved_text(&self.missing_replicas, canvas)
        } else {
            missing_text(&self.missing_replicas, canvas)
        };
        if self.is_empty() {
            return format!("Nothing waits for approval.\n{missing}");
        }
        let mut out = String::new();
        if self.approved {
            let done = "Approved: objects that are missing from the source are removed.";
            out.push_str(&paragraph(&Span::new(done, Tone::Good), canvas, 0));
        }
        let what = if self.approved {
            ["Removed", "Resolved", "On nodes"]
        } else {
            ["Held", "Incomplete", "Held by nodes"]
        };
        if let Some(held) = &self.held {
            out.push_str(&held_text(what[0], held, self.now, canvas));
        }
        if let Some(doubt) = &self.doubt {
            out.push_str(&long_field(what[1], &Span::new(doubt, Tone::Warn), canvas));
        }
        if !self.nodes.is_empty() {
            let shown = self.nodes.len().min(NODES_NAMED);
            let mut spans: Vec<_> = self.nodes[..shown].iter().map(Span::plain).collect();
            let more = self.nodes.len() - shown;
            spans.extend((more > 0).then(|| Span::plain(format!("{more} more"))));
            out.push_str(&field(what[2], &spans, canvas));
        }
        out + &missing
    }
}

/// Returns a field with what a control plane holds.
pub(super) fn held_text(key: &str, held: &HeldView, now: Option<Time>, canvas: &Canvas) -> String {
    let services = |count: u64| plural(usize::try_from(count).unwrap_or(usize::MAX), "service");
    let mut counts = Vec::new();
    if held.services > 0 {
        counts.push(Span::new(services(held.services), Tone::Warn));
    }
    if held.without_endpoints > 0 {
        let text = format!("the last endpoints of {}", services(held.without_endpoints));
        counts.push(Span::new(text, Tone::Warn));
    }
    if let (Some(since), Some(now)) = (held.since, now) {
        counts.push(Span::plain(format!("for {}", since.age_text(now))));
    }
    let all = held.services.saturating_add(held.without_endpoints);
    let more = all.saturating_sub(held.examples.len() as u64);
    let more = (more > 0).then(|| format!(" and {more} more"));
    let names = held.examples.join(", ") + &more.unwrap_or_default();
    [
        field(key, &counts, canvas),
        long_field("", &Span::plain(&held.reason), canvas),
        long_field("", &Span::plain(names), canvas),
    ]
    .concat()
}
