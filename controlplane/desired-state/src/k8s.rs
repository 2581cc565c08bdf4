//! The Kubernetes objects that kplane reads, with only the fields that it reads.
//!
//! Slim types need a third of the memory that full types need, and show what kplane uses. Unknown
//! fields are ignored; absent ones are `None` or empty.

mod endpoint;
mod node;
mod policy;
mod texts;
mod tiers;
mod uid;
mod version;

use std::fmt;
use std::sync::Arc;

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

pub use endpoint::{EndpointConditions, EndpointHints, Hint, SliceEndpoint, TargetRef};
pub use node::{Node, NodeAddress, NodeSpec, NodeStatus, Taint};
pub use policy::{
    Container, ContainerPort, EgressRule, IngressRule, IpBlock, LabelSelector, MatchExpression,
    NameOrNumber, Namespace, NetworkPolicy, NetworkPolicySpec, Pod, PodIp, PodSpec, PodStatus,
    PolicyPeer, PolicyPort,
};
pub use texts::Texts;
use texts::{maybe_shared, of_these};
pub use tiers::{
    ClusterNetworkPolicy, ClusterPeer, ClusterPolicySpec, ClusterPort, ClusterPorts,
    ClusterProtocol, ClusterRange, ClusterRule, NamespacedPods, Others,
};
pub use uid::Uid;
use uid::read_uid;
pub use version::Version;

/// The kinds that kplane reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `v1` Service.
    Service,
    /// `discovery.k8s.io/v1` EndpointSlice.
    EndpointSlice,
    /// `v1` Node.
    Node,
    /// `networking.k8s.io/v1` ServiceCIDR.
    ServiceCidr,
    /// `networking.k8s.io/v1` NetworkPolicy.
    NetworkPolicy,
    /// `v1` Namespace.
    Namespace,
    /// `v1` Pod.
    Pod,
    /// `policy.networking.k8s.io` ClusterNetworkPolicy.
    ClusterNetworkPolicy,
}

impl Kind {
    /// All kinds that Services need.
    pub const ALL: [Self; 4] = [
        Self::Service,
        Self::EndpointSlice,
        Self::Node,
        Self::ServiceCidr,
    ];

    /// These, and those that NetworkPolicies need.
    pub const WITH_POLICIES: [Self; 8] = [
        Self::Service,
        Self::EndpointSlice,
        Self::Node,
        Self::ServiceCidr,
        Self::NetworkPolicy,
        Self::Namespace,
        Self::Pod,
        Self::ClusterNetworkPolicy,
    ];

