//! Totals of what is published.

use super::PublishedPorts;

/// Totals of what is published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Services with at least one served port.
    pub services: usize,
    /// Endpoints of all served ports; each family counts separately.
    pub endpoints: usize,
    /// NetworkPolicies and ClusterNetworkPolicies that nodes enforce.
    pub policies: usize,
    /// Pods that they can tell apart from other addresses.
    pub policy_pods: usize,
}

impl Totals {
    /// Replaces the former ports of a Service by its new ones.
    pub(super) fn change(&mut self, before: &PublishedPorts, after: &PublishedPorts) {
        let endpoints = |ports: &PublishedPorts| ports.iter().map(|(_, n)| n).sum::<usize>();
        self.services += usize::from(!after.is_empty());
        self.services -= usize::from(!before.is_empty());
        self.endpoints += endpoints(after);
        self.endpoints -= endpoints(before);
    }
}
