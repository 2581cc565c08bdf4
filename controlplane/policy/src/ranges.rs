//! The ranges of nodes, which say whose claim of an address is the best.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use kplane_model::{Cidr, NodeName};

/// How well a node's ranges support that one of its Pods has an address. The best comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Support {
    /// The address lies in a range that the node has.
    Has,
    /// The address lies in a range that the node had. Another node may have it by now.
    Had,
    /// The ranges say nothing.
    Nothing,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct NodeRanges {
    ranges: Vec<Cidr>,
    /// The node is gone, or has no ranges any more.
    is_past: bool,
}

/// The last known ranges of nodes.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    nodes: HashMap<NodeName, NodeRanges>,
    has_changed: bool,
}

impl Ranges {
    /// Takes over the ranges of a node; none = the last known ones stay, as past ones.
    pub(crate) fn set(&mut self, node: &NodeName, ranges: Vec<Cidr>) {
        let is_past = ranges.is_empty();
        match self.nodes.get_mut(node) {
            Some(known) if is_past => {
                self.has_changed |= !known.is_past;
                known.is_past = true;
            }
            None if is_past => {}
            _ => {
                let now = NodeRanges { ranges, is_past };
                let is_new = self.nodes.get(node) != Some(&now);
                self.has_changed |= is_new;
                if is_new {
                    self.nodes.insert(node.clone(), now);
                }
            }
        }
    }

    /// Returns whether something changed since the last call. Forgets past ranges of nodes without Pods.
    pub(crate) fn take(&mut self, with_pods: impl Iterator<Item = NodeName>) -> bool {
        if self.has_changed && self.nodes.values().any(|known| known.is_past) {
            let with_pods: HashSet<NodeName> = with_pods.collect();
            self.nodes.retain(|node, known| !known.is_past || with_pods.contains(node));
        }
        std::mem::take(&mut self.has_changed)
    }

    pub(crate) fn support(&self, node: &NodeName, address: IpAddr) -> Support {
        match self.nodes.get(node) {
            Some(known) if known.ranges.iter().any(|range| range.contains(address)) => {
                if known.is_past { Support::Had } else { Support::Has }
            }
            _ => Support::Nothing,
        }
    }
}
