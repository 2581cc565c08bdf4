//! How far the newest state of one Service has come in the fleet.

use kplane_proto::v1::{self as pb, ServiceState};

use super::replicas::MissingReplicaView;
use super::{latency, progress};
use crate::goal::{Goal, Threshold};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, grouped, long_field};
use crate::time::Time;
use crate::wire::{known, name, named, view_of};

/// Most laggards in the header of a description, before it refers to `-o wide`.
const SHOWN: usize = 5;

/// The state of a node whose agent keeps Services that the source does not name.
const HOLDING: &str = "Holding";

view_of! {
    /// Durations of a Service's last change.
    pub struct DurationsView: ChangeDurations {
        /// The number of nodes that were measured.
        nodes: u64,
        p50_milliseconds: u64 = p50_ms,
        p99_milliseconds: u64 = p99_ms,
        max_milliseconds: u64 = max_ms,
    }

    /// A node that lags.
    pub struct LaggardView: Laggard {
        node: String,
        state: String => name::<pb::LagState>,
        /// The start of the state; `null` when it is not known.
        since: Option<Time> = since_ms,
        reason: String,
        /// The revision that the node has applied; `null` when it has not reported one.
        applied_revision: Option<u64> = revision,
        wanted_revision: u64,
        /// Whether the kernel holds the newest state all the same.
        #[serde(skip)]
        programmed: bool = state => |state| state == pb::LagState::Unverified as i32,
    }

    /// How far the newest state of one Service has come.
    pub struct ConvergenceView: Convergence {
        namespace: String,
        name: String,
        #[serde(serialize_with = "named")]
        state: ServiceState => known,
        /// The reason for the state if the Service is not served.
        reason: String,
        wanted_revision: u64,
        /// The time of the last change; `null` when it is no longer known.
        changed: Option<Time> = changed_at_ms,
        nodes: u64,
        programmed: u64,
        verified: u64,
        /// Times of the last change until kernels held it; `null` when none was measured.
        durations: Option<DurationsView>,
        laggards: Vec<LaggardView>,
        laggards_omitted: u64,
        /// Replicas that did not answer.
        missing_replicas: Vec<MissingReplicaView>,
        /// Whether `nodes` is too small, because replicas are missing.
        nodes_incomplete: bool,
        /// The current time, for ages.
        #[serde(skip)]
        now: Option<Time> = now_ms,
    }
}

impl ConvergenceView {
    /// Returns whether enough nodes have reached a goal. Nothing is programmed without nodes, and nobody knows what is
    /// enough while some nodes are unknown.
    pub fn has_reached(&self, goal: Goal, threshold: Threshold) -> bool {
        use ServiceState::{Deleted, Served, Unknown};
        if self.nodes_incomplete {
            return false;
        }
        let needed = threshold.of(self.nodes);
        match (goal, self.state) {
            (Goal::Programmed, Served) => self.nodes > 0 && self.programmed >= needed,
            (Goal::Verified, Served) => self.nodes > 0 && self.verified >= needed,
            (Goal::Deleted, Deleted | Unknown) => self.programmed >= needed,
            _ => false,
        }
    }

    /// Returns the name with its kind, as `wait` takes it.
    pub fn object(&self) -> String {
        format!("service/{}/{}", self.namespace, self.name)
    }

    /// Returns whether an agent keeps Services that the source does not name, perhaps this one.
    pub fn is_held(&self) -> bool {
        self.laggards.iter().any(|laggard| laggard.state == HOLDING)
    }

    /// Returns the state on one line.
    pub fn line(&self) -> String {
        format!("{}{}", self.short_line(), self.times())
    }

    /// Returns the state on one line, without the times of the last change.
    pub fn short_line(&self) -> String {
        let object = self.object();
        let (programmed, nodes) = (grouped(self.programmed), grouped(self.nodes));
        match self.state {
            ServiceState::Served => {
                format!("{object}: in the kernel of {programmed} of {nodes} nodes")
            }
            ServiceState::Deleted => {
                format!("{object}: deleted; gone from the kernel of {programmed} of {nodes} nodes")
            }
            ServiceState::Unknown => format!("{object}: not served: {}", self.reason),
            ServiceState::Uncertain | ServiceState::Unspecified => {
                format!("{object}: not known: {}", self.reason)
            }
        }
    }

