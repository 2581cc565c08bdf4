//! Nodes.

use serde::Deserialize;

use super::ObjectMeta;

/// A Node.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    /// Metadata.
    pub metadata: ObjectMeta,
    /// Specification.
    #[serde(default)]
    pub spec: NodeSpec,
    /// Status.
    #[serde(default)]
    pub status: NodeStatus,
}

/// `spec` of a Node.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSpec {
    /// First pod range.
    #[serde(rename = "podCIDR")]
    pub pod_cidr: Option<String>,
    /// All pod ranges.
    #[serde(rename = "podCIDRs")]
    pub pod_cidrs: Option<Vec<String>>,
    /// Taints.
    pub taints: Option<Vec<Taint>>,
}

/// A taint of a Node.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
pub struct Taint {
    /// The taint's key.
    pub key: String,
}

/// `status` of a Node.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// Addresses.
    pub addresses: Option<Vec<NodeAddress>>,
}

/// One address of a Node.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
pub struct NodeAddress {
    /// `InternalIP`, `ExternalIP`, `Hostname`, ...
    #[serde(rename = "type")]
    pub type_: String,
    /// The address.
    pub address: String,
}
