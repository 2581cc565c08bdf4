//! What the Node object named last, and may not name any more: a restriction never opens because the object is gone. The cache
//! file has it, too.

use std::net::IpAddr;

use kplane_model::{Cidr, Family};

use super::Desired;

impl Desired {
    /// Returns the node's own address of each family as the Node object last named it, which may be gone by now.
    pub fn last_known(&self) -> [Option<IpAddr>; 2] {
        self.last_known
    }

    /// Returns the ranges of the node's Pods as the Node object last named some of each family.
    pub fn pod_ranges(&self) -> &[Cidr] {
        &self.pod_ranges
    }

    /// Returns the last known ranges of Pods that the Node object does not name any more.
    pub fn lost_pod_ranges(&self) -> impl Iterator<Item = Cidr> {
        let named = self.node().map_or(&[][..], |node| &node.pod_cidrs);
        self.pod_ranges.iter().copied().filter(move |range| !named.contains(range))
    }

    /// Remembers what the Node object names.
    pub(super) fn note_node(&mut self) {
        for family in Family::ALL {
            let named = self.node().and_then(|node| node.primary_address(family));
            self.last_known[family as usize] = named.or(self.last_known[family as usize]);
        }
        let named = self.node().map_or(&[][..], |node| &node.pod_cidrs);
        let is_named = |family| named.iter().any(|range| range.family() == family);
        let kept = self.pod_ranges.iter().filter(|range| !is_named(range.family()));
        self.pod_ranges = named.iter().chain(kept).copied().collect();
    }
}
