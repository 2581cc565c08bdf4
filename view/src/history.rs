//! The latest publications.

use super::View;
use super::replicas::alone_text;
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, paragraph};
use crate::time::Time;
use crate::wire::view_of;

/// Most publications that a table shows, the newest ones.
const SHOWN: usize = 20;

view_of! {
    /// The view of `kpctl history`.
    pub struct HistoryView: History as "History" {
        /// Oldest first.
        points: Vec<PointView>,
        #[serde(skip)]
        now: Option<Time> = now_ms,
        /// Other replicas, which have revisions of their own.
        unasked_replicas: u32,
    }

    /// A publication.
    pub(crate) struct PointView: HistoryPoint {
        revision: u64,
        at: Option<Time> = at_ms,
        changes: u64,
    }
}

impl View for HistoryView {
    fn text(&self, canvas: &Canvas) -> String {
        let hidden = self.points.len().saturating_sub(SHOWN);
        let newest_first: Vec<PointView> = self.points[hidden..].iter().rev().cloned().collect();
        let age = |point: &PointView| {
            let span = point.at.zip(self.now);
            Span::plain(span.map_or_else(String::new, |(at, now)| at.age_text(now)))
        };
        let table = Table::new(&newest_first)
            .text(Column::new("REVISION"), |point| point.revision.to_string())
            .column(Column::new("AGE"), age)
            .text(Column::new("CHANGES"), |point| point.changes.to_string())
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
        table + &more + &alone_text(self.unasked_replicas, "revisions of its own", canvas)
    }
}
