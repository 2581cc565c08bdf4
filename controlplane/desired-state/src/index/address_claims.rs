//! Places that no Service gets, and the Services that must be checked again when these places
//! change.
//!
//! Reserved places follow the cluster: nodes and API servers come and go. Work for such a change is
//! proportional to the Services that name one of its addresses, not to all of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};

use kplane_model::{Cidr, Family, Holder, NodeFacts, Protocol, ServiceName, ServicePort};

use crate::admission::Reserved;

/// Holders of places, and the Services that name an address.
#[derive(Debug, Default)]
pub(super) struct AddressClaims {
    reserved: Reserved,
    /// Addresses of Nodes, with the number of Nodes that have each.
    nodes: HashMap<IpAddr, usize>,
    /// Addresses of API servers according to their EndpointSlices.
    api_endpoints: BTreeSet<SocketAddr>,
    /// Addresses at which this process reaches an API server.
    api_server: BTreeSet<SocketAddr>,
    pod_ranges: Ranges,
    /// Services by the addresses that they name.
    users: BTreeMap<IpAddr, BTreeSet<ServiceName>>,
}

impl AddressClaims {
    pub(super) fn new(reserved: Reserved) -> Self {
        Self {
            reserved,
            ..Self::default()
        }
    }

    /// Replaces the addresses that a Service names.
    pub(super) fn replace_user(
        &mut self,
        service: &ServiceName,
        before: &[ServicePort],
        after: &[ServicePort],
    ) {
        for ip in named(before) {
            if let Some(users) = self.users.get_mut(&ip) {
                users.remove(service);
                if users.is_empty() {
                    self.users.remove(&ip);
                }
            }
        }
        for ip in named(after) {
            self.users.entry(ip).or_default().insert(service.clone());
        }
    }

    /// Replaces a Node; returns the Services that name an address of the Node.
    pub(super) fn replace_node(
        &mut self,
        before: Option<&NodeFacts>,
        after: Option<&NodeFacts>,
    ) -> BTreeSet<ServiceName> {
        let addresses = |node: Option<&NodeFacts>| match node {
            Some(node) => (node.addresses.clone(), node.pod_cidrs.clone()),
            None => Default::default(),
        };
        let (before, after) = (addresses(before), addresses(after));
        if before == after {
            return BTreeSet::new();
        }
        for ip in &before.0 {
            if let Some(nodes) = self.nodes.get_mut(ip) {
                *nodes -= 1;
                if *nodes == 0 {
                    self.nodes.remove(ip);
                }
            }
        }
        for ip in &after.0 {
            *self.nodes.entry(*ip).or_default() += 1;
        }
        before.1.iter().for_each(|range| self.pod_ranges.remove(*range));
        after.1.iter().for_each(|range| self.pod_ranges.insert(*range));
        let mut users = BTreeSet::new();
        for (ips, ranges) in [before, after] {
            users.extend(ips.iter().flat_map(|ip| self.users_of(*ip)).cloned());
            users.extend(ranges.iter().flat_map(|range| self.users_in(*range)).cloned());
        }
        users
    }

    /// Replaces the addresses of API servers from their EndpointSlices; returns the Services that
    /// name one of them.
    pub(super) fn replace_api_endpoints(
        &mut self,
        now: BTreeSet<SocketAddr>,
    ) -> BTreeSet<ServiceName> {
        let before = std::mem::replace(&mut self.api_endpoints, now);
        self.users_of_differing(&before, &self.api_endpoints)
    }

    /// Replaces the addresses at which this process reaches the API server; returns the Services
    /// that name one of them.
    pub(super) fn replace_api_server(
        &mut self,
        now: BTreeSet<SocketAddr>,
    ) -> BTreeSet<ServiceName> {
        let before = std::mem::replace(&mut self.api_server, now);
        self.users_of_differing(&before, &self.api_server)
    }

