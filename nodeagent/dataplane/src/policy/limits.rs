//! How many elements policies may need.

use std::collections::BTreeSet;

use kplane_model::PodName;

use super::content::{Content, pairs_of};

impl Content {
    /// Cuts off Pods whose policies need more elements than there may be, and the last ones by name beyond what there
    /// may be in all.
    pub(super) fn keep_limits(&mut self) {
        let mut left = self.limits.node;
        let mut cut_off = BTreeSet::new();
        for (pod, weight) in &self.weights {
            match left.checked_sub(*weight) {
                Some(rest) if *weight <= self.limits.pod => left = rest,
                _ => drop(cut_off.insert(pod.clone())),
            }
        }
        let changed: Vec<PodName> = cut_off
            .symmetric_difference(&self.cut_off)
            .cloned()
            .collect();
        for pod in changed {
            self.failures = None;
            let object = self.objects.pods.get(&pod);
            let pairs = object.map_or(Vec::new(), |object| pairs_of(&pod, object));
            self.pairs(&pairs, false);
            self.tier(&pod, false);
            match cut_off.contains(&pod) {
                true => self.cut_off.insert(pod.clone()),
                false => self.cut_off.remove(&pod),
            };
            self.pairs(&pairs, true);
            self.tier(&pod, true);
        }
    }
}
