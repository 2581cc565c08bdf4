//! A Service as the control plane publishes it.

use std::collections::BTreeMap;
use std::net::IpAddr;

use kp_controlplane::publish::Published;
use kplane_model::select::variants;
use kplane_model::{Endpoint, ServiceKey, ServicePort, TrafficPolicy};

/// One port with a ClusterIP and nothing else.
pub(crate) fn cluster_ip_service(
    key: ServiceKey,
    port: u16,
    cluster_ip: IpAddr,
    endpoints: &[Endpoint],
) -> Published {
    let port = ServicePort {
        key,
        port,
        cluster_ip,
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        node_port: None,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        affinity_timeout_s: None,
        source_ranges: Vec::new(),
        health_check_node_port: None,
        ipvs_scheduler: None,
    };
    Published {
        variants: variants(&port, endpoints),
        port,
        local: BTreeMap::new(),
    }
}
