//! Facts about a node.

use std::net::IpAddr;
use std::sync::Arc;

use crate::cidr::Cidr;
use crate::net::Family;

/// A node's name, as in `metadata.name`.
pub type NodeName = Arc<str>;

/// A zone's name: the value of the label `topology.kubernetes.io/zone` (behaviour B9).
pub type ZoneName = Arc<str>;

/// Facts of one node, and the cluster facts that every node needs, that determine its rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// The node's name.
    pub name: NodeName,
    /// The node's zone. Without a zone, no zone hints apply (B2).
    pub zone: Option<ZoneName>,
    /// The node's addresses, InternalIP before ExternalIP.
    pub addresses: Vec<IpAddr>,
    /// Pod ranges of this node.
    pub pod_cidrs: Vec<Cidr>,
    /// ServiceCIDRs of the cluster: unallocated addresses inside are dropped (A20).
    pub service_cidrs: Vec<Cidr>,
    /// False while the node is being deleted or drained by an autoscaler (G3).
    pub eligible: bool,
    /// A Node object of this name exists. Without one, only `name`, `service_cidrs` and `other_nodes` are set.
    pub known: bool,
    /// Nodes exist, and none has this name. False if `known`.
    pub other_nodes: bool,
}

impl NodeFacts {
    /// Returns the node's first address of a family (`primary` in `nodePortAddresses`, A21).
    pub fn primary_address(&self, family: Family) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|ip| Family::of(*ip) == family)
    }
}
