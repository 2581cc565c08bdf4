//! Known Pods of other nodes whose addresses lie in this node's ranges.
//!
//! A new Pod of the node is closed until it is known, since its address lies in the node's `podCIDRs`. Where the CNI plugin
//! gives addresses from somewhere else, a Pod of another node may have such an address, and is no new Pod. The plugin does
//! so if a Pod of this node has an address outside of the ranges: nobody but this node's kubelet can say that, so that no
//! other node can take the closure away by claiming addresses for Pods of its own.

use std::collections::BTreeSet;
use std::net::IpAddr;

use kplane_model::Family;

use super::expand::addresses;
use super::objects::Objects;

/// The addresses of such Pods.
#[derive(Debug, Default)]
pub(super) struct Elsewhere {
    known: BTreeSet<IpAddr>,
    /// Whether the ranges say nothing about who has an address in them.
    ranges_are_void: bool,
    /// Addresses with another Pod since the last look.
    touched: BTreeSet<IpAddr>,
}

impl Elsewhere {
    pub(super) fn touch(&mut self, address: IpAddr) {
        // Otherwise there are none, and all are looked for once the ranges say nothing.
        if self.ranges_are_void {
            self.touched.insert(address);
        }
    }

    /// Finds these Pods anew: all of them after a change of the ranges. Returns the addresses that are known now (`true`),
    /// and those that are not any more.
    pub(super) fn renew(
        &mut self,
        objects: &Objects,
        family: Family,
        is_in_range: impl Fn(IpAddr) -> bool,
        ranges_changed: bool,
    ) -> Vec<(IpAddr, bool)> {
        let mut touched = std::mem::take(&mut self.touched);
        let void = objects
            .pods
            .values()
            .any(|pod| addresses(pod, family).any(|ip| !is_in_range(ip)));
        if ranges_changed || void != self.ranges_are_void {
            self.ranges_are_void = void;
            touched.extend(&self.known);
            let peers = objects.peers.keys().copied();
            touched.extend(peers.filter(|address| void && is_in_range(*address)));
        }
        let is_here = |address| objects.pods.values().any(|pod| pod.addresses.contains(&address));
        let mut changes = Vec::new();
        for address in touched {
            let is_peer = objects.peers.contains_key(&address);
            let there = void && is_peer && is_in_range(address) && !is_here(address);
            let changed =
                if there { self.known.insert(address) } else { self.known.remove(&address) };
            if changed {
                changes.push((address, there));
            }
        }
        changes
    }
}
