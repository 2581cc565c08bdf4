//! Plans the node's own settings.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use kplane_model::{Cidr, Family, NodeFacts};

use super::Reserved;

/// Settings of the agent that affect every node plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSettings {
    /// Address ranges of all pods of the cluster, which distinguish pods from other clients (`clusterCIDR`).
    /// Empty = pods are not distinguished by these.
    pub cluster_cidrs: Vec<Cidr>,
    /// Whether the node's own pod ranges, the first of each family, distinguish its pods (`NodeCIDR`).
    pub node_cidr: bool,
    /// Whether to masquerade all traffic to ClusterIPs (A17).
    pub masquerade_all: bool,
    /// Ranges of the node's own addresses on which node ports are served (A21). Empty = the node's own
    /// address from its Node object, or every address while that is not known.
    pub nodeport_addresses: Vec<Cidr>,
    /// Whether node ports are also served on loopback addresses (KEP-6032).
    pub nodeport_localhost: bool,
    /// The node's own address in its family, which overrides the Node object (`bindAddress`).
    pub node_ip: Option<IpAddr>,
    /// Places that no Service gets on this node. They do not come from the configuration file; the agent
    /// finds them itself.
    pub reserved: Reserved,
}

impl NodeSettings {
    /// Returns whether packets of the node itself to ClusterIPs are certainly masqueraded, whatever the
    /// node's pod ranges are (A15, A17).
    #[must_use]
    pub fn masquerades_own(&self, family: Family) -> bool {
        let of_family = |range: &Cidr| range.family() == family;
        self.masquerade_all || self.cluster_cidrs.iter().any(of_family)
    }
}

/// Facts that a node's data path needs besides Services, for one family. Every list is sorted, and no range
/// is inside another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePlan {
    /// Sources that count as pods (A16).
    pub pod_sources: Vec<Cidr>,
    /// Sources whose packets to ClusterIPs are not masqueraded (A15).
    pub unmasqueraded_sources: Vec<Cidr>,
    /// Destinations on which node ports are served, if they are the node's own addresses (A21).
    pub nodeport_ips: Vec<Cidr>,
    /// Whether node ports are also served on loopback addresses (KEP-6032).
    pub nodeport_localhost: bool,
    /// Ranges in which an address that no Service has is dropped (A20).
    pub service_cidrs: Vec<Cidr>,
}

impl NodePlan {
    /// Returns the plan for one family.
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
            nodeport_localhost: settings.nodeport_localhost,
            service_cidrs: of_family(&node.service_cidrs),
        }
    }
}

/// Returns the node's pod range of a family: the first one, as in kube-proxy.
fn node_cidr(family: Family, node: &NodeFacts) -> Option<Cidr> {
    let mut ours = node.pod_cidrs.iter().copied();
    ours.find(|cidr| cidr.family() == family)
}

/// Returns the loopback addresses of a family.
#[must_use]
pub fn loopback(family: Family) -> Cidr {
    match family {
        Family::V4 => {
            let net = Cidr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8);
            net.unwrap_or(Cidr::everything(Family::V4))
        }
        Family::V6 => Cidr::single(IpAddr::V6(Ipv6Addr::LOCALHOST)),
    }
}

/// Returns the ranges sorted, without those that lie inside another, so that no two overlap.
#[must_use]
pub fn disjoint(cidrs: &[Cidr]) -> Vec<Cidr> {
    let mut sorted = cidrs.to_vec();
    // The order is by first address, the wider range first. So a range stands behind all ranges that contain
    // it.
    sorted.sort_by_key(|c| (c.first(), c.prefix_len()));
    let mut kept: Vec<Cidr> = Vec::with_capacity(sorted.len());
    for cidr in sorted {
        if !kept.last().is_some_and(|last| last.covers(cidr)) {
            kept.push(cidr);
        }
    }
    kept
}