    fn users_of_differing(
        &self,
        before: &BTreeSet<SocketAddr>,
        after: &BTreeSet<SocketAddr>,
    ) -> BTreeSet<ServiceName> {
        let differing = before.symmetric_difference(after);
        differing.flat_map(|place| self.users_of(place.ip())).cloned().collect()
    }

    fn users_of(&self, ip: IpAddr) -> impl Iterator<Item = &ServiceName> {
        self.users.get(&ip).into_iter().flatten()
    }

    /// Returns the Services that name an address of a range.
    pub(super) fn users_in(&self, range: Cidr) -> impl Iterator<Item = &ServiceName> {
        self.users
            .range(range.first()..=range.last())
            .flat_map(|(_, services)| services)
    }

    #[cfg(test)]
    pub(super) fn users(&self) -> impl Iterator<Item = &ServiceName> {
        self.users.values().flatten()
    }

    /// Returns the program that listens at an address and port, so that no Service gets it.
    pub(super) fn holder(&self, ip: IpAddr, protocol: Protocol, port: u16) -> Option<Holder> {
        let place = SocketAddr::new(ip, port);
        let api = || {
            let is_one = self.api_endpoints.contains(&place) || self.api_server.contains(&place);
            (protocol == Protocol::Tcp && is_one).then_some(Holder::ApiServer)
        };
        let of_a_node = || {
            let is_one = self.is_of_a_node(ip);
            is_one.then(|| self.reserved.holder_on_node(ip, protocol, port))?
        };
        let elsewhere = self.reserved.holder_at(ip, protocol, port);
        elsewhere.or_else(of_a_node).or_else(api)
    }

    /// Returns the program that listens at a port of every node, so that it cannot be a node port.
    pub(super) fn node_port_holder(&self, protocol: Protocol, port: u16) -> Option<Holder> {
        self.reserved.holder_of_node_port(protocol, port)
    }

    /// Returns whether an address is a Node's.
    pub(super) fn is_of_a_node(&self, ip: IpAddr) -> bool {
        self.nodes.contains_key(&ip)
    }

    /// Returns the pod range of a Node that contains an address.
    pub(super) fn pod_range(&self, ip: IpAddr) -> Option<Cidr> {
        self.pod_ranges.find(ip)
    }
}

/// Returns the external and load-balancer addresses, which a Service's author chooses. The API
/// server chooses ClusterIPs, from ranges in which no program listens.
fn named(ports: &[ServicePort]) -> BTreeSet<IpAddr> {
    let ips = |port: &'_ ServicePort| {
        port.external_ips
            .iter()
            .chain(&port.load_balancer_ips)
            .copied()
            .collect::<Vec<_>>()
    };
    ports.iter().flat_map(ips).collect()
}

/// A set of address ranges with search by prefix length: a cluster has very few lengths.
#[derive(Debug, Default)]
struct Ranges {
    /// Number of times that each range was added.
    count: HashMap<Cidr, usize>,
    /// Number of ranges by length.
    lengths: BTreeMap<(Family, u8), usize>,
}

impl Ranges {
    fn insert(&mut self, range: Cidr) {
        *self.count.entry(range).or_default() += 1;
        *self.lengths.entry(length(range)).or_default() += 1;
    }

    fn remove(&mut self, range: Cidr) {
        if let Some(count) = self.count.get_mut(&range) {
            *count -= 1;
            if *count == 0 {
                self.count.remove(&range);
            }
        }
        if let Some(count) = self.lengths.get_mut(&length(range)) {
            *count -= 1;
            if *count == 0 {
                self.lengths.remove(&length(range));
            }
        }
    }

    fn find(&self, ip: IpAddr) -> Option<Cidr> {
        let family = Family::of(ip);
        self.lengths
            .keys()
            .filter(|(of, _)| *of == family)
            .filter_map(|(_, length)| Cidr::new(ip, *length))
            .find(|range| self.count.contains_key(range))
    }
}

fn length(range: Cidr) -> (Family, u8) {
    (range.family(), range.prefix_len())
}
