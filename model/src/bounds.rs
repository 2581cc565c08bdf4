//! Limits on what one Service may cost. Anyone who may write a Service must not be able to fill every node.
//!
//! A place is an address with a port, or a node port. For each place of a Service, a data path holds one element
//! for each endpoint. For each load-balancer address, it also holds one element for each source range. The cost is
//! therefore a product, and the limits apply to this product. Addresses above the limit are not served. Of too
//! many endpoints only the first are used, so every address is still served.

use crate::service::ServicePort;

/// Maximum number of places of a Service: ports x (ClusterIP + load-balancer addresses + external addresses), plus
/// node ports; both families together. This is enough for 1,000 ports with 15 addresses, or for 2 ports on the
/// addresses of 8,000 nodes.
pub const MAX_SERVICE_PLACES: usize = 16_384;

/// Maximum number of elements of a Service: places x endpoints, plus load-balancer addresses x source ranges; both
/// families together. This is more than a whole cluster of 250,000 endpoints has. 10,000 endpoints fit at 26
/// places.
pub const MAX_SERVICE_ELEMENTS: usize = 262_144;

/// Maximum number of elements of a Service that source ranges may use.
const MAX_FIREWALL_ELEMENTS: usize = MAX_SERVICE_ELEMENTS / 2;

/// The size of a Service. Where its ports differ, the largest value counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceSize {
    /// Number of ports; each family counts separately.
    pub ports: usize,
    /// Number of node ports; each family counts separately.
    pub node_ports: usize,
    /// Number of load-balancer addresses of a port.
    pub load_balancer_ips: usize,
    /// Number of external addresses of a port.
    pub external_ips: usize,
    /// Number of source ranges of a port.
    pub source_ranges: usize,
    /// Number of endpoints of a port.
    pub endpoints: usize,
}

/// The part of a Service that is served, for each of its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// Number of load-balancer addresses.
    pub load_balancer_ips: usize,
    /// Number of external addresses.
    pub external_ips: usize,
    /// Number of endpoints.
    pub endpoints: usize,
}

impl ServiceSize {
    /// Adds a port with its number of endpoints.
    pub fn add(&mut self, port: &ServicePort, endpoints: usize) {
        self.ports += 1;
        self.node_ports += usize::from(port.node_port.is_some());
        self.load_balancer_ips = self.load_balancer_ips.max(port.load_balancer_ips.len());
        self.external_ips = self.external_ips.max(port.external_ips.len());
        self.source_ranges = self.source_ranges.max(port.source_ranges.len());
        self.endpoints = self.endpoints.max(endpoints);
    }

    /// Returns the part of the Service that fits within [`MAX_SERVICE_PLACES`] and [`MAX_SERVICE_ELEMENTS`].
    /// Load-balancer addresses take precedence over external ones, and addresses over endpoints.
    pub fn allowance(&self) -> Allowance {
        let ports = self.ports.max(1);
        let room = MAX_SERVICE_PLACES.saturating_sub(ports + self.node_ports) / ports;
        let load_balancer_ips = self.load_balancer_ips.min(room).min(self.guarded(ports));
        let external_ips = self.external_ips.min(room - load_balancer_ips);
        let places = ports * (1 + load_balancer_ips + external_ips) + self.node_ports;
        let left = MAX_SERVICE_ELEMENTS - self.firewall(ports, load_balancer_ips);
        Allowance {
            load_balancer_ips,
            external_ips,
            endpoints: self.endpoints.min((left / places).max(1)),
        }
    }

    /// Returns whether the whole Service fits.
    pub fn fits(&self) -> bool {
        let all = Allowance {
            load_balancer_ips: self.load_balancer_ips,
            external_ips: self.external_ips,
            endpoints: self.endpoints,
        };
        self.allowance() == all
    }

