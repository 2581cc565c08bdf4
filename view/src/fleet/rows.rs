//! The rows of `kpctl status`: nodes, and groups of nodes with the same problem.

use std::time::Duration;

use super::super::fold::{self, Folded};
use super::super::latency;
use super::super::nodes::{FailureView, FamilyView, HeldView, NodeStateView, NodeView};
use super::FAILURES_SHOWN;
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, plural, short_count};
use crate::time::{Time, human};

/// Time for which a repair of another program's change is shown; `-o wide` always shows it.
const REPAIRS_SHOWN: Duration = Duration::from_secs(3600);

/// A row: one node, or nodes with the same problem.
struct NodeRow<'a>(Vec<&'a NodeView>);

/// Returns what makes nodes share a row: the state, and the problem without times.
fn problem(node: &NodeView, canvas: &Canvas) -> (NodeStateView, Vec<String>) {
    let notes = notes(node, None, canvas);
    let repairs = node.families.iter().map(|of| of.last_repair.clone());
    let texts = notes.into_iter().map(|span| span.text).chain(repairs);
    (node.state, texts.collect())
}

impl<'a> NodeRow<'a> {
    /// Returns a row of nodes. The one that has been in its state for the longest time comes first.
    fn new(mut nodes: Vec<&'a NodeView>) -> Self {
        nodes.sort_by_key(|node| (node.since.is_none(), node.since));
        Self(nodes)
    }

    /// Returns the only node, or the first one of a group.
    fn first(&self) -> &'a NodeView {
        self.0[0]
    }

    /// Returns the node that lags most.
    fn last_to_follow(&self) -> &NodeView {
        let nodes = self.0.iter().copied();
        let most = nodes.max_by_key(|node| node.revisions.lag);
        most.unwrap_or(self.first())
    }

    fn name(&self) -> Span {
        fold::name_span(&self.0, |node| &node.name)
    }

    /// Returns a value that all nodes have, or the largest.
    fn most(&self, of: impl Fn(&NodeView) -> Option<u64>) -> Option<u64> {
        self.0.iter().filter_map(|node| of(node)).max()
    }

    /// Returns a value that all nodes have; empty if they differ.
    fn common(&self, of: impl Fn(&'a NodeView) -> &'a str) -> &'a str {
        let first = of(self.0[0]);
        let same = self.0.iter().all(|node| of(node) == first);
        if same { first } else { "" }
    }

    /// Returns the names of a group, then the problem.
    fn notes(&self, now: Option<Time>, canvas: &Canvas) -> Vec<Span> {
        let names = fold::names_note(&self.0, |node| &node.name);
        let mut lines: Vec<Span> = names.into_iter().collect();
        lines.extend(notes(self.first(), now, canvas));
        lines
    }
}

/// Returns how long ago an event was.
fn ago(at: Option<Time>, now: Option<Time>) -> Span {
    match (at, now) {
        (Some(at), Some(now)) => Span::plain(format!("{} ago", at.age_text(now))),
        _ => Span::none(),
    }
}

/// Returns the table of nodes: what they hold, and why not. A large fleet is folded.
pub(super) fn text(nodes: &[NodeView], now: Option<Time>, canvas: &Canvas) -> String {
    let healthy = |node: &NodeView| {
        node.state == NodeStateView::InSync && notes(node, now, canvas).is_empty()
    };
    let problem = |node: &NodeView| (!healthy(node)).then(|| problem(node, canvas));
    let folded = Folded::new(nodes, canvas, problem, |node| node.state.urgency());
    let rest = folded.rest("in sync", &format!("{} status", canvas.program));
    let rows: Vec<NodeRow<'_>> = folded.rows.into_iter().map(NodeRow::new).collect();
    if rows.is_empty() { rest } else { table(&rows, now, canvas) + &rest }
}

