//! What was published, as digests, so that only differences are published.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;

use kplane_model::{GroupId, LocalPod, NodeName, PeerId, PodName};

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
    for policy in &pod.policies {
        encoding.text(&policy.namespace).text(&policy.name);
    }
    encoding.sum()
}
