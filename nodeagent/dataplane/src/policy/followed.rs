//! Pods whose denied packets people follow.

use kplane_model::PodName;

/// Namespaces and names of Pods whose denied packets people follow. An empty namespace or name stands for all. Most
/// of the time nobody follows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Followed(pub Vec<(String, String)>);

impl Followed {
    /// Returns whether a Pod is followed.
    pub fn covers(&self, pod: &PodName) -> bool {
        let is = |wanted: &str, actual: &str| wanted.is_empty() || wanted == actual;
        self.0
            .iter()
            .any(|(namespace, name)| is(namespace, &pod.namespace) && is(name, &pod.name))
    }
}
