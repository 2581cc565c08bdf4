//! Totals of what is published.

use kplane_model::ServicePort;

use super::PublishedPorts;

/// Totals of what is published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Services with at least one served port.
    pub services: usize,
    /// Endpoints of all served ports; each family counts separately.
    pub endpoints: usize,
    /// Node ports of Services, those of health checks included.
    pub node_ports: usize,
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

/// Counts the node ports of one Service. Ports of two protocols, and of both families, share a node port.
pub(super) fn node_ports<'a>(ports: impl Iterator<Item = &'a ServicePort>) -> usize {
    let of_port = |port: &'a ServicePort| [port.node_port, port.health_check_node_port];
    let mut all: Vec<u16> = ports.flat_map(of_port).flatten().collect();
    all.sort_unstable();
    all.dedup();
    all.len()
}
