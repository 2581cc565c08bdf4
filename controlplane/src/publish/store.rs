//! The store: latest encoded state of every object, and who needs which of it.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::SystemTime;

use bytes::Bytes;
use kplane_model::{
    Cidr, DesiredKey, DesiredObject, Digest, LocalEndpoints, NodeFacts, NodeName, ObjectHash,
    ServiceKey, ServiceProgram, ZoneName,
};
use kplane_proto::convert::encode_object;
use tokio::sync::watch;

use super::log::Log;
use super::{Publication, Published};

/// Objects are collected into one message until it is this large, in bytes: far below every
/// limit, large enough that framing costs nothing.
const PIECE_BYTES: usize = 64 * 1024;

/// What a deleted key adds to a message, about.
const DELETED_BYTES: usize = 64;

/// Deleted keys that are remembered for agents that come back. An agent that missed more than
/// these gets a snapshot instead.
const TOMBSTONES: usize = 16_384;

/// Publications whose time is remembered, to tell how old the oldest missing change is.
const REMEMBERED_TIMES: usize = 4_096;

/// The newest state, for those who wait for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// Revision of the newest change; 0 = none.
    pub revision: u64,
    /// The source has delivered a complete picture: before that nobody is served.
    pub synced: bool,
}

/// How far an agent is: all that the control plane keeps of its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// Revision that the agent holds completely; 0 = nothing.
    base: u64,
    /// Changes up to here have been collected since.
    position: u64,
    /// Newest revision when the collecting began.
    started: u64,
}

impl Cursor {
    /// The cursor of an agent that holds `revision` completely, or nothing if it is 0.
    #[must_use]
    pub fn at(revision: u64) -> Self {
        Self {
            base: revision,
            position: revision,
            started: 0,
        }
    }

    /// There are changes up to `head` that have not been collected, or a collecting under way.
    #[must_use]
    pub fn is_behind(&self, head: u64) -> bool {
        self.base < head
    }

    /// Nothing has been collected yet since the agent's last complete state.
    fn is_fresh(&self) -> bool {
        self.base == self.position
    }

    /// A deletion need not be named to an agent that begins from nothing, unless the object may
    /// have been sent since it began.
    fn names_deletion(&self, revision: u64) -> bool {
        self.base != 0 || revision > self.started
    }
}

/// Part of what an agent lacks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Encoded objects.
    pub objects: Vec<Bytes>,
    /// Objects that are gone.
    pub deleted: Vec<DesiredKey>,
    /// Set when nothing is left.
    pub end: Option<PieceEnd>,
}

/// The state that an agent is in after the last piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceEnd {
    /// Revision.
    pub revision: u64,
    /// Digest of everything that the agent holds.
    pub digest: Digest,
    /// When the oldest change that the agent lacked was observed.
    pub changed_at: Option<SystemTime>,
}

/// Latest encoded state of every object. Written by the index, read by every stream.
#[derive(Debug)]
pub struct Store {
    epoch: u64,
    state: RwLock<State>,
    head: watch::Sender<Head>,
}

#[derive(Debug, Default)]
struct State {
    revision: u64,
    shared: HashMap<ServiceKey, Shared>,
    log: Log<ServiceKey>,
    views: HashMap<NodeName, View>,
    /// Digest of all default variants.
    default_digest: Digest,
    /// What nodes of a zone have to add to it.
    zone_digests: HashMap<ZoneName, Digest>,
    /// ServicePorts with more than the default variant.
    varied: BTreeSet<ServiceKey>,
    tombstones: VecDeque<Tombstone>,
    /// Deletions up to here may be forgotten.
    horizon: u64,
    /// Part of every node's configuration.
    service_cidrs: Vec<Cidr>,
    /// First revision of each publication, and when its change was observed.
    times: VecDeque<(u64, SystemTime)>,
}

/// A deleted key, remembered in one log.
#[derive(Debug)]
struct Tombstone {
    revision: u64,
    node: Option<NodeName>,
    key: DesiredKey,
}

/// One encoded object.
#[derive(Clone, Debug)]
struct Blob {
    bytes: Bytes,
    hash: ObjectHash,
    revision: u64,
}

/// All variants of one ServicePort.
#[derive(Debug)]
struct Shared {
    default: Blob,
    by_zone: BTreeMap<ZoneName, Blob>,
    by_node: BTreeMap<NodeName, Blob>,
    /// Nodes that have [`LocalEndpoints`] of it.
    local_nodes: BTreeSet<NodeName>,
}

