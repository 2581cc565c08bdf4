//! Claims of several Services to the same address or node port.
//!
//! The winner is the same on every node and after every restart. A ClusterIP goes before any other use of an
//! address: an externalIP must not shadow a ClusterIP (CVE-2020-8554). A Service that the source names goes before
//! one that is only held. Then the older Service wins, then the smaller name. The loser gets an issue, and gets
//! the place when the winner goes away.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{EndpointAddr, Family, Protocol, ServiceKey, ServiceName, ServicePort};

/// A place where packets arrive; only one Service can have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Claim {
    Address {
        ip: IpAddr,
        protocol: Protocol,
        port: u16,
    },
    NodePort {
        family: Family,
        protocol: Protocol,
        port: u16,
    },
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { ip, protocol, port } => {
                let addr = EndpointAddr::new(*ip, *port);
                write!(f, "address {addr}/{protocol}")
            }
            Self::NodePort {
                family,
                protocol,
                port,
            } => {
                write!(f, "node port {port}/{protocol} ({family})")
            }
        }
    }
}

/// A Service's rank for a place: the smallest wins.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    not_cluster_ip: bool,
    seniority: Seniority,
    pub(super) key: ServiceKey,
}

/// A Service's seniority; the smallest comes first, and equal ones are ordered by name. A Service that the source
/// names comes before one that is only held, then the older one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Seniority {
    held: bool,
    /// Services without a creation time come after those with one.
    not_dated: bool,
    created: Option<Arc<str>>,
}

impl Seniority {
    pub(super) fn new(created: Option<&Arc<str>>, held: bool) -> Self {
        Self {
            held,
            not_dated: created.is_none(),
            created: created.cloned(),
        }
    }
}

/// All claims of all Services.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// The ranks of all Services that claim a place, the owner first. There is nearly always one. A list needs
    /// less memory than a tree, which makes room for eleven.
    ranks: HashMap<Claim, Vec<Rank>>,
    of: HashMap<ServiceName, Box<[(Claim, Rank)]>>,
}

impl Claims {
    /// Replaces the claims of a Service; returns the places that have another owner now.
    pub(super) fn replace(
        &mut self,
        service: &ServiceName,
        seniority: &Seniority,
        ports: &[ServicePort],
    ) -> Vec<Claim> {
        let after: Box<[_]> = ports.iter().flat_map(|port| wanted(port, seniority)).collect();
        let before = self.of.remove(service).unwrap_or_default();
        if before == after {
            self.of.insert(service.clone(), before);
            return Vec::new();
        }
        let mut moved = Vec::new();
        for entry @ (claim, rank) in &before {
            if let Some(ranks) = self.ranks.get_mut(claim) {
                if let Ok(place) = ranks.binary_search(rank) {
                    ranks.remove(place);
                    if place == 0 && !ranks.is_empty() && !after.contains(entry) {
                        moved.push(*claim);
                    }
                }
                if ranks.is_empty() {
                    self.ranks.remove(claim);
                }
            }
        }
        for entry @ (claim, rank) in &after {
            let alone = || Vec::with_capacity(1);
            let ranks = self.ranks.entry(*claim).or_insert_with(alone);
            if let Err(place) = ranks.binary_search(rank) {
                if place == 0 && !ranks.is_empty() && !before.contains(entry) {
                    moved.push(*claim);
                }
                ranks.insert(place, rank.clone());
            }
        }
        if !after.is_empty() {
            self.of.insert(service.clone(), after);
        }
        moved
    }

    /// Returns the Services that want a place.
    pub(super) fn wanting(&self, claim: &Claim) -> impl Iterator<Item = &ServiceName> {
        self.ranks.get(claim).into_iter().flatten().map(|rank| &rank.key.service)
    }

    /// Returns the places that a Service owns and others want, each with the Service that would get it next.
    pub(super) fn contested<'a>(
        &'a self,
        service: &'a ServiceName,
    ) -> impl Iterator<Item = (&'a Claim, &'a ServiceName)> {
        self.of.get(service).into_iter().flatten().filter_map(move |(claim, _)| {
            let mut ranks = self.ranks.get(claim)?.iter();
            let owns = ranks.next()?.key.service == *service;
            let next = ranks.find(|rank| rank.key.service != *service)?;
            owns.then_some((claim, &next.key.service))
        })
    }

    /// Returns the ServicePort whose ClusterIP a place is.
    pub(super) fn cluster_ip_of(&self, claim: &Claim) -> Option<&ServiceKey> {
        let owner = self.ranks.get(claim)?.first()?;
        (!owner.not_cluster_ip).then_some(&owner.key)
    }

    /// Returns the ServicePort that owns a place.
    pub(super) fn owner(&self, claim: &Claim) -> Option<&ServiceKey> {
        self.ranks.get(claim)?.first().map(|rank| &rank.key)
    }
}

/// Returns every place that a ServicePort claims.
fn wanted<'a>(
    port: &'a ServicePort,
    seniority: &'a Seniority,
) -> impl Iterator<Item = (Claim, Rank)> + 'a {
    let rank = move |cluster_ip: bool| Rank {
        not_cluster_ip: !cluster_ip,
        seniority: seniority.clone(),
        key: port.key.clone(),
    };
    let others = port.external_ips.iter().chain(&port.load_balancer_ips);
    let node_port = port.node_port.map(|number| node_port_claim(port, number));
    std::iter::once((address_claim(port, port.cluster_ip), rank(true)))
        .chain(others.map(move |ip| (address_claim(port, *ip), rank(false))))
        .chain(node_port.map(|claim| (claim, rank(false))))
}

pub(super) fn address_claim(port: &ServicePort, ip: IpAddr) -> Claim {
    Claim::Address {
        ip,
        protocol: port.key.protocol,
        port: port.port,
    }
}

pub(super) fn node_port_claim(port: &ServicePort, number: u16) -> Claim {
    Claim::NodePort {
        family: port.key.family,
        protocol: port.key.protocol,
        port: number,
    }
}
