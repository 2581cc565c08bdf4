//! What would change if some objects were applied: what `kpctl whatif` shows.

use std::time::Duration;

use kplane_proto::v1 as pb;
use serde::Serialize;

use super::{API_VERSION, IssueView, KeyView, SeverityView, View};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, field, grouped, paragraph, plural};
use crate::time::human;

/// ServicePorts that a table shows; `-o wide` shows all.
const SHOWN: usize = 20;

/// How a ServicePort would change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum ChangeView {
    New,
    Changed,
    Gone,
}

/// A ServicePort that would change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct PortView {
    port: Option<KeyView>,
    change: ChangeView,
    endpoints_before: u64,
    endpoints_after: u64,
}

/// Nodes of which each has the same cost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct ClassView {
    /// Empty = no agent.
    backend: String,
    zone: String,
    nodes: u64,
    /// The node whose cost it is.
    node: String,
    operations: u64,
    bytes: u64,
    /// Rules that the node would have more; `null` if its rules do not depend on Services.
    rules: Option<i64>,
    /// `null` if it is not known.
    estimate_microseconds: Option<u64>,
    /// ServicePorts that the backend would leave out.
    left_out: Vec<LeftOutView>,
    /// Reason why the cost is not known; empty otherwise.
    error: String,
}

/// A ServicePort that a backend would leave out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct LeftOutView {
    port: Option<KeyView>,
    reason: String,
}

/// The view of `kpctl whatif`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WhatIfView {
    api_version: &'static str,
    kind: &'static str,
    /// Number of objects that were read.
    objects: u64,
    ports: Vec<PortView>,
    ports_omitted: u64,
    classes: Vec<ClassView>,
    /// Problems of the manifests themselves.
    refused: Vec<IssueView>,
    new_issues: Vec<IssueView>,
    ended_issues: Vec<IssueView>,
    /// New Services without a ClusterIP.
    unassigned: Vec<String>,
}

impl WhatIfView {
    /// Creates the view.
    pub fn new(answer: pb::WhatIfAnswer) -> Self {
        let issues = |all: Vec<pb::InputIssue>| all.into_iter().map(IssueView::from).collect();
        Self {
            api_version: API_VERSION,
            kind: "WhatIf",
            objects: answer.objects,
            ports: answer.ports.into_iter().map(PortView::from).collect(),
            ports_omitted: answer.more,
            classes: answer.classes.into_iter().map(ClassView::from).collect(),
            refused: issues(answer.refused),
            new_issues: issues(answer.new_issues),
            ended_issues: issues(answer.ended_issues),
            unassigned: answer.unassigned,
        }
    }

    /// Returns whether a manifest is refused, or there would be new errors.
    pub fn has_errors(&self) -> bool {
        let mut all = self.refused.iter().chain(&self.new_issues);
        all.any(|issue| issue.severity == SeverityView::Error)
    }

    fn summary(&self) -> Span {
        let count = |change| {
            let ports = self.ports.iter().filter(|port| port.change == change);
            grouped(ports.count() as u64)
        };
        let text = match (self.ports.is_empty(), self.ports_omitted) {
            (true, _) => "nothing on any node".to_owned(),
            (false, 0) => format!(
                "{} new, {} changed, {} gone",
                count(ChangeView::New),
                count(ChangeView::Changed),
                count(ChangeView::Gone)
            ),
            (false, more) => grouped(self.ports.len() as u64 + more),
        };
        Span::plain(text)
    }
}

impl From<pb::WhatIfPort> for PortView {
    fn from(port: pb::WhatIfPort) -> Self {
        Self {
            change: match port.change() {
                pb::WhatIfChange::New => ChangeView::New,
                pb::WhatIfChange::Gone => ChangeView::Gone,
                pb::WhatIfChange::Changed | pb::WhatIfChange::Unspecified => ChangeView::Changed,
            },
            port: port.key.map(KeyView::from),
            endpoints_before: port.endpoints_before,
            endpoints_after: port.endpoints_after,
        }
    }
}

impl From<pb::WhatIfClass> for ClassView {
    fn from(class: pb::WhatIfClass) -> Self {
        let left_out = class.left_out.into_iter().map(|failure| LeftOutView {
            port: failure.key.map(KeyView::from),
            reason: failure.reason,
        });
        Self {
            left_out: left_out.collect(),
            backend: class.backend,
            zone: class.zone,
            nodes: class.nodes,
            node: class.node,
            operations: class.operations,
            bytes: class.bytes,
            rules: class.rules,
            estimate_microseconds: Some(class.estimate_us).filter(|estimate| *estimate > 0),
            error: class.error,
        }
    }
}

impl ClassView {
    fn notes(&self) -> Vec<Span> {
        let mut notes = Vec::new();
        if !self.error.is_empty() {
            notes.push(Span::new(&self.error, Tone::Warn));
        }
        for LeftOutView { port, reason } in &self.left_out {
            let port = port.as_ref().map(ToString::to_string).unwrap_or_default();
            notes.push(Span::new(format!("left out: {port}: {reason}"), Tone::Bad));
        }
        notes
    }

    fn number(&self, of: u64) -> Span {
        match self.error.is_empty() {
            true => Span::plain(grouped(of)),
            false => Span::none(),
        }
    }
}

impl PortView {
    fn change(&self) -> Span {
        let (text, tone) = match self.change {
            ChangeView::New => ("new", Tone::Good),
            ChangeView::Changed => ("changed", Tone::Plain),
            ChangeView::Gone => ("gone", Tone::Bad),
        };
        Span::new(text, tone)
    }
}

