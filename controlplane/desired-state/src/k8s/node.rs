//! Nodes.

use serde::Deserialize;

use super::policy::Labelled;
use super::{ObjectMeta, Texts, ZONE_LABEL};

/// A Node.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(from = "Labelled<NodeSpec, NodeStatus>")]
pub struct Node {
    /// Metadata; of the labels, only those that Services need.
    pub metadata: ObjectMeta,
    /// All labels.
    pub labels: Texts,
    /// Specification.
    pub spec: NodeSpec,
    /// Status.
    pub status: NodeStatus,
}

impl From<Labelled<NodeSpec, NodeStatus>> for Node {
    fn from(read: Labelled<NodeSpec, NodeStatus>) -> Self {
        let (mut metadata, labels, spec, status) = read.split();
        let zone = labels.get_key_value(ZONE_LABEL);
        metadata.labels = zone.map(|(key, zone)| Texts::from([(key.clone(), zone.clone())]));
        Self {
            metadata,
            labels,
            spec,
            status,
        }
    }
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
