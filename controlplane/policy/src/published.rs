//! What was published, as digests, so that only differences are published.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{
    Decisions, LocalPod, NodeName, Peer, PeerId, PodName, PolicyKey, PolicyName, PolicyObject,
};

use crate::PolicyChanges;
use crate::identity::{Encoding, Kind};
use crate::placement::Placed;
use crate::texts::Copies;

/// Digest of a published object.
pub(crate) type Sum = [u8; 16];

/// Digests of published objects of a kind.
#[derive(Debug)]
pub(crate) struct Sums<K>(HashMap<K, Sum>);

impl<K> Default for Sums<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Clone + Eq + Hash> Sums<K> {
    /// Notes that an object is published now, or gone (`None`). Returns whether that is a change.
    pub(crate) fn note(&mut self, key: &K, sum: Option<Sum>) -> bool {
        match sum {
            Some(sum) => self.0.insert(key.clone(), sum) != Some(sum),
            None => self.0.remove(key).is_some(),
        }
    }

    /// Returns what is published.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &K> {
        self.0.keys()
    }
}

/// A published Pod: its node, the digest of its object, and its policies.
#[derive(Debug)]
struct PublishedPod {
    node: NodeName,
    sum: Sum,
    policies: Arc<[PolicyName]>,
}

impl PublishedPod {
    fn placed(&self) -> Placed {
        (self.node.clone(), Arc::clone(&self.policies))
    }
}

/// Everything that is published, except for what `placement` and `groups` know.
#[derive(Debug, Default)]
pub(crate) struct Published {
    pub(crate) peers: Sums<IpAddr>,
    pub(crate) classes: Sums<PeerId>,
    pub(crate) namespaces: Sums<Arc<str>>,
    pods: HashMap<PodName, PublishedPod>,
    /// Pods of a workload have the same policies.
    sets: Copies<[PolicyName]>,
}

impl Published {
    /// Publishes a Pod to a node, or to none. Returns its place and policies before and now, if something changed.
    pub(crate) fn note_pod(
        &mut self,
        name: &PodName,
        now: Option<(NodeName, LocalPod)>,
        changes: &mut PolicyChanges,
    ) -> Option<(Option<Placed>, Option<Placed>)> {
        let new = now.as_ref().map(|(node, pod)| PublishedPod {
            node: node.clone(),
            sum: sum(pod),
            policies: self.sets.share(&pod.policies),
        });
        let place = new.as_ref().map(PublishedPod::placed);
        let is_as_before = |old: &PublishedPod| {
            new.as_ref().is_some_and(|new| (&new.node, new.sum) == (&old.node, old.sum))
        };
        let old = self.pods.get(name);
        if old.map_or(new.is_none(), is_as_before) {
            return None;
        }
        let before = match new {
            Some(new) => self.pods.insert(name.clone(), new),
            None => self.pods.remove(name),
        };
        let key = || PolicyKey::Pod(name.clone());
        let node = now.as_ref().map(|(node, _)| node);
        if let Some(old) = before.as_ref().filter(|old| Some(&old.node) != node) {
            changes.push_own(key(), None, vec![old.node.clone()]);
        }
        if let Some((node, pod)) = now {
            changes.push_own(key(), Some(PolicyObject::Pod(pod)), vec![node]);
        }
        Some((before.as_ref().map(PublishedPod::placed), place))
    }
}

/// Returns the digest of an address's object. Classes are digests already.
pub(crate) fn sum_of_peer(peer: &Peer) -> Sum {
    match &peer.tier {
        None => peer.class.0,
        Some(tier) => Encoding::new(Kind::Peer).raw(&peer.class.0).raw(&tier.0).sum(),
    }
}

/// Returns the digest of decisions.
pub(crate) fn sum_of_decisions(decisions: &Decisions) -> Sum {
    let mut encoding = Encoding::new(Kind::Decisions);
    for row in &decisions.rows {
        let actions = &row.actions;
        encoding.raw(&[row.direction as u8, row.tier as u8, actions.rest as u8]);
        encoding.number(actions.ranges.len());
        for (protocol, first, last, action) in &actions.ranges {
            encoding.raw(&[protocol.number(), *action as u8]);
            encoding.raw(&first.to_be_bytes()).raw(&last.to_be_bytes());
        }
        encoding.number(row.peers.len());
        for peer in &row.peers {
            encoding.raw(&peer.0);
        }
    }
    encoding.sum()
}

/// Returns the digest of a part's members.
pub(crate) fn sum_of_members(members: &[PeerId]) -> Sum {
    let mut encoding = Encoding::new(Kind::Part);
    for member in members {
        encoding.raw(&member.0);
    }
    encoding.sum()
}

fn sum(pod: &LocalPod) -> Sum {
    let mut encoding = Encoding::new(Kind::Pod);
    encoding.number(pod.addresses.len());
    for address in &pod.addresses {
        encoding.text(&address.to_string());
    }
    encoding.ports(pod.ports.iter());
    encoding.raw(&pod.tier.map_or([0; 16], |tier| tier.0));
    for policy in &pod.policies {
        encoding.text(&policy.namespace).text(&policy.name);
    }
    encoding.sum()
}