    /// Returns the name as Kubernetes writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::Node => "Node",
            Self::ServiceCidr => "ServiceCIDR",
            Self::NetworkPolicy => "NetworkPolicy",
            Self::Namespace => "Namespace",
            Self::Pod => "Pod",
            Self::ClusterNetworkPolicy => "ClusterNetworkPolicy",
        }
    }

    /// Returns the supported `apiVersion`.
    pub fn api_version(self) -> &'static str {
        match self {
            Self::Service | Self::Node | Self::Namespace | Self::Pod => "v1",
            Self::EndpointSlice => "discovery.k8s.io/v1",
            Self::ServiceCidr | Self::NetworkPolicy => "networking.k8s.io/v1",
            Self::ClusterNetworkPolicy => "policy.networking.k8s.io/v1alpha2",
        }
    }

    /// Returns whether objects of this `apiVersion` can be read.
    pub fn reads(self, api_version: &str) -> bool {
        let is_beta = api_version == "policy.networking.k8s.io/v1beta1";
        api_version == self.api_version() || self == Self::ClusterNetworkPolicy && is_beta
    }

    /// Returns whether objects of this kind live in a namespace.
    pub fn is_namespaced(self) -> bool {
        match self {
            Self::Service | Self::EndpointSlice | Self::NetworkPolicy | Self::Pod => true,
            Self::Node | Self::ServiceCidr | Self::Namespace | Self::ClusterNetworkPolicy => false,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Identity of an object. `namespace` is empty for cluster-wide kinds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectId {
    /// The kind.
    pub kind: Kind,
    /// The namespace.
    pub namespace: Arc<str>,
    /// The name.
    pub name: Arc<str>,
}

/// An object of one of the kinds.
#[derive(Clone, Debug, PartialEq, Hash)]
pub enum Object {
    /// A Service.
    Service(Service),
    /// An EndpointSlice.
    EndpointSlice(EndpointSlice),
    /// A Node.
    Node(Node),
    /// A ServiceCIDR.
    ServiceCidr(ServiceCidr),
    /// A NetworkPolicy.
    NetworkPolicy(NetworkPolicy),
    /// A Namespace.
    Namespace(Namespace),
    /// A Pod.
    Pod(Pod),
    /// A ClusterNetworkPolicy.
    ClusterNetworkPolicy(ClusterNetworkPolicy),
}

impl Object {
    /// Returns the kind.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Service(_) => Kind::Service,
            Self::EndpointSlice(_) => Kind::EndpointSlice,
            Self::Node(_) => Kind::Node,
            Self::ServiceCidr(_) => Kind::ServiceCidr,
            Self::NetworkPolicy(_) => Kind::NetworkPolicy,
            Self::Namespace(_) => Kind::Namespace,
            Self::Pod(_) => Kind::Pod,
            Self::ClusterNetworkPolicy(_) => Kind::ClusterNetworkPolicy,
        }
    }

    /// Returns the metadata.
    pub fn metadata(&self) -> &ObjectMeta {
        match self {
            Self::Service(o) => &o.metadata,
            Self::EndpointSlice(o) => &o.metadata,
            Self::Node(o) => &o.metadata,
            Self::ServiceCidr(o) => &o.metadata,
            Self::NetworkPolicy(o) => &o.metadata,
            Self::Namespace(o) => &o.metadata,
            Self::Pod(o) => &o.metadata,
            Self::ClusterNetworkPolicy(o) => &o.metadata,
        }
    }

    /// Returns the identity; a namespaced object without a namespace is in `default`.
    pub fn id(&self) -> ObjectId {
        let kind = self.kind();
        let meta = self.metadata();
        ObjectId {
            kind,
            namespace: meta.namespace_of(kind),
            name: meta.name.clone(),
        }
    }
}

/// The metadata that kplane reads.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectMeta {
    /// The name.
    pub name: Arc<str>,
    /// The namespace.
    #[serde(default, deserialize_with = "maybe_shared")]
    pub namespace: Option<Arc<str>>,
    /// The UID, which distinguishes the object from earlier and later ones of the same name.
    #[serde(default, deserialize_with = "read_uid")]
    pub uid: Option<Uid>,
    /// The version of this state of the object.
    #[serde(default)]
    pub resource_version: Version,
    /// Labels; only those that kplane reads are kept.
    #[serde(default, deserialize_with = "read_labels")]
    pub labels: Option<Texts>,
    /// Annotations; only those that kplane reads are kept.
    #[serde(default, deserialize_with = "read_annotations")]
    pub annotations: Option<Texts>,
    /// RFC 3339 time of creation: the older of two conflicting Services wins.
    #[serde(default)]
    pub creation_timestamp: Option<Arc<str>>,
    /// Time of deletion, set while the object is being deleted.
    #[serde(default)]
    pub deletion_timestamp: Option<Arc<str>>,
}

impl ObjectMeta {
    /// Returns the namespace of an object of `kind`: empty for cluster-wide kinds, else the written
    /// one or `default`.
    pub fn namespace_of(&self, kind: Kind) -> Arc<str> {
        match &self.namespace {
            _ if !kind.is_namespaced() => "".into(),
            Some(namespace) if !namespace.is_empty() => namespace.clone(),
            _ => "default".into(),
        }
    }

    /// Returns a label's value.
    pub fn label(&self, name: &str) -> Option<&Arc<str>> {
        self.labels.as_ref()?.get(name)
    }
}

fn read_labels<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Texts>, D::Error> {
    of_these(&LABELS, from)
}

