//! The parts of NetworkPolicies among the desired objects.

use std::mem::discriminant;
use std::net::{IpAddr, Ipv4Addr};

use kplane_model::{
    DesiredKey, DesiredObject, LocalPod, PodName, PolicyKey, PolicyName, PolicyObject,
};

use super::held::Backing;
use super::staged::Staged;
use super::{CliffGuard, Confidence, Desired, Dirty, Slot};

/// How many of the existing objects a snapshot lacks, and how many there are.
#[derive(Clone, Copy, Debug, Default)]
struct Loss {
    lost: usize,
    all: usize,
}

/// What is lost of the namespaces with NetworkPolicies and of ClusterNetworkPolicies, which all nodes know, of Pods of the
/// node and their policies, and of what these refer to: each is judged alone, so that many Pods do not hide a loss of all
/// policies.
#[derive(Debug, Default)]
struct PolicyLosses {
    everywhere: Loss,
    policies: Loss,
    pods: Loss,
    others: Loss,
}

impl PolicyLosses {
    /// Returns whether the loss is a cliff. Losing all policies is one, however few they are.
    fn is_cliff(&self, guard: CliffGuard) -> bool {
        let is_cliff = |loss: Loss| guard.is_cliff(loss.lost, loss.all);
        // Older control planes send all policies to all nodes, and name no namespaces.
        let facts = match self.everywhere.all {
            0 => self.policies,
            _ => self.everywhere,
        };
        let all_gone = guard.enabled && facts.all > 0 && facts.lost == facts.all;
        all_gone || is_cliff(facts) || is_cliff(self.pods)
    }
}

impl Loss {
    fn count(&mut self, is_lost: bool) {
        self.lost += usize::from(is_lost);
        self.all += 1;
    }
}

/// Returns the smallest key of a part of NetworkPolicies; no other kind follows.
pub(super) fn first_policy() -> DesiredKey {
    DesiredKey::Policy(PolicyKey::Peer(IpAddr::V4(Ipv4Addr::UNSPECIFIED)))
}

impl Desired {
    /// Returns a part of the NetworkPolicies; `None` when it does not exist (any more).
    pub fn policy(&self, key: &PolicyKey) -> Option<&PolicyObject> {
        let slot = self.objects.get(&DesiredKey::Policy(key.clone()))?;
        slot.policy()
    }

    /// Returns all parts of the NetworkPolicies.
    pub fn policies(&self) -> impl Iterator<Item = (&PolicyKey, &PolicyObject)> {
        self.policy_slots().filter_map(|(key, slot)| Some((key, slot.policy()?)))
    }

    /// Returns whether there is a policy of any kind.
    pub fn has_policies(&self) -> bool {
        let first = DesiredKey::Policy(PolicyKey::Policy(PolicyName::new("", "")));
        let next = self.objects.range(first..).next().map(|(key, _)| key);
        let Some(DesiredKey::Policy(key)) = next else {
            return false;
        };
        matches!(
            key,
            PolicyKey::Policy(_) | PolicyKey::Namespace(_) | PolicyKey::Cluster(_)
        )
    }

    /// Returns the Pods of this node under NetworkPolicies. Work: these Pods.
    pub fn local_pods(&self) -> impl Iterator<Item = &LocalPod> {
        let first = DesiredKey::Policy(PolicyKey::Pod(PodName::new("", "")));
        self.objects.range(first..).map(|(_, slot)| slot).filter_map(|slot| {
            match slot.policy()? {
                PolicyObject::Pod(pod) => Some(pod),
                _ => None,
            }
        })
    }

    fn policy_slots(&self) -> impl Iterator<Item = (&PolicyKey, &Slot)> {
        self.objects.range(first_policy()..).filter_map(|(key, slot)| match key {
            DesiredKey::Policy(key) => Some((key, slot)),
            DesiredKey::Service(_) | DesiredKey::Local(_) | DesiredKey::Node => None,
        })
    }

