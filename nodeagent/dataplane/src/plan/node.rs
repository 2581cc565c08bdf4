//! Plans the node's own settings.

use std::net::IpAddr;

use kplane_model::{Cidr, Family, NodeFacts};

use super::Reserved;

/// Settings of the agent that shape every node plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSettings {
    /// Address ranges of all pods of the cluster, for telling pods from other clients
    /// (`clusterCIDR`). Empty = no telling.
    pub cluster_cidrs: Vec<Cidr>,
    /// The node's own pod ranges tell them, the first of each family (`NodeCIDR`).
    pub node_cidr: bool,
    /// Masquerade all traffic to ClusterIPs (A17).
    pub masquerade_all: bool,
    /// Ranges of the node's own addresses on which node ports are served; empty = the node's own
    /// address as its Node object gives it, or every address while that is not known (A21).
    pub nodeport_addresses: Vec<Cidr>,
    /// The node's own address in its family, whatever its Node object says (`bindAddress`).
    pub node_ip: Option<IpAddr>,
    /// What no Service gets on this node. Not of the configuration file: what the agent finds out.
    pub reserved: Reserved,
}

impl NodeSettings {
    /// It is certain, whatever the node's pod ranges are, that packets of the node itself to ClusterIPs are
    /// masqueraded (A15, A17).
    #[must_use]
    pub fn masquerades_own(&self, family: Family) -> bool {
        let of_family = |range: &Cidr| range.family() == family;
        self.masquerade_all || self.cluster_cidrs.iter().any(of_family)
    }
}

/// What a node's data path must know besides Services, for one family. Every list is sorted, and
/// no range is inside another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePlan {
    /// Sources that count as pods (A16).
    pub pod_sources: Vec<Cidr>,
    /// Sources whose packets to ClusterIPs are not masqueraded (A15).
    pub unmasqueraded_sources: Vec<Cidr>,
    /// Destinations on which node ports are served, as far as they are the node's own (A21).
    pub nodeport_ips: Vec<Cidr>,
    /// Ranges in which an unknown address is no Service: dropped (A20).
    pub service_cidrs: Vec<Cidr>,
}

impl NodePlan {
    /// Plans one family.
    #[must_use]
    pub fn new(family: Family, node: &NodeFacts, settings: &NodeSettings) -> Self {
        let everything = || vec![Cidr::everything(family)];
        let of_family = |cidrs: &[Cidr]| -> Vec<Cidr> {
            let ours = cidrs.iter().copied().filter(|c| c.family() == family);
            disjoint(&ours.collect::<Vec<_>>())
        };
        let pod_sources = if settings.node_cidr {
            node_cidr(family, node).into_iter().collect()
        } else {
            of_family(&settings.cluster_cidrs)
        };
        let unmasqueraded_sources = if settings.masquerade_all {
            Vec::new()
        } else if pod_sources.is_empty() {
            everything()
        } else {
            pod_sources.clone()
        };
        let nodeport_ips = if settings.nodeport_addresses.is_empty() {
            let given = settings.node_ip.filter(|ip| Family::of(*ip) == family);
            given
                .or_else(|| node.primary_address(family))
                .map_or_else(everything, |ip| vec![Cidr::single(ip)])
        } else {
            of_family(&settings.nodeport_addresses)
        };
        Self {
            pod_sources,
            unmasqueraded_sources,
            nodeport_ips,
            service_cidrs: of_family(&node.service_cidrs),
        }
    }
}

/// The node's pod range of a family: the first, as in kube-proxy.
fn node_cidr(family: Family, node: &NodeFacts) -> Option<Cidr> {
    let mut ours = node.pod_cidrs.iter().copied();
    ours.find(|cidr| cidr.family() == family)
}

/// Ranges sorted, without those that lie inside another: what is left does not overlap.
#[must_use]
pub fn disjoint(cidrs: &[Cidr]) -> Vec<Cidr> {
    let mut sorted = cidrs.to_vec();
    // By first address, the wider first: whatever covers a range stands before it.
    sorted.sort_by_key(|c| (c.first(), c.prefix_len()));
    let mut kept: Vec<Cidr> = Vec::with_capacity(sorted.len());
    for cidr in sorted {
        if !kept.last().is_some_and(|last| last.covers(cidr)) {
            kept.push(cidr);
        }
    }
    kept
}
