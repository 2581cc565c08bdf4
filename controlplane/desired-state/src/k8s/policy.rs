//! NetworkPolicies, and the namespaces and Pods that they are about.

use std::sync::Arc;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::texts::maybe_shared;
use super::{ObjectMeta, Texts};

/// A NetworkPolicy.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
pub struct NetworkPolicy {
    /// Metadata.
    pub metadata: ObjectMeta,
    /// Specification.
    #[serde(default)]
    pub spec: NetworkPolicySpec,
}

/// `spec` of a NetworkPolicy.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NetworkPolicySpec {
    /// The Pods of the namespace that the policy is for.
    pub pod_selector: Option<LabelSelector>,
    /// `Ingress` and `Egress`; unset = Ingress, and Egress if there are egress rules.
    pub policy_types: Option<Vec<String>>,
    /// Rules for connections to the Pods.
    pub ingress: Option<Vec<IngressRule>>,
    /// Rules for connections from the Pods.
    pub egress: Option<Vec<EgressRule>>,
}

/// A rule for connections to Pods.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(default)]
pub struct IngressRule {
    /// Sources; unset or empty = all.
    pub from: Option<Vec<PolicyPeer>>,
    /// Ports of the Pods; unset or empty = all.
    pub ports: Option<Vec<PolicyPort>>,
}

/// A rule for connections from Pods.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(default)]
pub struct EgressRule {
    /// Destinations; unset or empty = all.
    pub to: Option<Vec<PolicyPeer>>,
    /// Ports of the destinations; unset or empty = all.
    pub ports: Option<Vec<PolicyPort>>,
}

/// A peer of a rule.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PolicyPeer {
    /// Selects Pods.
    pub pod_selector: Option<LabelSelector>,
    /// Selects namespaces.
    pub namespace_selector: Option<LabelSelector>,
    /// A range of addresses.
    pub ip_block: Option<IpBlock>,
}

/// A range of addresses without some ranges in it.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(default)]
pub struct IpBlock {
    /// The range.
    pub cidr: String,
    /// Ranges in it that are not meant.
    pub except: Option<Vec<String>>,
}

/// A port, or a range of ports, of a rule.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PolicyPort {
    /// TCP (also when unset), UDP or SCTP.
    pub protocol: Option<String>,
    /// A number, or the name of a container port; unset = all ports.
    pub port: Option<NameOrNumber>,
    /// The last port of a range.
    pub end_port: Option<i64>,
}

/// A port's name or number.
#[derive(Clone, Debug, PartialEq, Hash, Deserialize)]
#[serde(untagged)]
pub enum NameOrNumber {
    /// A number.
    Number(i64),
    /// A name.
    Name(Arc<str>),
}

/// A label selector.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LabelSelector {
    /// Labels with these values.
    pub match_labels: Option<Texts>,
    /// Further requirements.
    pub match_expressions: Option<Vec<MatchExpression>>,
}

/// A requirement of a label selector.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(default)]
pub struct MatchExpression {
    /// The label.
    pub key: Arc<str>,
    /// `In`, `NotIn`, `Exists` or `DoesNotExist`.
    pub operator: String,
    /// Values for `In` and `NotIn`.
    pub values: Option<Vec<Arc<str>>>,
}

/// A Namespace.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(from = "Labelled<IgnoredAny, IgnoredAny>")]
pub struct Namespace {
    /// Metadata, without labels.
    pub metadata: ObjectMeta,
    /// All labels.
    pub labels: Texts,
}

/// A Pod.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(from = "Labelled<PodSpec, PodStatus>")]
pub struct Pod {
    /// Metadata, without labels.
    pub metadata: ObjectMeta,
    /// All labels.
    pub labels: Texts,
    /// Specification.
    pub spec: PodSpec,
    /// Status.
    pub status: PodStatus,
}

/// `spec` of a Pod.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    /// The Pod's node.
    #[serde(deserialize_with = "maybe_shared")]
    pub node_name: Option<Arc<str>>,
    /// The Pod uses its node's network.
    pub host_network: bool,
    /// Containers.
    pub containers: Option<Vec<Container>>,
    /// Containers that end before the others begin, and sidecars, which go on.
    pub init_containers: Option<Vec<Container>>,
}

/// A container of a Pod.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Container {
    /// Its ports.
    pub ports: Option<Vec<ContainerPort>>,
    /// `Always` for sidecars.
    pub restart_policy: Option<String>,
}

/// A port of a container.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerPort {
    /// Its name.
    #[serde(deserialize_with = "maybe_shared")]
    pub name: Option<Arc<str>>,
    /// TCP (also when unset), UDP or SCTP.
    pub protocol: Option<String>,
    /// Its number.
    pub container_port: i64,
}

/// `status` of a Pod.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    /// `Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`.
    pub phase: Option<String>,
    /// The first address.
    #[serde(rename = "podIP")]
    pub pod_ip: Option<String>,
    /// All addresses.
    #[serde(rename = "podIPs")]
    pub pod_ips: Option<Vec<PodIp>>,
}

/// An address of a Pod.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(default)]
pub struct PodIp {
    /// The address.
    pub ip: String,
}

/// An object of which all labels count.
#[derive(Deserialize)]
pub(super) struct Labelled<Spec, Status> {
    metadata: LabelledMeta,
    #[serde(default)]
    spec: Option<Spec>,
    #[serde(default)]
    status: Option<Status>,
}

impl<Spec: Default, Status: Default> Labelled<Spec, Status> {
    /// Returns the metadata without labels, all labels, and the rest.
    pub(super) fn split(self) -> (ObjectMeta, Texts, Spec, Status) {
        let (metadata, labels) = self.metadata.split();
        let (spec, status) = (self.spec, self.status);
        (
            metadata,
            labels,
            spec.unwrap_or_default(),
            status.unwrap_or_default(),
        )
    }
}

/// The metadata that kplane reads, with all labels.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LabelledMeta {
    name: Arc<str>,
    #[serde(default, deserialize_with = "maybe_shared")]
    namespace: Option<Arc<str>>,
    #[serde(default, deserialize_with = "super::read_uid")]
    uid: Option<super::Uid>,
    #[serde(default)]
    resource_version: super::Version,
    #[serde(default)]
    labels: Option<Texts>,
    #[serde(default)]
    creation_timestamp: Option<Arc<str>>,
    #[serde(default)]
    deletion_timestamp: Option<Arc<str>>,
}

impl LabelledMeta {
    fn split(self) -> (ObjectMeta, Texts) {
        let metadata = ObjectMeta {
            name: self.name,
            namespace: self.namespace,
            uid: self.uid,
            resource_version: self.resource_version,
            labels: None,
            annotations: None,
            creation_timestamp: self.creation_timestamp,
            deletion_timestamp: self.deletion_timestamp,
        };
        (metadata, self.labels.unwrap_or_default())
    }
}

impl From<Labelled<IgnoredAny, IgnoredAny>> for Namespace {
    fn from(read: Labelled<IgnoredAny, IgnoredAny>) -> Self {
        let (metadata, labels, ..) = read.split();
        Self { metadata, labels }
    }
}

impl From<Labelled<PodSpec, PodStatus>> for Pod {
    fn from(read: Labelled<PodSpec, PodStatus>) -> Self {
        let (metadata, labels, spec, status) = read.split();
        Self {
            metadata,
            labels,
            spec,
            status,
        }
    }
}
