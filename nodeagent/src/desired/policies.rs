//! The parts of NetworkPolicies among the desired objects.

use std::net::{IpAddr, Ipv4Addr};

use kplane_model::{DesiredKey, DesiredObject, LocalPod, PodName, PolicyKey, PolicyObject};

use super::held::Backing;
use super::staged::Staged;
use super::{CliffGuard, Confidence, Desired, Slot, Touched};

/// How many of the existing objects a snapshot lacks, and how many there are.
#[derive(Clone, Copy, Debug, Default)]
struct Loss {
    lost: usize,
    all: usize,
}

impl Loss {
    fn count(&mut self, is_lost: bool) {
        self.lost += usize::from(is_lost);
        self.all += 1;
    }
}

impl Desired {
    /// Returns a part of the NetworkPolicies; `None` when it does not exist (any more).
    #[must_use]
    pub fn policy(&self, key: &PolicyKey) -> Option<&PolicyObject> {
        let slot = self.objects.get(&DesiredKey::Policy(key.clone()))?;
        slot.policy()
    }

    /// Returns all parts of the NetworkPolicies.
    pub fn policies(&self) -> impl Iterator<Item = (&PolicyKey, &PolicyObject)> {
        self.policy_slots()
            .filter_map(|(key, slot)| Some((key, slot.policy()?)))
    }

    /// Returns the Pods of this node under NetworkPolicies. Work: these Pods.
    pub fn local_pods(&self) -> impl Iterator<Item = &LocalPod> {
        let first = DesiredKey::Policy(PolicyKey::Pod(PodName::new("", "")));
        let slots = self.objects.range(first..).map(|(_, slot)| slot);
        slots.filter_map(|slot| match slot.policy()? {
            PolicyObject::Pod(pod) => Some(pod),
            _ => None,
        })
    }

    fn policy_slots(&self) -> impl Iterator<Item = (&PolicyKey, &Slot)> {
        let first = PolicyKey::Peer(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let slots = self.objects.range(DesiredKey::Policy(first)..);
        slots.filter_map(|(key, slot)| match key {
            DesiredKey::Policy(key) => Some((key, slot)),
            DesiredKey::Service(_) | DesiredKey::Local(_) | DesiredKey::Node => None,
        })
    }

    /// Returns how many NetworkPolicies and Pods of the node are kept although a snapshot lacks them. They are kept
    /// together with everything that they refer to, or none is: an absent policy would open its Pods.
    pub(super) fn kept_policies(&self, staged: &Staged, confidence: Confidence) -> usize {
        let (mut policies, mut pods, mut others) =
            (Loss::default(), Loss::default(), Loss::default());
        for (key, _) in self.policy_slots() {
            let is_lost = !staged.named.contains_key(&DesiredKey::Policy(key.clone()));
            match key {
                PolicyKey::Policy(_) | PolicyKey::Cluster(_) => policies.count(is_lost),
                PolicyKey::Pod(_) => pods.count(is_lost),
                PolicyKey::Peer(_)
                | PolicyKey::Class(_)
                | PolicyKey::Group(..)
                | PolicyKey::Span(..)
                | PolicyKey::Decisions(..) => others.count(is_lost),
            }
        }
        let guard = self.guard;
        let holds = |loss: Loss| guard.holds(confidence, loss.lost, loss.all);
        let any = confidence == Confidence::Partial && others.lost > 0;
        match holds(policies) || holds(pods) || any {
            true => (policies.lost + pods.lost).max(1),
            false => 0,
        }
    }

    /// Returns whether so many kept policies and Pods would still be a cliff.
    pub(super) fn is_policy_cliff(&self, guard: CliffGuard, kept: usize) -> bool {
        let counts = |(key, _): &(&PolicyKey, &Slot)| {
            matches!(
                key,
                PolicyKey::Policy(_) | PolicyKey::Cluster(_) | PolicyKey::Pod(_)
            )
        };
        guard.is_cliff(kept, self.policy_slots().filter(counts).count())
    }

    /// Stops keeping parts of NetworkPolicies that the control plane does not send.
    pub(super) fn release_policies(&mut self, touched: &mut Touched) {
        let kept = self.policy_slots();
        let kept = kept.filter(|(_, slot)| slot.backing == Backing::Unnamed);
        let kept: Vec<_> = kept
            .map(|(key, _)| DesiredKey::Policy(key.clone()))
            .collect();
        for key in kept {
            self.remove(&key, touched);
        }
    }

    /// Returns whether parts of NetworkPolicies are kept.
    pub(super) fn keeps_policies(&self) -> bool {
        self.policy_slots()
            .any(|(_, slot)| slot.backing == Backing::Unnamed)
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
