//! The index of policies, namespaces and Pods.

use std::sync::Arc;

use kplane_model::{PodName, PolicyName};

use crate::{Labels, NetworkPolicy, Pod, PolicyChanges};

/// All policies, namespaces and Pods, and what follows from them.
#[derive(Debug, Default)]
pub struct Policies {}

impl Policies {
    /// Adds or replaces a policy.
    pub fn put_policy(&mut self, _policy: NetworkPolicy) {}

    /// Removes a policy.
    pub fn delete_policy(&mut self, _name: &PolicyName) {}

    /// Adds or replaces a namespace.
    pub fn put_namespace(&mut self, _name: &Arc<str>, _labels: Labels) {}

    /// Removes a namespace.
    pub fn delete_namespace(&mut self, _name: &Arc<str>) {}

    /// Adds or replaces a Pod.
    pub fn put_pod(&mut self, _pod: Pod) {}

    /// Removes a Pod.
    pub fn delete_pod(&mut self, _name: &PodName) {}

    /// Returns what changed since the last call.
    pub fn take(&mut self) -> PolicyChanges {
        PolicyChanges::default()
    }
}