fn read_annotations<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Texts>, D::Error> {
    of_these(&ANNOTATIONS, from)
}

/// Annotation of an EndpointSlice: RFC 3339 time of the change that led to the slice.
pub const LAST_CHANGE_ANNOTATION: &str = "endpoints.kubernetes.io/last-change-trigger-time";
/// Annotation of a Service: its scheduler on nodes with backend ipvs, an extension of D7.
pub const IPVS_SCHEDULER_ANNOTATION: &str = "kplane.io/ipvs-scheduler";
/// Annotation of a Service: `userspace` has the agents' userspace proxy serve it.
pub const DATA_PATH_ANNOTATION: &str = "kplane.io/data-path";
/// Annotation of a Service: whether the userspace proxy tries another endpoint when one takes no connection.
pub const CONNECT_RETRY_ANNOTATION: &str = "kplane.io/connect-retry";
/// All annotations that kplane reads.
const ANNOTATIONS: [&str; 4] = [
    LAST_CHANGE_ANNOTATION,
    IPVS_SCHEDULER_ANNOTATION,
    DATA_PATH_ANNOTATION,
    CONNECT_RETRY_ANNOTATION,
];
/// Label of an EndpointSlice: its Service.
pub const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";
/// Label of an EndpointSlice: what writes it.
pub const MANAGED_BY_LABEL: &str = "endpointslice.kubernetes.io/managed-by";
/// The writer of the slices of Services with a selector: a controller of Kubernetes, which follows the state of Pods.
pub const SLICE_CONTROLLER: &str = "endpointslice-controller.k8s.io";
/// Label of a Service that another proxy serves (A1, Z1).
pub const SERVICE_PROXY_NAME_LABEL: &str = "service.kubernetes.io/service-proxy-name";
/// Label of slices of headless Services (Z1).
pub const HEADLESS_LABEL: &str = "service.kubernetes.io/headless";
/// Label of a Node: its zone (B9).
pub const ZONE_LABEL: &str = "topology.kubernetes.io/zone";
/// All labels that kplane reads.
const LABELS: [&str; 5] = [
    SERVICE_NAME_LABEL,
    MANAGED_BY_LABEL,
    SERVICE_PROXY_NAME_LABEL,
    HEADLESS_LABEL,
    ZONE_LABEL,
];
/// Taint of a Node that an autoscaler is about to remove (G3).
pub const TO_BE_DELETED_TAINT: &str = "ToBeDeletedByClusterAutoscaler";

/// A Service.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Service {
    /// Metadata.
    pub metadata: ObjectMeta,
    /// Specification.
    #[serde(default)]
    pub spec: ServiceSpec,
    /// Status.
    #[serde(default)]
    pub status: ServiceStatus,
}

/// `spec` of a Service.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceSpec {
    /// ClusterIP, NodePort, LoadBalancer or ExternalName; unset = ClusterIP.
    #[serde(rename = "type")]
    pub type_: Option<String>,
    /// First cluster address, `None` for headless.
    #[serde(rename = "clusterIP")]
    pub cluster_ip: Option<String>,
    /// All cluster addresses.
    #[serde(rename = "clusterIPs")]
    pub cluster_ips: Option<Vec<String>>,
    /// `IPv4`, `IPv6`, by index of `cluster_ips`.
    pub ip_families: Option<Vec<String>>,
    /// Further addresses, which the operator routes to nodes.
    #[serde(rename = "externalIPs")]
    pub external_ips: Option<Vec<String>>,
    /// Ports.
    pub ports: Option<Vec<ServicePort>>,
    /// Labels of the Pods that are its endpoints; unset or empty = others write its EndpointSlices.
    pub selector: Option<Box<Texts>>,
    /// Endpoints are ready although their Pods are not, or are being deleted.
    pub publish_not_ready_addresses: bool,
    /// The name to which DNS leads, for type ExternalName.
    pub external_name: Option<Box<str>>,
    /// `None` or `ClientIP`.
    pub session_affinity: Option<String>,
    /// Options of session affinity.
    pub session_affinity_config: Option<Box<SessionAffinityConfig>>,
    /// `Cluster` or `Local`.
    pub internal_traffic_policy: Option<String>,
    /// `Cluster` or `Local`.
    pub external_traffic_policy: Option<String>,
    /// Sources that may use load-balancer addresses.
    pub load_balancer_source_ranges: Option<Vec<String>>,
    /// Port of the health check server.
    pub health_check_node_port: Option<i64>,
}

