//! Policies by name, and by the Pods that they are for.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use kplane_model::{Direction, PolicyName};

use crate::NetworkPolicy;
use crate::limits::Limits;
use crate::lookup::Selectors;
use crate::rules::Entry;
use crate::share::{Demand, Fate};
use crate::texts::LabelSet;

/// All policies.
#[derive(Debug, Default)]
pub(crate) struct Subjects {
    entries: HashMap<PolicyName, Arc<Entry>>,
    by_pods: Selectors<Arc<str>, PolicyName>,
    demands: HashMap<Arc<str>, Demand>,
    /// Changed policies as they were at the last call of `take`.
    pub(crate) before: BTreeMap<PolicyName, Option<Arc<Entry>>>,
    /// Policies that fit into no message, and their sizes in bytes.
    pub(crate) too_large: BTreeMap<PolicyName, usize>,
    /// Policies beyond the share of their namespace, and what they take of it in bytes.
    pub(crate) beyond: BTreeMap<PolicyName, usize>,
    /// Policies whose groups are beyond the share of their namespace, and that share in bytes.
    pub(crate) wide: BTreeMap<PolicyName, usize>,
    pub(crate) limits: Limits,
    /// Maximum size of the names in a Pod's object, where a namespace has so many Pods that it is less than for others.
    names: BTreeMap<Arc<str>, usize>,
}

impl Subjects {
    pub(crate) fn put(&mut self, policy: NetworkPolicy) {
        let name = policy.name.clone();
        if self.entries.get(&name).is_some_and(|old| old.policy == policy) {
            return;
        }
        let was_beyond = self.remove(&name);
        let entry = Entry::new(policy, self.limits.object);
        let pods = &entry.policy.pods;
        self.by_pods.insert(&name.namespace, pods, &name);
        let demand = self.demands.entry(Arc::clone(&name.namespace)).or_default();
        demand.add(&name, entry.weight);
        if entry.is_too_large {
            self.too_large.insert(name.clone(), entry.size);
        }
        self.entries.insert(name.clone(), Arc::new(entry));
        self.keep_share(&name.namespace, was_beyond);
    }

    pub(crate) fn delete(&mut self, name: &PolicyName) {
        let was_beyond = self.remove(name);
        self.keep_share(&name.namespace, was_beyond);
    }

    /// Decides which policies of a namespace are beyond its share, if any is or was.
    fn keep_share(&mut self, namespace: &Arc<str>, was_beyond: bool) {
        let share = self.limits.share;
        let Some(demand) = self.demands.get(namespace) else {
            return;
        };
        if !was_beyond && !demand.is_beyond(share) {
            return;
        }
        for (name, fate) in demand.fates(share) {
            let Some(entry) = self.entries.get_mut(name) else {
                continue;
            };
            let is_beyond = !entry.is_too_large && (fate != Fate::Whole || entry.is_forgotten);
            if entry.is_beyond != is_beyond {
                note(&mut self.before, entry);
                Arc::make_mut(entry).is_beyond = is_beyond;
            }
            if fate == Fate::Forgotten && !entry.is_forgotten {
                Arc::make_mut(entry).forget();
            }
            if is_beyond {
                self.beyond.insert(name.clone(), entry.weight)
            } else {
                self.beyond.remove(name)
            };
        }
    }

    /// Decides which policies of a namespace name too many Pods, by the price of each policy's groups.
    pub(crate) fn keep_group_share(&mut self, prices: &Demand, share: usize) {
        for (name, fate) in prices.fates(share) {
            let Some(entry) = self.entries.get_mut(name) else {
                continue;
            };
            let is_wide = fate != Fate::Whole;
            if entry.is_wide != is_wide {
                note(&mut self.before, entry);
                Arc::make_mut(entry).is_wide = is_wide;
            }
            if is_wide {
                self.wide.insert(name.clone(), share)
            } else {
                self.wide.remove(name)
            };
        }
    }

