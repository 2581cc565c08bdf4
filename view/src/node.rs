//! One node: its state, what it holds, what fails there, and what stands in the way of packets.

use kplane_proto::v1 as pb;
use serde::Serialize;

use super::findings;
use super::nodes::{EnforcedView, FailureView, FamilyView, NodeStateView, NodeView};
use super::{API_VERSION, View, latency, next, next_steps_text};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, field, paragraph};
use crate::time::Time;

/// Most failures that the text lists before it refers to `-o wide`.
const FAILURES_SHOWN: usize = 10;

/// The view of `kpctl describe node`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeDescriptionView {
    api_version: &'static str,
    kind: &'static str,
    node: NodeView,
    /// The current time, for ages.
    #[serde(skip)]
    now: Option<Time>,
}

impl NodeDescriptionView {
    /// Returns the view of the only node of an answer; `None` if there is none.
    pub fn new(fleet: pb::Fleet) -> Option<Self> {
        let control_plane = fleet.control_plane.unwrap_or_default();
        let node = fleet.nodes.into_iter().next()?;
        Some(Self {
            api_version: API_VERSION,
            kind: "NodeDescription",
            node: NodeView::new(node, control_plane.epoch),
            now: Time::from_wire(control_plane.now_ms),
        })
    }

    /// Returns whether the node holds what it should.
    pub fn is_in_sync(&self) -> bool {
        matches!(
            self.node.state,
            NodeStateView::InSync | NodeStateView::Frozen
        )
    }

    fn ago(&self, time: Option<Time>) -> Option<String> {
        Some(time?.age_text(self.now?))
    }

    fn header(&self, canvas: &Canvas) -> String {
        let node = &self.node;
        let since = self.ago(node.since);
        let state = since.map_or_else(
            || node.state.word().to_owned(),
            |since| format!("{} for {since}", node.state.word()),
        );
        let mut out = field("Node", &[Span::plain(&node.name)], canvas);
        out.push_str(&field(
            "State",
            &[Span::new(state, node.state.tone())],
            canvas,
        ));
        if !node.last_error.is_empty() {
            out.push_str(&paragraph(
                &Span::new(&node.last_error, node.state.tone()),
                canvas,
                2,
            ));
        }
        let list = |items: &[String]| items.iter().map(Span::plain).collect::<Vec<_>>();
        let one = |text: String| vec![Span::plain(text)];
        let some = |text: &str| match text {
            "" => Vec::new(),
            text => vec![Span::plain(text)],
        };
        let revisions = &node.revisions;
        let applied = revisions.applied.map_or_else(
            || format!("wanted {}, nothing applied", revisions.wanted),
            // A newer revision of other nodes may be applied as well.
            |applied| format!("applied {applied} of {}", revisions.wanted.max(applied)),
        );
        let verified = self.ago(node.verified_time()).map(|ago| format!("read back {ago} ago"));
        let objects = node
            .objects
            .as_ref()
            .map(|of| format!("{} Services, {} endpoints", of.services, of.endpoints));
        let policies = node.policies.as_ref().map(enforced);
        let fields: [(&str, Vec<Span>); 8] = [
            ("Agent", self.agent()),
            (
                "Replica",
                node.replica
                    .as_deref()
                    .map(|replica| one(replica.to_owned()))
                    .unwrap_or_default(),
            ),
            ("Zone", some(&node.zone)),
            ("Addresses", list(&node.addresses)),
            ("Pod ranges", list(&node.pod_cidrs)),
            (
                "Revision",
                [one(applied), verified.map(one).unwrap_or_default()].concat(),
            ),
            ("Holds", objects.map(one).unwrap_or_default()),
            ("Policies", policies.map(one).unwrap_or_default()),
        ];
        out.extend(fields.iter().map(|(key, values)| field(key, values, canvas)));
        out.push_str(&self.latency(canvas));
        let avoided = node
            .avoided
            .iter()
            .map(|one| Span::new(format!("{} of {}", one.address, one.port), Tone::Warn))
            .collect::<Vec<_>>();
        out.push_str(&field("Avoids", &avoided, canvas));
        out
    }

