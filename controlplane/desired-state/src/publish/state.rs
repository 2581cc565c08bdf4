//! The state behind the store: latest objects, logs of last changes, digests.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use kplane_model::{
    Cidr, DesiredKey, Digest, NodeFacts, NodeName, ObjectHash, ServiceKey, ZoneName,
};

use super::blob::Encoded;
use super::log::{History, Log, Tombstone};
use super::triggers::TriggerLog;
use crate::freshness::Freshness;
use crate::trust::Trust;
use kplane_proto::v1::Enforcement;

/// Number of deleted keys that are remembered in any case for agents that are behind. More are as long as there are
/// more objects: an agent that missed more deletions than objects are left gets a snapshot, which is smaller.
const TOMBSTONES: usize = 16_384;

/// First revision of a store: the revision of the configuration of nodes without a Node object.
pub(super) const FIRST_REVISION: u64 = 1;

/// Memory is given back when less than one place in this many is taken.
const SPARSE: usize = 4;

#[derive(Debug)]
pub(super) struct State {
    pub(super) revision: u64,
    /// ServicePorts, and shared parts of NetworkPolicies.
    pub(super) shared: HashMap<DesiredKey, Shared>,
    pub(super) log: Log<DesiredKey>,
    pub(super) views: HashMap<NodeName, View>,
    /// Newest revision at which the store forgot a node.
    pub(super) freed_at: u64,
    /// Digest of all default variants.
    pub(super) default_digest: Digest,
    /// Values of `default_digest` at earlier revisions.
    pub(super) history: History,
    /// Digest that the nodes of a zone add to `default_digest`.
    pub(super) zone_digests: HashMap<ZoneName, Digest>,
    /// ServicePorts with more than the default variant.
    pub(super) varied: BTreeSet<DesiredKey>,
    pub(super) tombstones: VecDeque<Tombstone>,
    /// Number of tombstones that are kept in any case.
    pub(super) least_tombstones: usize,
    /// Newest revision whose deletions may be forgotten.
    pub(super) horizon: u64,
    /// The cluster's ServiceCIDRs, a part of every node's configuration.
    pub(super) service_cidrs: Vec<Cidr>,
    /// There is a Node object, as the configuration of nodes without one says.
    pub(super) has_nodes: bool,
    /// Revision at which the configuration of nodes without a Node object last changed. No object
    /// has this revision.
    pub(super) strangers_revision: u64,
    /// The latest publications, newest last.
    pub(super) times: VecDeque<Moment>,
    pub(super) triggers: TriggerLog,
    /// Trust in the picture, and the number of its changes.
    pub(super) trust: Trust,
    pub(super) trust_changes: u64,
    /// What is said of NetworkPolicies as a whole; `trust_changes` counts its changes as well.
    pub(super) enforcement: Enforcement,
    /// The versions of the source that the state contains.
    pub(super) freshness: Arc<Freshness>,
}

/// The time of one publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// First revision of the publication.
    pub first: u64,
    /// Time at which the control plane observed the first of its changes.
    pub observed_at: SystemTime,
    /// Time at which streams could read it.
    pub published_at: Instant,
}

/// One encoded object.
#[derive(Clone, Debug)]
pub(super) struct Blob {
    pub(super) bytes: Bytes,
    pub(super) hash: ObjectHash,
    pub(super) revision: u64,
}

/// All variants of one object that nodes share: of a ServicePort, or the only one of a part of NetworkPolicies.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) default: Blob,
    pub(super) by_zone: BTreeMap<ZoneName, Blob>,
    pub(super) by_node: BTreeMap<NodeName, Blob>,
    /// Nodes with local endpoints of the ServicePort; sorted.
    pub(super) local_nodes: Box<[NodeName]>,
}

/// The objects of one node.
#[derive(Debug, Default)]
pub(super) struct View {
    pub(super) zone: Option<ZoneName>,
    pub(super) facts: Option<Arc<NodeFacts>>,
    pub(super) objects: HashMap<DesiredKey, Blob>,
    /// Own objects, and `Service` keys that the node must check again.
    pub(super) log: Log<DesiredKey>,
    pub(super) digest: Digest,
    /// Digest that variants for this node add to the zone's digest.
    pub(super) variants_digest: Digest,
    /// Number of agents' streams for this node.
    pub(super) agents: usize,
    /// The Node object is gone: the view is kept for the node's agent only.
    pub(super) orphaned: bool,
    /// Value of `State::freed_at` when this view was created. Deletions before this revision may be
    /// unknown.
    pub(super) since: u64,
}