    /// Returns how many NetworkPolicies and Pods of the node are kept although a snapshot lacks them. They are kept
    /// together with everything that they refer to, or none is: an absent policy would open its Pods. Without a confidence,
    /// their absence means nothing.
    pub(super) fn kept_policies(&self, staged: &Staged, confidence: Option<Confidence>) -> usize {
        let lost = self.policy_losses(|key, _| {
            let key = DesiredKey::Policy(key.clone());
            !staged.named.contains_key(&key)
        });
        let facts = lost.everywhere.lost.max(lost.policies.lost) + lost.pods.lost;
        let any = facts + lost.others.lost > 0;
        let keeps = match confidence {
            None | Some(Confidence::Partial) => any,
            Some(Confidence::Confirmed) => false,
            Some(Confidence::Whole) => lost.is_cliff(self.guard),
        };
        if keeps { facts.max(1) } else { 0 }
    }

    /// Returns whether it would still be a cliff if the kept policies and Pods were removed.
    pub(super) fn is_policy_cliff(&self, guard: CliffGuard) -> bool {
        let kept = self.policy_losses(|_, slot| slot.backing == Backing::Unnamed);
        kept.is_cliff(guard)
    }

    fn policy_losses(&self, is_lost: impl Fn(&PolicyKey, &Slot) -> bool) -> PolicyLosses {
        let mut losses = PolicyLosses::default();
        for (key, slot) in self.policy_slots() {
            let loss = match key {
                PolicyKey::Namespace(_) | PolicyKey::Cluster(_) => &mut losses.everywhere,
                PolicyKey::Policy(_) => &mut losses.policies,
                PolicyKey::Pod(_) => &mut losses.pods,
                PolicyKey::Peer(_)
                | PolicyKey::Class(_)
                | PolicyKey::Group(..)
                | PolicyKey::Span(..)
                | PolicyKey::Decisions(..) => &mut losses.others,
            };
            loss.count(is_lost(key, slot));
        }
        losses
    }

    /// Stops keeping parts of NetworkPolicies that the control plane does not send.
    pub(super) fn release_policies(&mut self, dirty: &mut Dirty) {
        let kept: Vec<_> = self
            .policy_slots()
            .filter(|(_, slot)| slot.backing == Backing::Unnamed)
            .map(|(key, _)| DesiredKey::Policy(key.clone()))
            .collect();
        for key in kept {
            self.remove(&key, dirty);
        }
    }

    /// Returns the kept Pods and ranges that have addresses of a Pod or a range that the control plane names. Together they
    /// would allow what neither allows. Work: the Pods of the node, or the ranges, while parts are kept.
    pub(super) fn outdated_by(&self, object: &DesiredObject) -> Vec<PolicyKey> {
        let first = match object {
            DesiredObject::Policy(PolicyObject::Pod(_)) => PolicyKey::Pod(PodName::new("", "")),
            DesiredObject::Policy(PolicyObject::Span(_)) => {
                let lowest = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
                PolicyKey::Span(lowest, lowest)
            }
            _ => return Vec::new(),
        };
        let (kind, first) = (discriminant(&first), DesiredKey::Policy(first));
        if !self.held.keeps(&first) {
            return Vec::new();
        }
        let overlaps = |old: &PolicyObject| match (old, object) {
            (PolicyObject::Pod(old), DesiredObject::Policy(PolicyObject::Pod(new))) => {
                let mut addresses = old.addresses.iter();
                old.name != new.name && addresses.any(|ip| new.addresses.contains(ip))
            }
            (PolicyObject::Span(old), DesiredObject::Policy(PolicyObject::Span(new))) => {
                let is_same = (old.first, old.last) == (new.first, new.last);
                !is_same && old.first <= new.last && new.first <= old.last
            }
            _ => false,
        };
        self.objects
            .range(first..)
            .map_while(|(key, slot)| match key {
                DesiredKey::Policy(key) if discriminant(key) == kind => Some((key, slot)),
                _ => None,
            })
            .filter(|(_, slot)| slot.backing == Backing::Unnamed)
            .filter(|(_, slot)| slot.policy().is_some_and(overlaps))
            .map(|(key, _)| key.clone())
            .collect()
    }

    /// Returns whether parts of NetworkPolicies are kept.
    pub(super) fn keeps_policies(&self) -> bool {
        self.policy_slots().any(|(_, slot)| slot.backing == Backing::Unnamed)
    }
}

impl Slot {
    fn policy(&self) -> Option<&PolicyObject> {
        match self.object.as_deref()? {
            DesiredObject::Policy(object) => Some(object),
            DesiredObject::Service(_) | DesiredObject::Local(_) | DesiredObject::Node(_) => None,
        }
    }
}
