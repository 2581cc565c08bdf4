//! What a node's kernel does not hold as desired.

use super::View;
use crate::style::{Canvas, Tone};
use crate::text::{Span, grouped, paragraph};
use crate::wire::view_of;

view_of! {
    /// The view of `kpctl diff`.
    pub struct DiffView: Diff as "Diff" {
        left: String,
        right: String,
        services: Vec<ServiceDiffView>,
        /// The number of Services that differ and are not listed.
        omitted: u64,
        equal: u64,
        notes: Vec<String>,
    }

    /// A Service that differs.
    pub(crate) struct ServiceDiffView: ServiceDiff {
        namespace: String,
        name: String,
        reason: Option<String>,
    }
}

impl View for DiffView {
    fn text(&self, canvas: &Canvas) -> String {
        let mut text = paragraph(
            &Span::new(format!("- {}", self.left), Tone::Strong),
            canvas,
            0,
        );
        text += &paragraph(
            &Span::new(format!("+ {}", self.right), Tone::Strong),
            canvas,
            0,
        );
        for service in &self.services {
            let name = format!("{}/{}", service.namespace, service.name);
            text += &paragraph(&Span::new(name, Tone::Strong), canvas, 0);
            if let Some(reason) = &service.reason {
                text += &paragraph(&Span::plain(format!("because {reason}")), canvas, 2);
            }
        }
        let differ = self.services.len() as u64 + self.omitted;
        let (differing, equal) = (grouped(differ), grouped(self.equal));
        let mut end = format!("{differing} Services differ, {equal} are equal.");
        if self.omitted > 0 {
            end += &format!(" {} are not listed.", grouped(self.omitted));
        }
        let tone = if differ == 0 { Tone::Good } else { Tone::Plain };
        text += &paragraph(&Span::new(end, tone), canvas, 0);
        for note in &self.notes {
            text += &paragraph(&Span::plain(note), canvas, 0);
        }
        text
    }
}
