//! The metrics of the userspace proxy: sums over all Services, and those Services that ask for the proxy (U56).

use std::fmt;

use kplane_dataplane::backend::Proxy;
use kplane_http::metrics::{Labels, Name};
use kplane_model::{ProxyCounts, ProxyFailure, ServiceKey};
use prometheus_client::encoding::DescriptorEncoder;

use super::numbers::float;
use super::service_labels;

/// Most ServicePorts that have metrics of their own.
const LISTED: usize = 200;

/// A count of a Service's connections.
type Count = fn(&ProxyCounts) -> f64;

/// Writes what the proxy counts.
pub(super) fn write(proxy: &dyn Proxy, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let (counts, avoided) = proxy.totals();
    let one = |value: u64| [(&[] as &Labels<'_>, float(value))];
    let [connections, flows] = proxy.open().map(|open| open as u64);
    Name(
        "kplane_agent_proxy_open",
        "TCP connections and UDP flows of the userspace proxy that are open",
    )
    .gauge(
        to,
        [
            (&[("protocol", "TCP")] as &Labels<'_>, float(connections)),
            (&[("protocol", "UDP")], float(flows)),
        ],
    )?;
    Name(
        "kplane_agent_proxy_opened",
        "TCP connections and UDP flows that the userspace proxy led to an endpoint",
    )
    .counter(to, one(counts.opened))?;
    let failed = ProxyFailure::ALL.map(|why| [("reason", why.as_str())]);
    let failed = failed.iter().zip(counts.failed);
    Name(
        "kplane_agent_proxy_failed",
        "TCP connections and UDP flows that reached no endpoint",
    )
    .counter(
        to,
        failed.map(|(labels, count)| (&labels[..], float(count))),
    )?;
    Name(
        "kplane_agent_proxy_retries",
        "Further attempts, after a refusal or beside an endpoint that did not answer",
    )
    .counter(to, one(counts.retries))?;
    Name(
        "kplane_agent_proxy_endpoints_avoided",
        "Endpoints of ServicePorts that new connections avoid, since they failed",
    )
    .gauge(to, one(avoided as u64))?;
    Name(
        "kplane_agent_proxy_bytes",
        "Bytes that the userspace proxy moved",
    )
    .counter(
        to,
        [
            (
                &[("to", "endpoint")] as &Labels<'_>,
                float(counts.to_endpoints),
            ),
            (&[("to", "client")], float(counts.to_clients)),
        ],
    )?;
    Name(
        "kplane_agent_proxy_lost",
        "Datagrams to clients that the kernel did not take",
    )
    .counter(to, one(counts.lost))?;
    Name(
        "kplane_agent_proxy_connect_seconds",
        "Sum of the times from a client's arrival until an endpoint had answered",
    )
    .counter(
        to,
        [(&[] as &Labels<'_>, counts.connect_time.as_secs_f64())],
    )?;
    services(&proxy.listed(LISTED), to)
}

/// Writes the counts of single ServicePorts.
fn services(listed: &[(ServiceKey, ProxyCounts)], to: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let each = |value: fn(&ProxyCounts) -> f64| {
        let series = listed.iter();
        let series = series.map(move |(key, counts)| (service_labels(key), value(counts)));
        series.collect::<Vec<_>>()
    };
    let open = each(|counts| float(counts.open));
    Name(
        "kplane_agent_proxy_service_open",
        "Open TCP connections or UDP flows of a Service that asks for the userspace proxy",
    )
    .gauge(to, open.iter().map(|(labels, value)| (&labels[..], *value)))?;
    let counters: [(Name, Count); 6] = [
        (
            Name(
                "kplane_agent_proxy_service_opened",
                "Its connections and flows that the proxy led to an endpoint",
            ),
            |counts| float(counts.opened),
        ),
        (
            Name(
                "kplane_agent_proxy_service_failed",
                "Its connections and flows that reached no endpoint",
            ),
            |counts| float(counts.failed.iter().sum()),
        ),
        (
            Name(
                "kplane_agent_proxy_service_retries",
                "Further attempts for its connections and flows",
            ),
            |counts| float(counts.retries),
        ),
        (
            Name(
                "kplane_agent_proxy_service_endpoint_bytes",
                "Bytes from its clients to its endpoints",
            ),
            |counts| float(counts.to_endpoints),
        ),
        (
            Name(
                "kplane_agent_proxy_service_client_bytes",
                "Bytes from its endpoints to its clients",
            ),
            |counts| float(counts.to_clients),
        ),
        (
            Name(
                "kplane_agent_proxy_service_connect_seconds",
                "Sum of the times from its clients' arrivals until an endpoint had answered",
            ),
            |counts| counts.connect_time.as_secs_f64(),
        ),
    ];
    for (name, value) in counters {
        let series = each(value);
        name.counter(
            to,
            series.iter().map(|(labels, value)| (&labels[..], *value)),
        )?;
    }
    Ok(())
}
