//! The assignment of addresses: free addresses, networks that hold all nodes, and ranges that
//! distinguish pods from other clients. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::{Context as _, Result};
use kplane_model::{Cidr, Family};

use super::objects::Objects;

/// Longest prefix of a network that the demo creates, so that there is room for its own machines.
const LONGEST: [u8; 2] = [24, 112];

/// Addresses in use.
#[derive(Clone, Debug, Default)]
pub(crate) struct Book {
    taken: BTreeSet<IpAddr>,
}

impl Book {
    /// Records that an address is in use.
    pub(crate) fn note(&mut self, ip: IpAddr) {
        self.taken.insert(ip);
    }

    /// Takes the highest free address of a prefix, except its last one (a broadcast address).
    pub(crate) fn take(&mut self, cidr: Cidr) -> Result<IpAddr> {
        let mut ip = before(cidr.last());
        while cidr.contains(ip) && self.taken.contains(&ip) {
            ip = before(ip);
        }
        Some(ip)
            .filter(|ip| cidr.contains(*ip) && self.taken.insert(*ip))
            .with_context(|| format!("there is no free address in {cidr}"))
    }
}

/// Returns one network for each family, with all nodes in it.
pub(crate) fn networks(objects: &Objects) -> Vec<Cidr> {
    let nodes: Vec<IpAddr> = objects
        .nodes
        .iter()
        .flat_map(|node| node.addresses.iter().copied())
        .collect();
    let of = |family| -> Vec<IpAddr> {
        nodes
            .iter()
            .copied()
            .filter(|ip| Family::of(*ip) == family)
            .collect()
    };
    Family::ALL
        .into_iter()
        .filter_map(|family| network(&of(family)))
        .collect()
}

/// Returns every address in use.
pub(crate) fn addresses(objects: &Objects) -> Vec<IpAddr> {
    let nodes = objects
        .nodes
        .iter()
        .flat_map(|node| node.addresses.iter().copied());
    let pods = objects.pods.iter().flat_map(|pod| pod.ips.iter().copied());
    nodes.chain(pods).collect()
}

/// Returns the destinations that clients send to nodes although no node has the address.
pub(crate) fn outside(objects: &Objects) -> Vec<Cidr> {
    let mut cidrs = objects.service_cidrs.clone();
    for port in objects.services.iter().flat_map(|service| &service.ports) {
        let port = &port.port;
        let vips = port.external_ips.iter().chain(&port.load_balancer_ips);
        cidrs.extend(vips.map(|ip| Cidr::single(*ip)));
        if !objects
            .service_cidrs
            .iter()
            .any(|cidr| cidr.contains(port.cluster_ip))
        {
            cidrs.push(Cidr::single(port.cluster_ip));
        }
    }
    cidrs.sort();
    cidrs.dedup();
    cidrs
}

/// Returns an address that the first source range of a family allows.
pub(crate) fn guests(objects: &Objects) -> BTreeMap<Family, IpAddr> {
    let ports = objects.services.iter().flat_map(|service| &service.ports);
    let ranges = ports.flat_map(|port| &port.port.source_ranges);
    let mut guests = BTreeMap::new();
    for range in ranges.filter(|range| range.prefix_len() > 0) {
        guests
            .entry(range.family())
            .or_insert_with(|| member(*range));
    }
    guests
}

