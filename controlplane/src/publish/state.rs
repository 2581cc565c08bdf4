//! The state behind the store: latest objects, logs of last changes, digests.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::SystemTime;

use bytes::Bytes;
use kplane_model::{
    Cidr, DesiredKey, DesiredObject, Digest, NodeFacts, NodeName, ObjectHash, ServiceKey, ZoneName,
};

use super::blob::{Encoded, encode};
use super::log::Log;
use super::triggers::Triggers;
use crate::trust::Trust;

/// Deleted keys that are remembered for agents that come back. An agent that missed more than
/// these gets a snapshot instead.
const TOMBSTONES: usize = 16_384;

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) revision: u64,
    pub(super) shared: HashMap<ServiceKey, Shared>,
    pub(super) log: Log<ServiceKey>,
    pub(super) views: HashMap<NodeName, View>,
    /// Digest of all default variants.
    pub(super) default_digest: Digest,
    /// What nodes of a zone have to add to it.
    pub(super) zone_digests: HashMap<ZoneName, Digest>,
    /// ServicePorts with more than the default variant.
    pub(super) varied: BTreeSet<ServiceKey>,
    pub(super) tombstones: VecDeque<Tombstone>,
    /// Deletions up to here may be forgotten.
    pub(super) horizon: u64,
    /// Part of every node's configuration.
    pub(super) service_cidrs: Vec<Cidr>,
    /// First revision of each publication, and when its change was observed.
    pub(super) times: VecDeque<(u64, SystemTime)>,
    pub(super) triggers: Triggers,
    /// How far the picture is believed, and how often that has changed.
    pub(super) trust: Trust,
    pub(super) trust_changes: u64,
}

/// A deleted key, remembered in one log.
#[derive(Debug)]
pub(super) struct Tombstone {
    pub(super) revision: u64,
    pub(super) node: Option<NodeName>,
    pub(super) key: DesiredKey,
}

/// One encoded object.
#[derive(Clone, Debug)]
pub(super) struct Blob {
    pub(super) bytes: Bytes,
    pub(super) hash: ObjectHash,
    pub(super) revision: u64,
}

/// All variants of one ServicePort.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) default: Blob,
    pub(super) by_zone: BTreeMap<ZoneName, Blob>,
    pub(super) by_node: BTreeMap<NodeName, Blob>,
    /// Nodes that have local endpoints of it; sorted.
    pub(super) local_nodes: Box<[NodeName]>,
}

/// What one node has of its own.
#[derive(Debug, Default)]
pub(super) struct View {
    pub(super) zone: Option<ZoneName>,
    pub(super) facts: Option<NodeFacts>,
    pub(super) objects: HashMap<DesiredKey, Blob>,
    /// Own objects, and `Service` keys that the node must look at again.
    pub(super) log: Log<DesiredKey>,
    pub(super) digest: Digest,
    /// What variants for this very node add to the zone's digest.
    pub(super) variants_digest: Digest,
}

impl Shared {
    pub(super) fn resolve(&self, node: &str, zone: Option<&str>) -> &Blob {
        self.by_node
            .get(node)
            .unwrap_or_else(|| self.resolve_zone(zone))
    }

    pub(super) fn resolve_zone(&self, zone: Option<&str>) -> &Blob {
        zone.and_then(|zone| self.by_zone.get(zone))
            .unwrap_or(&self.default)
    }

    pub(super) fn is_varied(&self) -> bool {
        !self.by_zone.is_empty() || !self.by_node.is_empty()
    }

    /// Whether the same kinds of nodes are told apart as in `encoded`.
    pub(super) fn same_shape(&self, encoded: &Encoded) -> bool {
        self.by_zone.keys().eq(encoded.by_zone.keys())
            && self.by_node.keys().eq(encoded.by_node.keys())
    }
}

impl View {
    pub(super) fn is_configured(&self) -> bool {
        self.facts.is_some()
    }