/// A port of a Service. Numbers are wide, so that kplane can report an out-of-range number by its
/// field's name.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServicePort {
    /// Name; may be empty for the only port.
    #[serde(deserialize_with = "maybe_shared")]
    pub name: Option<Arc<str>>,
    /// TCP (also when unset), UDP or SCTP.
    pub protocol: Option<String>,
    /// The port.
    pub port: i64,
    /// The node port; 0 or unset = none.
    pub node_port: Option<i64>,
    /// The name in `targetPort`: that of a container port. `None` for a number.
    #[serde(deserialize_with = "name_of_port")]
    pub target_port: Option<Arc<str>>,
}

/// Reads the name in a field that has a name or a number. Controllers use the field, not kplane, so that anything
/// else counts as a number.
fn name_of_port<'de, D: Deserializer<'de>>(field: D) -> Result<Option<Arc<str>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum NameOrNumber {
        Name(Arc<str>),
        Number(IgnoredAny),
    }
    let is_name = |text: &Arc<str>| text.bytes().any(|byte| byte.is_ascii_alphabetic());
    Ok(match NameOrNumber::deserialize(field)? {
        NameOrNumber::Name(name) => Some(name).filter(is_name),
        NameOrNumber::Number(IgnoredAny) => None,
    })
}

/// Options of session affinity.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SessionAffinityConfig {
    /// Options of affinity by client address.
    #[serde(rename = "clientIP")]
    pub client_ip: Option<ClientIpConfig>,
}

/// Options of affinity by client address.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClientIpConfig {
    /// Idle timeout; unset = 10,800 s.
    pub timeout_seconds: Option<i64>,
}

/// `status` of a Service.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceStatus {
    /// The load balancer's part.
    pub load_balancer: LoadBalancerStatus,
}

/// `status.loadBalancer` of a Service.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LoadBalancerStatus {
    /// Addresses of the load balancer.
    pub ingress: Option<Vec<LoadBalancerIngress>>,
}

/// One address of a load balancer.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LoadBalancerIngress {
    /// The address's IP. kplane ignores host names.
    pub ip: Option<String>,
    /// `VIP` (also when unset) or `Proxy` (A6).
    pub ip_mode: Option<String>,
}

/// An EndpointSlice.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointSlice {
    /// Metadata.
    pub metadata: ObjectMeta,
    /// `IPv4`, `IPv6` or `FQDN`.
    pub address_type: String,
    /// Endpoints.
    #[serde(default)]
    pub endpoints: Option<Vec<SliceEndpoint>>,
    /// Ports of every endpoint.
    #[serde(default)]
    pub ports: Option<Vec<SlicePort>>,
}

/// A port of a slice.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(default)]
pub struct SlicePort {
    /// Name, matched with the Service port's name (A28).
    #[serde(deserialize_with = "maybe_shared")]
    pub name: Option<Arc<str>>,
    /// TCP (also when unset), UDP or SCTP.
    pub protocol: Option<String>,
    /// The pods' port.
    pub port: Option<i64>,
}

/// A ServiceCIDR.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
pub struct ServiceCidr {
    /// Metadata.
    pub metadata: ObjectMeta,
    /// Specification.
    #[serde(default)]
    pub spec: ServiceCidrSpec,
}

/// `spec` of a ServiceCIDR.
#[derive(Clone, Debug, Default, PartialEq, Hash, Deserialize)]
#[serde(default)]
pub struct ServiceCidrSpec {
    /// Address ranges.
    pub cidrs: Option<Vec<String>>,
}
