//! Failures and sizes of a family's policies.

use std::collections::BTreeSet;

use kplane_model::{Direction, Policy, PolicyKey, PolicyName};

use super::content::Content;
use super::expand::addresses;
use super::objects::names_ports;
use super::{PolicyCounts, PolicyFailure};

impl Content {
    /// Returns all parts that are not enforced as written.
    pub(super) fn find_failures(&self) -> Vec<PolicyFailure> {
        let mut failures = Vec::new();
        let named: BTreeSet<&PolicyName> = self.objects.pods_of.keys().collect();
        for name in named {
            let reason = match self.objects.policies.get(name) {
                None => "it is not known; its Pods may use nothing because of it",
                Some(policy) if names_ports_of_blocks(policy) => {
                    "an egress rule has a named port for a range of addresses, where ports have no names; it allows \
                     nothing there"
                }
                Some(_) => continue,
            };
            failures.push(PolicyFailure {
                key: PolicyKey::Policy(name.clone()),
                reason: reason.to_owned(),
            });
        }
        failures.extend(self.grants.aside.iter().map(|name| PolicyFailure {
            key: PolicyKey::Policy(name.clone()),
            reason: "the agent has died twice while it worked this policy out, and has set it aside until it changes; it \
                isolates its Pods here and allows nothing: please report it"
                .to_owned(),
        }));
        let tiers = &self.tiers;
        let unknown = self.objects.pods.iter().filter(|(_, pod)| !tiers.knows(pod.tier));
        failures.extend(unknown.map(|(pod, _)| PolicyFailure {
            key: PolicyKey::Pod(pod.clone()),
            reason:
                "what ClusterNetworkPolicies decide for it is not known; it is cut off".to_owned(),
        }));
        let limits = self.limits;
        failures.extend(self.cut_off.iter().map(|pod| {
            let weight = self.weights.get(pod).copied().unwrap_or_default();
            let reason = match self.refused.reason(pod) {
                Some(reason) => format!(
                    "the kernel refuses what policies allow it ({reason}); it is cut off until it or one of its policies \
                     changes: please report it"
                ),
                None => format!(
                    "the decisions of ClusterNetworkPolicies for it need {weight} elements; there may be {} for a Pod and {} \
                     in all; it is cut off",
                    limits.pod, limits.node
                ),
            };
            PolicyFailure {
                key: PolicyKey::Pod(pod.clone()),
                reason,
            }
        }));
        failures.extend(self.grants.beyond.iter().map(|(name, share)| PolicyFailure {
            key: PolicyKey::Policy(name.clone()),
            reason: format!(
                "its rules need {} on this node, and all policies of its namespace may have {share}; it isolates its Pods \
                 here and allows nothing: use fewer ports, ranges or other ends",
                match self.grants.price(name) {
                    u64::MAX => "more elements than are counted".to_owned(),
                    price => format!("{price} elements"),
                }
            ),
        }));
        failures
    }

    /// Returns the sizes.
    pub(super) fn counts(&self) -> PolicyCounts {
        let objects = &self.objects;
        let number = |number: usize| number as u64;
        let pods = objects.pods.values().filter(|pod| addresses(pod, self.family).next().is_some());
        let (mut all, mut isolated) = (0, 0);
        for pod in pods {
            all += 1;
            let mut places = addresses(pod, self.family)
                .flat_map(|ip| Direction::ALL.map(|direction| (direction, ip)));
            let is_isolated = places.any(|(direction, ip)| self.is_judged(direction, ip));
            isolated += u64::from(is_isolated);
        }
        let policies = objects.pods_of.keys().filter(|name| objects.policies.contains_key(*name));
        PolicyCounts {
            policies: number(policies.count()),
            pods: all,
            isolated,
            elements: number(self.held.len()),
        }
    }
}

fn names_ports_of_blocks(policy: &Policy) -> bool {
    policy.egress.iter().flatten().any(|rule| {
        let has_blocks = rule.peers.as_ref().is_some_and(|peers| !peers.blocks.is_empty());
        has_blocks && names_ports(rule)
    })
}
