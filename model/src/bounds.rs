//! What one Service may cost: whoever may write a Service must not be able to fill every node.
//!
//! A data path holds, for each place of a Service (an address with a port, or a node port), one
//! element for each endpoint, and for each load-balancer address one for each source range. So the
//! price is a product, and it is the product that is bounded. Addresses that are too many are not
//! served; of endpoints that are too many the first are used, which serves every address still.

use crate::service::ServicePort;

/// Places of a Service: ports x (ClusterIP + load-balancer addresses + external addresses), and node
/// ports; both families together. Enough for 1,000 ports with 15 addresses, or for 2 ports on the
/// addresses of 8,000 nodes.
pub const MAX_SERVICE_PLACES: usize = 16_384;

/// Elements of a Service: places x endpoints, and load-balancer addresses x source ranges; both
/// families together. More than a whole cluster of 250,000 endpoints has; 10,000 endpoints fit at 26
/// places.
pub const MAX_SERVICE_ELEMENTS: usize = 262_144;

/// Elements of a Service that may be spent on source ranges.
const MAX_FIREWALL_ELEMENTS: usize = MAX_SERVICE_ELEMENTS / 2;

/// How much a Service asks for. Of what differs between its ports, the most counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceSize {
    /// Ports, each family apart.
    pub ports: usize,
    /// Node ports, each family apart.
    pub node_ports: usize,
    /// Load-balancer addresses of a port.
    pub load_balancer_ips: usize,
    /// External addresses of a port.
    pub external_ips: usize,
    /// Source ranges of a port.
    pub source_ranges: usize,
    /// Endpoints of a port.
    pub endpoints: usize,
}

/// How much of it a Service gets, for each of its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// Load-balancer addresses.
    pub load_balancer_ips: usize,
    /// External addresses.
    pub external_ips: usize,
    /// Endpoints.
    pub endpoints: usize,
}

impl ServiceSize {
    /// Adds a port with a number of endpoints.
    pub fn add(&mut self, port: &ServicePort, endpoints: usize) {
        self.ports += 1;
        self.node_ports += usize::from(port.node_port.is_some());
        self.load_balancer_ips = self.load_balancer_ips.max(port.load_balancer_ips.len());
        self.external_ips = self.external_ips.max(port.external_ips.len());
        self.source_ranges = self.source_ranges.max(port.source_ranges.len());
        self.endpoints = self.endpoints.max(endpoints);
    }

    /// What fits within [`MAX_SERVICE_PLACES`] and [`MAX_SERVICE_ELEMENTS`]: load-balancer addresses
    /// go before external ones, and addresses before endpoints.
    #[must_use]
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

    /// Whether all of it fits.
    #[must_use]
    pub fn fits(&self) -> bool {
        let all = Allowance {
            load_balancer_ips: self.load_balancer_ips,
            external_ips: self.external_ips,
            endpoints: self.endpoints,
        };
        self.allowance() == all
    }

    /// Elements that it gets: [`ServiceSize::allowance`], multiplied out. A place without endpoints counts as
    /// one.
    #[must_use]
    pub fn elements(&self) -> usize {
        let allowed = self.allowance();
        let addresses = 1 + allowed.load_balancer_ips + allowed.external_ips;
        let places = self.ports * addresses + self.node_ports;
        let firewall = self.firewall(self.ports, allowed.load_balancer_ips);
        places * allowed.endpoints.max(1) + firewall
    }

    /// Elements that so many load-balancer addresses need for their source ranges. On a node that is
    /// in a range the addresses themselves are sources too (A9).
    fn firewall(&self, ports: usize, ips: usize) -> usize {
        match self.source_ranges {
            0 => 0,
            ranges => ports * ips * (ranges + ips),
        }
    }

    /// The most load-balancer addresses whose source ranges fit.
    fn guarded(&self, ports: usize) -> usize {
        let fits = |ips: &usize| self.firewall(ports, *ips) <= MAX_FIREWALL_ELEMENTS;
        // A number of addresses is bounded by its input; the search is a few steps.
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

    /// As a Service with a ClusterIP and node ports has it.
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
            // What was cut once is not cut again.
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
