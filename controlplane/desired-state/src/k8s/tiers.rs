//! ClusterNetworkPolicies. Fields that are not known are kept by name: what they restrict must not be open.

use std::fmt;

use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::ObjectMeta;
use super::policy::LabelSelector;

/// A ClusterNetworkPolicy.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
pub struct ClusterNetworkPolicy {
    /// Metadata.
    pub metadata: ObjectMeta,
    /// Specification.
    #[serde(default)]
    pub spec: ClusterPolicySpec,
}

/// `spec` of a ClusterNetworkPolicy.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(default)]
pub struct ClusterPolicySpec {
    /// `Admin` or `Baseline`.
    pub tier: Option<String>,
    /// 0 to 1000; smaller numbers come first.
    pub priority: Option<i64>,
    /// The Pods that the policy is for.
    pub subject: ClusterPeer,
    /// Rules for connections to the Pods.
    pub ingress: Option<Vec<ClusterRule>>,
    /// Rules for connections from the Pods.
    pub egress: Option<Vec<ClusterRule>>,
    /// Other fields.
    #[serde(flatten)]
    pub others: Others,
}

/// A rule of a ClusterNetworkPolicy.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(default)]
pub struct ClusterRule {
    /// Its name.
    pub name: Option<String>,
    /// `Accept`, `Deny` or `Pass`.
    pub action: Option<String>,
    /// Sources, of an ingress rule.
    pub from: Option<Vec<ClusterPeer>>,
    /// Destinations, of an egress rule.
    pub to: Option<Vec<ClusterPeer>>,
    /// Protocols and ports; unset = all.
    pub protocols: Option<Vec<ClusterProtocol>>,
    /// Other fields.
    #[serde(flatten)]
    pub others: Others,
}

/// A subject, or a peer of a rule. One field is set.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(default)]
pub struct ClusterPeer {
    /// All Pods of these namespaces.
    pub namespaces: Option<LabelSelector>,
    /// Pods of namespaces.
    pub pods: Option<NamespacedPods>,
    /// Addresses of nodes.
    pub nodes: Option<LabelSelector>,
    /// Ranges of addresses.
    pub networks: Option<Vec<String>>,
    /// Other fields.
    #[serde(flatten)]
    pub others: Others,
}

/// Pods of namespaces.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NamespacedPods {
    /// The namespaces; unset = all.
    pub namespace_selector: Option<LabelSelector>,
    /// The Pods in them.
    pub pod_selector: Option<LabelSelector>,
    /// Other fields.
    #[serde(flatten)]
    pub others: Others,
}

/// A protocol of a rule. One field is set.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterProtocol {
    /// TCP.
    pub tcp: Option<ClusterPorts>,
    /// UDP.
    pub udp: Option<ClusterPorts>,
    /// SCTP.
    pub sctp: Option<ClusterPorts>,
    /// Name of a container port.
    pub destination_named_port: Option<String>,
    /// Other fields.
    #[serde(flatten)]
    pub others: Others,
}

/// Ports of a protocol.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterPorts {
    /// The destination's port; unset = all.
    pub destination_port: Option<ClusterPort>,
    /// Other fields.
    #[serde(flatten)]
    pub others: Others,
}

/// A port, or a range. One field is set.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(default)]
pub struct ClusterPort {
    /// A port.
    pub number: Option<i64>,
    /// A range of ports.
    pub range: Option<ClusterRange>,
    /// Other fields.
    #[serde(flatten)]
    pub others: Others,
}

/// A range of ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(default)]
pub struct ClusterRange {
    /// The first.
    pub start: i64,
    /// The last.
    pub end: i64,
}

/// Names of fields that are not known, at most 4.
#[derive(Clone, Debug, Default, PartialEq, Hash)]
pub struct Others(pub Vec<String>);

/// Maximum number of names in [`Others`], and of characters of each.
const NAMES: usize = 4;
const NAME: usize = 64;

impl<'de> Deserialize<'de> for Others {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(Names)
    }
}

struct Names;

impl<'de> Visitor<'de> for Names {
    type Value = Others;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Others, A::Error> {
        let mut names = Vec::new();
        while let Some((name, _)) = map.next_entry::<String, IgnoredAny>()? {
            if names.len() < NAMES {
                names.push(name.chars().take(NAME).collect());
            }
        }
        Ok(Others(names))
    }
}
