//! Traces: one for each sampled change of a Service, from the write at the API server to the kernels of nodes, in the
//! protocol of OpenTelemetry (OTLP over gRPC).
//!
//! A trace is written from the flight recorder a while after the change, when nodes have had the time to apply it. So
//! the way of a change knows nothing of traces, and a collector that is slow or away costs traces and nothing else.

mod spans;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::Args;
use kplane_fleet::hub::{Hub, Missed};
use kplane_model::ServiceName;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use tokio::time::{Instant, interval};
use tonic::transport::{Channel, Endpoint, Uri};
use tracing::warn;

use crate::server::recorded_changes;

/// Time from a change to its trace: what nodes have not applied by then is in the trace as such.
const SETTLED: Duration = Duration::from_secs(10);
/// Time between two messages to the collector.
const PAUSE: Duration = Duration::from_secs(1);
/// Time that a message may take.
const DEADLINE: Duration = Duration::from_secs(5);
/// Maximum number of changes that wait for their traces.
const WAITING: usize = 1_024;
/// Maximum number of traces in a message.
const AT_ONCE: usize = 128;
/// Minimum time between two log lines about a collector that does not take traces.
const SAY_AGAIN: Duration = Duration::from_secs(300);

/// Flags: the collector of traces, and the share of changes that are traced.
#[derive(Args, Clone, Debug, Default)]
pub struct TraceFlags {
    /// Collector of OpenTelemetry traces, such as http://127.0.0.1:4317: OTLP over gRPC, without TLS. The control plane
    /// sends it a trace of some changes, from the write at the API server to the kernels of nodes.
    #[arg(long, value_name = "URL", value_parser = parse_collector, help_heading = "Traces")]
    otlp_endpoint: Option<Uri>,

    /// Share of the changes of Services that are traced, from 0 to 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.01, value_parser = parse_share, help_heading = "Traces")]
    otlp_sample: f64,
}

impl TraceFlags {
    /// Returns the configuration; `None` = no traces.
    pub fn config(&self) -> Option<Config> {
        Some(Config {
            collector: self.otlp_endpoint.clone()?,
            share: self.otlp_sample,
            settled: SETTLED,
        })
    }
}

/// Configuration of traces.
#[derive(Clone, Debug)]
pub struct Config {
    /// Address of the collector.
    pub collector: Uri,
    /// Share of the changes that are traced, from 0 to 1.
    pub share: f64,
    /// Time from a change to its trace.
    pub settled: Duration,
}

fn parse_collector(text: &str) -> Result<Uri, String> {
    let uri: Uri = text.parse().map_err(|error| format!("{error}"))?;
    match (uri.scheme_str(), uri.host()) {
        (Some("http"), Some(_)) => Ok(uri),
        _ => Err(
            "it must be http://HOST:PORT; for TLS let a collector on this machine send traces on"
                .to_owned(),
        ),
    }
}

fn parse_share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|error| format!("{error}"))?;
    match (0.0..=1.0).contains(&share) {
        true => Ok(share),
        false => Err("it must be from 0 to 1".to_owned()),
    }
}

/// Numbers of traces.
#[derive(Debug, Default)]
pub struct Counts {
    /// Traces that the collector took.
    pub sent: AtomicU64,
    /// Traces that were lost: the collector did not take them, or too many changes waited.
    pub lost: AtomicU64,
}

/// A change that waits for its trace.
struct Waiting {
    service: ServiceName,
    due: Instant,
}

/// Sends traces until the control plane ends, and counts them.
pub async fn send(hub: Arc<Hub>, config: Config, counts: Arc<Counts>) {
    let endpoint = Endpoint::from(config.collector.clone())
        .timeout(DEADLINE)
        .connect_timeout(DEADLINE);
    let mut collector = Collector {
        client: TraceServiceClient::new(endpoint.connect_lazy()),
        name: config.collector.to_string(),
        said: None,
        counts,
    };
    let mut changes = hub.touched.follow();
    let mut waiting = VecDeque::<Waiting>::new();
    let mut ticks = interval(PAUSE.min(config.settled));
    loop {
        tokio::select! {
            next = changes.next() => match next {
                Ok(names) => sample(&collector.counts, &config, names, &mut waiting),
                // Some changes have no trace.
                Err(Missed::Some) => {}
                Err(Missed::All) => return,
            },
            _ = ticks.tick() => {
                let now = Instant::now();
                let due = waiting.partition_point(|change| change.due <= now).min(AT_ONCE);
                let due: Vec<Waiting> = waiting.drain(..due).collect();
                collector.send(&hub, &due).await;
            }
            () = hub.shutdown.cancelled() => return,
        }
    }
}

fn sample(
    counts: &Counts,
    config: &Config,
    names: impl IntoIterator<Item = ServiceName>,
    waiting: &mut VecDeque<Waiting>,
) {
    let due = Instant::now() + config.settled;
    for service in names {
        if rand::random::<f64>() >= config.share {
            continue;
        }
        match waiting.len() < WAITING {
            true => waiting.push_back(Waiting { service, due }),
            false => drop(counts.lost.fetch_add(1, Ordering::Relaxed)),
        }
    }
}

struct Collector {
    client: TraceServiceClient<Channel>,
    name: String,
    /// Time of the last log line about it.
    said: Option<Instant>,
    counts: Arc<Counts>,
}

impl Collector {
    async fn send(&mut self, hub: &Hub, due: &[Waiting]) {
        let mut all = Vec::new();
        let mut traces = 0;
        for change in due {
            if let Some(recorded) = recorded_changes(hub, &change.service, 1).pop() {
                all.extend(spans::of(hub.store.epoch(), &change.service, &recorded));
                traces += 1;
            }
        }
        if all.is_empty() {
            return;
        }
        let request = ExportTraceServiceRequest {
            resource_spans: vec![spans::resource(hub.store.epoch(), all)],
        };
        let counter = match self.client.export(request).await {
            Ok(_) => &self.counts.sent,
            Err(status) => {
                self.complain(&status);
                &self.counts.lost
            }
        };
        counter.fetch_add(traces, Ordering::Relaxed);
    }

    fn complain(&mut self, status: &tonic::Status) {
        if self.said.is_none_or(|said| said.elapsed() >= SAY_AGAIN) {
            self.said = Some(Instant::now());
            warn!(
                collector = self.name,
                error = status.message(),
                "traces are lost: the collector of --otlp-endpoint does not take them. Check its address, and that it \
                 takes OTLP over gRPC"
            );
        }
    }
}