impl Shared {
    pub(super) fn resolve(&self, node: &str, zone: Option<&str>) -> &Blob {
        self.by_node.get(node).unwrap_or_else(|| self.resolve_zone(zone))
    }

    pub(super) fn resolve_zone(&self, zone: Option<&str>) -> &Blob {
        zone.and_then(|zone| self.by_zone.get(zone)).unwrap_or(&self.default)
    }

    /// Returns whether the variants are for the same zones and nodes as those of `encoded`.
    fn has_shape_of(&self, encoded: &Encoded) -> bool {
        self.by_zone.keys().eq(encoded.by_zone.keys())
            && self.by_node.keys().eq(encoded.by_node.keys())
    }

    pub(super) fn is_varied(&self) -> bool {
        !self.by_zone.is_empty() || !self.by_node.is_empty()
    }
}

impl View {
    /// Returns whether the view is unused: no object mentions the node, and it has neither Node
    /// object nor agent.
    fn is_vacant(&self) -> bool {
        let configured = usize::from(self.facts.is_some());
        self.agents == 0
            && (self.orphaned || configured == 0)
            && self.objects.len() == configured
            && self.variants_digest == Digest::default()
    }

    /// Stores an object; returns false if it was there.
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

    /// Removes an object; returns false if it was not there.
    pub(super) fn take(&mut self, key: &DesiredKey, revision: u64) -> bool {
        let Some(blob) = self.objects.remove(key) else {
            return false;
        };
        self.digest.remove(blob.hash);
        self.log.note(key.clone(), revision);
        true
    }
}

impl Default for State {
    fn default() -> Self {
        Self {
            revision: FIRST_REVISION,
            strangers_revision: FIRST_REVISION,
            shared: HashMap::new(),
            log: Log::default(),
            views: HashMap::new(),
            freed_at: 0,
            default_digest: Digest::default(),
            history: History::default(),
            zone_digests: HashMap::new(),
            varied: BTreeSet::new(),
            tombstones: VecDeque::new(),
            least_tombstones: TOMBSTONES,
            horizon: 0,
            service_cidrs: Vec::new(),
            has_nodes: false,
            times: VecDeque::new(),
            triggers: TriggerLog::default(),
            trust: Trust::default(),
            trust_changes: 0,
            enforcement: Enforcement::Unspecified,
            freshness: Arc::default(),
        }
    }
}

impl State {
    /// Forgets a node without data: names come and go with the objects that mention them.
    pub(super) fn free_if_vacant(&mut self, node: &NodeName) {
        if !self.views.get(node).is_some_and(View::is_vacant) {
            return;
        }
        let freed = self.views.remove(node);
        if freed.is_some_and(|view| view.log.newest_first().next().is_some()) {
            // The view's deletions are forgotten too, so an agent that reconnects cannot learn of
            // them.
            self.freed_at = self.revision;
        }
        let left = self.views.len();
        if left < self.views.capacity() / SPARSE {
            self.views.shrink_to(2 * left);
        }
    }

    pub(super) fn upsert(&mut self, key: &DesiredKey, encoded: Encoded) {
        let before = self.shared.remove(key);
        let for_nodes: Vec<NodeName> =
            before.iter().flat_map(|before| before.by_node.keys()).cloned().collect();
        self.forget_variants(
            key,
            for_nodes.iter().filter(|node| !encoded.by_node.contains_key(*node)),
        );
        if let Some(before) = &before {
            self.count_digests(before, false);
        }
        let local_before = before.as_ref().map_or(&[][..], |s| &s.local_nodes);
        if let Some(port) = key.service() {
            self.set_local(port, local_before, &encoded);
        }
        let shared = self.next_shared(key, before, encoded);
        if shared.is_varied() {
            self.varied.insert(key.clone());
        } else {
            self.varied.remove(key);
        }
        self.count_digests(&shared, true);
        self.shared.insert(key.clone(), shared);
        for node in &for_nodes {
            self.free_if_vacant(node);
        }
    }

    /// Returns the new variants of a ServicePort. Changed variants get a new revision. All of them
    /// get one if the variants are for other zones or nodes than before.
    pub(super) fn next_shared(
        &mut self,
        key: &DesiredKey,
        before: Option<Shared>,
        encoded: Encoded,
    ) -> Shared {
        let revision = self.revision + 1;
        let before = before.filter(|before| before.has_shape_of(&encoded));
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
        let by_node: BTreeMap<NodeName, Blob> =
            blobs(encoded.by_node, before.as_ref().map(|s| &s.by_node));
        if changed {
            self.revision = revision;
            self.log.note(key.clone(), revision);
            self.note_variants(key, by_node.keys(), revision);
        }
        Shared {
            default,
            by_zone,
            by_node,
            local_nodes: encoded.local.into_iter().map(|(node, _)| node).collect(),
        }
    }

