//! Grants: pairs of a policy and a Pod become elements, or are left out if their namespace is beyond its share.

use kplane_model::{Cidr, Direction, GroupId, PodName, PolicyName};

use super::blocks::Stretches;
use super::content::Content;
use super::expand::{Member, Terms};
use super::objects::{names_ports, rules};
use super::pricing::Pricing;
use super::shares::beyond;
use super::suspects::Suspects;

impl Content {
    /// Sets a policy aside, or takes that back, before the policy is taken over.
    pub(super) fn set_aside(&mut self, name: &PolicyName, aside: bool) {
        let has_changed = if aside {
            self.grants.aside.insert(name.clone())
        } else {
            self.grants.aside.remove(name)
        };
        if has_changed {
            self.failures = None;
        }
    }

    /// Counts the ranges that a policy's rules need.
    pub(super) fn count_ranges(&mut self, name: &PolicyName) {
        let policy = self.objects.policies.get(name);
        if let Some(policy) = policy
            && !self.grants.aside.contains(name)
        {
            let counts = rules(policy).map(|(_, rule)| {
                let stretches = Stretches::of(rule, self.family);
                stretches.prefixes().count() as u64
            });
            self.grants.ranges.insert(name.clone(), counts.collect());
        } else {
            self.grants.ranges.remove(name);
        }
        self.grants.repriced.insert(name.clone());
    }

    /// Records a pair of a Pod and a policy, which has to be granted.
    pub(super) fn await_pair(&mut self, pod: &PodName, policy: &PolicyName) {
        let pods = self.grants.missing.entry(policy.clone()).or_default();
        pods.insert(pod.clone());
        self.grants.repriced.insert(policy.clone());
    }

    /// Takes back what a policy allows a Pod, before the Pod changes.
    pub(super) fn forget_pair(&mut self, pod: &PodName, policy: &PolicyName) {
        if self.grants.has(pod, policy) {
            self.grant(policy, std::slice::from_ref(pod), false);
        } else if let Some(pods) = self.grants.missing.get_mut(policy) {
            pods.remove(pod);
            if pods.is_empty() {
                self.grants.missing.remove(policy);
            }
        }
        self.grants.repriced.insert(policy.clone());
    }

    /// Takes back what a policy allows, before something that it refers to changes.
    pub(super) fn retract(&mut self, policy: &PolicyName) {
        let pods = self.objects.pods_of(policy);
        let granted: Vec<PodName> =
            pods.iter().filter(|pod| self.grants.has(pod, policy)).cloned().collect();
        self.grant(policy, &granted, false);
        if !pods.is_empty() {
            self.grants.missing.insert(policy.clone(), pods.into_iter().collect());
        }
        self.grants.repriced.insert(policy.clone());
    }

    /// Takes over that a group loses and gets members, which `change` records. Small changes are added to what is granted;
    /// for others, everything is granted anew if there is room for it.
    pub(super) fn regroup(
        &mut self,
        group: GroupId,
        gone: &[Member],
        come: &[Member],
        change: impl FnOnce(&mut Self),
    ) {
        let mut small = Vec::new();
        for policy in self.objects.policies_with(group) {
            if self.is_small(&policy, gone.len() + come.len()) {
                small.push(policy);
            } else {
                self.retract(&policy);
            }
        }
        change(self);
        for policy in small {
            let pods = self.objects.pods_of(&policy).into_iter();
            let granted: Vec<PodName> = pods.filter(|pod| self.grants.has(pod, &policy)).collect();
            for (members, there) in [(gone, false), (come, true)] {
                self.grant_members(&policy, &granted, (group, members), there);
            }
            self.grants.repriced.insert(policy);
        }
    }

    /// Returns whether a policy with a group whose members change so much is not worth granting anew.
    fn is_small(&self, name: &PolicyName, members: usize) -> bool {
        let Some(policy) = self.objects.policies.get(name) else {
            return false;
        };
        let ports = rules(policy).map(|(direction, rule)| match &rule.ports {
            None => Some(1),
            Some(_) if direction == Direction::Egress && names_ports(rule) => None,
            Some(ports) => Some(ports.len()),
        });
        let Some(ports) = ports.sum::<Option<usize>>() else {
            return false;
        };
        let pods = self.objects.pods_of(name).len();
        let most = ports.saturating_mul(members).saturating_mul(pods) as u64;
        most <= self.limits.namespace
    }

