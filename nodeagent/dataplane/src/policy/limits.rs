//! Pods that are cut off, mostly by limits of what ClusterNetworkPolicies may decide for them.

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;

use kplane_model::PodName;

use super::content::Content;
use crate::backend::ApplyError;
use crate::backend::nftables::{Key, refused_keys};

impl Content {
    /// Cuts off Pods for which tiers decide more than there may be, the last ones by name beyond what there may be in all,
    /// and those about which the kernel refuses something.
    pub(super) fn keep_limits(&mut self) {
        let mut left = self.limits.node;
        let refused = self.refused.certain().filter(|pod| self.objects.pods.contains_key(*pod));
        let mut cut_off: BTreeSet<PodName> = refused.cloned().collect();
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

    /// Notes the Pods about which the kernel refused an element, as far as an error names any.
    pub(super) fn note_refused(&mut self, error: &ApplyError) {
        let refused: HashSet<IpAddr> = refused_keys(error).into_iter().filter_map(pod_of).collect();
        if refused.is_empty() {
            return;
        }
        let words = error.source.to_string();
        for (name, pod) in &self.objects.pods {
            if pod.addresses.iter().any(|ip| refused.contains(ip)) {
                self.refused.note(name, &words);
            }
        }
    }
}

/// Returns the Pod of an element that allows or decides something, and nothing else.
fn pod_of(key: Key) -> Option<IpAddr> {
    match key {
        Key::Grant(pod, _) | Key::GrantPort(pod, ..) | Key::GrantPorts(pod, ..) => Some(pod),
        _ => None,
    }
}
