//! The Services that change most, and the slowest nodes.

use std::time::Duration;

use super::View;
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, grouped, paragraph};
use crate::time::{Time, human};
use crate::wire::view_of;

view_of! {
    /// The view of `kpctl top`.
    pub struct TopView: Top as "Top" {
        /// The busiest first.
        services: Vec<BusyView>,
        /// The slowest first.
        nodes: Vec<SlowView>,
        /// The time from which on changes count.
        since: Option<Time> = since_ms,
        #[serde(skip)]
        now: Option<Time> = now_ms,
    }

    /// A Service that changes often.
    pub(crate) struct BusyView: BusyService {
        namespace: String,
        name: String,
        changes: u64,
        endpoint_changes: u64 = endpoints,
        last: Option<Time> = last_ms,
    }

    /// A slow node.
    pub(crate) struct SlowView: SlowNode {
        node: String,
        /// Revisions between what the node holds and what it should hold.
        behind: u64,
        /// Time since the oldest change that it lacks; `null` = it lacks none.
        lag_milliseconds: Option<u64> = lag_ms,
        /// From a change to the kernel; `null` = not measured.
        p50_milliseconds: Option<u64> = p50_ms,
        max_milliseconds: Option<u64> = max_ms,
        sync_microseconds: Option<u64> = sync_us,
    }
}

/// Returns a duration for a cell.
fn cell(value: Option<u64>, unit: fn(u64) -> Duration) -> Span {
    value.map_or_else(Span::none, |value| Span::plain(human(unit(value))))
}

impl View for TopView {
    fn text(&self, canvas: &Canvas) -> String {
        let services = Table::new(&self.services)
            .text(Column::new("SERVICE"), |busy| {
                format!("{}/{}", busy.namespace, busy.name)
            })
            .text(Column::new("CHANGES"), |busy| grouped(busy.changes))
            .text(Column::new("ENDPOINTS"), |busy| {
                grouped(busy.endpoint_changes)
            })
            .column(Column::new("LAST"), |busy| {
                let age = busy.last.zip(self.now).map(|(at, now)| at.age_text(now));
                age.map_or_else(Span::none, Span::plain)
            })
            .render(canvas);
        let nodes = Table::new(&self.nodes)
            .text(Column::new("NODE"), |slow| &slow.node)
            .column(Column::new("BEHIND"), |slow| {
                let tone = if slow.behind > 0 {
                    Tone::Warn
                } else {
                    Tone::Plain
                };
                Span::new(grouped(slow.behind), tone)
            })
            .column(Column::new("LAG"), |slow| {
                cell(slow.lag_milliseconds, Duration::from_millis)
            })
            .column(Column::new("P50"), |slow| {
                cell(slow.p50_milliseconds, Duration::from_millis)
            })
            .column(Column::new("MAX"), |slow| {
                cell(slow.max_milliseconds, Duration::from_millis)
            })
            .column(Column::new("SYNC"), |slow| {
                cell(slow.sync_microseconds, Duration::from_micros)
            })
            .render(canvas);
        let since = self.since.map_or_else(|| "?".to_owned(), Time::local);
        let end = format!("Changes of Services count since {since}.");
        let end = paragraph(&Span::new(end, Tone::Faint), canvas, 0);
        services + "\n" + &nodes + &end
    }
}
