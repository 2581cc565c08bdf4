//! The latest publications.

use kplane_proto::v1 as pb;
use serde::Serialize;

use super::{API_VERSION, View};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, paragraph};
use crate::time::Time;

/// Most publications that a table shows, the newest ones.
const SHOWN: usize = 20;

/// The view of `kpctl history`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HistoryView {
    api_version: &'static str,
    kind: &'static str,
    /// Oldest first.
    points: Vec<PointView>,
}

/// A publication.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct PointView {
    revision: u64,
    at: Option<Time>,
    changes: u64,
    #[serde(skip)]
    age: String,
}

impl HistoryView {
    /// Creates the view.
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
        Self {
            api_version: API_VERSION,
            kind: "History",
            points: points.collect(),
        }
    }
}

impl View for HistoryView {
    fn text(&self, canvas: &Canvas) -> String {
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
                    format!("{hidden} older ones: kpctl history -o json"),
                    Tone::Faint,
                ),
                canvas,
                0,
            ),
        };
        table + &more
    }
}
