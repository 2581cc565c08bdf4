//! kube-proxy's metrics of node ports on loopback addresses in mode nftables (K5, K6).

use std::fmt;

use kplane_dataplane::backend::nftables::LoopbackCounts;
use kplane_http::metrics::Name;
use kplane_model::Family;
use prometheus_client::encoding::DescriptorEncoder;

use super::numbers::float;

/// Writes the metrics of this network namespace.
pub(super) fn write(to: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let counts = LoopbackCounts::read();
    let name = |family: Family| match family {
        Family::V4 => "IPv4",
        Family::V6 => "IPv6",
    };
    let labels = Family::ALL.map(|family| [("ip_family", name(family))]);
    let each = |values: [u64; 2]| {
        let series = labels.iter().zip(values);
        series.map(|(labels, value)| (&labels[..], float(value)))
    };
    Name(
        "kubeproxy_nftables_localhost_nodeport_listeners",
        "Node ports of TCP that the agent's proxy serves on loopback addresses alone",
    )
    .gauge(to, each(counts.served))?;
    // kplane leads packets to one socket, so no other program can hold a node port's.
    Name(
        "kubeproxy_nftables_localhost_nodeport_listener_creation_failures",
        "Node ports that could not be opened on loopback addresses; always 0, because kplane opens no socket for each",
    )
    .counter(to, each([0; 2]))?;
    let refused: Vec<_> = counts
        .refused
        .iter()
        .map(|(family, protocol, packets)| {
            let labels = [
                ("ip_family", name(*family)),
                ("protocol", protocol.as_str()),
            ];
            (labels, float(*packets))
        })
        .collect();
    Name(
        "kubeproxy_nftables_localhost_nodeport_rejected_packets",
        "Packets for node ports on loopback addresses that were rejected, because nothing serves them there",
    )
    .counter(to, refused.iter().map(|(labels, value)| (&labels[..], *value)))
}