/// What one node has of its own.
#[derive(Debug, Default)]
struct View {
    zone: Option<ZoneName>,
    facts: Option<NodeFacts>,
    objects: HashMap<DesiredKey, Blob>,
    /// Own objects, and `Service` keys that the node must look at again.
    log: Log<DesiredKey>,
    digest: Digest,
    /// What variants for this very node add to the zone's digest.
    variants_digest: Digest,
}

impl Store {
    /// An empty store. `epoch` is random for each start of the control plane.
    #[must_use]
    pub fn new(epoch: u64) -> Self {
        Self {
            epoch,
            state: RwLock::default(),
            head: watch::Sender::default(),
        }
    }

    /// The epoch that revisions belong to.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The newest state; wakes up when it changes.
    #[must_use]
    pub fn head(&self) -> watch::Receiver<Head> {
        self.head.subscribe()
    }

    /// Says that everything published so far is a complete picture.
    pub fn set_synced(&self) {
        self.head
            .send_if_modified(|head| !std::mem::replace(&mut head.synced, true));
    }

    /// Publishes changes; what is equal to what was published before is left out. Returns the
    /// newest revision.
    pub fn publish(&self, publication: &Publication) -> u64 {
        let encoded: Vec<_> = publication
            .services
            .iter()
            .map(|(key, published)| (key, published.as_ref().map(Encoded::new)))
            .collect();
        let mut state = self.write();
        let first = state.revision + 1;
        for (key, encoded) in encoded {
            match encoded {
                Some(encoded) => state.upsert(key, encoded),
                None => state.delete(key),
            }
        }
        for node in &publication.nodes {
            state.set_node(node.clone());
        }
        if let Some(cidrs) = &publication.service_cidrs {
            state.set_service_cidrs(cidrs);
        }
        let revision = state.revision;
        if revision >= first {
            state.times.push_back((first, publication.observed_at));
            if state.times.len() > REMEMBERED_TIMES {
                state.times.pop_front();
            }
        }
        state.forget_old_tombstones();
        drop(state);
        self.head
            .send_if_modified(|head| std::mem::replace(&mut head.revision, revision) != revision);
        revision
    }

    /// Makes sure that a node has a configuration object, though nothing is known of it.
    pub fn ensure_node(&self, name: &NodeName) {
        if self.read().views.get(name).is_some_and(View::is_configured) {
            return;
        }
        self.publish(&Publication {
            services: Vec::new(),
            nodes: vec![NodeFacts {
                name: name.clone(),
                eligible: true,
                ..NodeFacts::default()
            }],
            service_cidrs: None,
            observed_at: SystemTime::now(),
        });
    }

    /// The next part of what `node` lacks; moves the cursor behind it.
    #[must_use]
    pub fn collect(&self, node: &str, cursor: &mut Cursor) -> Piece {
        self.read().collect(node, cursor)
    }

    /// Where an agent may go on that holds objects with this digest and, if the epoch is ours, says
    /// that it is at `revision`; `None` if it needs a snapshot.
    #[must_use]
    pub fn resume(&self, node: &str, digest: Digest, revision: Option<u64>) -> Option<Cursor> {
        let state = self.read();
        if digest == state.digest(node) {
            return Some(Cursor::at(state.revision));
        }
        let known = state.horizon.max(1)..=state.revision;
        revision.filter(|r| known.contains(r)).map(Cursor::at)
    }

    /// Facts of all nodes that have a configuration, by name.
    #[must_use]
    pub fn nodes(&self) -> BTreeMap<NodeName, NodeFacts> {
        let state = self.read();
        let facts = state.views.values().filter_map(|view| view.facts.clone());
        facts.map(|node| (node.name.clone(), node)).collect()
    }

    /// Digest of everything that a node must hold.
    #[must_use]
    pub fn digest(&self, node: &str) -> Digest {
        self.read().digest(node)
    }

    /// Revision of the newest change that concerns a node.
    #[must_use]
    pub fn wanted(&self, node: &str) -> u64 {
        self.read().wanted(node)
    }

    /// Revision of the newest change of a ServicePort that concerns a node.
    #[must_use]
    pub fn wanted_of(&self, node: &str, key: &ServiceKey) -> u64 {
        let state = self.read();
        let view = state.views.get(node);
        let zone = view.and_then(|v| v.zone.as_deref());
        let shared = match state.shared.get(key) {
            Some(shared) => shared.resolve(node, zone).revision,
            None => state.log.revision_of(key).unwrap_or(0),
        };
        let own = view.map_or(0, |view| {
            let revision = |key| view.log.revision_of(&key).unwrap_or(0);
            revision(DesiredKey::Local(key.clone())).max(revision(DesiredKey::Service(key.clone())))
        });
        shared.max(own)
    }

