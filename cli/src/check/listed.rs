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
    #[serde(default)]
    pub(super) publish_not_ready_addresses: bool,
    #[serde(default)]
    ports: Vec<Port>,
    #[serde(default)]
    health_check_node_port: u16,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Port {
    #[serde(default)]
    node_port: u16,
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

impl ServiceSpec {
    /// Returns the addresses of the cluster.
    pub(super) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        let addresses = self.cluster_ips.iter();
        addresses.filter_map(|address| address.parse().ok())
    }

    /// Returns the ports on nodes. One may come twice, for two protocols.
    pub(super) fn node_ports(&self) -> impl Iterator<Item = u16> {
        let ports = self.ports.iter().map(|port| port.node_port);
        let all = ports.chain([self.health_check_node_port]);
        all.filter(|port| *port != 0)
    }
}
