//! The elements of a Pod as the subject of policies: its own addresses, what leads to its policies, and what of its denied
//! packets is counted and sampled.

use std::collections::BTreeSet;
use std::net::IpAddr;

use kplane_model::{Direction, LocalPod};

use super::content::Content;
use super::expand::addresses;
use super::held::Held;
use crate::backend::nftables::{Key, PolicySet};

impl Held {
    /// Adds that a set leads to policies which may deny an address something, or takes that back.
    pub(super) fn subject(
        &mut self,
        set: PolicySet,
        direction: Direction,
        address: IpAddr,
        there: bool,
    ) {
        for set in [PolicySet::Denied(direction), set] {
            self.count((set, Key::Ip(address)), None, there);
        }
    }
}

impl Content {
    /// Adds a Pod's connections to itself, or takes them back.
    pub(super) fn set_addresses(&mut self, pod: &LocalPod, there: bool) {
        for address in addresses(pod, self.family) {
            let place = (PolicySet::Loops, Key::Loop(address));
            self.held.count(place, None, there);
        }
    }

    /// Has exactly those of the followed Pods sampled that policies may deny something.
    pub(super) fn sample(&mut self) {
        if self.followed.0.is_empty() && self.sampled.is_empty() {
            return;
        }
        let followed = self
            .objects
            .pods
            .iter()
            .filter(|(name, _)| self.followed.covers(name))
            .flat_map(|(_, pod)| addresses(pod, self.family));
        let is_denied = |ip: &IpAddr| {
            Direction::ALL
                .into_iter()
                .any(|direction| self.held.has(PolicySet::Denied(direction), Key::Ip(*ip)))
        };
        let new: BTreeSet<IpAddr> = followed.filter(is_denied).collect();
        let old = std::mem::replace(&mut self.sampled, new);
        let place = |ip: &IpAddr| (PolicySet::Sampled, Key::Ip(*ip));
        for gone in old.difference(&self.sampled) {
            self.held.remove(place(gone));
        }
        for come in self.sampled.difference(&old) {
            self.held.add(place(come), None);
        }
    }
}
