//! The loopback address of each Service. Pure.

use std::collections::{HashMap, HashSet};
use std::net::Ipv4Addr;

use kplane_model::ServiceName;

/// The first address of 127.64.0.0/10, and the bits that distinguish addresses within.
const BASE: u32 = 0x7f40_0000;
const BITS: u32 = 0x003f_ffff;

/// The addresses that Services have.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    /// The address of each Service, and the number of its ServicePorts.
    of: HashMap<ServiceName, (Ipv4Addr, usize)>,
    taken: HashSet<Ipv4Addr>,
}

impl Addresses {
    /// Returns the address of a Service: the end of its ClusterIP, behind 127.64.0.0/10. `10.96.0.10` becomes
    /// `127.96.0.10`. If another Service has that address, the next free one.
    pub(super) fn assign(&mut self, service: &ServiceName, cluster_ip: Ipv4Addr) -> Ipv4Addr {
        if let Some((address, _)) = self.of.get(service) {
            return *address;
        }
        let first = u32::from(cluster_ip) & BITS;
        // There are fewer Services than addresses.
        let address = (0..=BITS)
            .map(|step| Ipv4Addr::from(BASE | (first + step) & BITS))
            .find(|address| !self.taken.contains(address))
            .unwrap_or(Ipv4Addr::LOCALHOST);
        self.of.insert(service.clone(), (address, 0));
        self.taken.insert(address);
        address
    }

    /// Counts a ServicePort that uses the address of its Service.
    pub(super) fn hold(&mut self, service: &ServiceName) {
        if let Some((_, ports)) = self.of.get_mut(service) {
            *ports += 1;
        }
    }

    /// Counts the end of a ServicePort. The address of a Service without any is free.
    pub(super) fn release(&mut self, service: &ServiceName) {
        let Some((address, ports)) = self.of.get_mut(service) else {
            return;
        };
        *ports = ports.saturating_sub(1);
        if *ports == 0 {
            self.taken.remove(address);
            self.of.remove(service);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_has_the_end_of_its_cluster_ip() {
        let mut addresses = Addresses::default();
        let name = |name: &str| ServiceName::new("shop", name);
        let mut assign =
            |service: &str, ip: [u8; 4]| addresses.assign(&name(service), ip.into()).octets();
        assert_eq!(assign("dns", [10, 96, 0, 10]), [127, 96, 0, 10]);
        assert_eq!(assign("web", [10, 111, 255, 255]), [127, 111, 255, 255]);
        // Two networks of Services meet.
        assert_eq!(assign("db", [10, 160, 0, 10]), [127, 96, 0, 11]);
        assert_eq!(assign("dns", [10, 96, 7, 7]), [127, 96, 0, 10], "it stays");
        // Two ServicePorts.
        (0..2).for_each(|_| addresses.hold(&name("dns")));
        addresses.release(&name("dns"));
        assert!(addresses.of.contains_key(&name("dns")));
        addresses.release(&name("dns"));
        assert_eq!(
            addresses.assign(&name("new"), [10, 96, 0, 10].into()).octets(),
            [127, 96, 0, 10]
        );
    }
}
