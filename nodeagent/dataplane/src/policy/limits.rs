//! Pods that are cut off, mostly by limits of what ClusterNetworkPolicies may decide for them.

use std::collections::BTreeSet;

use kplane_model::PodName;

use super::content::Content;

impl Content {
    /// Cuts off Pods for which tiers decide more than there may be, the last ones by name beyond what there may be in all,
    /// and those about which the kernel refuses something.
    pub(super) fn keep_limits(&mut self) {
        let mut left = self.limits.node;
        let refused = self.refused.certain().map(|(pod, _)| pod.clone());
        let mut cut_off: BTreeSet<PodName> =
            refused.filter(|pod| self.objects.pods.contains_key(pod)).collect();
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
