//! Metrics of the control plane's ports.

use std::fmt;
use std::sync::Arc;

use kplane_agents::connection_limits::{ConnectionLimiter, Counts};
use kplane_agents::identity::Authenticator;
use kplane_http::Guests;
use kplane_http::metrics::{Metric, alone};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

/// The admission of connections at each port.
#[derive(Debug)]
pub(super) struct Ports {
    pub(super) agents: Arc<ConnectionLimiter>,
    pub(super) status: Arc<ConnectionLimiter>,
    pub(super) http: Arc<Guests>,
    pub(super) authenticator: Arc<Authenticator>,
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
        let refusals = self.authenticator.refusals().into_iter().map(|(port, reason, count)| {
            let labels = [("port", port.as_str()), ("reason", reason.as_str())];
            (labels, count as f64)
        });
        Metric::new("kplane_controlplane_refusals")
            .help("Calls and streams that were refused because of the caller's identity or rights")
            .counter(to, refusals)?;
        Metric::new("kplane_controlplane_audit_lines_dropped")
            .help("Lines that the audit log lacks because its disk or reader was too slow")
            .counter(to, [alone(self.authenticator.unaudited() as f64)])
    }
}

impl Collector for Ports {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let counts = self.counts();
        let open = counts.map(|(port, counts)| ([("port", port)], counts.open as f64));
        Metric::new("kplane_controlplane_connections")
            .help("Open connections by port")
            .gauge(&mut to, open)?;
        let closed = counts.iter().flat_map(|(port, counts)| {
            let reasons = [
                ("displaced", counts.displaced),
                ("expired", counts.expired),
                ("handshake", counts.handshakes),
                ("refused", counts.refused),
            ];
            reasons.map(|(reason, n)| ([("port", *port), ("reason", reason)], n as f64))
        });
        Metric::new("kplane_controlplane_connections_closed")
            .help("Connections that were refused, closed for newer ones, closed after being idle for too long, or \
             whose TLS handshake failed")
            .counter(&mut to, closed)?;
        self.refusals(&mut to)?;
        let failures = counts.map(|(port, counts)| ([("port", port)], counts.failures as f64));
        Metric::new("kplane_controlplane_accept_failures")
            .help("Connections that could not be accepted, mostly for lack of open files")
            .counter(&mut to, failures)
    }
}
