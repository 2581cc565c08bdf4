//! Pods about which the kernel refuses an element: they are cut off, and the kernel takes the rest.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;

use kplane_model::PodName;

use super::content::Content;
use crate::backend::ApplyError;
use crate::backend::nftables::{Key, refused_keys};

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
    /// Returns the Pods that are cut off, and why.
    pub(super) fn certain(&self) -> impl Iterator<Item = (&PodName, &str)> {
        self.0
            .iter()
            .filter(|(_, refusal)| refusal.times >= CERTAIN)
            .map(|(pod, refusal)| (pod, refusal.reason.as_str()))
    }

    pub(super) fn reason(&self, pod: &PodName) -> Option<&str> {
        let refusal = self.0.get(pod).filter(|refusal| refusal.times >= CERTAIN)?;
        Some(&refusal.reason)
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

impl Content {
    /// Notes the Pods about which the kernel refused an element, as far as an error names any.
    pub(super) fn note_refused(&mut self, error: &ApplyError) {
        let refused: HashSet<IpAddr> = refused_keys(error).into_iter().filter_map(pod_of).collect();
        if refused.is_empty() {
            return;
        }
        let pods = self.objects.pods.iter();
        for (name, _) in pods.filter(|(_, pod)| pod.addresses.iter().any(|ip| refused.contains(ip)))
        {
            let refusal = self.refused.0.entry(name.clone()).or_insert(Refusal {
                times: 0,
                reason: error.source.to_string(),
            });
            refusal.times = refusal.times.saturating_add(1);
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
