//! What the groups of a policy take of the control plane's memory: members, and parts on nodes. It is known from numbers of
//! Pods alone, before any group is made.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::Policies;
use crate::group::{GroupSpec, Namespaces};
use crate::parts::Parts;
use crate::rules::Entry;
use crate::share::Demand;

/// What a member of a group takes, and a part of a group on a node, in bytes.
const MEMBER: usize = 24;
const PART: usize = 400;

/// What a namespace may take for each node, beside its share.
const NODE: usize = 16 << 10;

impl Policies {
    /// Decides which policies name more Pods than their namespaces may. Concerned are namespaces with changed policies, and
    /// all of them when there are an eighth more or fewer Pods than when that was last so.
    pub(crate) fn weigh_groups(&mut self) {
        let pods = self.pods.len();
        let namespaces: BTreeSet<Arc<str>> = if pods.abs_diff(self.weighed) > self.weighed / 8 {
            self.weighed = pods;
            self.policies.namespaces().cloned().collect()
        } else {
            self.policies.changed_namespaces()
        };
        let share = self.policies.limits.groups + NODE * self.tiers.nodes();
        for namespace in namespaces {
            let mut demand = Demand::default();
            for entry in self.policies.of_namespace(&namespace) {
                demand.add(&entry.policy.name, self.price(entry, share));
            }
            self.policies.keep_group_share(&demand, share);
        }
    }

    /// Returns what the groups of a policy take, or some number beyond `most`.
    fn price(&self, entry: &Entry, most: usize) -> usize {
        let policy = &entry.policy;
        let own = self.pods.most_selected(Some(&policy.name.namespace), &policy.pods);
        let nodes = match self.tiers.nodes() {
            0 => own,
            all => own.min(all),
        };
        let mut price = 0;
        for spec in entry.written_groups().values() {
            if price > most || nodes == 0 {
                break;
            }
            let members = self.most_members(spec);
            price += MEMBER * members + PART * nodes * Parts::of(members).count();
        }
        price
    }

    /// Returns how many members a group has at most.
    fn most_members(&self, spec: &GroupSpec) -> usize {
        let pods = &spec.pods;
        match (&spec.namespaces, spec.has_classes()) {
            (Namespaces::Own(_), false) => 1,
            (Namespaces::Own(own), true) => self.pods.most_selected(Some(own), pods),
            (Namespaces::Selected(some), false) => self.namespaces.selected(some).count(),
            (Namespaces::Selected(some), true) if some.is_everything() => {
                self.pods.most_selected(None, pods)
            }
            (Namespaces::Selected(some), true) => {
                let names = self.namespaces.selected(some);
                names.map(|name| self.pods.most_selected(Some(name), pods)).sum()
            }
        }
    }
}
