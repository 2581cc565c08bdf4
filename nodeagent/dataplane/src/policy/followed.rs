//! Pods whose denied packets somebody follows.

use std::collections::BTreeSet;
use std::net::IpAddr;

use kplane_model::{Direction, PodName};

use super::content::Content;
use super::expand::addresses;
use crate::backend::nftables::{Key, PolicySet};

/// Namespaces and names of Pods whose denied packets somebody follows. An empty namespace or name stands for all. Most
/// of the time nobody follows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Followed(pub Vec<(String, String)>);

impl Followed {
    /// Returns whether somebody follows a Pod.
    #[must_use]
    pub fn covers(&self, pod: &PodName) -> bool {
        let is = |wanted: &str, actual: &str| wanted.is_empty() || wanted == actual;
        let mut followed = self.0.iter();
        followed.any(|(namespace, name)| is(namespace, &pod.namespace) && is(name, &pod.name))
    }
}

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
