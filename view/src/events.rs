//! What the control plane noticed.

use kplane_proto::v1 as pb;

use super::View;
use super::replicas::alone_text;
use crate::style::{Canvas, Tone};
use crate::text::{Span, paragraph};
use crate::time::Time;
use crate::wire::view_of;

view_of! {
    /// The view of `kpctl events`.
    pub struct EventListView: NoticedList as "EventList" {
        /// Oldest first.
        events: Vec<EventView>,
        /// The time from which on the record is complete.
        since: Option<Time> = since_ms,
        /// Other replicas, which have records of their own.
        unasked_replicas: u32,
        /// Whether to say since when the record is complete.
        #[serde(skip)]
        is_first: bool = _,
    }

    pub(crate) struct EventView: Noticed {
        number: u64,
        at: Option<Time> = at_ms,
        event: String = kind,
        object: Option<String>,
        text: String,
    }
}

impl EventListView {
    /// Creates the view of all events, or of those since the last view.
    pub fn new(list: pb::NoticedList, is_first: bool) -> Self {
        Self {
            is_first,
            ..list.into()
        }
    }
}

/// Returns the tone of a kind of events.
pub fn tone(kind: &str) -> Tone {
    match kind {
        "NodeLost" | "NodeSuspected" | "NodeFailing" | "ProblemAppeared" | "Held" => Tone::Bad,
        "NodeRecovered" | "NodeReached" | "ProblemGone" | "Released" => Tone::Good,
        "Repaired" => Tone::Warn,
        _ => Tone::Plain,
    }
}

impl View for EventListView {
    fn text(&self, canvas: &Canvas) -> String {
        let lines = self.events.iter().map(|event| {
            let at = event.at.map_or_else(|| "?".to_owned(), Time::local);
            let object = event.object.as_deref().unwrap_or("-");
            let line = format!("{at}  {}  {object}  {}", event.event, event.text);
            paragraph(&Span::new(line, tone(&event.event)), canvas, 0)
        });
        let mut text: String = lines.collect();
        if self.is_first {
            let since = self.since.map_or_else(|| "?".to_owned(), Time::local);
            let end = format!("The record begins at {since}.");
            text += &paragraph(&Span::new(end, Tone::Faint), canvas, 0);
            text += &alone_text(self.unasked_replicas, "a record of its own", canvas);
        }
        text
    }
}
