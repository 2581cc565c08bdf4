//! The fleet: which nodes are in sync, which are not, and why not.

mod rows;

use std::collections::BTreeMap;
use std::time::Duration;

use kplane_proto::v1 as pb;
use serde::Serialize;

use super::approve::held_text;
use super::nodes::{NodeStateView, NodeView, names_of};
use super::plane::{ConfidenceView, ControlPlaneView, EnforcementView};
use super::replicas::{MissingReplicaView, missing_text};
use super::{API_VERSION, IssueView, View, issues_text, next, next_steps_text};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, field, long_field, plural};
use crate::time::{Time, age};
use crate::wire::FromWire;

/// Most failures of one node that a table shows before it refers to `-o wide`.
const FAILURES_SHOWN: usize = 3;

/// Time since the last contact after which a source counts as stale. Watches of the API server
/// receive something at least once a minute.
const STALE_AFTER: Duration = Duration::from_secs(90);

/// The numbers of nodes by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SummaryView {
    pub(crate) nodes: usize,
    pub(crate) in_sync: usize,
    pub(crate) syncing: usize,
    pub(crate) failing: usize,
    pub(crate) disconnected: usize,
    pub(crate) no_agent: usize,
    pub(crate) unverified: usize,
    pub(crate) holding: usize,
    pub(crate) conflict: usize,
    /// Nodes that an operator froze.
    pub(crate) frozen: usize,
    pub(crate) unknown: usize,
    /// Nodes that drop packets for other reasons than Services, whatever their state.
    pub(crate) obstructed: usize,
    pub(crate) errors: usize,
    pub(crate) warnings: usize,
    /// Whether `kpctl status --check` succeeds: nodes and input are healthy.
    pub healthy: bool,
    /// Whether all nodes are known, there is at least one, and each is in sync or frozen and lets packets pass.
    pub nodes_healthy: bool,
    /// Whether the input has no errors, was read in full, and nothing is held that it lacks.
    pub input_healthy: bool,
}

impl SummaryView {
    /// Builds the summary. The second argument is the number of errors and warnings that the
    /// control plane counts; it may list fewer.
    fn new(
        plane: &ControlPlaneView,
        reported: [u64; 2],
        nodes: &[NodeView],
        issues: &[IssueView],
        missing: &[MissingReplicaView],
    ) -> Self {
        let count = |state| nodes.iter().filter(|node| node.state == state).count();
        let listed = issues.iter().filter(|issue| issue.is_error()).count();
        let total = |reported: u64, listed: usize| {
            listed.max(usize::try_from(reported).unwrap_or(usize::MAX))
        };
        let errors = total(reported[0], listed);
        let in_sync = count(NodeStateView::InSync);
        let frozen = count(NodeStateView::Frozen);
        // A fleet without nodes, or incomplete data, must not count as in sync.
        let known = plane.synced && missing.is_empty() && !nodes.is_empty();
        let obstructed = nodes.iter().filter(|node| node.is_obstructed()).count();
        let nodes_healthy = known && in_sync + frozen == nodes.len() && obstructed == 0;
        let whole = plane.synced && plane.confidence != ConfidenceView::Partial;
        let input_healthy = whole && plane.held.is_none() && errors == 0;
        Self {
            nodes: nodes.len(),
            in_sync,
            syncing: count(NodeStateView::Syncing),
            failing: count(NodeStateView::Failing),
            disconnected: count(NodeStateView::Disconnected),
            no_agent: count(NodeStateView::NoAgent),
            unverified: count(NodeStateView::Unverified),
            holding: count(NodeStateView::Holding),
            conflict: count(NodeStateView::Conflict),
            frozen,
            unknown: count(NodeStateView::Unknown),
            obstructed,
            errors,
            warnings: total(reported[1], issues.len() - listed),
            healthy: nodes_healthy && input_healthy,
            nodes_healthy,
            input_healthy,
        }
    }

