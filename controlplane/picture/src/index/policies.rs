//! NetworkPolicies, and the namespaces and Pods that they are about, within the index.

use kplane_model::Issue;
use kplane_policy::{Policies, PolicyChanges};

use super::Index;
use super::holding::service_name;
use crate::convert::{self, not_enforced};
use crate::k8s::{Kind, Object, ObjectId};

impl Index {
    /// Returns the NetworkPolicies, if nodes enforce them.
    #[must_use]
    pub fn policies(&self) -> Option<&Policies> {
        self.policies.as_ref()
    }

    /// Adds or replaces an object of a kind that NetworkPolicies are about.
    pub(super) fn put_policy_object(&mut self, object: &Object, location: &str) -> Vec<Issue> {
        let Some(policies) = &mut self.policies else {
            return match object {
                Object::NetworkPolicy(policy) => not_enforced(policy, location),
                _ => Vec::new(),
            };
        };
        match object {
            Object::NetworkPolicy(policy) => {
                let (policy, issues) = convert::network_policy(policy, location);
                policies.put_policy(policy);
                return issues;
            }
            Object::Namespace(namespace) => {
                policies.put_namespace(&namespace.metadata.name, convert::namespace(namespace));
            }
            Object::Pod(pod) => match convert::pod(pod) {
                Some(pod) => policies.put_pod(pod),
                None => policies.delete_pod(&service_name(&object.id())),
            },
            _ => {}
        }
        Vec::new()
    }

    /// Removes an object of a kind that NetworkPolicies are about.
    pub(super) fn delete_policy_object(&mut self, id: &ObjectId) {
        let Some(policies) = &mut self.policies else {
            return;
        };
        match id.kind {
            Kind::NetworkPolicy => policies.delete_policy(&service_name(id)),
            Kind::Namespace => policies.delete_namespace(&id.name),
            Kind::Pod => policies.delete_pod(&service_name(id)),
            Kind::Service | Kind::EndpointSlice | Kind::Node | Kind::ServiceCidr => {}
        }
    }

    /// Returns what changed in the NetworkPolicies.
    pub(super) fn take_policies(&mut self) -> PolicyChanges {
        let policies = self.policies.as_mut();
        policies.map_or_else(PolicyChanges::default, Policies::take)
    }
}
