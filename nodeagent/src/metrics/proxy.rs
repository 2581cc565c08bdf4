//! The metrics of the userspace proxy: sums over all Services.

use std::fmt;

use kplane_dataplane::backend::userspace::{Proxy, ProxyFailure};
use kplane_http::metrics::{Labels, Name};
use prometheus_client::encoding::DescriptorEncoder;

use super::numbers::float;

/// Writes what the proxy counts.
pub(super) fn write(proxy: &Proxy, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let (counts, avoided) = proxy.table().totals();
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
        "kplane_agent_proxy_connect_seconds",
        "Sum of the times from a client's arrival until an endpoint had answered",
    )
    .counter(
        to,
        [(&[] as &Labels<'_>, counts.connect_time.as_secs_f64())],
    )
}
