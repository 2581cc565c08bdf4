//! Metrics of what the control plane sends and writes, and of what it was given.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use kplane_agents::connection_limits::ServerTls;
use kplane_agents::hub::Hub;
use kplane_agents::traffic::EventCounts;
use kplane_desired_state::kubernetes::{Api, Requests};
use kplane_http::metrics::{Metric, alone};
use kplane_status_api::server::Metrics;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

/// The credentials of this control plane, and what its parts count.
#[derive(Clone, Default)]
pub(crate) struct Own {
    /// The connection to the API server, if there is one.
    pub(crate) api: Option<Arc<Api>>,
    /// The configuration of TLS on the ports, if they have any.
    pub(crate) tls: Option<ServerTls>,
    /// Kubernetes events by their fate.
    pub(crate) events: Arc<EventCounts>,
    pub(crate) metrics: Metrics,
}

/// Metrics of work, read at each scrape.
pub(super) struct Work {
    pub(super) hub: Arc<Hub>,
    pub(super) own: Own,
}

/// Shows no credentials.
impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").finish_non_exhaustive()
    }
}

impl Collector for Work {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        self.build(&mut to)?;
        self.traffic(&mut to)?;
        self.requests(&mut to)?;
        self.recorder(&mut to)?;
        self.certificate(&mut to)?;
        let Some(panics) = kplane_http::panics::seen() else {
            return Ok(());
        };
        Metric::new("kplane_controlplane_panics")
            .help("Requests to the control plane, and parts of it, that ended by a bug")
            .counter(&mut to, [alone(panics.count as f64)])
    }
}

/// Writes the requests to the API server under the names that Kubernetes' own components have.
fn rest_client(requests: &Requests, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let all = requests.all();
    let series = all.iter().map(|((method, code, host), count)| {
        let labels = [("method", &**method), ("code", &**code), ("host", &**host)];
        (labels, *count as f64)
    });
    Metric::new("rest_client_requests")
        .help("Requests to the API server by method, status code and host")
        .counter(to, series)?;
    let durations = requests.durations();
    let series = durations.iter().map(|((method, host), distribution)| {
        let labels = [("verb", &**method), ("host", &**host)];
        (labels, distribution.clone())
    });
    Metric::new("rest_client_request_duration_seconds")
        .help("Time from a request to the API server until the head of its answer")
        .histogram(to, series)
}

impl Work {
    fn build(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let version = [
            ("version", env!("CARGO_PKG_VERSION")),
            ("source", self.hub.replica().source),
        ];
        Metric::new("kplane_controlplane_build_info")
            .help("Version of the control plane, and the kind of its source; always 1")
            .gauge(to, [(version, 1.0)])
    }

    fn traffic(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let volumes = self.hub.streams().traffic.volumes();
        let labels = volumes.map(|(kind, _)| [("kind", kind)]);
        let messages = volumes.map(|(_, volume)| volume.messages as f64);
        Metric::new("kplane_controlplane_sent_messages")
            .help("Messages to agents; a stream adds its own with each heartbeat")
            .counter(to, labels.into_iter().zip(messages))?;
        let bytes = volumes.map(|(_, volume)| volume.bytes as f64);
        Metric::new("kplane_controlplane_sent_bytes")
            .help("Bytes of messages to agents, before TLS")
            .counter(to, labels.into_iter().zip(bytes))
    }

    fn requests(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let events = self.own.events.all();
        let labels = events.map(|(result, _)| [("result", result)]);
        let counts = events.map(|(_, count)| count as f64);
        Metric::new("kplane_controlplane_events")
            .help("Kubernetes events by their fate")
            .counter(to, labels.into_iter().zip(counts))?;
        let Some(api) = &self.own.api else {
            return Ok(());
        };
        let failures = api.failures().all();
        let series = failures.iter().map(|((verb, reason), count)| {
            let labels = [("verb", *verb), ("reason", *reason)];
            (labels, *count as f64)
        });
        Metric::new("kplane_controlplane_api_failures")
            .help("Requests to the API server that failed, without those of the source")
            .counter(to, series)?;
        rest_client(api.requests(), to)
    }

    fn recorder(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let size = self.hub.notices().recorder.size();
        let progress = self.hub.agents().progress_bytes();
        Metric::new("kplane_controlplane_recorder_bytes")
            .help("Memory of the record of changes and events, and of the times of nodes")
            .gauge(to, [alone((size.bytes + progress) as f64)])?;
        Metric::new("kplane_controlplane_recorder_changes")
            .help("Changes of Services in the record")
            .gauge(to, [alone(size.changes as f64)])
    }

    fn certificate(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let tls = self.own.tls.as_ref().and_then(|tls| tls.peek());
        let ends_at = tls.and_then(|follower| follower.as_ref()?.ends_at());
        let since_1970 = ends_at.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
        let Some(seconds) = since_1970.map(|since| since.as_secs_f64()) else {
            return Ok(());
        };
        Metric::new("kplane_controlplane_certificate_expires_timestamp_seconds")
            .help("Time at which the certificate of the ports ends")
            .gauge(to, [alone(seconds)])
    }
}