    fn grant_members(
        &mut self,
        name: &PolicyName,
        pods: &[PodName],
        (group, members): (GroupId, &[Member]),
        there: bool,
    ) {
        let Some(policy) = self.objects.policies.get(name) else {
            return;
        };
        let terms = Terms {
            family: self.family,
            objects: &self.objects,
            numbers: &self.numbers,
        };
        let held = &mut self.held;
        let pods = pods.iter().filter_map(|pod| terms.objects.pods.get(pod));
        for pod in pods {
            for (direction, rule) in rules(policy) {
                let groups = rule.peers.iter().flat_map(|peers| &peers.groups);
                for _ in groups.filter(|other| **other == group) {
                    for member in members {
                        terms.rule(pod, (direction, rule), *member, &mut |grant| {
                            held.allow(grant, there);
                        });
                    }
                }
            }
        }
    }

    /// Grants what is missing and fits, and takes back what no longer fits.
    pub(super) fn grant_all(&mut self, suspects: &mut Suspects) {
        let repriced = std::mem::take(&mut self.grants.repriced);
        let mut differs = false;
        for name in repriced {
            self.works_on(&name, suspects);
            let price = Pricing::of(self, &name);
            let before = match price {
                0 => self.grants.prices.remove(&name),
                _ => self.grants.prices.insert(name, price),
            };
            differs |= before.unwrap_or_default() != price;
        }
        if differs {
            let new = beyond(&self.grants.prices, self.limits);
            let old = std::mem::replace(&mut self.grants.beyond, new);
            // The reasons name prices.
            if !old.is_empty() || !self.grants.beyond.is_empty() {
                self.failures = None;
            }
            let come: Vec<PolicyName> = self
                .grants
                .beyond
                .keys()
                .filter(|name| !old.contains_key(*name))
                .cloned()
                .collect();
            for name in &come {
                self.retract(name);
            }
            // Their prices are known.
            self.grants.repriced.clear();
        }
        let missing = std::mem::take(&mut self.grants.missing);
        for (name, pods) in missing {
            let is_known = self.objects.policies.contains_key(&name);
            let grants = &self.grants;
            let is_left_out = grants.beyond.contains_key(&name) || grants.aside.contains(&name);
            let fits = is_known && !is_left_out;
            if fits {
                self.works_on(&name, suspects);
            }
            let (granted, left): (Vec<PodName>, Vec<PodName>) =
                pods.into_iter().partition(|pod| fits && !self.cut_off.contains(pod));
            self.grant(&name, &granted, true);
            if !left.is_empty() {
                self.grants.missing.insert(name, left.into_iter().collect());
            }
        }
    }

    fn works_on(&self, name: &PolicyName, suspects: &mut Suspects) {
        if let Some(policy) = self.objects.policies.get(name) {
            suspects.works_on(name, policy);
        }
    }

    /// Adds what a policy allows Pods to the elements, or takes it back.
    fn grant(&mut self, name: &PolicyName, pods: &[PodName], there: bool) {
        let (family, blocks) = (self.family, &mut self.blocks);
        let policy = self.objects.policies.get(name);
        if pods.is_empty() {
            return;
        }
        let Some(policy) = policy else {
            return;
        };
        let users = pods.len() as u64;
        let mut number = |prefix: Cidr| {
            if there {
                Some(blocks.acquire(prefix, users, || self.numbers.fresh()))
            } else {
                blocks.release(prefix, users)
            }
        };
        let ranges: Vec<Vec<u32>> = rules(policy)
            .map(|(_, rule)| {
                let stretches = Stretches::of(rule, family);
                stretches.prefixes().filter_map(&mut number).collect()
            })
            .collect();
        let terms = Terms {
            family,
            objects: &self.objects,
            numbers: &self.numbers,
        };
        let held = &mut self.held;
        for pod in pods.iter().filter_map(|pod| terms.objects.pods.get(pod)) {
            terms.policy(pod, policy, &ranges, &mut |grant| held.allow(grant, there));
        }
    }
}
