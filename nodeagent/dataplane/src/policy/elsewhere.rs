//! Known Pods of other nodes whose addresses lie in this node's ranges.
//!
//! A new Pod of the node is closed until it is known, since its address lies in the node's `podCIDRs`. Where the CNI plugin
//! gives addresses from somewhere else, a Pod of another node may have such an address, and is no new Pod. The plugin does
//! so if a Pod of this node has an address outside of the ranges: nobody but this node's kubelet can say that, so that no
//! other node can take the closure away by claiming addresses for Pods of its own.

use std::collections::BTreeSet;
use std::net::IpAddr;

use kplane_model::LocalPod;

use super::content::Content;
use super::expand::addresses;
use crate::backend::nftables::{Key, PolicySet};

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
        self.touched.insert(address);
    }
}

impl Content {
    /// Finds these Pods anew: all of them after a change of the ranges.
    pub(super) fn renew_elsewhere(&mut self, ranges_changed: bool) {
        let mut touched = std::mem::take(&mut self.elsewhere.touched);
        let mut pods = self.objects.pods.values();
        let is_outside =
            |pod: &LocalPod| addresses(pod, self.family).any(|ip| !self.is_in_range(ip));
        let void = pods.any(is_outside);
        if ranges_changed || void != self.elsewhere.ranges_are_void {
            self.elsewhere.ranges_are_void = void;
            touched.extend(self.elsewhere.known.iter().copied());
            let peers = self.objects.peers.keys().copied();
            touched.extend(peers.filter(|address| void && self.is_in_range(*address)));
        }
        for address in touched {
            self.look_elsewhere(address);
        }
    }

    fn look_elsewhere(&mut self, address: IpAddr) {
        let mut pods = self.objects.pods.values();
        let there = self.elsewhere.ranges_are_void
            && self.is_in_range(address)
            && self.objects.peers.contains_key(&address)
            && !pods.any(|pod| pod.addresses.contains(&address));
        let known = &mut self.elsewhere.known;
        let changed = match there {
            true => known.insert(address),
            false => known.remove(&address),
        };
        if changed {
            let place = (PolicySet::LocalPods, Key::Ip(address));
            self.held.count(place, None, there);
        }
    }
}
