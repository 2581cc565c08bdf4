//! The few fields of a cluster's objects that checks need.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::Deserialize;

/// The namespace, name and labels of an object.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Metadata {
    #[serde(default)]
    pub(super) namespace: String,
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) labels: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Service {
    pub(super) metadata: Metadata,
    #[serde(default)]
    pub(super) spec: ServiceSpec,
    #[serde(default)]
    status: ServiceStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ServiceStatus {
    #[serde(default)]
    load_balancer: LoadBalancer,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct LoadBalancer {
    #[serde(default)]
    ingress: Vec<Ingress>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Ingress {
    #[serde(default)]
    ip: String,
    #[serde(default)]
    ip_mode: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ServiceSpec {
    #[serde(default)]
    pub(super) selector: BTreeMap<String, String>,
    #[serde(default, rename = "type")]
    pub(super) kind: String,
    /// Addresses, or `None` for a headless Service.
    #[serde(default, rename = "clusterIPs")]
    cluster_ips: Vec<String>,
    #[serde(default, rename = "externalIPs")]
    external_ips: Vec<String>,
    #[serde(default)]
    pub(super) publish_not_ready_addresses: bool,
    #[serde(default)]
    pub(super) ports: Vec<Port>,
    #[serde(default)]
    health_check_node_port: u16,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Port {
    #[serde(default)]
    node_port: u16,
    #[serde(default)]
    pub(super) port: u16,
    #[serde(default)]
    pub(super) protocol: String,
}

/// A range of addresses for Services.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct ServiceCidr {
    #[serde(default)]
    pub(super) spec: ServiceCidrSpec,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct ServiceCidrSpec {
    #[serde(default)]
    pub(super) cidrs: Vec<String>,
}

impl Service {
    /// Returns the addresses of `externalIPs`, and those that nodes serve for a load balancer.
    pub(super) fn external(&self) -> [Vec<IpAddr>; 2] {
        let named = self.spec.external_ips.iter();
        let served = self.status.load_balancer.ingress.iter().filter(|one| one.ip_mode != "Proxy");
        let parse = |text: &String| text.parse().ok();
        [
            named.filter_map(parse).collect(),
            served.filter_map(|one| parse(&one.ip)).collect(),
        ]
    }
}

impl ServiceSpec {
    /// Returns the addresses of the cluster.
    pub(super) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.cluster_ips.iter().filter_map(|address| address.parse().ok())
    }

    /// Returns the ports on nodes. One may come twice, for two protocols.
    pub(super) fn node_ports(&self) -> impl Iterator<Item = u16> {
        self.ports
            .iter()
            .map(|port| port.node_port)
            .chain([self.health_check_node_port])
            .filter(|port| *port != 0)
    }
}
