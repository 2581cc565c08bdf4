//! The views that people and programs see: `message -> view` and `view -> text`, all of it pure.
//!
//! `-o json` and `-o yaml` print the same views. Field names are camelCase as in Kubernetes and never
//! change. Every field is always present, and unknown values are `null`. Times are RFC 3339, and
//! other units are in the name. `cli/README.md` lists the fields. `view_of!` defines the view of one message.

pub mod approve;
pub mod bundle;
pub mod changes;
pub mod convergence;
pub mod declared;
pub mod describe;
pub mod diff;
pub mod drops;
pub mod endpoints;
pub mod findings;
pub mod fleet;
pub mod flows;
mod fold;
pub mod freeze;
pub mod goal;
pub mod graph;
mod next;
pub mod node;
pub mod nodes;
mod plane;
pub mod policies;
pub mod probe;
pub mod proxied;
pub mod replicas;
pub mod servers;
pub mod services;
mod silent;
pub mod style;
pub mod table;
pub mod testing;
pub mod text;
pub mod time;
pub mod uninstall;
pub mod version;
pub mod wait;
pub mod why;
mod wire;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use kplane_model::ObjectRef;
use kplane_proto::v1 as pb;
use serde::Serialize;

use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, plural};
use crate::time::human;
use crate::wire::{FromWire, known, view_of};

/// Version of the fields in JSON and YAML.
pub const API_VERSION: &str = "kplane.v1";

/// Most issues that a table shows before it refers to `-o wide`.
const ISSUES_SHOWN: usize = 10;

/// Most further objects with the same issue that a table names.
const OTHERS_NAMED: usize = 3;

/// A result that can be shown.
pub trait View: Serialize {
    /// Returns the view as human-readable text, with colours. Ends with a newline.
    fn text(&self, canvas: &Canvas) -> String;

    /// Returns the names of its objects, such as `node/node-1`; `None` if it is no list of objects.
    fn names(&self) -> Option<Vec<String>> {
        None
    }

    /// Returns the text for Graphviz; `None` if it is no graph.
    fn dot(&self) -> Option<String> {
        None
    }
}

/// A view that lists items, and nothing else that matters.
pub trait List: View {
    /// An item.
    type Item: Serialize;

    /// Returns the items, to be sorted.
    fn items(&mut self) -> &mut Vec<Self::Item>;
}

view_of! {
    /// The identity of one port of one Service in one family.
    #[derive(PartialOrd, Ord, Hash)]
    pub struct KeyView: ServiceKey {
        namespace: String,
        service: String = name,
        port_name: String,
        protocol: &'static str => |of| protocol(known(of)),
        family: &'static str => |of| family(known(of)),
    }
}

impl FromWire<Option<pb::ServiceKey>> for KeyView {
    fn from_wire(key: Option<pb::ServiceKey>) -> Self {
        key.unwrap_or_default().into()
    }
}

impl fmt::Display for KeyView {
    /// Writes `namespace/name:port/TCP (IPv4)`, as everywhere in kplane.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.service)?;
        if !self.port_name.is_empty() {
            write!(f, ":{}", self.port_name)?;
        }
        write!(f, "/{} ({})", self.protocol, self.family)
    }
}

/// Returns the protocol as Kubernetes writes it.
pub fn protocol(protocol: pb::Protocol) -> &'static str {
    match protocol {
        pb::Protocol::Tcp => "TCP",
        pb::Protocol::Udp => "UDP",
        pb::Protocol::Sctp => "SCTP",
        pb::Protocol::Unspecified => "Unknown",
    }
}

/// Returns the family as Kubernetes writes it.
fn family(family: pb::Family) -> &'static str {
    match family {
        pb::Family::Ipv4 => "IPv4",
        pb::Family::Ipv6 => "IPv6",
        pb::Family::Unspecified => "Unknown",
    }
}

/// Returns the traffic policy as Kubernetes writes it.
fn policy(policy: pb::TrafficPolicy) -> &'static str {
    match policy {
        pb::TrafficPolicy::Cluster => "Cluster",
        pb::TrafficPolicy::Local => "Local",
    }
}

/// The severity of an issue or a finding; values that a newer server may add count as errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum SeverityView {
    /// Something is not served as desired.
    Error,
    /// Something may not do what its author expects.
    Warning,
    /// A fact that may explain what a user sees.
    Info,
}

impl FromWire<i32> for SeverityView {
    fn from_wire(severity: i32) -> Self {
        match known(severity) {
            pb::Severity::Info => Self::Info,
            pb::Severity::Warning => Self::Warning,
            pb::Severity::Error | pb::Severity::Unspecified => Self::Error,
        }
    }
}

impl SeverityView {
    fn span(self) -> Span {
        match self {
            Self::Error => Span::new("Error", Tone::Bad),
            Self::Warning => Span::new("Warning", Tone::Warn),
            Self::Info => Span::plain("Info"),
        }
    }
}

view_of! {
    /// A problem with one object of the input.
    pub struct IssueView: InputIssue {
        severity: SeverityView,
        /// The stable name of the problem: `docs/reasons.md` explains each.
        code: String,
        location: String,
        kind: String,
        namespace: String,
        name: String,
        reason: String,
        /// The number of further objects with the same problem, which the server did not list.
        alike: u64,
    }
}

