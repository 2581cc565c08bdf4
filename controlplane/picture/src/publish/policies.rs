//! Parts of NetworkPolicies among the published objects.

use bytes::Bytes;
use kplane_model::{DesiredKey, DesiredObject, NodeName, ObjectHash, PolicyKey, PolicyObject};
use kplane_policy::PolicyChanges;

use super::blob::{Encoded, encode};
use super::state::State;

/// A node, and an object of its own that is new, changed, or gone.
type OwnChange = (NodeName, DesiredKey, Option<(Bytes, ObjectHash)>);

/// [`PolicyChanges`] after encoding, which happens outside of the lock.
#[derive(Debug, Default)]
pub(super) struct EncodedPolicies {
    shared: Vec<(DesiredKey, Option<Encoded>)>,
    pods: Vec<OwnChange>,
}

impl EncodedPolicies {
    pub(super) fn new(changes: PolicyChanges) -> Self {
        let shared = changes.shared.into_iter();
        let shared =
            shared.map(|(key, object)| (DesiredKey::Policy(key), object.map(Encoded::part)));
        let pods = changes.pods.into_iter().map(|(node, name, pod)| {
            let encode_pod = |pod| encode(&DesiredObject::Policy(PolicyObject::Pod(pod)));
            let key = DesiredKey::Policy(PolicyKey::Pod(name));
            (node, key, pod.map(encode_pod))
        });
        Self {
            shared: shared.collect(),
            pods: pods.collect(),
        }
    }
}

impl State {
    /// Publishes parts of NetworkPolicies.
    pub(super) fn set_policies(&mut self, changes: EncodedPolicies) {
        for (key, object) in changes.shared {
            match object {
                Some(object) => self.upsert(&key, object),
                None => self.delete(&key),
            }
        }
        for (node, key, pod) in changes.pods {
            match pod {
                Some(pod) => self.put_own(&node, &key, pod),
                None => self.take_own(&node, &key),
            }
            self.free_if_vacant(&node);
        }
    }
}
