//! Metrics of the control plane's ports.

use std::fmt;
use std::sync::Arc;

use kplane_fleet::doors::{Counts, Door};
use kplane_fleet::identity::Gate;
use kplane_http::Guests;
use kplane_http::metrics::{Labels, Name};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

const ALONE: &Labels<'_> = &[];

/// The admission of connections at each port.
#[derive(Debug)]
pub(super) struct Ports {
    pub(super) agents: Arc<Door>,
    pub(super) status: Arc<Door>,
    pub(super) http: Arc<Guests>,
    pub(super) gate: Arc<Gate>,
}

impl Ports {
    fn counts(&self) -> [(&'static str, Counts); 3] {
        let http = Counts {
            open: self.http.open(),
            displaced: self.http.displaced(),
            failures: self.http.failures(),
            ..Counts::default()
        };
        [
            ("agents", self.agents.counts()),
            ("http", http),
            ("status", self.status.counts()),
        ]
    }
}

impl Ports {
    fn refusals(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let refusals: Vec<_> = self
            .gate
            .refusals()
            .into_iter()
            .map(|(port, reason, count)| {
                let labels = [("port", port.as_str()), ("reason", reason.as_str())];
                (labels, count as f64)
            })
            .collect();
        Name(
            "kplane_controlplane_refusals",
            "Calls and streams that were refused because of the caller's identity or rights",
        )
        .counter(to, refusals.iter().map(|(labels, n)| (&labels[..], *n)))?;
        Name(
            "kplane_controlplane_audit_lines_dropped",
            "Lines that the audit log lacks because its disk or reader was too slow",
        )
        .counter(to, [(ALONE, self.gate.unaudited() as f64)])
    }
}

impl Collector for Ports {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let counts = self.counts();
        let open = counts.map(|(port, counts)| ([("port", port)], counts.open as f64));
        Name(
            "kplane_controlplane_connections",
            "Open connections by port",
        )
        .gauge(&mut to, open.iter().map(|(labels, n)| (&labels[..], *n)))?;
        let closed = counts.iter().flat_map(|(port, counts)| {
            let reasons = [
                ("displaced", counts.displaced),
                ("expired", counts.expired),
                ("handshake", counts.handshakes),
                ("refused", counts.refused),
            ];
            reasons.map(|(reason, n)| ([("port", *port), ("reason", reason)], n as f64))
        });
        let closed: Vec<_> = closed.collect();
        Name(
            "kplane_controlplane_connections_closed",
            "Connections that were refused, closed for newer ones, closed after being idle for too long, or \
             whose TLS handshake failed",
        )
        .counter(&mut to, closed.iter().map(|(labels, n)| (&labels[..], *n)))?;
        self.refusals(&mut to)?;
        let failures = counts.map(|(port, counts)| ([("port", port)], counts.failures as f64));
        Name(
            "kplane_controlplane_accept_failures",
            "Connections that could not be accepted, mostly for lack of open files",
        )
        .counter(
            &mut to,
            failures.iter().map(|(labels, n)| (&labels[..], *n)),
        )
    }
}