/// Returns the ranges that distinguish pods from other clients: one range for each family that
/// holds all pods and nothing else; or else all ranges of pods; or else the pods' own addresses.
pub(crate) fn cluster_cidrs(objects: &Objects, networks: &[Cidr]) -> Vec<Cidr> {
    let nodes = || objects.nodes.iter();
    let others: Vec<Cidr> = networks
        .iter()
        .chain(&objects.service_cidrs)
        .copied()
        .collect();
    let mut cidrs = Vec::new();
    for family in Family::ALL {
        let ranges = nodes().flat_map(|node| node.pod_cidrs.iter().copied());
        let ranges: Vec<Cidr> = ranges.filter(|cidr| cidr.family() == family).collect();
        let whole = covering(&ranges).filter(|whole| !others.iter().any(|o| overlap(*whole, *o)));
        if let Some(whole) = whole {
            cidrs.push(whole);
        } else if ranges.is_empty() {
            let ips = objects.pods.iter().flat_map(|pod| pod.ips.iter().copied());
            let ips = ips.filter(|ip| Family::of(*ip) == family);
            let ips = ips.filter(|ip| !nodes().any(|node| node.addresses.contains(ip)));
            cidrs.extend(ips.map(Cidr::single));
        } else {
            cidrs.extend(ranges);
        }
    }
    cidrs
}

/// Returns the narrowest prefix that holds all of these.
fn covering(cidrs: &[Cidr]) -> Option<Cidr> {
    let first = cidrs.first()?;
    (0..=first.prefix_len())
        .rev()
        .filter_map(|len| Cidr::new(first.first(), len))
        .find(|whole| cidrs.iter().all(|part| whole.covers(*part)))
}

fn overlap(a: Cidr, b: Cidr) -> bool {
    a.covers(b) || b.covers(a)
}

/// Returns the narrowest prefix that holds all of `ips`, leaves room, and whose second address (the
/// gateway's) is not one of them. `None` when there are no addresses.
fn network(ips: &[IpAddr]) -> Option<Cidr> {
    let first = *ips.first()?;
    let family = Family::of(first);
    let longest = LONGEST[usize::from(family == Family::V6)];
    let holds_all = |cidr: &Cidr| ips.iter().all(|ip| cidr.contains(*ip));
    let is_usable = |cidr: &Cidr| !ips.contains(&after(cidr.first()));
    (0..=longest)
        .rev()
        .filter_map(|len| Cidr::new(first, len))
        .find(|cidr| holds_all(cidr) && is_usable(cidr))
}

/// Returns the address after the first one of a prefix, or the first one if the prefix holds only
/// one.
pub(crate) fn member(cidr: Cidr) -> IpAddr {
    let ip = after(cidr.first());
    if cidr.contains(ip) { ip } else { cidr.first() }
}

fn after(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(ip) => IpAddr::V4(ip.to_bits().wrapping_add(1).into()),
        IpAddr::V6(ip) => IpAddr::V6(ip.to_bits().wrapping_add(1).into()),
    }
}

fn before(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(ip) => IpAddr::V4(ip.to_bits().wrapping_sub(1).into()),
        IpAddr::V6(ip) => IpAddr::V6(ip.to_bits().wrapping_sub(1).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn networks_hold_all_and_have_a_free_gateway() {
        for (addresses, expected) in [
            (&["172.18.0.11", "172.18.0.16"][..], "172.18.0.0/24"),
            (&["172.18.0.1", "172.18.0.2"], "172.16.0.0/14"),
            (&["10.1.2.3", "10.9.2.3"], "10.0.0.0/12"),
            (&["fd00::11", "fd00::1:0"], "fd00::/111"),
        ] {
            let expected: Cidr = expected.parse().unwrap();
            assert_eq!(network(&ips(addresses)), Some(expected), "{addresses:?}");
        }
        assert_eq!(network(&[]), None);
    }

    #[test]
    fn free_addresses_are_taken_from_above() {
        let mut book = Book::default();
        book.note("10.0.0.2".parse().unwrap());
        let cidr = "10.0.0.0/30".parse().unwrap();
        assert_eq!(book.take(cidr).unwrap().to_string(), "10.0.0.1");
        assert_eq!(book.take(cidr).unwrap().to_string(), "10.0.0.0");
        assert!(book.take(cidr).is_err());
        assert_eq!(
            member("10.0.0.0/8".parse().unwrap()).to_string(),
            "10.0.0.1"
        );
        assert_eq!(
            member("10.0.0.7/32".parse().unwrap()).to_string(),
            "10.0.0.7"
        );
    }
}
