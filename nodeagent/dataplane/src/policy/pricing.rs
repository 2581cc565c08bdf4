//! The price of a policy: how many elements it needs for all of its Pods. It is worked out before any element is made.

use std::sync::Arc;

use kplane_model::{Direction, LocalPod, PolicyName, PolicyPort, PolicyRule, Protocol};

use super::content::Content;
use super::expand::{Member, addresses, named};
use super::objects::rules;

/// Most ports of Pods, other ends and bearers of named ports that are counted one by one. A policy that needs more is beyond
/// any price.
const MAX_STEPS: u64 = 1_000_000;

/// A policy, with what has been counted for it.
pub(super) struct Pricing<'a> {
    content: &'a Content,
    pods: Vec<&'a LocalPod>,
    /// Number of addresses of all Pods.
    addresses: u64,
    steps: u64,
}

impl<'a> Pricing<'a> {
    /// Returns how many elements a policy needs; `u64::MAX` = more than can be counted. Ports that differ are counted one by
    /// one, also where ranges of them overlap.
    pub(super) fn of(content: &'a Content, name: &PolicyName) -> u64 {
        let objects = &content.objects;
        let (Some(policy), Some(ranges)) =
            (objects.policies.get(name), content.grants.ranges.get(name))
        else {
            return 0;
        };
        let pods: Vec<&LocalPod> = objects
            .pods_of
            .get(name)
            .into_iter()
            .flatten()
            .filter_map(|pod| objects.pods.get(pod))
            .collect();
        let count = |pod: &&LocalPod| addresses(pod, content.family).count() as u64;
        let mut pricing = Self {
            content,
            addresses: pods.iter().map(count).sum(),
            pods,
            steps: 0,
        };
        rules(policy).zip(ranges).fold(0, |sum: u64, ((direction, rule), ranges)| {
            sum.saturating_add(pricing.rule(direction, rule, *ranges))
        })
    }

    fn rule(&mut self, direction: Direction, rule: &PolicyRule, ranges: u64) -> u64 {
        let objects = &self.content.objects;
        let members = match &rule.peers {
            None => 1,
            Some(peers) => peers
                .groups
                .iter()
                .map(|group| objects.size(*group))
                .fold(ranges, u64::saturating_add),
        };
        let Some(ports) = &rule.ports else {
            return members.saturating_mul(self.addresses);
        };
        ports
            .iter()
            .map(|port| match (port, direction) {
                (PolicyPort::All(_) | PolicyPort::Range(..), _) => {
                    members.saturating_mul(self.addresses)
                }
                (PolicyPort::Named(protocol, name), Direction::Ingress) => {
                    members.saturating_mul(self.own(*protocol, name))
                }
                (PolicyPort::Named(protocol, name), Direction::Egress) => {
                    let bearers = self.bearers(rule, *protocol, name);
                    bearers.saturating_mul(self.addresses)
                }
            })
            .fold(0, u64::saturating_add)
    }

    /// Returns how many ports of a name the Pods have, once for each of their addresses.
    fn own(&mut self, protocol: Protocol, name: &str) -> u64 {
        let looked_at = self.pods.iter().map(|pod| pod.ports.len() as u64 + 1);
        self.steps += looked_at.sum::<u64>();
        if self.steps >= MAX_STEPS {
            return u64::MAX;
        }
        self.pods
            .iter()
            .map(|pod| {
                let ports = named(&pod.ports, protocol, name).count();
                (ports * addresses(pod, self.content.family).count()) as u64
            })
            .sum()
    }

    /// Returns how many ports of a name a rule's other ends have.
    fn bearers(&mut self, rule: &PolicyRule, protocol: Protocol, name: &Arc<str>) -> u64 {
        let (terms, objects) = (self.content.terms(), &self.content.objects);
        let name = (protocol, Arc::clone(name));
        let everybody = rule.peers.is_none().then_some(Member::Everybody);
        let groups = rule.peers.iter().flat_map(|peers| &peers.groups);
        let members = groups.flat_map(|group| objects.members(*group));
        let mut found = 0;
        for member in members.map(Member::Peer).chain(everybody) {
            self.steps += 1;
            let left = MAX_STEPS.saturating_sub(self.steps);
            if left == 0 {
                return u64::MAX;
            }
            let bearers = terms
                .bearers(member, &name)
                .take(usize::try_from(left).unwrap_or(usize::MAX))
                .count() as u64;
            found += bearers;
            self.steps += bearers;
        }
        found
    }
}