    /// Puts an object in; false if it was there.
    pub(super) fn put(
        &mut self,
        key: DesiredKey,
        (bytes, hash): (Bytes, ObjectHash),
        revision: u64,
    ) -> bool {
        let before = self.objects.get(&key);
        if before.is_some_and(|blob| blob.hash == hash) {
            return false;
        }
        if let Some(before) = before {
            self.digest.remove(before.hash);
        }
        self.digest.add(hash);
        let blob = Blob {
            bytes,
            hash,
            revision,
        };
        self.objects.insert(key.clone(), blob);
        self.log.note(key, revision);
        true
    }

    /// Takes an object out; false if it was not there.
    pub(super) fn take(&mut self, key: &DesiredKey, revision: u64) -> bool {
        let Some(blob) = self.objects.remove(key) else {
            return false;
        };
        self.digest.remove(blob.hash);
        self.log.note(key.clone(), revision);
        true
    }
}

impl State {
    pub(super) fn upsert(&mut self, key: &ServiceKey, encoded: Encoded) {
        let before = self.shared.remove(key);
        if let Some(before) = &before {
            self.count_digests(before, false);
        }
        let local_before = before.as_ref().map_or(&[][..], |s| &s.local_nodes);
        self.set_local(key, local_before, &encoded);
        let shared = self.next_shared(key, before, encoded);
        if shared.is_varied() {
            self.varied.insert(key.clone());
        } else {
            self.varied.remove(key);
        }
        self.count_digests(&shared, true);
        self.shared.insert(key.clone(), shared);
    }

    /// The new variants of a ServicePort: those that changed carry a new revision, or all of them
    /// when nodes are told apart in another way than before.
    pub(super) fn next_shared(
        &mut self,
        key: &ServiceKey,
        before: Option<Shared>,
        encoded: Encoded,
    ) -> Shared {
        let revision = self.revision + 1;
        let before = before.filter(|before| before.same_shape(&encoded));
        let mut changed = false;
        let mut blob = |(bytes, hash): (Bytes, ObjectHash), before: Option<&Blob>| match before {
            Some(before) if before.hash == hash => before.clone(),
            _ => {
                changed = true;
                Blob {
                    bytes,
                    hash,
                    revision,
                }
            }
        };
        let default = blob(encoded.default, before.as_ref().map(|s| &s.default));
        let mut blobs = |by: BTreeMap<NodeName, _>, before: Option<&BTreeMap<NodeName, Blob>>| {
            by.into_iter()
                .map(|(name, encoded)| {
                    let before = before.and_then(|b| b.get(&name));
                    let blob = blob(encoded, before);
                    (name, blob)
                })
                .collect()
        };
        let by_zone = blobs(encoded.by_zone, before.as_ref().map(|s| &s.by_zone));
        let by_node = blobs(encoded.by_node, before.as_ref().map(|s| &s.by_node));
        if changed {
            self.revision = revision;
            self.log.note(key.clone(), revision);
        }
        Shared {
            default,
            by_zone,
            by_node,
            local_nodes: encoded.local.into_iter().map(|(node, _)| node).collect(),
        }
    }

    pub(super) fn set_local(&mut self, key: &ServiceKey, before: &[NodeName], encoded: &Encoded) {
        let local = DesiredKey::Local(key.clone());
        for (node, object) in &encoded.local {
            let view = self.views.entry(node.clone()).or_default();
            if view.put(local.clone(), object.clone(), self.revision + 1) {
                self.revision += 1;
            }
        }
        for node in before {
            let is_its = |(other, _): &(NodeName, _)| other.cmp(node);
            if encoded.local.binary_search_by(is_its).is_err() {
                self.take_local(node, &local);
            }
        }
    }

    pub(super) fn take_local(&mut self, node: &NodeName, key: &DesiredKey) {
        let revision = self.revision + 1;
        let view = self.views.entry(node.clone()).or_default();
        if view.take(key, revision) {
            self.revision = revision;
            self.tombstones.push_back(Tombstone {
                revision,
                node: Some(node.clone()),
                key: key.clone(),
            });
        }
    }