    /// Returns the times that the last change took, after a semicolon.
    fn times(&self) -> String {
        let Some(times) = &self.durations else {
            return String::new();
        };
        let [p50, p99, max] = [
            times.p50_milliseconds,
            times.p99_milliseconds,
            times.max_milliseconds,
        ]
        .map(|ms| latency(Some(ms)).text);
        format!("; p50 {p50}, p99 {p99}, max {max}")
    }

    /// Returns the fields of a description's header.
    pub fn fields(&self, canvas: &Canvas) -> String {
        let tone = if self.programmed == self.nodes { Tone::Good } else { Tone::Warn };
        let (programmed, nodes) = (grouped(self.programmed), grouped(self.nodes));
        let text = format!(
            "in the kernel of {programmed} of {nodes} nodes{}",
            self.times()
        );
        let mut out = long_field("Nodes", &Span::new(text, tone), canvas);
        let shown = if canvas.wide { usize::MAX } else { SHOWN };
        let lagging = self.laggards.iter().filter(|one| !one.programmed);
        for (i, laggard) in lagging.take(shown).enumerate() {
            let key = if i == 0 { "Lagging" } else { "" };
            let since = laggard.since.zip(self.now);
            let since = since.map(|(since, now)| format!(" for {}", since.age_text(now)));
            let text = format!(
                "{}: {}{}: {}",
                laggard.node,
                laggard.state,
                since.unwrap_or_default(),
                laggard.reason
            );
            out.push_str(&long_field(key, &Span::new(text, Tone::Bad), canvas));
        }
        let lagging = self.nodes.saturating_sub(self.programmed);
        let listed = self.laggards.iter().filter(|one| !one.programmed).count().min(shown);
        if let Some(more @ 1..) = lagging.checked_sub(listed as u64) {
            let text = format!("and {} more", grouped(more));
            out.push_str(&long_field("", &Span::new(text, Tone::Bad), canvas));
        }
        out
    }

    /// Returns the laggards that keep a goal from being reached, and the number of others that are not listed.
    fn in_the_way(&self, goal: Goal) -> (Vec<&LaggardView>, u64) {
        let counts = |laggard: &&LaggardView| goal == Goal::Verified || !laggard.programmed;
        let listed: Vec<_> = self.laggards.iter().filter(counts).collect();
        let reached = match goal {
            Goal::Verified => self.verified,
            Goal::Programmed | Goal::Deleted => self.programmed,
        };
        let all = self.nodes.saturating_sub(reached);
        let omitted = all.saturating_sub(listed.len() as u64);
        (listed, omitted)
    }

    /// Returns the table of the laggards that keep a goal from being reached; an empty text without any.
    pub fn laggards_text(&self, goal: Goal, canvas: &Canvas) -> String {
        let (laggards, omitted) = self.in_the_way(goal);
        if laggards.is_empty() {
            return String::new();
        }
        let since = |laggard: &&LaggardView| match laggard.since.zip(self.now) {
            Some((since, now)) => Span::plain(since.age_text(now)),
            None => Span::none(),
        };
        let table = Table::new(&laggards)
            .text(Column::new("NODE").elastic(20), |l| &l.node)
            .column(Column::new("STATE"), |l| Span::new(&l.state, Tone::Bad))
            .column(Column::new("SINCE"), since)
            .column(Column::new("APPLIED"), |l| {
                progress(l.applied_revision, l.wanted_revision)
            })
            .notes(|l| vec![Span::plain(&l.reason)])
            .render(canvas);
        let more = match omitted {
            0 => String::new(),
            1 => "and 1 more node\n".to_owned(),
            more => format!("and {} more nodes\n", grouped(more)),
        };
        format!("{table}{more}")
    }
}
