//! Parts of NetworkPolicies among the published objects.

use bytes::Bytes;
use kplane_model::{DesiredKey, DesiredObject, NodeName, ObjectHash};
use kplane_policy::PolicyChanges;

use super::blob::{Encoded, encode};
use super::state::State;

/// An object that is new, changed, or gone on some nodes. It is encoded once for all of them.
#[derive(Debug)]
struct EncodedOwn {
    key: DesiredKey,
    object: Option<(Bytes, ObjectHash)>,
    nodes: Vec<NodeName>,
}

/// [`PolicyChanges`] after encoding, which happens outside of the lock.
#[derive(Debug, Default)]
pub(super) struct EncodedPolicies {
    shared: Vec<(DesiredKey, Option<Encoded>)>,
    own: Vec<EncodedOwn>,
}

impl EncodedPolicies {
    pub(super) fn new(changes: PolicyChanges) -> Self {
        let shared = changes
            .shared
            .into_iter()
            .map(|(key, object)| (DesiredKey::Policy(key), object.map(Encoded::part)));
        let own = changes.own.into_iter().map(|change| EncodedOwn {
            key: DesiredKey::Policy(change.key),
            object: change.object.map(|object| encode(&DesiredObject::Policy(object))),
            nodes: change.nodes,
        });
        Self {
            shared: shared.collect(),
            own: own.collect(),
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
        for EncodedOwn { key, object, nodes } in changes.own {
            for node in nodes {
                match &object {
                    Some(object) => self.put_own(&node, &key, object.clone()),
                    None => self.take_own(&node, &key),
                }
                self.free_if_vacant(&node);
            }
        }
    }
}