    fn spans(&self) -> Vec<Span> {
        if self.nodes == 0 {
            return vec![Span::new("none", Tone::Warn)];
        }
        let all = self.in_sync == self.nodes;
        let tone = if all { Tone::Good } else { Tone::Warn };
        let mut spans = vec![Span::new(
            format!("{}/{} in sync", self.in_sync, self.nodes),
            tone,
        )];
        let others = [
            (self.syncing, "syncing", Tone::Warn),
            (self.failing, "failing", Tone::Bad),
            (self.disconnected, "disconnected", Tone::Bad),
            (self.no_agent, "without an agent", Tone::Warn),
            (self.unverified, "unverified", Tone::Warn),
            (self.holding, "holding vanished objects", Tone::Warn),
            (self.conflict, "in conflict", Tone::Bad),
            (self.frozen, "frozen", Tone::Warn),
            (self.unknown, "unknown", Tone::Warn),
            (self.obstructed, "obstructed", Tone::Bad),
        ]
        .into_iter()
        .filter(|(count, _, _)| *count > 0);
        spans.extend(others.map(|(count, what, tone)| Span::new(format!("{count} {what}"), tone)));
        spans
    }
}

/// The view of `kpctl status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetView {
    api_version: &'static str,
    kind: &'static str,
    pub(crate) control_plane: ControlPlaneView,
    /// The whole fleet in numbers.
    pub summary: SummaryView,
    /// The number of replicas whose agents are in the answer; `null` when the control plane asks no others.
    pub(crate) replicas: Option<u32>,
    /// Replicas that did not answer.
    pub(crate) missing_replicas: Vec<MissingReplicaView>,
    pub(crate) nodes: Vec<NodeView>,
    pub(crate) issues: Vec<IssueView>,
    /// The number of issues that are neither listed nor counted as alike.
    pub(crate) issues_omitted: u64,
}

impl From<pb::Fleet> for FleetView {
    fn from(fleet: pb::Fleet) -> Self {
        let mut status = fleet.control_plane.unwrap_or_default();
        let issues = IssueView::list(std::mem::take(&mut status.issues));
        let nodes: Vec<_> =
            fleet.nodes.into_iter().map(|n| NodeView::new(n, status.epoch)).collect();
        let issues_omitted = status.issues_omitted;
        let (errors, warnings) = (status.errors, status.warnings);
        let control_plane = ControlPlaneView::from(status);
        let missing = Vec::from_wire(fleet.missing_replicas);
        let reported = [errors, warnings];
        Self {
            api_version: API_VERSION,
            kind: "Fleet",
            summary: SummaryView::new(&control_plane, reported, &nodes, &issues, &missing),
            replicas: FromWire::from_wire(fleet.replicas),
            missing_replicas: missing,
            issues_omitted,
            control_plane,
            nodes,
            issues,
        }
    }
}

impl View for FleetView {
    fn names(&self) -> Option<Vec<String>> {
        Some(names_of(&self.nodes))
    }

    fn text(&self, canvas: &Canvas) -> String {
        let now = self.control_plane.time;
        let mut out = self.header(canvas);
        if !self.nodes.is_empty() {
            out.push('\n');
            out.push_str(&rows::text(&self.nodes, now, canvas));
        }
        out.push_str(&missing_text(&self.missing_replicas, canvas));
        out.push_str(&degraded_text(&self.nodes, canvas));
        out.push_str(&issues_text(&self.issues, self.issues_omitted, canvas));
        let mut steps = next::steps(&self.nodes, &self.issues, canvas.program);
        if self.control_plane.doubt.is_some() || self.control_plane.held.is_some() {
            let step = format!("{} approve, if the source is complete", canvas.program);
            steps.push(step);
        }
        out.push_str(&next_steps_text(&steps, canvas));
        out
    }
}

impl FleetView {
    fn header(&self, canvas: &Canvas) -> String {
        let plane = &self.control_plane;
        let since = |time: Option<Time>| Some(time?.age_text(plane.time?));
        let mut about = vec![Span::plain(&plane.version)];
        about.extend(since(plane.start_time).map(|age| Span::plain(format!("up {age}"))));
        let upstream = Duration::from_millis(plane.upstream_age_milliseconds);
        let stale = upstream >= STALE_AFTER;
        let tone = if stale { Tone::Warn } else { Tone::Plain };
        let mut source = vec![
            Span::plain(&plane.source),
            Span::new(format!("last contact {} ago", age(upstream)), tone),
        ];
        if !plane.synced {
            source.push(Span::new("not complete yet", Tone::Warn));
        }
        let mut revision = vec![Span::plain(plane.revision.to_string())];
        revision.extend(since(plane.revision_time).map(|age| Span::plain(format!("{age} ago"))));
        for (count, noun) in [(plane.services, "service"), (plane.endpoints, "endpoint")] {
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            revision.push(Span::plain(plural(count, noun)));
        }
        let doubt = plane.doubt.iter().map(|doubt| {
            let picture = Span::new(format!("incomplete: {doubt}"), Tone::Warn);
            long_field("Data", &picture, canvas)
        });
        let plain_text = (!plane.plain_text_ports.is_empty()).then(|| {
            let ports = plane.plain_text_ports.join(", ");
            let danger = format!(
                "{ports}: any machine that reaches these ports can pose as any node or user (--insecure)"
            );
            long_field("Plain text", &Span::new(danger, Tone::Bad), canvas)
        });
        let held = plane.held.iter();
        let held = held.map(|held| held_text("Held", held, plane.time, canvas));
        [
            field("Control plane", &about, canvas),
            plain_text.unwrap_or_default(),
            field("Source", &source, canvas),
            doubt.chain(held).collect(),
            field("Revision", &revision, canvas),
            field("Nodes", &self.summary.spans(), canvas),
            self.policies_text(canvas),
            self.replicas_text(canvas),
        ]
        .concat()
    }
}

