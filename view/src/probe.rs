//! What came back on each node: what `kpctl probe` shows.

use std::time::Duration;

use kplane_proto::v1 as pb;
use serde::Serialize;

use super::fold::{Folded, name_span, names_note};
use super::replicas::{MissingReplicaView, missing_text};
use super::{API_VERSION, KeyView, View};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, field, grouped, paragraph};
use crate::time::human;
use crate::wire::{FromWire, known, view_of};

/// The verdict about all nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Overall {
    /// All data paths work.
    Works,
    /// A node's data path, or the way to endpoints, does not work.
    Broken,
    /// All that is known works, and a node did not answer.
    Unknown,
}

/// The verdict about one node; the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub(crate) enum NodeVerdict {
    /// The node's data path does not lead to the Service.
    DataPath,
    /// Neither the Service nor its endpoints answer.
    Endpoints,
    /// A neighbour's node port does not answer.
    NodePort,
    /// The agent did not answer: the control path.
    Unknown,
    Works,
}

impl FromWire<i32> for NodeVerdict {
    fn from_wire(verdict: i32) -> Self {
        match known(verdict) {
            pb::ProbeVerdict::Unspecified => Self::Unknown,
            pb::ProbeVerdict::Works => Self::Works,
            pb::ProbeVerdict::DataPath => Self::DataPath,
            pb::ProbeVerdict::Endpoints => Self::Endpoints,
            pb::ProbeVerdict::NodePort => Self::NodePort,
        }
    }
}

impl NodeVerdict {
    /// Returns the cells about the data path and the control path.
    fn spans(self) -> (Span, Span) {
        let good = |text: &str| Span::new(text, Tone::Good);
        let bad = |text: &str| Span::new(text, Tone::Bad);
        match self {
            Self::Works => (good("works"), good("answers")),
            Self::DataPath => (bad("broken"), good("answers")),
            Self::Endpoints => (bad("no endpoint answers"), good("answers")),
            Self::NodePort => (bad("a neighbour is silent"), good("answers")),
            Self::Unknown => (Span::new("unknown", Tone::Warn), bad("no answer")),
        }
    }
}

/// A connection that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct FailedView {
    /// `ClusterIP`, `endpoint` or `node port`.
    to: String,
    address: String,
    /// The neighbour, for a node port; empty otherwise.
    node: String,
    /// What came back.
    error: String,
}

impl FromWire<pb::ProbedConnection> for FailedView {
    fn from_wire(failed: pb::ProbedConnection) -> Self {
        let attempt = failed.attempt.unwrap_or_default();
        let error = match attempt.outcome() {
            pb::AttemptOutcome::Refused => "refused".to_owned(),
            pb::AttemptOutcome::Silent => "no answer within 1s".to_owned(),
            _ => attempt.error,
        };
        Self {
            to: failed.kind,
            address: attempt.address,
            node: failed.node,
            error,
        }
    }
}

view_of! {
    /// A node.
    pub(crate) struct ProbedView: ProbedNode {
        node: String,
        verdict: NodeVerdict,
        /// Human-readable; empty if all is well.
        reason: String,
        /// Time of the connection through the Service; `null` if there was none.
        took_microseconds: Option<u32> = took_us,
        failed: Vec<FailedView>,
        /// Neighbours that have reached this node's node port, and the number of those that have not.
        seen_by: Vec<String>,
        not_seen_by: u32,
    }
}

impl ProbedView {
    /// Returns what nodes of one row have in common.
    fn problem(&self) -> Option<(NodeVerdict, String)> {
        (self.verdict != NodeVerdict::Works).then(|| (self.verdict, self.reason.clone()))
    }

    fn took(&self) -> Span {
        let took = self.took_microseconds.map(u64::from);
        took.map_or_else(Span::none, |took| {
            Span::plain(human(Duration::from_micros(took)))
        })
    }

