//! Pods about which the kernel refuses an element: they are cut off, and the kernel takes the rest.

use std::collections::BTreeMap;

use kplane_model::PodName;

/// Refusals in a row at which a Pod is cut off. The change after the first one begins with what the kernel holds, so
/// that no other program's change is the reason.
const CERTAIN: u32 = 2;

/// The Pods at whose elements changes failed. They stay until they or their policies change.
#[derive(Debug, Default)]
pub(super) struct RefusedPods(BTreeMap<PodName, Refusal>);

#[derive(Debug)]
struct Refusal {
    times: u32,
    /// The kernel's words.
    reason: String,
}

impl RefusedPods {
    /// Returns the Pods that are cut off.
    pub(super) fn certain(&self) -> impl Iterator<Item = &PodName> {
        self.0.keys().filter(|pod| self.reason(pod).is_some())
    }

    /// Returns why a Pod is cut off, if it is.
    pub(super) fn reason(&self, pod: &PodName) -> Option<&str> {
        let refusal = self.0.get(pod).filter(|refusal| refusal.times >= CERTAIN)?;
        Some(&refusal.reason)
    }

    /// Notes that the kernel refused an element about a Pod, and its words.
    pub(super) fn note(&mut self, pod: &PodName, words: &str) {
        let refusal = self.0.entry(pod.clone()).or_insert_with(|| Refusal {
            times: 0,
            reason: words.to_owned(),
        });
        refusal.times = refusal.times.saturating_add(1);
    }

    /// Gives a Pod another chance.
    pub(super) fn forget(&mut self, pod: &PodName) {
        self.0.remove(pod);
    }

    /// Notes that the kernel has taken a change.
    pub(super) fn was_taken(&mut self) {
        self.0.retain(|_, refusal| refusal.times >= CERTAIN);
    }
}