impl FleetView {
    /// Returns how many NetworkPolicies there are, how many nodes enforce their newest state, and what is wrong with that.
    fn policies_text(&self, canvas: &Canvas) -> String {
        let (policies, nodes) = (self.control_plane.policies, self.nodes.len());
        let mut spans = Vec::new();
        if policies > 0 {
            let current = |node: &&NodeView| node.revisions.lag == Some(0);
            let current = self.nodes.iter().filter(current).count();
            let tone = if current == nodes { Tone::Plain } else { Tone::Warn };
            let enforced = format!("enforced on {current} of {}", plural(nodes, "node"));
            spans = vec![Span::plain(policies.to_string()), Span::new(enforced, tone)];
        }
        let warn = |text: String| Span::new(text, Tone::Warn);
        let unread = self.control_plane.enforcement == Some(EnforcementView::Unread);
        spans.extend(unread.then(|| warn("not read yet".to_owned())));
        let count = |is: fn(&NodeView) -> bool| self.nodes.iter().filter(|node| is(node)).count();
        let troubles = [
            (count(NodeView::misses_policies), "not as written on"),
            (count(NodeView::lacks_pod_ranges), "Pod ranges unknown on"),
        ]
        .into_iter()
        .filter(|(nodes, _)| *nodes > 0);
        spans.extend(
            troubles.map(|(nodes, what)| warn(format!("{what} {}", plural(nodes, "node")))),
        );
        if spans.is_empty() { String::new() } else { field("Policies", &spans, canvas) }
    }

    /// Returns how many replicas answered, if there can be several.
    fn replicas_text(&self, canvas: &Canvas) -> String {
        let Some(answered) = self.replicas else {
            return String::new();
        };
        let missing = self.missing_replicas.len();
        let mut spans = vec![Span::plain(format!("{answered} answered"))];
        spans.extend((missing > 0).then(|| Span::new(format!("{missing} missing"), Tone::Bad)));
        field("Replicas", &spans, canvas)
    }
}

/// An object that is served, but not in every respect.
struct Degraded<'a> {
    object: String,
    reason: &'a str,
    nodes: usize,
}

/// Returns the objects that are served, but not in every respect: usually the same ones on all
/// nodes.
fn degraded_text(nodes: &[NodeView], canvas: &Canvas) -> String {
    let mut counts = BTreeMap::<(String, &str), usize>::new();
    for failure in nodes.iter().flat_map(|n| &n.failures).filter(|f| f.degraded) {
        let object = failure.object.as_ref().map_or("node".to_owned(), ToString::to_string);
        *counts.entry((object, &failure.reason)).or_default() += 1;
    }
    let rows: Vec<Degraded<'_>> = counts
        .into_iter()
        .map(|((object, reason), nodes)| Degraded {
            object,
            reason,
            nodes,
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    let shown = if canvas.all { rows.len() } else { rows.len().min(FAILURES_SHOWN) };
    let table = Table::new(&rows[..shown])
        .column(Column::new("DEGRADED").elastic(20), |row: &Degraded<'_>| {
            Span::new(&row.object, Tone::Warn)
        })
        .text(Column::new("NODES"), |row| row.nodes.to_string())
        .notes(|row| vec![Span::plain(row.reason)])
        .render(canvas);
    match rows.len() - shown {
        0 => format!("\n{table}"),
        more => format!("\n{table}  and {} more: -o wide\n", plural(more, "object")),
    }
}