    fn notes(&self) -> Vec<Span> {
        let mut notes = Vec::new();
        if !self.reason.is_empty() {
            notes.push(Span::plain(&self.reason));
        }
        for failed in &self.failed {
            let FailedView {
                to,
                address,
                node,
                error,
            } = failed;
            let of = if node.is_empty() { "" } else { " of " };
            notes.push(Span::plain(format!("{to} {address}{of}{node}: {error}")));
        }
        let seen = self.seen_by.join(", ");
        let text = match (self.verdict, self.seen_by.is_empty(), self.not_seen_by) {
            (NodeVerdict::Unknown, false, 0) => {
                format!(
                    "its node port answers {seen}: its data path works, its control path does not"
                )
            }
            (NodeVerdict::Unknown, true, 1..) => {
                "its node port answers no neighbour either: see whether the node is up".to_owned()
            }
            (_, false, 1..) => format!("its node port answers {seen}, and other neighbours not"),
            _ => return notes,
        };
        notes.push(Span::plain(text));
        notes
    }
}

/// The view of `kpctl probe`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProbeReportView {
    api_version: &'static str,
    kind: &'static str,
    /// The ServicePort.
    port: Option<KeyView>,
    /// The verdict about all nodes.
    pub overall: Overall,
    /// `null` if the Service has none, so that no neighbours were probed.
    node_port: Option<u32>,
    /// The Service has endpoints that are ready.
    has_endpoints: bool,
    /// The name that DNS was asked for; empty if connections were opened.
    dns_name: String,
    nodes: Vec<ProbedView>,
    nodes_omitted: u64,
    missing_replicas: Vec<MissingReplicaView>,
}

impl ProbeReportView {
    /// Creates the view.
    pub fn new(report: pb::ProbeReport) -> Self {
        let nodes = Vec::<ProbedView>::from_wire(report.nodes);
        let worst = nodes.iter().map(|node| node.verdict).min();
        let missing = report.more > 0 || !report.missing_replicas.is_empty();
        Self {
            api_version: API_VERSION,
            kind: "ProbeReport",
            port: report.key.map(KeyView::from),
            overall: match worst {
                Some(NodeVerdict::Works) if !missing => Overall::Works,
                None | Some(NodeVerdict::Works | NodeVerdict::Unknown) => Overall::Unknown,
                Some(_) => Overall::Broken,
            },
            node_port: FromWire::from_wire(report.node_port),
            has_endpoints: report.has_endpoints,
            dns_name: report.dns_name,
            nodes,
            nodes_omitted: report.more,
            missing_replicas: FromWire::from_wire(report.missing_replicas),
        }
    }

    fn summary(&self) -> Span {
        let count =
            |verdict| self.nodes.iter().filter(|node| node.verdict == verdict).count() as u64;
        let all = grouped(self.nodes.len() as u64 + self.nodes_omitted);
        let works = grouped(count(NodeVerdict::Works));
        let mut text = format!("{works} of {all} work");
        for (verdict, what) in [
            (NodeVerdict::DataPath, "with a broken data path"),
            (NodeVerdict::Endpoints, "without an endpoint that answers"),
            (NodeVerdict::NodePort, "with a silent neighbour"),
            (NodeVerdict::Unknown, "unknown"),
        ] {
            match count(verdict) {
                0 => {}
                number => text.push_str(&format!(", {} {what}", grouped(number))),
            }
        }
        let tone = match self.overall {
            Overall::Works => Tone::Good,
            Overall::Broken => Tone::Bad,
            Overall::Unknown => Tone::Warn,
        };
        Span::new(text, tone)
    }

    /// Returns what else a reader has to know.
    fn hints(&self) -> Vec<String> {
        let mut hints = Vec::new();
        let endpoints = |node: &ProbedView| node.verdict == NodeVerdict::Endpoints;
        if !self.has_endpoints {
            hints.push(
                "The Service has no endpoint that is ready: name another Service.".to_owned(),
            );
        } else if self.nodes.len() > 1 && self.nodes.iter().all(endpoints) {
            hints.push(
                "No node reaches an endpoint: the endpoints, or a NetworkPolicy, rather than the nodes."
                    .to_owned(),
            );
        }
        if self.node_port.is_none() {
            hints.push("Neighbours were not probed: the Service has no node port.".to_owned());
        }
        hints
    }
}

