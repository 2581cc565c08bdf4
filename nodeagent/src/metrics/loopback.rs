//! kube-proxy's metrics of node ports on loopback addresses in mode nftables (K5, K6).

use std::fmt;

use kplane_dataplane::backend::nftables::LoopbackCounts;
use kplane_http::metrics::Metric;
use kplane_model::Family;
use prometheus_client::encoding::DescriptorEncoder;

use super::numbers::float;

/// Writes the metrics of this network namespace.
pub(super) fn write(to: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let counts = LoopbackCounts::read();
    let labels = Family::ALL.map(|family| [("ip_family", family.as_str())]);
    let each = |values: [u64; 2]| labels.into_iter().zip(values.map(float));
    Metric::new("kubeproxy_nftables_localhost_nodeport_listeners")
        .help("Node ports of TCP that the agent's proxy serves on loopback addresses alone")
        .gauge(to, each(counts.served))?;
    // kplane leads packets to one socket, so no other program can hold a node port's.
    Metric::new("kubeproxy_nftables_localhost_nodeport_listener_creation_failures")
        .help("Node ports that could not be opened on loopback addresses; always 0, because kplane opens no socket for each")
        .counter(to, each([0; 2]))?;
    let refused = counts.refused.iter().map(|(family, protocol, packets)| {
        let (family, protocol) = (family.as_str(), protocol.as_str());
        let labels = [("ip_family", family), ("protocol", protocol)];
        (labels, float(*packets))
    });
    Metric::new("kubeproxy_nftables_localhost_nodeport_rejected_packets")
        .help("Packets for node ports on loopback addresses that were rejected, because nothing serves them there")
        .counter(to, refused)
}