    /// Returns the number of elements of the part that is served ([`ServiceSize::allowance`]). A place without
    /// endpoints counts as one element.
    pub fn elements(&self) -> usize {
        let allowed = self.allowance();
        let addresses = 1 + allowed.load_balancer_ips + allowed.external_ips;
        let places = self.ports * addresses + self.node_ports;
        let firewall = self.firewall(self.ports, allowed.load_balancer_ips);
        places * allowed.endpoints.max(1) + firewall
    }

    /// Returns the number of elements that `ips` load-balancer addresses need for their source ranges. On a node
    /// inside a range, the load-balancer addresses themselves are allowed sources too (A9).
    fn firewall(&self, ports: usize, ips: usize) -> usize {
        match self.source_ranges {
            0 => 0,
            ranges => ports * ips * (ranges + ips),
        }
    }

    /// Returns the largest number of load-balancer addresses whose source ranges fit.
    fn guarded(&self, ports: usize) -> usize {
        let fits = |ips: &usize| self.firewall(ports, *ips) <= MAX_FIREWALL_ELEMENTS;
        // The input limits the number of addresses, so the binary search takes few steps.
        let (mut fitting, mut beyond) = (0, self.load_balancer_ips + 1);
        while fitting + 1 < beyond {
            let middle = usize::midpoint(fitting, beyond);
            if fits(&middle) {
                fitting = middle;
            } else {
                beyond = middle;
            }
        }
        fitting
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The size of a Service with a ClusterIP and node ports.
    fn size(ports: usize, endpoints: usize) -> ServiceSize {
        ServiceSize {
            ports,
            node_ports: ports,
            endpoints,
            ..ServiceSize::default()
        }
    }

    #[test]
    fn what_real_clusters_have_fits() {
        for (what, size) in [
            ("10,000 endpoints, 5 ports", size(5, 10_000)),
            ("16,384 endpoints", size(1, 16_384)),
            ("1,000 ports of a media server", size(1_000, 100)),
            (
                "k3s: two ports on the addresses of 2,000 nodes",
                ServiceSize {
                    load_balancer_ips: 2_000,
                    ..size(2, 10)
                },
            ),
            (
                "1,000 source ranges",
                ServiceSize {
                    load_balancer_ips: 4,
                    source_ranges: 1_000,
                    ..size(10, 100)
                },
            ),
        ] {
            assert!(size.fits(), "{what}: {:?}", size.allowance());
        }
    }

    #[test]
    fn a_product_of_ports_and_addresses_is_cut_and_every_port_is_still_served() {
        let hostile = ServiceSize {
            external_ips: 1_000,
            ..size(1_000, 1)
        };
        assert!(!hostile.fits());
        let allowed = hostile.allowance();
        assert_eq!((allowed.external_ips, allowed.endpoints), (14, 1));
        let crowded = size(1_000, 10_000).allowance();
        assert_eq!(crowded.endpoints, 131);
    }

    proptest! {
        #[test]
        fn whatever_is_asked_for_the_bounds_hold(
            ports in 0_usize..2_001, node_ports in 0_usize..2_001,
            load_balancer_ips in 0_usize..3_000, external_ips in 0_usize..3_000,
            source_ranges in 0_usize..1_001, endpoints in 0_usize..20_000,
        ) {
            let size = ServiceSize {
                ports, node_ports: node_ports.min(ports), load_balancer_ips, external_ips,
                source_ranges, endpoints,
            };
            let got = size.allowance();
            let places = ports * (1 + got.load_balancer_ips + got.external_ips) + size.node_ports;
            prop_assert!(places <= MAX_SERVICE_PLACES);
            let firewall = size.firewall(ports, got.load_balancer_ips);
            prop_assert!(places * got.endpoints + firewall <= MAX_SERVICE_ELEMENTS);
            prop_assert!(size.elements() <= MAX_SERVICE_ELEMENTS);
            // A Service that was already cut to its allowance is not cut again.
            let cut = ServiceSize {
                load_balancer_ips: got.load_balancer_ips,
                external_ips: got.external_ips,
                endpoints: got.endpoints,
                ..size
            };
            prop_assert!(cut.fits());
        }
    }
}
