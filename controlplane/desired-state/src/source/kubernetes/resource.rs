//! The requested resources, their paths and their filters (Z1).

use std::sync::Arc;

use super::protobuf::{self, Message};
use crate::k8s::Kind;
use crate::kubernetes::Asked;

/// Filter that leaves out slices of headless Services. Services themselves are all read, unlike in kube-proxy (Z1):
/// `kpctl describe` says of each why it is not proxied, and there are few such Services.
const NOT_HEADLESS: &str = "!service.kubernetes.io/headless";

/// Filter that leaves out Pods of which NetworkPolicies know nothing (NP12, NP18).
const OWN_NETWORK_AND_ALIVE: &str =
    "spec.hostNetwork=false,status.phase!=Succeeded,status.phase!=Failed";

/// A resource that can be listed and watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Resource {
    Services,
    Slices,
    /// v1 Endpoints, where the server has no slices.
    Endpoints,
    /// All Nodes, or one.
    Nodes(Option<Arc<str>>),
    ServiceCidrs,
    NetworkPolicies,
    /// ClusterNetworkPolicies of `v1beta1`, or of `v1alpha2`.
    ClusterPolicies {
        beta: bool,
    },
    Namespaces,
    /// Pods with addresses of their own that have not ended.
    Pods,
}

impl Resource {
    /// Returns the kind for the rest of the program.
    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Services => Kind::Service,
            Self::Slices | Self::Endpoints => Kind::EndpointSlice,
            Self::Nodes(_) => Kind::Node,
            Self::ServiceCidrs => Kind::ServiceCidr,
            Self::NetworkPolicies => Kind::NetworkPolicy,
            Self::ClusterPolicies { .. } => Kind::ClusterNetworkPolicy,
            Self::Namespaces => Kind::Namespace,
            Self::Pods => Kind::Pod,
        }
    }

    /// Returns what is known of its protobuf; `None` = it is asked for as JSON. There is no protobuf of resources that
    /// a definition (CRD) adds, and no use for it where objects are few.
    pub(super) fn message(&self) -> Option<&'static Message> {
        match self {
            Self::Services => Some(&protobuf::SERVICE),
            Self::Slices => Some(&protobuf::SLICE),
            Self::Nodes(_) => Some(&protobuf::NODE),
            Self::Namespaces => Some(&protobuf::NAMESPACE),
            Self::Pods => Some(&protobuf::POD),
            Self::Endpoints
            | Self::ServiceCidrs
            | Self::NetworkPolicies
            | Self::ClusterPolicies { .. } => None,
        }
    }

    pub(super) fn path(&self) -> &'static str {
        match self {
            Self::Services => "/api/v1/services",
            Self::Slices => "/apis/discovery.k8s.io/v1/endpointslices",
            Self::Endpoints => "/api/v1/endpoints",
            Self::Nodes(_) => "/api/v1/nodes",
            Self::ServiceCidrs => "/apis/networking.k8s.io/v1/servicecidrs",
            Self::NetworkPolicies => "/apis/networking.k8s.io/v1/networkpolicies",
            Self::ClusterPolicies { beta: true } => {
                "/apis/policy.networking.k8s.io/v1beta1/clusternetworkpolicies"
            }
            Self::ClusterPolicies { beta: false } => {
                "/apis/policy.networking.k8s.io/v1alpha2/clusternetworkpolicies"
            }
            Self::Namespaces => "/api/v1/namespaces",
            Self::Pods => "/api/v1/pods",
        }
    }

    pub(super) fn asked(&self, verb: &'static str) -> Asked {
        let (resource, group) = match self {
            Self::Services => ("services", ""),
            Self::Slices => ("endpointslices", "discovery.k8s.io"),
            Self::Endpoints => ("endpoints", ""),
            Self::Nodes(_) => ("nodes", ""),
            Self::ServiceCidrs => ("servicecidrs", "networking.k8s.io"),
            Self::NetworkPolicies => ("networkpolicies", "networking.k8s.io"),
            Self::ClusterPolicies { .. } => ("clusternetworkpolicies", "policy.networking.k8s.io"),
            Self::Namespaces => ("namespaces", ""),
            Self::Pods => ("pods", ""),
        };
        Asked::new(verb, resource, group)
    }

    /// Returns the filters, ready for a query.
    pub(super) fn selectors(&self) -> String {
        match self {
            Self::Slices | Self::Endpoints => {
                format!("labelSelector={}", escaped(NOT_HEADLESS))
            }
            Self::Nodes(Some(name)) => {
                let only = format!("metadata.name={name}");
                format!("fieldSelector={}", escaped(&only))
            }
            Self::Pods => format!("fieldSelector={}", escaped(OWN_NETWORK_AND_ALIVE)),
            Self::Services
            | Self::Nodes(None)
            | Self::ServiceCidrs
            | Self::NetworkPolicies
            | Self::ClusterPolicies { .. }
            | Self::Namespaces => String::new(),
        }
    }
}

/// Escapes a text for a query (RFC 3986, unreserved characters).
pub(super) fn escaped(text: &str) -> String {
    use std::fmt::Write as _;
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(byte.into());
        } else {
            // Writing to a string cannot fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn z1_slices_and_the_own_node_are_filtered_as_by_kube_proxy() {
        assert_eq!(Resource::Services.selectors(), "");
        assert_eq!(
            Resource::Slices.selectors(),
            "labelSelector=%21service.kubernetes.io%2Fheadless"
        );
        assert_eq!(
            Resource::Nodes(Some("node-1".into())).selectors(),
            "fieldSelector=metadata.name%3Dnode-1"
        );
        assert_eq!(Resource::Nodes(None).selectors(), "");
    }
}
