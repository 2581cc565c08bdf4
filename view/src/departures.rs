//! The Pods that waited to end: what `kpctl drain-status` shows.

use std::time::Duration;

use kplane_proto::v1 as pb;
use kplane_proto::v1::LeavingOutcome;
use serde::Serialize;

use super::replicas::alone_text;
use super::{API_VERSION, View};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, paragraph};
use crate::time::{Time, human};
use crate::wire::{FromWire, known, view_of};

view_of! {
    /// A Pod that waited to end.
    pub(crate) struct DepartureView: Departure {
        namespace: String,
        /// `null` if no EndpointSlice names it.
        pod: Option<String>,
        address: String,
        node: String,
        services: Vec<String>,
        /// `Gone`, `Bound` or `LastEndpoint`.
        outcome: &'static str => |of| outcome(known(of)),
        /// What was missing when the time was over.
        reason: Option<String>,
        waited_milliseconds: u64 = waited_ms,
        at: Option<Time> = at_ms,
    }
}

/// The view of `kpctl drain-status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeparturesView {
    api_version: &'static str,
    kind: &'static str,
    /// Newest first.
    departures: Vec<DepartureView>,
    /// Other replicas, which know of further ones.
    unasked_replicas: u32,
}

fn outcome(outcome: LeavingOutcome) -> &'static str {
    match outcome {
        LeavingOutcome::Gone => "Gone",
        LeavingOutcome::Bound => "Bound",
        LeavingOutcome::Last => "LastEndpoint",
        LeavingOutcome::Unspecified => "Unknown",
    }
}

impl DeparturesView {
    /// Creates the view.
    pub fn new(status: pb::DrainStatus) -> Self {
        Self {
            api_version: API_VERSION,
            kind: "DepartureList",
            departures: FromWire::from_wire(status.departures),
            unasked_replicas: status.unasked_replicas,
        }
    }
}

impl DepartureView {
    fn name(&self) -> String {
        match &self.pod {
            Some(pod) => format!("{}/{pod}", self.namespace),
            None => self.address.clone(),
        }
    }
}

impl View for DeparturesView {
    fn text(&self, canvas: &Canvas) -> String {
        let each = "the Pods of nodes whose agents it serves";
        let alone = alone_text(self.unasked_replicas, each, canvas);
        if self.departures.is_empty() {
            let text = "No Pod has waited to end since this control plane started: no preStop hook has asked.";
            return paragraph(&Span::plain(text), canvas, 0) + &alone;
        }
        let table = Table::new(&self.departures)
            .text(Column::new("POD").elastic(16), DepartureView::name)
            .text(Column::new("NODE").elastic(12), |one| &one.node)
            .column(Column::new("OUTCOME"), |one| {
                let tone = match one.outcome {
                    "Gone" => Tone::Good,
                    _ => Tone::Warn,
                };
                Span::new(one.outcome, tone)
            })
            .text(Column::new("WAITED"), |one| {
                human(Duration::from_millis(one.waited_milliseconds))
            })
            .column(Column::new("ENDED"), |one| {
                one.at.map_or_else(Span::none, |at| Span::plain(at.local()))
            })
            .text(Column::wide("SERVICES"), |one| one.services.join(", "))
            .notes(|one| {
                let reason = one.reason.iter();
                reason.map(|reason| Span::new(reason, Tone::Warn)).collect()
            })
            .render(canvas);
        table + &alone
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::table;
    use super::*;

    #[test]
    fn a_pod_that_ended_early_says_why() {
        let one = |pod: &str, outcome: LeavingOutcome, reason: &str| pb::Departure {
            namespace: "shop".to_owned(),
            pod: pod.to_owned(),
            address: "10.0.0.5".to_owned(),
            node: "n1".to_owned(),
            outcome: outcome.into(),
            reason: reason.to_owned(),
            waited_ms: 120,
            ..pb::Departure::default()
        };
        let view = DeparturesView::new(pb::DrainStatus {
            departures: vec![
                one("web-1", LeavingOutcome::Gone, ""),
                one("", LeavingOutcome::Bound, "n7 did not confirm"),
            ],
            ..pb::DrainStatus::default()
        });
        let text = table(&view);
        for part in [
            "shop/web-1",
            "Gone",
            "120ms",
            "10.0.0.5",
            "Bound",
            "n7 did not confirm",
        ] {
            assert!(text.contains(part), "no {part:?}:\n{text}");
        }
        assert!(!text.contains("replica"), "{text}");
        let alone = DeparturesView::new(pb::DrainStatus {
            unasked_replicas: 2,
            ..pb::DrainStatus::default()
        });
        assert!(table(&alone).contains("2 more were not asked"));
        let nothing = DeparturesView::new(pb::DrainStatus::default());
        assert!(table(&nothing).contains("No Pod has waited"));
    }
}