fn classes_text(classes: &[ClassView], canvas: &Canvas) -> String {
    let with_rules = classes.iter().any(|class| class.rules.is_some());
    Table::new(classes)
        .column(Column::new("NODES"), |class| {
            Span::plain(grouped(class.nodes))
        })
        .column(Column::new("MODE"), |class| Span::plain(&class.backend))
        .column(Column::new("ZONE").elastic(8), |class| {
            Span::plain(&class.zone)
        })
        .column(Column::new("OPERATIONS"), |class| {
            class.number(class.operations)
        })
        .column(Column::new("BYTES"), |class| class.number(class.bytes))
        .column_if(with_rules, Column::new("RULES"), |class| {
            let rules = class.rules;
            rules.map_or_else(Span::none, |rules| Span::plain(format!("{rules:+}")))
        })
        .column(Column::new("ESTIMATE"), |class| {
            let estimate = class.estimate_microseconds;
            estimate.map_or_else(Span::none, |us| {
                Span::plain(human(Duration::from_micros(us)))
            })
        })
        .column(Column::wide("NODE"), |class| Span::plain(&class.node))
        .notes(ClassView::notes)
        .render(canvas)
}

fn ports_text(ports: &[PortView], omitted: u64, canvas: &Canvas) -> String {
    let most = if canvas.wide { ports.len() } else { SHOWN };
    let (shown, hidden) = ports.split_at(most.min(ports.len()));
    let mut out = Table::new(shown)
        .column(Column::new("SERVICE PORT").elastic(24), |port| {
            let key = port.port.as_ref().map(ToString::to_string);
            Span::plain(key.unwrap_or_default())
        })
        .column(Column::new("CHANGE"), PortView::change)
        .column(Column::new("ENDPOINTS"), |port| {
            let (before, after) = (port.endpoints_before, port.endpoints_after);
            Span::plain(match before == after {
                true => grouped(after),
                false => format!("{} -> {}", grouped(before), grouped(after)),
            })
        })
        .render(canvas);
    let hidden = hidden.len() as u64 + omitted;
    if hidden > 0 {
        out.push_str(&format!("{} more: -o wide\n", grouped(hidden)));
    }
    out
}

fn issues_text(title: &str, issues: &[IssueView], tone: Tone, canvas: &Canvas) -> String {
    let mut out = String::new();
    for issue in issues {
        let alike = match issue.alike {
            0 => String::new(),
            alike => format!(" (and {} more)", grouped(alike)),
        };
        let text = format!(
            "{title}: {}: {}: {}{alike}",
            issue.object(),
            issue.code,
            issue.reason
        );
        out.push_str(&paragraph(&Span::new(text, tone), canvas, 0));
    }
    out
}

impl View for WhatIfView {
    fn text(&self, canvas: &Canvas) -> String {
        let objects = usize::try_from(self.objects).unwrap_or(usize::MAX);
        let objects = Span::plain(format!(
            "{} read; nothing is applied",
            plural(objects, "object")
        ));
        let mut out = field("Manifests", &[objects], canvas);
        out.push_str(&field("Would change", &[self.summary()], canvas));
        if !self.ports.is_empty() {
            out.push('\n');
            out.push_str(&ports_text(&self.ports, self.ports_omitted, canvas));
            out.push_str("\nOn each node:\n");
            out.push_str(&classes_text(&self.classes, canvas));
        }
        let mut notes = issues_text("Refused", &self.refused, Tone::Bad, canvas);
        notes += &issues_text("New problem", &self.new_issues, Tone::Bad, canvas);
        notes += &issues_text("Ends", &self.ended_issues, Tone::Good, canvas);
        if !self.unassigned.is_empty() {
            let text = format!(
                "The API server chooses the addresses of {}: an address of no use stands for each here.",
                self.unassigned.join(", ")
            );
            notes += &paragraph(&Span::plain(text), canvas, 0);
        }
        if !notes.is_empty() {
            out.push('\n');
            out.push_str(&notes);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::table;
    use super::*;

    #[test]
    fn costs_and_conflicts_are_shown() {
        let key = pb::ServiceKey {
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            port_name: "http".to_owned(),
            protocol: pb::Protocol::Tcp.into(),
            family: pb::Family::Ipv4.into(),
        };
        let class = pb::WhatIfClass {
            backend: "iptables".to_owned(),
            zone: "a".to_owned(),
            nodes: 1_200,
            operations: 12,
            bytes: 2_345,
            rules: Some(-3),
            estimate_us: 900,
            ..pb::WhatIfClass::default()
        };
        let mut answer = pb::WhatIfAnswer {
            objects: 2,
            ports: vec![pb::WhatIfPort {
                key: Some(key),
                change: pb::WhatIfChange::Changed.into(),
                endpoints_before: 2,
                endpoints_after: 3,
            }],
            classes: vec![class],
            unassigned: vec!["shop/api".to_owned()],
            ..pb::WhatIfAnswer::default()
        };
        let view = WhatIfView::new(answer.clone());
        assert!(!view.has_errors());
        let text = table(&view);
        for part in [
            "2 objects read; nothing is applied",
            "0 new, 1 changed, 0 gone",
            "shop/web:http/TCP (IPv4)  changed  2 -> 3",
            "1,200  iptables  a     12          2,345  -3     900us",
            "The API server chooses the addresses of shop/api",
        ] {
            assert!(text.contains(part), "no {part:?}:\n{text}");
        }
        answer.new_issues.push(pb::InputIssue {
            severity: pb::Severity::Error.into(),
            kind: "Service".to_owned(),
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            reason: "taken".to_owned(),
            code: "AddressConflict".to_owned(),
            ..pb::InputIssue::default()
        });
        let view = WhatIfView::new(answer);
        assert!(view.has_errors());
        let text = table(&view);
        assert!(
            text.contains("New problem: Service shop/web: AddressConflict: taken"),
            "{text}"
        );
    }
}