    pub(super) fn delete(&mut self, key: &ServiceKey) {
        let Some(shared) = self.shared.remove(key) else {
            return;
        };
        self.count_digests(&shared, false);
        self.varied.remove(key);
        let local = DesiredKey::Local(key.clone());
        for node in &shared.local_nodes {
            self.take_local(node, &local);
        }
        self.revision += 1;
        self.log.note(key.clone(), self.revision);
        self.tombstones.push_back(Tombstone {
            revision: self.revision,
            node: None,
            key: DesiredKey::Service(key.clone()),
        });
    }

    /// Adds a ServicePort's part to all digests, or takes it out.
    pub(super) fn count_digests(&mut self, shared: &Shared, add: bool) {
        let count = |digest: &mut Digest, plus: &Blob, minus: Option<&Blob>| {
            let (plus, minus) = if add {
                (Some(plus), minus)
            } else {
                (minus, Some(plus))
            };
            if let Some(blob) = plus {
                digest.add(blob.hash);
            }
            if let Some(blob) = minus {
                digest.remove(blob.hash);
            }
        };
        count(&mut self.default_digest, &shared.default, None);
        for (zone, blob) in &shared.by_zone {
            let digest = self.zone_digests.entry(zone.clone()).or_default();
            count(digest, blob, Some(&shared.default));
        }
        for (node, blob) in &shared.by_node {
            let view = self.views.entry(node.clone()).or_default();
            let otherwise = shared.resolve_zone(view.zone.as_deref());
            count(&mut view.variants_digest, blob, Some(otherwise));
        }
    }

    pub(super) fn set_node(&mut self, mut node: NodeFacts) {
        node.service_cidrs.clone_from(&self.service_cidrs);
        let (name, zone) = (node.name.clone(), node.zone.clone());
        let object = encode(&DesiredObject::Node(node.clone()));
        let view = self.views.entry(name.clone()).or_default();
        view.facts = Some(node);
        if view.put(DesiredKey::Node, object, self.revision + 1) {
            self.revision += 1;
        }
        if view.zone != zone {
            self.move_node(&name, zone);
        }
    }

    pub(super) fn set_service_cidrs(&mut self, cidrs: &[Cidr]) {
        cidrs.clone_into(&mut self.service_cidrs);
        let nodes: Vec<NodeFacts> = self
            .views
            .values()
            .filter_map(|v| v.facts.clone())
            .collect();
        for node in nodes {
            self.set_node(node);
        }
    }

    /// A node is in another zone now: it must look again at everything that depends on zones.
    pub(super) fn move_node(&mut self, name: &NodeName, zone: Option<ZoneName>) {
        let view = self.views.entry(name.clone()).or_default();
        view.zone = zone;
        view.variants_digest = Digest::default();
        for key in &self.varied {
            let Some(shared) = self.shared.get(key) else {
                continue;
            };
            if let Some(blob) = shared.by_node.get(name) {
                let otherwise = shared.resolve_zone(view.zone.as_deref());
                view.variants_digest.add(blob.hash);
                view.variants_digest.remove(otherwise.hash);
            }
            self.revision += 1;
            view.log
                .note(DesiredKey::Service(key.clone()), self.revision);
        }
    }

    pub(super) fn forget_old_tombstones(&mut self) {
        while self.tombstones.len() > TOMBSTONES {
            let Some(old) = self.tombstones.pop_front() else {
                return;
            };
            self.horizon = self.horizon.max(old.revision);
            match (&old.node, &old.key) {
                (None, DesiredKey::Service(key)) => {
                    if self.log.revision_of(key) == Some(old.revision) {
                        self.log.forget(key);
                    }
                }
                (Some(node), key) => {
                    if let Some(view) = self.views.get_mut(node)
                        && view.log.revision_of(key) == Some(old.revision)
                    {
                        view.log.forget(key);
                    }
                }
                (None, DesiredKey::Local(_) | DesiredKey::Node) => {}
            }
        }
    }
}