    /// Returns the agent's version, its backend, its address, and when it was last heard.
    fn agent(&self) -> Vec<Span> {
        let node = &self.node;
        let heard = self.ago(node.last_heard).map(|ago| format!("last heard {ago} ago"));
        let texts = [
            &node.agent_version,
            &node.backend,
            &node.peer,
            &heard.unwrap_or_default(),
        ];
        texts.into_iter().filter(|text| !text.is_empty()).map(Span::plain).collect()
    }

    /// Returns how long the latest changes took, and how many failed.
    fn latency(&self, canvas: &Canvas) -> String {
        let mut spans = Vec::new();
        if let Some(programming) = &self.node.network_programming {
            let of = |ms| latency(Some(ms)).text;
            spans.push(Span::plain(format!(
                "p50 {} and max {} from a change to the kernel",
                of(programming.p50_milliseconds),
                of(programming.max_milliseconds)
            )));
        }
        if self.node.syncs_failed > 0 {
            let text = format!(
                "{} of {} updates failed",
                self.node.syncs_failed,
                self.node.syncs_failed.saturating_add(self.node.syncs_ok)
            );
            spans.push(Span::new(text, Tone::Warn));
        }
        field("Updates", &spans, canvas)
    }
}

impl View for NodeDescriptionView {
    fn names(&self) -> Option<Vec<String>> {
        Some(vec![format!("node/{}", self.node.name)])
    }

    fn text(&self, canvas: &Canvas) -> String {
        let node = &self.node;
        let mut out = self.header(canvas);
        out.push_str(&findings::text(&node.findings, canvas));
        if !node.families.is_empty() {
            out.push('\n');
            out.push_str(&self.families(canvas));
        }
        if !node.failures.is_empty() {
            out.push('\n');
            out.push_str(&failures(&node.failures, canvas));
        }
        let nodes = std::slice::from_ref(node);
        let mut steps = next::steps(nodes, &[], canvas.program);
        // The reader has just typed it.
        steps.retain(|step| !step.ends_with(&format!(" describe node {}", node.name)));
        out.push_str(&next_steps_text(&steps, canvas));
        out
    }
}

impl NodeDescriptionView {
    fn families(&self, canvas: &Canvas) -> String {
        let read_back = |family: &FamilyView| match self.ago(family.verified_time) {
            Some(ago) => Span::plain(format!("{ago} ago")),
            None => Span::none(),
        };
        Table::new(&self.node.families)
            .text(Column::new("FAMILY"), |family| family.family)
            .column(Column::new("PROGRAMMED"), |family| {
                if family.programmed {
                    Span::new("Yes", Tone::Good)
                } else {
                    Span::new("No", Tone::Bad)
                }
            })
            .column(Column::new("READ BACK"), read_back)
            .text(Column::new("REPAIRS"), |family| family.repairs.to_string())
            .notes(|family| {
                let mut notes = Vec::new();
                if !family.error.is_empty() {
                    notes.push(Span::new(&family.error, Tone::Bad));
                }
                if !family.last_repair.is_empty() {
                    let ago = self.ago(family.last_repair_time).unwrap_or_default();
                    notes.push(Span::plain(format!(
                        "repaired {ago} ago: {}",
                        family.last_repair
                    )));
                }
                notes
            })
            .render(canvas)
    }
}

/// Returns what a node enforces of the NetworkPolicies.
fn enforced(of: &EnforcedView) -> String {
    format!(
        "{} for {} of {} Pods, {} elements",
        of.policies, of.isolated_pods, of.pods, of.elements
    )
}

fn failures(all: &[FailureView], canvas: &Canvas) -> String {
    let shown = if canvas.wide { all.len() } else { FAILURES_SHOWN.min(all.len()) };
    let table = Table::new(&all[..shown])
        .column(Column::new("FAILURE"), |failure| {
            if failure.degraded {
                Span::new("Degraded", Tone::Warn)
            } else {
                Span::new("Failed", Tone::Bad)
            }
        })
        .column(
            Column::new("OBJECT").elastic(24),
            |failure| match &failure.object {
                Some(key) => Span::plain(key.to_string()),
                None => Span::plain("the node"),
            },
        )
        .notes(|failure| vec![Span::plain(&failure.reason)])
        .render(canvas);
    table + &super::more_text(all.len() - shown, "failure")
}