    /// When the first change after `revision` was observed, if there is one and it is remembered.
    #[must_use]
    pub fn changed_after(&self, revision: u64) -> Option<SystemTime> {
        self.read().changed_after(revision)
    }

    fn read(&self) -> RwLockReadGuard<'_, State> {
        // A panic while writing is a bug that tests find; readers must not multiply it.
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A [`Published`] after encoding, outside of the lock.
struct Encoded {
    default: (Bytes, ObjectHash),
    by_zone: BTreeMap<ZoneName, (Bytes, ObjectHash)>,
    by_node: BTreeMap<NodeName, (Bytes, ObjectHash)>,
    local: BTreeMap<NodeName, (Bytes, ObjectHash)>,
}

impl Encoded {
    fn new(published: &Published) -> Self {
        let variants = &published.variants;
        let program = |endpoints: &Vec<_>| {
            encode(&DesiredObject::Service(ServiceProgram {
                port: published.port.clone(),
                endpoints: endpoints.clone(),
                has_any: variants.has_any,
            }))
        };
        let programs = |by: &BTreeMap<NodeName, Vec<_>>| {
            by.iter()
                .map(|(name, endpoints)| (name.clone(), program(endpoints)))
                .collect()
        };
        let local = published.local.iter().map(|(node, endpoints)| {
            let local = LocalEndpoints {
                key: published.port.key.clone(),
                endpoints: endpoints.clone(),
            };
            (node.clone(), encode(&DesiredObject::Local(local)))
        });
        Self {
            default: program(&variants.default),
            by_zone: programs(&variants.by_zone),
            by_node: programs(&variants.by_node),
            local: local.collect(),
        }
    }
}

fn encode(object: &DesiredObject) -> (Bytes, ObjectHash) {
    let bytes = encode_object(object);
    let hash = ObjectHash::of(&bytes);
    (bytes, hash)
}

impl Shared {
    fn resolve(&self, node: &str, zone: Option<&str>) -> &Blob {
        self.by_node
            .get(node)
            .unwrap_or_else(|| self.resolve_zone(zone))
    }

    fn resolve_zone(&self, zone: Option<&str>) -> &Blob {
        zone.and_then(|zone| self.by_zone.get(zone))
            .unwrap_or(&self.default)
    }

    fn is_varied(&self) -> bool {
        !self.by_zone.is_empty() || !self.by_node.is_empty()
    }

    /// Whether the same kinds of nodes are told apart as in `encoded`.
    fn same_shape(&self, encoded: &Encoded) -> bool {
        self.by_zone.keys().eq(encoded.by_zone.keys())
            && self.by_node.keys().eq(encoded.by_node.keys())
    }
}

impl View {
    fn is_configured(&self) -> bool {
        self.facts.is_some()
    }

    /// Puts an object in; false if it was there.
    fn put(&mut self, key: DesiredKey, (bytes, hash): (Bytes, ObjectHash), revision: u64) -> bool {
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
    fn take(&mut self, key: &DesiredKey, revision: u64) -> bool {
        let Some(blob) = self.objects.remove(key) else {
            return false;
        };
        self.digest.remove(blob.hash);
        self.log.note(key.clone(), revision);
        true
    }
}

impl State {
    fn upsert(&mut self, key: &ServiceKey, encoded: Encoded) {
        let before = self.shared.remove(key);
        if let Some(before) = &before {
            self.count_digests(before, false);
        }
        let local_before = before
            .as_ref()
            .map(|s| s.local_nodes.clone())
            .unwrap_or_default();
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
    fn next_shared(
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
            local_nodes: encoded.local.into_keys().collect(),
        }
    }

    fn set_local(&mut self, key: &ServiceKey, before: BTreeSet<NodeName>, encoded: &Encoded) {
        let local = DesiredKey::Local(key.clone());
        for (node, object) in &encoded.local {
            let view = self.views.entry(node.clone()).or_default();
            if view.put(local.clone(), object.clone(), self.revision + 1) {
                self.revision += 1;
            }
        }
        for node in before {
            if !encoded.local.contains_key(&node) {
                self.take_local(&node, &local);
            }
        }
    }

