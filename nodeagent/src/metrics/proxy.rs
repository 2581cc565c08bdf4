//! The metrics of the userspace proxy: sums over all Services, and those Services that ask for the proxy (U56).

use std::fmt;

use kplane_dataplane::backend::Proxy;
use kplane_http::metrics::{Metric, alone};
use kplane_model::{ProxyCounts, ProxyFailure, ServiceKey};
use prometheus_client::encoding::DescriptorEncoder;

use super::numbers::float;
use super::service_labels;

/// Most ServicePorts that have metrics of their own.
const LISTED: usize = 200;

/// Writes what the proxy counts.
pub(super) fn write(proxy: &dyn Proxy, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let (counts, avoided) = proxy.totals();
    let one = |value: u64| [alone(float(value))];
    let [connections, flows] = proxy.open().map(|open| open as u64);
    Metric::new("kplane_agent_proxy_open")
        .help("TCP connections and UDP flows of the userspace proxy that are open")
        .gauge(
            to,
            [
                ([("protocol", "TCP")], float(connections)),
                ([("protocol", "UDP")], float(flows)),
            ],
        )?;
    Metric::new("kplane_agent_proxy_opened")
        .help("TCP connections and UDP flows that the userspace proxy led to an endpoint")
        .counter(to, one(counts.opened))?;
    let failed = ProxyFailure::ALL
        .map(|why| [("reason", why.as_str())])
        .into_iter()
        .zip(counts.failed.map(float));
    Metric::new("kplane_agent_proxy_failed")
        .help("TCP connections and UDP flows that reached no endpoint")
        .counter(to, failed)?;
    Metric::new("kplane_agent_proxy_retries")
        .help("Further attempts, after a refusal or beside an endpoint that did not answer")
        .counter(to, one(counts.retries))?;
    Metric::new("kplane_agent_proxy_endpoints_avoided")
        .help("Endpoints of ServicePorts that new connections avoid, since they failed")
        .gauge(to, one(avoided as u64))?;
    Metric::new("kplane_agent_proxy_bytes")
        .help("Bytes that the userspace proxy moved")
        .counter(
            to,
            [
                ([("to", "endpoint")], float(counts.to_endpoints)),
                ([("to", "client")], float(counts.to_clients)),
            ],
        )?;
    Metric::new("kplane_agent_proxy_lost")
        .help("Datagrams to clients that the kernel did not take")
        .counter(to, one(counts.lost))?;
    Metric::new("kplane_agent_proxy_connect_seconds")
        .help("Sum of the times from a client's arrival until an endpoint had answered")
        .counter(to, [alone(counts.connect_time.as_secs_f64())])?;
    services(&proxy.listed(LISTED), to)
}

/// Writes the counts of single ServicePorts.
fn services(listed: &[(ServiceKey, ProxyCounts)], to: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let each = |value: fn(&ProxyCounts) -> f64| {
        listed.iter().map(move |(key, counts)| (service_labels(key), value(counts)))
    };
    Metric::new("kplane_agent_proxy_service_open")
        .help("Open TCP connections or UDP flows of a Service that asks for the userspace proxy")
        .gauge(to, each(|counts| float(counts.open)))?;
    Metric::new("kplane_agent_proxy_service_opened")
        .help("Its connections and flows that the proxy led to an endpoint")
        .counter(to, each(|counts| float(counts.opened)))?;
    Metric::new("kplane_agent_proxy_service_failed")
        .help("Its connections and flows that reached no endpoint")
        .counter(to, each(|counts| float(counts.failed.iter().sum())))?;
    Metric::new("kplane_agent_proxy_service_retries")
        .help("Further attempts for its connections and flows")
        .counter(to, each(|counts| float(counts.retries)))?;
    Metric::new("kplane_agent_proxy_service_endpoint_bytes")
        .help("Bytes from its clients to its endpoints")
        .counter(to, each(|counts| float(counts.to_endpoints)))?;
    Metric::new("kplane_agent_proxy_service_client_bytes")
        .help("Bytes from its endpoints to its clients")
        .counter(to, each(|counts| float(counts.to_clients)))?;
    Metric::new("kplane_agent_proxy_service_connect_seconds")
        .help("Sum of the times from its clients' arrivals until an endpoint had answered")
        .counter(to, each(|counts| counts.connect_time.as_secs_f64()))
}
