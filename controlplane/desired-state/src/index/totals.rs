//! Totals of what is published.

use kplane_model::{Family, ServicePort};

use super::PublishedPorts;

/// Totals of what is published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Services with at least one served port.
    pub services: usize,
    /// Endpoints of all served ports; each family counts separately.
    pub endpoints: usize,
    /// What Services have taken of ranges.
    pub taken: Taken,
    /// Addresses of each family that Services can get, by the ServiceCIDRs.
    pub service_addresses: ByFamily<u128>,
    /// NetworkPolicies and ClusterNetworkPolicies that nodes enforce.
    pub policies: usize,
    /// Pods that they can tell apart from other addresses.
    pub policy_pods: usize,
}

/// A number for each family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByFamily<T> {
    /// IPv4.
    pub v4: T,
    /// IPv6.
    pub v6: T,
}

impl<T: Copy> ByFamily<T> {
    /// Counts for each family.
    pub fn count(of: impl Fn(Family) -> T) -> Self {
        Self {
            v4: of(Family::V4),
            v6: of(Family::V6),
        }
    }

    /// Returns the number of a family.
    pub fn of(self, family: Family) -> T {
        family.pick(self.v4, self.v6)
    }
}

/// What Services have taken of the ranges that the API server hands out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Node ports, those of health checks included.
    pub node_ports: usize,
    /// ClusterIPs of each family.
    pub cluster_ips: ByFamily<usize>,
}

impl Taken {
    /// Counts what one Service has taken. Ports of two protocols, and of both families, share a node port; all ports of
    /// a family share the ClusterIP.
    pub(super) fn by<'a>(ports: impl Iterator<Item = &'a ServicePort> + Clone) -> Self {
        let of_port = |port: &'a ServicePort| [port.node_port, port.health_check_node_port];
        let mut node_ports: Vec<u16> = ports.clone().flat_map(of_port).flatten().collect();
        node_ports.sort_unstable();
        node_ports.dedup();
        // A headless Service has an address of zeros.
        let ips = ports.map(|port| port.cluster_ip).filter(|ip| !ip.is_unspecified());
        let has = |family| ips.clone().any(|ip| Family::of(ip) == family);
        Self {
            node_ports: node_ports.len(),
            cluster_ips: ByFamily::count(|family| usize::from(has(family))),
        }
    }
}

impl Totals {
    /// Replaces what a Service had taken by what it takes now.
    pub(super) fn take(&mut self, before: Taken, after: Taken) {
        self.taken.node_ports = self.taken.node_ports + after.node_ports - before.node_ports;
        let [all, had, has] = [self.taken, before, after].map(|taken| taken.cluster_ips);
        self.taken.cluster_ips =
            ByFamily::count(|family| all.of(family) + has.of(family) - had.of(family));
    }

    /// Replaces the former ports of a Service by its new ones.
    pub(super) fn change(&mut self, before: &PublishedPorts, after: &PublishedPorts) {
        let endpoints = |ports: &PublishedPorts| ports.iter().map(|(_, n)| n).sum::<usize>();
        self.services += usize::from(!after.is_empty());
        self.services -= usize::from(!before.is_empty());
        self.endpoints += endpoints(after);
        self.endpoints -= endpoints(before);
    }
}