/// Each replica counts revisions by itself, so those of two cannot be compared. The lag can.
fn applied(rows: &[NodeRow<'_>]) -> Column {
    let nodes = rows.iter().flat_map(|row| &row.0);
    let mut replicas = nodes.map(|node| &node.replica);
    let first = replicas.next();
    if replicas.all(|replica| Some(replica) == first) {
        Column::new("APPLIED")
    } else {
        Column::wide("APPLIED")
    }
}

fn table(rows: &[NodeRow<'_>], now: Option<Time>, canvas: &Canvas) -> String {
    let duration = |us: Option<u64>| {
        Span::plain(us.map_or(String::new(), |us| human(Duration::from_micros(us))))
    };
    let number = |number: Option<u64>| Span::plain(number.map_or(String::new(), |n| n.to_string()));
    let since = |row: &NodeRow<'_>| match (row.first().since, now) {
        (Some(since), Some(now)) => Span::plain(since.age_text(now)),
        _ => Span::none(),
    };
    let nodes = rows.iter().flat_map(|row| &row.0);
    let mut servers = nodes.map(|node| node.sum_of_servers(|servers| servers.draining));
    let ipvs = servers.any(|draining| draining.is_some());
    Table::new(rows)
        .column(Column::new("NODE").elastic(20).names(), NodeRow::name)
        .column(Column::new("STATE"), |row| row.first().state_span())
        .column(Column::new("SINCE"), since)
        .column(Column::wide("RECEIVED"), |row| {
            number(row.first().revisions.received)
        })
        .column(applied(rows), |row| row.last_to_follow().applied_span())
        .column(Column::wide("VERIFIED-REV"), |row| {
            number(row.first().revisions.verified)
        })
        .column(Column::new("VERIFIED").optional(4), |row| {
            let times = row.0.iter().filter_map(|node| node.verified_time());
            ago(times.min(), now)
        })
        .column(Column::new("LAG"), |row| {
            match row.most(|node| node.revisions.lag) {
                Some(0) | None => Span::none(),
                Some(lag) => Span::new(lag.to_string(), Tone::Warn),
            }
        })
        .column(Column::new("SYNC").optional(3), |row| {
            duration(row.most(|node| Some(node.last_sync.as_ref()?.total_microseconds)))
        })
        .column(Column::wide("KERNEL"), |row| {
            duration(row.most(|node| Some(node.last_sync.as_ref()?.kernel_microseconds)))
        })
        .column(Column::wide("CHANGE-P50"), |row| {
            latency(row.most(|node| Some(node.network_programming.as_ref()?.p50_milliseconds)))
        })
        .column(Column::wide("CHANGE-MAX"), |row| {
            latency(row.most(|node| Some(node.network_programming.as_ref()?.max_milliseconds)))
        })
        .column(Column::new("OBJECTS").optional(2), |row| {
            let objects = row.first().objects.as_ref();
            Span::plain(objects.map_or(String::new(), |o| {
                format!("{}/{}", short_count(o.services), short_count(o.endpoints))
            }))
        })
        .text(Column::new("BACKEND").optional(1), |row| {
            row.common(|node| &node.backend)
        })
        .column_if(ipvs, Column::wide("ACTIVE"), |row| {
            number(row.most(|node| node.sum_of_servers(|of| of.active_connections)))
        })
        .column_if(ipvs, Column::wide("INACTIVE"), |row| {
            number(row.most(|node| node.sum_of_servers(|of| of.inactive_connections)))
        })
        .column_if(ipvs, Column::new("DRAINING").optional(0), |row| {
            number(row.most(|node| node.sum_of_servers(|of| of.draining)))
        })
        .notes(|row| row.notes(now, canvas))
        .render(canvas)
}

/// Returns the size of mode iptables' rules, compared with kube-proxy's list of all Services.
fn rules_span(family: &FamilyView) -> Option<Span> {
    let rules = family.rules.as_ref()?;
    Some(Span::plain(format!(
        "{}: {}; a new connection passes at most {} to its Service, {} in one list like \
         kube-proxy's",
        family.family,
        plural(usize::try_from(rules.rules).unwrap_or(usize::MAX), "rule"),
        rules.lookups,
        rules.lookups_in_one_list,
    )))
}

/// Returns the repairs of other programs' changes to a family's rules, as long as they are recent
/// enough to matter.
fn repairs_span(family: &FamilyView, now: Option<Time>, wide: bool) -> Option<Span> {
    let age = family.last_repair_time?.age(now?);
    if !wide && age > REPAIRS_SHOWN {
        return None;
    }
    let times = match family.repairs {
        1 => "once".to_owned(),
        times => format!("{times} times, last"),
    };
    let text = format!(
        "{}: repaired {times} {} ago: {}",
        family.family,
        crate::time::age(age),
        family.last_repair
    );
    Some(Span::new(text, Tone::Warn))
}

/// Returns the reasons why a node is not in sync.
fn notes(node: &NodeView, now: Option<Time>, canvas: &Canvas) -> Vec<Span> {
    let mut notes = Vec::new();
    if !node.last_error.is_empty() {
        notes.push(Span::new(&node.last_error, node.state.tone()));
    }
    let has_agent = !matches!(node.state, NodeStateView::NoAgent | NodeStateView::Unknown);
    if node.revisions.applied.is_none() && has_agent {
        notes.push(Span::plain("no report since the control plane started"));
    }
    if let (NodeStateView::Disconnected, Some(heard), Some(now)) =
        (node.state, node.last_heard, now)
    {
        let heard = heard.age_text(now);
        notes.push(Span::plain(format!(
            "last contact {heard} ago; the node's kernel keeps its rules"
        )));
    }
    let codes: Vec<&str> = node.obstacles().map(|of| of.code.as_str()).collect();
    if !codes.is_empty() {
        let tone = if node.is_obstructed() { Tone::Bad } else { Tone::Warn };
        let text = format!("in the way of packets: {}", codes.join(", "));
        notes.push(Span::new(text, tone));
    }
    for family in node.families.iter().filter(|f| !f.error.is_empty()) {
        let text = format!("{}: {}", family.family, family.error);
        notes.push(Span::new(text, Tone::Bad));
    }
    let families = node.families.iter();
    notes.extend(families.filter_map(|family| repairs_span(family, now, canvas.wide)));
    if canvas.wide {
        notes.extend(node.held.as_ref().and_then(HeldView::names));
        notes.extend(node.families.iter().filter_map(rules_span));
        notes.extend(node.families.iter().flat_map(|family| {
            let servers = family.ipvs.iter();
            servers.flat_map(|servers| servers.notes(family.family))
        }));
    }
    // Objects that are served all the same are listed once for all nodes: `degraded_text`.
    let failures = node.failures.iter().filter(|f| canvas.wide || !f.degraded);
    let all = failures.clone().count();
    let shown = if canvas.wide { all } else { FAILURES_SHOWN };
    notes.extend(failures.take(shown).map(|failure| failure_span(failure, now)));
    if all > shown {
        let more = plural(all - shown, "object");
        notes.push(Span::plain(format!("and {more} more: -o wide")));
    }
    notes
}

fn failure_span(failure: &FailureView, now: Option<Time>) -> Span {
    let object = match &failure.object {
        Some(key) => key.to_string(),
        None => "node".to_owned(),
    };
    let (tone, degraded) =
        if failure.degraded { (Tone::Warn, "degraded: ") } else { (Tone::Bad, "") };
    let since = match (failure.since, now) {
        (Some(since), Some(now)) => format!(" (for {})", since.age_text(now)),
        _ => String::new(),
    };
    Span::new(
        format!("{object}: {degraded}{}{since}", failure.reason),
        tone,
    )
}