impl IssueView {
    /// Returns the issues, errors first.
    fn list(issues: Vec<pb::InputIssue>) -> Vec<Self> {
        let mut issues = Vec::<Self>::from_wire(issues);
        issues.sort_by_key(|issue| issue.severity);
        issues
    }

    /// Returns the part that is equal for the same problem of different objects.
    fn problem(&self) -> (SeverityView, &str, &str) {
        (self.severity, &self.kind, &self.reason)
    }

    fn is_error(&self) -> bool {
        self.severity == SeverityView::Error
    }

    /// Returns the object, such as `Service shop/web`.
    fn object(&self) -> String {
        let object = ObjectRef::new(self.kind.clone(), self.namespace.clone(), self.name.clone());
        object.to_string()
    }
}

/// One problem, and the objects that have it.
struct Problem<'a> {
    first: &'a IssueView,
    others: Vec<&'a IssueView>,
}

impl<'a> Problem<'a> {
    /// Groups issues by problem, in the order of their first objects. A wide table lists each object
    /// separately.
    fn all(issues: &'a [IssueView], wide: bool) -> Vec<Self> {
        let mut problems: Vec<Self> = Vec::new();
        let mut known = HashMap::new();
        for issue in issues {
            let at = *known.entry(issue.problem()).or_insert(problems.len());
            if !wide && let Some(problem) = problems.get_mut(at) {
                problem.others.push(issue);
            } else {
                problems.push(Self {
                    first: issue,
                    others: Vec::new(),
                });
            }
        }
        problems
    }

    fn notes(&self) -> Vec<Span> {
        let IssueView { code, reason, .. } = self.first;
        let mut notes = vec![match code.as_str() {
            "" => Span::plain(reason),
            code => Span::plain(format!("{code}: {reason}")),
        }];
        let all = self.others.iter().chain([&self.first]);
        let unnamed: u64 = all.map(|issue| issue.alike).sum();
        let count =
            usize::try_from(unnamed).unwrap_or(usize::MAX).saturating_add(self.others.len());
        let names: Vec<String> =
            self.others.iter().take(OTHERS_NAMED).map(|issue| issue.object()).collect();
        notes.extend((count > 0).then(|| {
            let such_as = match names.as_slice() {
                [] => String::new(),
                names if names.len() == count => format!(": {}", names.join(", ")),
                names => format!(", such as {}", names.join(", ")),
            };
            Span::plain(format!(
                "the same problem with {}{such_as}",
                plural(count, "other object")
            ))
        }));
        notes
    }
}

/// Returns a section about issues, after an empty line; an empty text when there are none. `omitted`
/// is the number of issues that the server did not list.
fn issues_text(issues: &[IssueView], omitted: u64, canvas: &Canvas) -> String {
    if issues.is_empty() {
        return String::new();
    }
    let problems = Problem::all(issues, canvas.wide);
    let limit = if canvas.wide { problems.len() } else { ISSUES_SHOWN };
    let (shown, hidden) = problems.split_at(limit.min(problems.len()));
    let table = Table::new(shown)
        .column(Column::new("ISSUE"), |problem: &Problem<'_>| {
            problem.first.severity.span()
        })
        .text(Column::new("OBJECT").elastic(24), |problem| {
            problem.first.object()
        })
        .text(Column::new("LOCATION").elastic(20), |problem| {
            &problem.first.location
        })
        .notes(Problem::notes);
    let more = more_text(hidden.len(), "issue");
    let omitted = match usize::try_from(omitted).unwrap_or(usize::MAX) {
        0 => String::new(),
        omitted => format!(
            "{} more are not listed: fix these first\n",
            plural(omitted, "issue")
        ),
    };
    format!("\n{}{more}{omitted}", table.render(canvas))
}

/// Returns a line with the number of hidden items; an empty text when there are none.
fn more_text(hidden: usize, noun: &str) -> String {
    match hidden {
        0 => String::new(),
        hidden => format!("{} more: -o wide\n", plural(hidden, noun)),
    }
}

/// Returns the next steps, after an empty line; an empty text when there are none.
pub fn next_steps_text(steps: &[String], canvas: &Canvas) -> String {
    if steps.is_empty() {
        return String::new();
    }
    let steps = steps.iter().map(|step| {
        let span = Span::new(step, Tone::Plain);
        text::paragraph(&span, canvas, 2)
    });
    let heading = Tone::Strong.paint("Next");
    format!("\n{heading}\n{}", steps.collect::<String>())
}

/// Returns how long a change took until a kernel held it, measured in whole milliseconds.
fn latency(ms: Option<u64>) -> Span {
    match ms {
        None => Span::none(),
        Some(0) => Span::plain("<1ms"),
        Some(ms) => Span::plain(human(Duration::from_millis(ms))),
    }
}

/// Returns `applied`, and behind a slash the wanted number if that is larger.
fn progress(applied: Option<u64>, wanted: u64) -> Span {
    match applied {
        None => Span::none(),
        Some(applied) if applied < wanted => Span::new(format!("{applied}/{wanted}"), Tone::Warn),
        Some(applied) => Span::plain(applied.to_string()),
    }
}
