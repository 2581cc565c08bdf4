//! What was published, as digests, so that only differences are published.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;

use kplane_model::{Decisions, GroupId, LocalPod, NodeName, Peer, PeerId, PodName};

use crate::identity::{Encoding, Kind};

/// Digest of a published object.
type Sum = [u8; 16];

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

/// Everything that is published, except for policies: those follow from the input alone.
#[derive(Debug, Default)]
pub(crate) struct Published {
    pub(crate) peers: Sums<IpAddr>,
    pub(crate) classes: Sums<PeerId>,
    pub(crate) parts: Sums<(GroupId, u8)>,
    pods: HashMap<PodName, (NodeName, Sum)>,
}

impl Published {
    /// Notes that a Pod is published to a node now, or to none. Returns what nodes must learn.
    pub(crate) fn note_pod(
        &mut self,
        name: &PodName,
        now: Option<(NodeName, LocalPod)>,
    ) -> Vec<(NodeName, PodName, Option<LocalPod>)> {
        let mut changes = Vec::new();
        let sum = now.as_ref().map(|(node, pod)| (node.clone(), sum(pod)));
        let before = match sum.clone() {
            Some(sum) => self.pods.insert(name.clone(), sum),
            None => self.pods.remove(name),
        };
        if before == sum {
            return changes;
        }
        let node = now.as_ref().map(|(node, _)| node);
        if let Some((old, _)) = before
            && Some(&old) != node
        {
            changes.push((old, name.clone(), None));
        }
        if let Some((node, pod)) = now {
            changes.push((node, name.clone(), Some(pod)));
        }
        changes
    }
}

/// Returns the digest of an address's object. Classes are digests already.
pub(crate) fn sum_of_peer(peer: &Peer) -> Sum {
    match &peer.tier {
        None => peer.class.0,
        Some(tier) => Encoding::new(Kind::Peer)
            .raw(&peer.class.0)
            .raw(&tier.0)
            .sum(),
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
