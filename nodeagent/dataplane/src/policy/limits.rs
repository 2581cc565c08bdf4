//! Limits of what ClusterNetworkPolicies may decide for Pods.

use std::collections::BTreeSet;

use kplane_model::PodName;

use super::content::Content;

impl Content {
    /// Cuts off Pods for which tiers decide more than there may be, and the last ones by name beyond what there may be in
    /// all.
    pub(super) fn keep_limits(&mut self) {
        let mut left = self.limits.node;
        let mut cut_off = BTreeSet::new();
        for (pod, weight) in &self.weights {
            match left.checked_sub(*weight) {
                Some(rest) if *weight <= self.limits.pod => left = rest,
                _ => drop(cut_off.insert(pod.clone())),
            }
        }
        let changed: Vec<PodName> = cut_off.symmetric_difference(&self.cut_off).cloned().collect();
        for pod in changed {
            self.failures = None;
            let object = self.objects.pods.get(&pod);
            let policies = object.map_or(Vec::new(), |object| object.policies.clone());
            for policy in &policies {
                self.isolate(&pod, policy, false);
                self.forget_pair(&pod, policy);
            }
            self.tier(&pod, false);
            if cut_off.contains(&pod) {
                self.cut_off.insert(pod.clone())
            } else {
                self.cut_off.remove(&pod)
            };
            for policy in &policies {
                self.isolate(&pod, policy, true);
                self.await_pair(&pod, policy);
            }
            self.tier(&pod, true);
        }
    }
}