    /// Records variants for nodes among these nodes' own objects: an agent without anything gets what all nodes share
    /// from the snapshot, which has no variants for nodes.
    fn note_variants<'a>(
        &mut self,
        key: &DesiredKey,
        nodes: impl Iterator<Item = &'a NodeName>,
        revision: u64,
    ) {
        for node in nodes {
            let view = view_of(&mut self.views, node, self.freed_at);
            view.log.note(key.clone(), revision);
        }
    }

    /// Forgets variants for these nodes. Every agent learns from the shared log what replaces them.
    fn forget_variants<'a>(&mut self, key: &DesiredKey, nodes: impl Iterator<Item = &'a NodeName>) {
        for node in nodes {
            if let Some(view) = self.views.get_mut(node) {
                view.log.forget(key);
            }
        }
    }

    pub(super) fn set_local(&mut self, key: &ServiceKey, before: &[NodeName], encoded: &Encoded) {
        let local = DesiredKey::Local(key.clone());
        for (node, object) in &encoded.local {
            self.put_own(node, &local, object.clone());
        }
        for node in before {
            let is_its = |(other, _): &(NodeName, _)| other.cmp(node);
            if encoded.local.binary_search_by(is_its).is_err() {
                self.take_own(node, &local);
                self.free_if_vacant(node);
            }
        }
    }

    /// Stores an object of a node.
    pub(super) fn put_own(
        &mut self,
        node: &NodeName,
        key: &DesiredKey,
        object: (Bytes, ObjectHash),
    ) {
        let view = view_of(&mut self.views, node, self.freed_at);
        if view.put(key.clone(), object, self.revision + 1) {
            self.revision += 1;
        }
    }

    /// Removes an object of a node.
    pub(super) fn take_own(&mut self, node: &NodeName, key: &DesiredKey) {
        let revision = self.revision + 1;
        let view = view_of(&mut self.views, node, self.freed_at);
        if view.take(key, revision) {
            self.revision = revision;
            self.tombstones.push_back(Tombstone {
                revision,
                node: Some(node.clone()),
                key: key.clone(),
            });
        }
    }

    pub(super) fn delete(&mut self, key: &DesiredKey) {
        let Some(shared) = self.shared.remove(key) else {
            return;
        };
        self.count_digests(&shared, false);
        self.varied.remove(key);
        if let Some(port) = key.service() {
            let local = DesiredKey::Local(port.clone());
            for node in &shared.local_nodes {
                self.take_own(node, &local);
            }
        }
        self.forget_variants(key, shared.by_node.keys());
        for node in shared.local_nodes.iter().chain(shared.by_node.keys()) {
            self.free_if_vacant(node);
        }
        self.revision += 1;
        self.log.note(key.clone(), self.revision);
        self.tombstones.push_back(Tombstone {
            revision: self.revision,
            node: None,
            key: key.clone(),
        });
    }

    /// Adds an object's part to all digests, or subtracts it.
    pub(super) fn count_digests(&mut self, shared: &Shared, add: bool) {
        let count = |digest: &mut Digest, plus: &Blob, minus: Option<&Blob>| {
            let (plus, minus) = if add { (Some(plus), minus) } else { (minus, Some(plus)) };
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
            if *digest == Digest::default() {
                self.zone_digests.remove(zone);
            }
        }
        for (node, blob) in &shared.by_node {
            let view = view_of(&mut self.views, node, self.freed_at);
            let otherwise = shared.resolve_zone(view.zone.as_deref());
            count(&mut view.variants_digest, blob, Some(otherwise));
        }
    }

    pub(super) fn forget_old_tombstones(&mut self) {
        if self.tombstones.len() <= self.least_tombstones {
            return;
        }
        let own: usize = self.views.values().map(|view| view.objects.len()).sum();
        let kept = self.least_tombstones.max(self.shared.len() + own);
        while self.tombstones.len() > kept {
            let Some(old) = self.tombstones.pop_front() else {
                return;
            };
            self.horizon = self.horizon.max(old.revision);
            match (&old.node, &old.key) {
                (None, key) => {
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
            }
        }
    }
}

/// Returns the view of a node. A new view does not know deletions before `since`.
pub(super) fn view_of<'a>(
    views: &'a mut HashMap<NodeName, View>,
    node: &NodeName,
    since: u64,
) -> &'a mut View {
    let new = || View {
        since,
        ..View::default()
    };
    views.entry(node.clone()).or_insert_with(new)
}
