//! Totals of what is published.

use std::collections::BTreeSet;

use kplane_model::{Cidr, Family, ServicePort};

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
    /// Addresses in the ServiceCIDRs of each family.
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
        match family {
            Family::V4 => self.v4,
            Family::V6 => self.v6,
        }
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
        let ips = ports.map(|port| port.cluster_ip);
        let ips = ips.filter(|ip| !ip.is_unspecified());
        let has = |family| ips.clone().any(|ip| Family::of(ip) == family);
        Self {
            node_ports: node_ports.len(),
            cluster_ips: ByFamily::count(|family| usize::from(has(family))),
        }
    }
}

/// Returns the number of addresses in ranges. A range inside another one adds none.
pub(super) fn addresses(ranges: &BTreeSet<Cidr>) -> ByFamily<u128> {
    let is_inside = |range: &Cidr| {
        let mut others = ranges.iter().filter(|other| *other != range);
        others.any(|other| other.covers(*range))
    };
    let outer = ranges.iter().filter(|range| !is_inside(range));
    let size = |range: &Cidr| {
        let bits = 8 * range.family().address_len() - usize::from(range.prefix_len());
        u32::try_from(bits)
            .ok()
            .and_then(|bits| 1_u128.checked_shl(bits))
            .unwrap_or(u128::MAX)
    };
    ByFamily::count(|family| {
        let of_family = outer.clone().filter(|range| range.family() == family);
        of_family.map(size).fold(0, u128::saturating_add)
    })
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