    /// Removes a policy. Returns whether its namespace was beyond its share.
    fn remove(&mut self, name: &PolicyName) -> bool {
        let mut was_beyond = false;
        let old = self.entries.remove(name);
        if let Some(old) = &old {
            let pods = &old.policy.pods;
            self.by_pods.remove(&name.namespace, pods, name);
            if let Some(demand) = self.demands.get_mut(&name.namespace) {
                was_beyond = demand.is_beyond(self.limits.share);
                demand.remove(name, old.weight);
                if demand.is_empty() {
                    self.demands.remove(&name.namespace);
                }
            }
        }
        self.too_large.remove(name);
        self.beyond.remove(name);
        self.wide.remove(name);
        self.before.entry(name.clone()).or_insert(old);
        was_beyond
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn get(&self, name: &PolicyName) -> Option<&Arc<Entry>> {
        self.entries.get(name)
    }

    /// Returns whether a namespace has a policy.
    pub(crate) fn is_in(&self, namespace: &Arc<str>) -> bool {
        self.demands.contains_key(namespace)
    }

    /// Returns the namespaces with policies.
    pub(crate) fn namespaces(&self) -> impl Iterator<Item = &Arc<str>> {
        self.demands.keys()
    }

    /// Returns the namespaces whose policies changed since the last call of `take`.
    pub(crate) fn changed_namespaces(&self) -> BTreeSet<Arc<str>> {
        self.before.keys().map(|name| Arc::clone(&name.namespace)).collect()
    }

    /// Returns the policies of a namespace.
    pub(crate) fn of_namespace(&self, namespace: &str) -> impl Iterator<Item = &Arc<Entry>> {
        self.demands
            .get(namespace)
            .into_iter()
            .flat_map(Demand::names)
            .filter_map(|name| self.entries.get(name))
    }

    /// Returns all policies, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Entry>> {
        self.entries.values()
    }

    /// Returns the policies that select a Pod with these labels, sorted by name (NP1).
    pub(crate) fn of_pod(&self, namespace: &Arc<str>, labels: &LabelSet) -> Vec<&Entry> {
        let candidates = self.by_pods.candidates(namespace, labels);
        let entries = candidates.filter_map(|name| self.get(name).map(|entry| &**entry));
        let mut policies: Vec<_> = entries.filter(|e| labels.meet(&e.policy.pods)).collect();
        policies.sort_unstable_by(|a, b| a.policy.name.cmp(&b.policy.name));
        policies
    }

    /// Sets the number of Pods of a namespace. Returns whether that changes what their objects may name.
    pub(crate) fn share_names(&mut self, namespace: &Arc<str>, pods: usize) -> bool {
        let share = self.limits.names_of_one(pods);
        let before = if share < self.limits.names {
            self.names.insert(Arc::clone(namespace), share)
        } else {
            self.names.remove(namespace)
        };
        before.unwrap_or(self.limits.names) != share
    }

    /// Returns those that the Pod's node enforces, and the number of others: if not all fit into a message, some that
    /// allow something are missing, but the Pod is isolated as it should be.
    pub(crate) fn enforced(&self, namespace: &Arc<str>, labels: &LabelSet) -> (Vec<&Entry>, usize) {
        let mut policies = self.of_pod(namespace, labels);
        let all = policies.len();
        let most = self.names.get(namespace).copied().unwrap_or(self.limits.names);
        let sizes = policies.iter().map(|entry| size_of_name(entry));
        if sizes.sum::<usize>() > most {
            for direction in Direction::ALL.into_iter().rev() {
                let isolates = |entry: &&Entry| entry.rules(direction).is_some();
                if let Some(at) = policies.iter().position(isolates) {
                    policies[..=at].rotate_right(1);
                }
            }
            let mut left = most;
            policies.retain(|entry| match left.checked_sub(size_of_name(entry)) {
                Some(rest) => {
                    left = rest;
                    true
                }
                None => false,
            });
            policies.sort_unstable_by(|a, b| a.policy.name.cmp(&b.policy.name));
        }
        let left_out = all - policies.len();
        (policies, left_out)
    }
}

/// Records a policy as it is before it changes.
fn note(before: &mut BTreeMap<PolicyName, Option<Arc<Entry>>>, entry: &Arc<Entry>) {
    let name = entry.policy.name.clone();
    before.entry(name).or_insert_with(|| Some(Arc::clone(entry)));
}

/// Returns the size of a policy's name in a message, in bytes.
fn size_of_name(entry: &Entry) -> usize {
    let name = &entry.policy.name;
    name.namespace.len() + name.name.len() + 10
}
