//! Human-readable views of the index.

use kplane_model::select::{Categorized, categorize};
use kplane_model::{Endpoint, Issue, NodeFacts, NodeName, ServiceName, ServicePort};

use super::Index;
use crate::k8s::{Kind, ObjectId, Uid};

/// One ServicePort with all its endpoints, usable or not.
#[derive(Clone, Debug, PartialEq)]
pub struct PortView {
    /// Addresses and policies, without the places that the Service does not get.
    pub port: ServicePort,
    /// Endpoints, sorted.
    pub endpoints: Vec<Endpoint>,
}

impl PortView {
    /// Returns the endpoints that a node uses, and why.
    #[must_use]
    pub fn on_node(&self, node: &NodeFacts) -> Categorized {
        categorize(
            &self.port,
            &self.endpoints,
            &node.name,
            node.zone.as_deref(),
        )
    }
}

/// Everything about one Service.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceDetail {
    /// All ports and families.
    pub ports: Vec<PortView>,
    /// Problems of the Service and of its slices.
    pub issues: Vec<Issue>,
}

impl Index {
    /// Returns all ServicePorts of a namespace, or of all if it is empty; sorted by key.
    #[must_use]
    pub fn ports(&self, namespace: &str) -> Vec<PortView> {
        let names = self.services.keys();
        let mut ports: Vec<_> = names
            .filter(|name| namespace.is_empty() || *name.namespace == *namespace)
            .flat_map(|name| self.ports_of(name))
            .collect();
        ports.sort_by(|a, b| a.port.key.cmp(&b.port.key));
        ports
    }

    /// Returns one Service, if it is known. `upstream`: further issues, some of which may be about
    /// the Service.
    #[must_use]
    pub fn detail(&self, name: &ServiceName, upstream: &[Issue]) -> Option<ServiceDetail> {
        let slices = self.slices_of.get(name);
        let is_its = |issue: &Issue| {
            let object = &issue.object;
            let in_namespace = *object.namespace == *name.namespace;
            in_namespace
                && match object.kind.as_str() {
                    "Service" => *object.name == *name.name,
                    "EndpointSlice" => slices
                        .is_some_and(|slices| slices.iter().any(|id| *id.name == *object.name)),
                    _ => false,
                }
        };
        let mut issues = self.issues();
        issues.extend_from_slice(upstream);
        issues.retain(is_its);
        issues.sort();
        if !self.services.contains_key(name) && issues.is_empty() {
            return None;
        }
        Some(ServiceDetail {
            ports: self.ports_of(name),
            issues,
        })
    }

    /// Returns the UID of a Service, or of an object that has issues of its own.
    #[must_use]
    pub fn uid(&self, id: &ObjectId) -> Option<Uid> {
        let service = || {
            let name = ServiceName {
                namespace: id.namespace.clone(),
                name: id.name.clone(),
            };
            self.services.get(&name).and_then(|entry| entry.uid)
        };
        let refused = self.refused_uids.get(id).copied();
        match id.kind {
            Kind::Service => service().or(refused),
            _ => refused,
        }
    }

    /// Returns the UID of a Node.
    #[must_use]
    pub fn node_uid(&self, name: &NodeName) -> Option<Uid> {
        self.node_uids.get(name).copied()
    }

    /// Returns the known nodes, sorted by name.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeFacts> {
        self.nodes.values()
    }

    fn ports_of(&self, name: &ServiceName) -> Vec<PortView> {
        let ports = self.effective(name).ports.into_iter();
        ports
            .map(|(port, endpoints)| PortView { port, endpoints })
            .collect()
    }
}
