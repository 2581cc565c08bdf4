//! The API paths of the kinds of objects.

use anyhow::{Context as _, Result, ensure};

/// A kind that tests use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) name: &'static str,
    /// Group and version, as in `apiVersion`.
    pub(super) api_version: &'static str,
    plural: &'static str,
    namespaced: bool,
}

const fn kind(
    name: &'static str,
    api_version: &'static str,
    plural: &'static str,
    namespaced: bool,
) -> Kind {
    Kind {
        name,
        api_version,
        plural,
        namespaced,
    }
}

const RBAC: &str = "rbac.authorization.k8s.io/v1";

/// All kinds. Add what a test needs.
const KINDS: &[Kind] = &[
    kind("ConfigMap", "v1", "configmaps", true),
    kind("Endpoints", "v1", "endpoints", true),
    kind("Namespace", "v1", "namespaces", false),
    kind("Node", "v1", "nodes", false),
    kind("Pod", "v1", "pods", true),
    kind("Secret", "v1", "secrets", true),
    kind("Service", "v1", "services", true),
    kind("ServiceAccount", "v1", "serviceaccounts", true),
    kind("DaemonSet", "apps/v1", "daemonsets", true),
    kind("Deployment", "apps/v1", "deployments", true),
    kind("ReplicaSet", "apps/v1", "replicasets", true),
    kind(
        "EndpointSlice",
        "discovery.k8s.io/v1",
        "endpointslices",
        true,
    ),
    kind("Event", "events.k8s.io/v1", "events", true),
    kind(
        "PodDisruptionBudget",
        "policy/v1",
        "poddisruptionbudgets",
        true,
    ),
    kind("Lease", "coordination.k8s.io/v1", "leases", true),
    kind("IPAddress", "networking.k8s.io/v1", "ipaddresses", false),
    kind(
        "CustomResourceDefinition",
        "apiextensions.k8s.io/v1",
        "customresourcedefinitions",
        false,
    ),
    kind(
        "ClusterNetworkPolicy",
        "policy.networking.k8s.io/v1alpha2",
        "clusternetworkpolicies",
        false,
    ),
    kind("ServiceCIDR", "networking.k8s.io/v1", "servicecidrs", false),
    kind("ClusterRole", RBAC, "clusterroles", false),
    kind("ClusterRoleBinding", RBAC, "clusterrolebindings", false),
    kind("Role", RBAC, "roles", true),
    kind("RoleBinding", RBAC, "rolebindings", true),
];

impl Kind {
    /// Finds a kind by its name, such as `Service`.
    pub(super) fn named(name: &str) -> Result<Self> {
        KINDS
            .iter()
            .find(|kind| kind.name == name)
            .copied()
            .with_context(|| format!("the rig knows no kind {name:?}: add it to cluster/kinds.rs"))
    }

    /// Returns the path of all objects of a namespace, or of all namespaces.
    pub(super) fn collection(&self, namespace: Option<&str>) -> String {
        let (plural, version) = (self.plural, self.api_version);
        let root = if version.contains('/') { "apis" } else { "api" };
        if self.namespaced
            && let Some(namespace) = namespace
        {
            format!("/{root}/{version}/namespaces/{namespace}/{plural}")
        } else {
            format!("/{root}/{version}/{plural}")
        }
    }

    /// Returns the path of an object: `namespace/name`, or `name` for kinds without namespaces.
    pub(super) fn object(&self, key: &str) -> Result<String> {
        let (namespace, name) = match key.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, key),
        };
        ensure!(
            namespace.is_some() == self.namespaced && !name.is_empty(),
            "{key:?} is not the name of a {}: {}",
            self.name,
            if self.namespaced { "namespace/name" } else { "no namespace" }
        );
        Ok(format!("{}/{name}", self.collection(namespace)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_the_api() {
        let path = |kind, key| Kind::named(kind).unwrap().object(key).unwrap();
        assert_eq!(path("Node", "n"), "/api/v1/nodes/n");
        assert_eq!(
            path("EndpointSlice", "shop/web-x"),
            "/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices/web-x"
        );
        let service = Kind::named("Service").unwrap();
        assert_eq!(service.collection(None), "/api/v1/services");
        assert!(service.object("web").is_err());
        assert!(Kind::named("Node").unwrap().object("a/b").is_err());
        assert!(Kind::named("Unicorn").is_err());
    }
}
