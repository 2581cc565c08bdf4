//! The states that can be published again, and the one that is.

use kplane_proto::v1 as pb;
use serde::Serialize;

use super::{API_VERSION, View};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, paragraph};
use crate::time::Time;

/// Most states that a table shows, the newest ones.
const SHOWN: usize = 20;

/// The view of `kpctl history` and `kpctl rollback`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HistoryView {
    api_version: &'static str,
    kind: &'static str,
    /// The states, oldest first.
    points: Vec<PointView>,
    /// The earlier state that is published; `null` if the newest one is.
    rollback: Option<RollbackView>,
    /// Whether the control plane that answered remembers that state. If it does not, nodes that it serves keep what
    /// they hold.
    lost: bool,
    #[serde(skip)]
    now: Option<Time>,
    /// Whether to show the states.
    #[serde(skip)]
    list: bool,
}

/// A state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct PointView {
    revision: u64,
    at: Option<Time>,
    changes: u64,
    #[serde(skip)]
    age: String,
}

/// The order to publish an earlier state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct RollbackView {
    state_at: Option<Time>,
    since: Option<Time>,
    by: Option<String>,
    reason: Option<String>,
}

impl HistoryView {
    /// Builds the view of all states.
    pub fn new(history: pb::History) -> Self {
        let now = Time::from_wire(history.now_ms);
        let points = history.points.into_iter().map(|point| {
            let at = Time::from_wire(point.at_ms);
            let age = at.zip(now).map(|(at, now)| at.age_text(now));
            PointView {
                revision: point.revision,
                at,
                changes: point.changes,
                age: age.unwrap_or_default(),
            }
        });
        let some = |text: String| Some(text).filter(|text| !text.is_empty());
        Self {
            api_version: API_VERSION,
            kind: "History",
            points: points.collect(),
            rollback: history.rollback.map(|rollback| RollbackView {
                state_at: Time::from_wire(rollback.state_ms),
                since: Time::from_wire(rollback.at_ms),
                by: some(rollback.by),
                reason: some(rollback.reason),
            }),
            lost: history.lost,
            now,
            list: true,
        }
    }

    /// Builds the view after a change.
    pub fn changed(history: pb::History) -> Self {
        Self {
            list: false,
            ..Self::new(history)
        }
    }

    /// Returns what is published.
    fn published(&self) -> Span {
        let Some(rollback) = &self.rollback else {
            return Span::new("The newest state is published.", Tone::Good);
        };
        let at = |time: &Option<Time>| time.map_or_else(|| "?".to_owned(), |time| time.to_string());
        let mut text = format!(
            "Rolled back to the state of {}, since {}",
            at(&rollback.state_at),
            at(&rollback.since)
        );
        if let Some(by) = &rollback.by {
            text += &format!(" by {by}");
        }
        if let Some(reason) = &rollback.reason {
            text += &format!(": {reason}");
        }
        text += ". `kpctl rollback --undo` ends that.";
        if self.lost {
            text +=
                " This control plane does not remember that state: its nodes keep what they hold.";
        }
        Span::new(text, Tone::Warn)
    }
}

impl View for HistoryView {
    fn text(&self, canvas: &Canvas) -> String {
        let published = paragraph(&self.published(), canvas, 0);
        if !self.list {
            return published;
        }
        let hidden = self.points.len().saturating_sub(SHOWN);
        let newest_first: Vec<PointView> = self.points[hidden..].iter().rev().cloned().collect();
        let table = Table::new(&newest_first)
            .column(Column::new("REVISION"), |point| {
                Span::plain(point.revision.to_string())
            })
            .column(Column::new("AGE"), |point| Span::plain(&point.age))
            .column(Column::new("CHANGES"), |point| {
                Span::plain(point.changes.to_string())
            })
            .render(canvas);
        let more = match hidden {
            0 => String::new(),
            _ => paragraph(
                &Span::new(
                    format!("{hidden} older states: kpctl history -o json"),
                    Tone::Faint,
                ),
                canvas,
                0,
            ),
        };
        table + &more + &published
    }
}
