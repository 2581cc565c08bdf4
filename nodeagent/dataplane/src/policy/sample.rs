//! The Pods whose denied packets the kernel logs.

use std::collections::BTreeSet;
use std::net::IpAddr;

use kplane_model::Direction;

use super::content::Content;
use super::expand::addresses;
use crate::backend::nftables::{Key, PolicySet};

impl Content {
    /// Has exactly those of the followed Pods sampled that policies may deny something.
    pub(super) fn sample(&mut self) {
        if self.followed.0.is_empty() && self.sampled.is_empty() {
            return;
        }
        let pods = self.objects.pods.iter();
        let followed = pods.filter(|(name, _)| self.followed.covers(name));
        let followed = followed.flat_map(|(_, pod)| addresses(pod, self.family));
        let is_denied = |ip: &IpAddr| {
            let mut directions = Direction::ALL.into_iter();
            directions.any(|direction| self.held.has(PolicySet::Denied(direction), Key::Ip(*ip)))
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