    fn take_local(&mut self, node: &NodeName, key: &DesiredKey) {
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

    fn delete(&mut self, key: &ServiceKey) {
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
    fn count_digests(&mut self, shared: &Shared, add: bool) {
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

    fn set_node(&mut self, mut node: NodeFacts) {
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

    fn set_service_cidrs(&mut self, cidrs: &[Cidr]) {
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
    fn move_node(&mut self, name: &NodeName, zone: Option<ZoneName>) {
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

    fn forget_old_tombstones(&mut self) {
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

    fn collect(&self, node: &str, cursor: &mut Cursor) -> Piece {
        if cursor.is_fresh() {
            cursor.started = self.revision;
        }
        let no_view = View::default();
        let view = self.views.get(node).unwrap_or(&no_view);
        let mut piece = Piece::default();
        let mut bytes = 0;
        for (revision, key, blob) in self.lacking(node, view, *cursor) {
            if bytes >= PIECE_BYTES {
                return piece;
            }
            cursor.position = revision;
            match blob {
                Some(blob) => {
                    bytes += blob.bytes.len();
                    piece.objects.push(blob.bytes.clone());
                }
                None if cursor.names_deletion(revision) => {
                    bytes += DELETED_BYTES;
                    piece.deleted.push(key);
                }
                None => {}
            }
        }
        piece.end = Some(PieceEnd {
            revision: self.revision,
            digest: self.digest(node),
            changed_at: self.changed_after(cursor.base),
        });
        *cursor = Cursor::at(self.revision);
        piece
    }

    /// Everything that changed for a node behind a cursor, oldest change first; without a blob it
    /// is gone.
    fn lacking<'a>(
        &'a self,
        node: &'a str,
        view: &'a View,
        cursor: Cursor,
    ) -> impl Iterator<Item = (u64, DesiredKey, Option<&'a Blob>)> {
        let mut shared = self
            .log
            .after(cursor.position)
            .map(move |(revision, key)| {
                let shared = self.shared.get(key);
                (
                    revision,
                    key,
                    shared.map(|s| s.resolve(node, view.zone.as_deref())),
                )
            })
            // Else another variant changed, and the agent holds this one already.
            .filter(move |(_, _, blob)| blob.is_none_or(|blob| blob.revision > cursor.base))
            .peekable();
        let mut own = view.log.after(cursor.position).peekable();
        std::iter::from_fn(move || {
            let next_own = own.peek().map_or(u64::MAX, |(revision, _)| *revision);
            match shared.next_if(|(revision, _, _)| *revision < next_own) {
                Some((revision, key, blob)) => {
                    Some((revision, DesiredKey::Service(key.clone()), blob))
                }
                None => own
                    .next()
                    .map(|(revision, key)| (revision, key.clone(), self.own_blob(view, node, key))),
            }
        })
    }

    fn own_blob<'a>(&'a self, view: &'a View, node: &str, key: &DesiredKey) -> Option<&'a Blob> {
        match key {
            DesiredKey::Service(key) => {
                let shared = self.shared.get(key)?;
                Some(shared.resolve(node, view.zone.as_deref()))
            }
            DesiredKey::Local(_) | DesiredKey::Node => view.objects.get(key),
        }
    }

    fn digest(&self, node: &str) -> Digest {
        let Some(view) = self.views.get(node) else {
            return self.default_digest;
        };
        let zone = view
            .zone
            .as_ref()
            .and_then(|zone| self.zone_digests.get(zone));
        self.default_digest
            .plus(zone.copied().unwrap_or_default())
            .plus(view.variants_digest)
            .plus(view.digest)
    }

    fn wanted(&self, node: &str) -> u64 {
        let view = self.views.get(node);
        let zone = view.and_then(|v| v.zone.as_deref());
        let own = view
            .and_then(|v| v.log.newest_first().next())
            .map_or(0, |(r, _)| r);
        let mut shared = self.log.newest_first();
        let concerns = |revision: u64, key: &ServiceKey| {
            let blob = self.shared.get(key).map(|s| s.resolve(node, zone));
            blob.is_none_or(|blob| blob.revision == revision)
        };
        let newest = shared.find(|(revision, key)| *revision <= own || concerns(*revision, key));
        newest.map_or(own, |(revision, _)| revision.max(own))
    }

    fn changed_after(&self, revision: u64) -> Option<SystemTime> {
        if revision >= self.revision {
            return None;
        }
        // The last publication that begins at or before the first missing revision.
        let after = self
            .times
            .partition_point(|(first, _)| *first <= revision + 1);
        let (_, at) = self.times.get(after.checked_sub(1)?)?;
        Some(*at)
    }
}
