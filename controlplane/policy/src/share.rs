//! The share of a namespace: what its policies may take in all.
//!
//! What a policy takes follows from its text alone. The largest policies of a namespace that is beyond its share allow
//! nothing until the rest fits, so the same ones do at all replicas, in whatever order they come. Nobody else pays.

use std::collections::BTreeSet;

use kplane_model::PolicyName;

/// What becomes of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Whole,
    /// It allows nothing.
    Beyond,
    /// It allows nothing, and its rules are forgotten: those of all that are beyond the share would take too much.
    Forgotten,
}

/// What the policies of a namespace take.
#[derive(Debug, Default)]
pub(crate) struct Demand {
    sum: usize,
    /// The smallest comes first.
    policies: BTreeSet<(usize, PolicyName)>,
}

impl Demand {
    pub(crate) fn add(&mut self, name: &PolicyName, weight: usize) {
        self.policies.insert((weight, name.clone()));
        self.sum += weight;
    }

    pub(crate) fn remove(&mut self, name: &PolicyName, weight: usize) {
        self.policies.remove(&(weight, name.clone()));
        self.sum -= weight;
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &PolicyName> {
        self.policies.iter().map(|(_, name)| name)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.policies.is_empty()
    }

    pub(crate) fn is_beyond(&self, share: usize) -> bool {
        self.sum > share
    }

    /// Returns what becomes of each policy.
    pub(crate) fn fates(&self, share: usize) -> impl Iterator<Item = (&PolicyName, Fate)> {
        let mut sum = 0;
        self.policies.iter().map(move |(weight, name)| {
            sum += weight;
            let fate = match sum {
                sum if sum <= share => Fate::Whole,
                sum if sum <= 2 * share => Fate::Beyond,
                _ => Fate::Forgotten,
            };
            (name, fate)
        })
    }
}