impl View for ProbeReportView {
    fn text(&self, canvas: &Canvas) -> String {
        let port = self.port.as_ref().map(ToString::to_string);
        let mut out = field("Probed", &[Span::plain(port.unwrap_or_default())], canvas);
        if !self.dns_name.is_empty() {
            out.push_str(&field("Asked for", &[Span::plain(&self.dns_name)], canvas));
        }
        out.push_str(&field("Data paths", &[self.summary()], canvas));
        let folded = Folded::new(&self.nodes, canvas, ProbedView::problem, |node| {
            node.verdict
        });
        if !folded.rows.is_empty() {
            let table = Table::new(&folded.rows)
                .column(Column::new("NODE").elastic(12), |row| {
                    name_span(row, |node| &node.node)
                })
                .column(Column::new("DATA PATH"), |row| row[0].verdict.spans().0)
                .column(Column::new("CONTROL PATH"), |row| row[0].verdict.spans().1)
                .column(Column::new("TOOK"), |row| row[0].took())
                .notes(|row| {
                    let mut notes = row[0].notes();
                    notes.extend(names_note(row, |node| &node.node));
                    notes
                })
                .render(canvas);
            out.push('\n');
            out.push_str(&table);
        }
        out.push_str(&folded.rest("work", &format!("{} probe", canvas.program)));
        for hint in self.hints() {
            out.push_str(&paragraph(&Span::new(hint, Tone::Plain), canvas, 0));
        }
        out.push_str(&missing_text(&self.missing_replicas, canvas));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{has, table};
    use super::*;

    fn node(name: &str, verdict: pb::ProbeVerdict, reason: &str) -> pb::ProbedNode {
        pb::ProbedNode {
            node: name.to_owned(),
            verdict: verdict.into(),
            reason: reason.to_owned(),
            ..pb::ProbedNode::default()
        }
    }

    fn report(nodes: Vec<pb::ProbedNode>) -> pb::ProbeReport {
        pb::ProbeReport {
            nodes,
            node_port: 30_000,
            has_endpoints: true,
            ..pb::ProbeReport::default()
        }
    }

    #[test]
    fn the_data_path_is_told_from_the_control_path() {
        use pb::ProbeVerdict as V;
        let mut gone = node("n2", V::Unspecified, "its agent is not connected");
        gone.seen_by = vec!["n1".to_owned()];
        let view = ProbeReportView::new(report(vec![node("n1", V::Works, ""), gone.clone()]));
        assert_eq!(view.overall, Overall::Unknown);
        let text = table(&view);
        for part in [
            "1 of 2 work, 1 unknown",
            "n1    works      answers",
            "n2    unknown    no answer",
            "its node port answers n1: its data path works",
        ] {
            has(&text, part);
        }
        let broken = node(
            "n3",
            V::DataPath,
            "nothing comes back through 10.96.0.1:443",
        );
        let view = ProbeReportView::new(report(vec![gone, broken]));
        assert_eq!(view.overall, Overall::Broken);
        assert!(table(&view).contains("n3    broken     answers"));
        assert!(!table(&view).contains("Asked for"));
        let asked = ProbeReportView::new(pb::ProbeReport {
            dns_name: "kubernetes.default".to_owned(),
            ..pb::ProbeReport::default()
        });
        has(&table(&asked), "kubernetes.default");
    }

    #[test]
    fn many_healthy_nodes_are_folded_and_equal_errors_share_a_line() {
        let mut nodes: Vec<_> = (0..193)
            .map(|n| node(&format!("good-{n}"), pb::ProbeVerdict::Works, ""))
            .collect();
        for n in 0..7 {
            let reason = "nothing comes back through 10.96.0.1:443";
            nodes.push(node(
                &format!("bad-{n}"),
                pb::ProbeVerdict::DataPath,
                reason,
            ));
        }
        let text = table(&ProbeReportView::new(report(nodes)));
        for part in [
            "193 nodes work",
            "7 nodes",
            "193 of 200 work, 7 with a broken",
        ] {
            has(&text, part);
        }
        assert!(text.lines().count() < 12, "{text}");
    }
}
