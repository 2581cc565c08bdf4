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
    /// address from its Node object. If not, a family without a range has all addresses, as in kube-proxy.
    pub nodeport_addresses: Vec<Cidr>,
    /// The configuration names the word `primary`, instead of being silent: the node's own address counts beside ranges, and
    /// a source without Nodes changes nothing.
    pub nodeport_primary: bool,
    /// Whether node ports are also served on loopback addresses of each family (KEP-6032).
    pub nodeport_localhost: [bool; 2],
    /// The node's own address in its family, which overrides the Node object (`bindAddress`).
    pub node_ip: Option<IpAddr>,
    /// The node's own address of each family as its Node object last named it. The agent remembers it.
    pub last_known: [Option<IpAddr>; 2],
    /// Places that no Service gets on this node. They do not come from the configuration file; the agent
    /// finds them itself.
    pub reserved: Reserved,
}

impl NodeSettings {
    /// Returns whether packets of the node itself to ClusterIPs are certainly masqueraded, whatever the
    /// node's pod ranges are (A15, A17).
    pub fn masquerades_own(&self, family: Family) -> bool {
        let of_family = |range: &Cidr| range.family() == family;
        self.masquerade_all || self.cluster_cidrs.iter().any(of_family)
    }

    /// Returns the ranges on which node ports of a family are served, as far as the configuration alone says: all
    /// addresses if it has ranges of the other family only. `None` = the node's own address.
    pub fn nodeport_ranges(&self, family: Family) -> Option<Vec<Cidr>> {
        if self.nodeport_addresses.is_empty() {
            return None;
        }
        let ranges = of_family(family, &self.nodeport_addresses);
        Some(if ranges.is_empty() { vec![Cidr::everything(family)] } else { ranges })
    }

    /// Returns whether the node's own address of any family is, or was, known.
    fn knows_an_address(&self) -> bool {
        self.node_ip.is_some() || self.last_known.iter().any(Option::is_some)
    }
}

/// The addresses on which node ports of a family are served, and why (A21).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodePorts {
    /// The ranges of the configuration, or all addresses if it has ranges of the other family only.
    Configured(Vec<Cidr>),
    /// The node's own address, from its Node object or the configuration.
    Own(IpAddr),
    /// The node's own address as it was last known: the Node object is gone, or names none any more.
    LastKnown(IpAddr),
    /// No address: the node's own address was never known.
    Nowhere,
    /// All addresses: the source has no Nodes at all, and the configuration says nothing.
    Everywhere,
}

impl NodePorts {
    /// Chooses the addresses. A restriction holds while a fact is missing: all addresses take part only if nobody
    /// ever named one.
    pub fn choose(family: Family, node: &NodeFacts, settings: &NodeSettings) -> Self {
        match settings.nodeport_ranges(family) {
            None => Self::own(family, node, settings),
            Some(ranges) if !settings.nodeport_primary => Self::Configured(ranges),
            Some(_) => {
                let own = Self::own(family, node, settings).ranges(family);
                let ranges = [own, of_family(family, &settings.nodeport_addresses)].concat();
                if ranges.is_empty() {
                    Self::Nowhere
                } else {
                    Self::Configured(disjoint(&ranges))
                }
            }
        }
    }

    fn own(family: Family, node: &NodeFacts, settings: &NodeSettings) -> Self {
        let given = settings.node_ip.filter(|ip| Family::of(*ip) == family);
        let without_nodes = !node.known && !node.other_nodes;
        if let Some(ip) = given.or_else(|| node.primary_address(family)) {
            Self::Own(ip)
        } else if let Some(ip) = settings.last_known[family as usize] {
            Self::LastKnown(ip)
        } else if without_nodes && !settings.nodeport_primary && !settings.knows_an_address() {
            Self::Everywhere
        } else {
            Self::Nowhere
        }
    }

    /// Returns the addresses as ranges, of which no two overlap.
    pub fn ranges(self, family: Family) -> Vec<Cidr> {
        match self {
            Self::Configured(ranges) => ranges,
            Self::Own(ip) | Self::LastKnown(ip) => vec![Cidr::single(ip)],
            Self::Nowhere => Vec::new(),
            Self::Everywhere => vec![Cidr::everything(family)],
        }
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
    /// Returns the plan for one family. A fact that is missing opens nothing:
    ///
    /// * Without a range of Pods, every client counts as one from outside, and nothing is masqueraded for being one.
    ///   So a policy Local keeps Pods to the node's own endpoints, and a client outside that reaches ClusterIPs by
    ///   routes may get its answers by another way, as with kube-proxy.
    /// * Without the node's own address, node ports are served on the last known one, or nowhere ([`NodePorts`]).
    /// * Without a ServiceCIDR, packets to addresses that no Service has go their way, as with kube-proxy (A20). Nodes
    ///   without a Node object have the ServiceCIDRs, too.
    pub fn new(family: Family, node: &NodeFacts, settings: &NodeSettings) -> Self {
        let pod_sources = if settings.node_cidr {
            node_cidr(family, node).into_iter().collect()
        } else {
            of_family(family, &settings.cluster_cidrs)
        };
        let unmasqueraded_sources = if settings.masquerade_all {
            Vec::new()
        } else if pod_sources.is_empty() {
            vec![Cidr::everything(family)]
        } else {
            pod_sources.clone()
        };
        Self {
            pod_sources,
            unmasqueraded_sources,
            nodeport_ips: NodePorts::choose(family, node, settings).ranges(family),
            nodeport_localhost: settings.nodeport_localhost[family as usize],
            service_cidrs: of_family(family, &node.service_cidrs),
        }
    }
}

/// Returns the ranges of a family, as [`disjoint`] does.
fn of_family(family: Family, cidrs: &[Cidr]) -> Vec<Cidr> {
    let ours = cidrs.iter().copied().filter(|c| c.family() == family);
    disjoint(&ours.collect::<Vec<_>>())
}

/// Returns the node's pod range of a family: the first one, as in kube-proxy.
fn node_cidr(family: Family, node: &NodeFacts) -> Option<Cidr> {
    node.pod_cidrs.iter().copied().find(|cidr| cidr.family() == family)
}

/// Returns the loopback addresses of a family.
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
