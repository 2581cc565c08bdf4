//! The store, which the index writes and every stream reads.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use kplane_model::{DesiredKey, Digest, NodeFacts, NodeName, ServiceKey, ServiceName, ZoneName};
use kplane_policy::PolicyChanges;
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use tokio::sync::watch;

use super::blob::Encoded;
use super::common::{Commons, Ready};
use super::cursor::{Cursor, PIECE_BYTES, Piece};
use super::policies::EncodedPolicies;
use super::resume::{RangeIndex, RangeIndexes, Way};
use super::snapshot_cache::{EncodedSnapshot, Walk};
use super::state::{FIRST_REVISION, Moment, State, view_of};
use super::{Publication, Trigger};
use crate::freshness::Freshness;
use crate::trust::Trust;
use kplane_proto::v1::Enforcement;

/// Maximum number of publications whose time is remembered, to compute the age of the oldest
/// missing change.
const REMEMBERED_TIMES: usize = 4_096;

/// The newest state, for tasks that wait for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// Revision of the newest change.
    pub revision: u64,
    /// The source has delivered a complete picture. Agents get nothing before.
    pub synced: bool,
    /// Number of changes of the trust in the picture, and of what is said of NetworkPolicies.
    pub trust: u64,
}

/// What was published.
#[derive(Clone, Debug, Default)]
pub struct Staged {
    /// The newest revision.
    pub revision: u64,
    /// The ServicePorts that changed.
    pub touched: Vec<ServiceChange>,
}

/// A ServicePort that changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceChange {
    /// Its Service.
    pub service: ServiceName,
    /// Revision of the change.
    pub revision: u64,
    /// Whether nodes share what changed. If not, only endpoints of single nodes changed.
    pub shared: bool,
}

/// Latest encoded state of every object. The index writes it, every stream reads it.
#[derive(Debug)]
pub struct Store {
    epoch: u64,
    /// The only node that is served; unset = all nodes.
    only: OnceLock<NodeName>,
    state: RwLock<State>,
    /// Encoded snapshots by zone; one for all zones without variants of their own.
    shelves: Mutex<HashMap<Option<ZoneName>, Arc<EncodedSnapshot>>>,
    /// Encoded updates that agents share.
    pub(super) commons: Mutex<Commons>,
    /// Shared objects by ranges.
    indexes: Mutex<RangeIndexes>,
    head: watch::Sender<Head>,
    /// The head as agents' streams know it.
    announced: watch::Sender<Head>,
}

impl Store {
    /// Creates an empty store. `epoch` is random for each start of the control plane.
    pub fn new(epoch: u64) -> Self {
        let head = Head {
            revision: FIRST_REVISION,
            ..Head::default()
        };
        Self {
            epoch,
            only: OnceLock::new(),
            state: RwLock::default(),
            shelves: Mutex::default(),
            commons: Mutex::default(),
            indexes: Mutex::default(),
            head: watch::Sender::new(head),
            announced: watch::Sender::new(head),
        }
    }

    /// Remembers as many deletions as there are objects, and at least so many.
    pub fn remember_deletions(&self, least: usize) {
        self.write().least_tombstones = least;
    }

    /// Keeps nothing from now on that is for another node than this one.
    pub fn serve_only(&self, node: NodeName) {
        // The first call counts; the wiring makes one.
        let _ = self.only.set(node);
    }

    /// Returns the epoch that revisions belong to.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns a receiver of the newest state.
    pub fn head(&self) -> watch::Receiver<Head> {
        self.head.subscribe()
    }

    /// Returns a receiver of the newest state that agents' streams are to send.
    pub fn announcements(&self) -> watch::Receiver<Head> {
        self.announced.subscribe()
    }

    /// Makes agents' streams send the newest state.
    pub fn announce(&self) {
        self.announced.send_if_modified(|announced| {
            let head = *self.head.borrow();
            std::mem::replace(announced, head) != head
        });
    }

    /// Marks everything published so far as a complete picture, and announces it.
    pub fn set_synced(&self) {
        let first = |head: &mut Head| !std::mem::replace(&mut head.synced, true);
        if self.head.send_if_modified(first) {
            self.announce();
        }
    }

    /// Sets the trust in the picture. Streams send it with their next update, or with an empty
    /// update if there is no other.
    pub fn set_trust(&self, trust: Trust) {
        let mut state = self.write();
        if state.trust == trust {
            return;
        }
        state.trust = trust;
        self.tell_trust(state);
    }

    /// Sets what is said of NetworkPolicies as a whole. Streams send it as they send the trust.
    pub fn set_enforcement(&self, enforcement: Enforcement) {
        let mut state = self.write();
        if state.enforcement == enforcement {
            return;
        }
        state.enforcement = enforcement;
        self.tell_trust(state);
    }

    /// Returns what is said of NetworkPolicies as a whole.
    pub fn enforcement(&self) -> Enforcement {
        self.read().enforcement
    }

    fn tell_trust(&self, mut state: RwLockWriteGuard<'_, State>) {
        state.trust_changes += 1;
        let changes = state.trust_changes;
        drop(state);
        self.head.send_modify(|head| head.trust = head.trust.max(changes));
        self.announce();
    }

    /// Returns the trust in the picture.
    pub fn trust(&self) -> Trust {
        self.read().trust.clone()
    }

    /// Sets the versions of the source that the published state contains.
    pub fn set_freshness(&self, freshness: &Freshness) {
        if *self.read().freshness != *freshness {
            self.write().set_freshness(freshness);
        }
    }

    /// Returns the versions of the source that the published state contains.
    pub fn freshness(&self) -> Arc<Freshness> {
        Arc::clone(&self.read().freshness)
    }

    /// Publishes changes of a source without versions; see [`Store::publish_as_of`].
    pub fn publish(&self, publication: Publication) -> u64 {
        let freshness = self.freshness();
        self.publish_as_of(publication, &freshness)
    }

    /// Publishes changes as [`Store::stage`] does, and announces them.
    pub fn publish_as_of(&self, publication: Publication, freshness: &Freshness) -> u64 {
        let revision = self.stage(publication, freshness).revision;
        self.announce();
        revision
    }

    /// Publishes changes; objects that equal the published ones are left out. The state afterwards
    /// contains these versions of the source. Streams send it after [`Store::announce`].
    pub fn stage(&self, mut publication: Publication, freshness: &Freshness) -> Staged {
        // Each one is dropped when it has been encoded, because there are many at a start.
        let encoded: Vec<_> = std::mem::take(&mut publication.services)
            .into_iter()
            .map(|(key, mut published)| {
                if let (Some(published), Some(only)) = (&mut published, self.only.get()) {
                    published.keep_only(only);
                }
                (key, published.as_ref().map(Encoded::new))
            })
            .collect();
        let policies = self.encode_policies(std::mem::take(&mut publication.policies));
        let mut state = self.write();
        let first = state.revision + 1;
        let (mut changed, mut touched) = (Vec::new(), Vec::new());
        for (key, encoded) in encoded {
            let before = state.revision;
            let port = DesiredKey::Service(key.clone());
            match encoded {
                Some(encoded) => state.upsert(&port, encoded),
                None => state.delete(&port),
            }
            if state.revision != before {
                touched.push(state.touched(&key, before));
                changed.push(key);
            }
        }
        state.set_policies(policies);
        state.triggers.note(first, &publication.triggers, &changed);
        state.set_nodes(publication.nodes, publication.service_cidrs.as_deref());
        state.set_freshness(freshness);
        Staged {
            revision: self.finish(state, first, publication.observed_at),
            touched,
        }
    }

    /// Encodes parts of NetworkPolicies, without those of nodes that are not served.
    fn encode_policies(&self, mut changes: PolicyChanges) -> EncodedPolicies {
        if let Some(only) = self.only.get() {
            for change in &mut changes.own {
                change.nodes.retain(|node| node == only);
            }
            changes.own.retain(|change| !change.nodes.is_empty());
        }
        EncodedPolicies::new(changes)
    }

    /// Registers a stream about a node. Until [`Store::leave`], the store keeps the node's view,
    /// even if objects that mention the node go.
    pub fn attend(&self, name: &NodeName) {
        let mut state = self.write();
        let since = state.freed_at;
        view_of(&mut state.views, name, since).agents += 1;
    }

    /// Unregisters a stream about a node.
    pub fn leave(&self, name: &NodeName) {
        let mut state = self.write();
        if let Some(view) = state.views.get_mut(name) {
            view.agents = view.agents.saturating_sub(1);
        }
        state.free_if_vacant(name);
    }

    /// Records when the changes since revision `first` were observed, and moves the head.
    fn finish(
        &self,
        mut state: RwLockWriteGuard<'_, State>,
        first: u64,
        observed_at: SystemTime,
    ) -> u64 {
        let revision = state.revision;
        let digest = state.default_digest;
        state.history.note(digest, revision);
        if revision >= first {
            state.times.push_back(Moment {
                first,
                observed_at,
                published_at: Instant::now(),
            });
            if state.times.len() > REMEMBERED_TIMES {
                state.times.pop_front();
            }
        }
        state.forget_old_tombstones();
        drop(state);
        // The revision never goes back: another call may have moved the head since the lock was released.
        self.head.send_if_modified(|head| {
            let newer = revision > head.revision;
            head.revision = head.revision.max(revision);
            newer
        });
        revision
    }

    /// Returns whether deletions that an agent lacks are forgotten, so that it needs a snapshot.
    pub fn forgot(&self, cursor: &Cursor) -> bool {
        self.read().forgot(cursor)
    }

    /// Returns the next part of what `node` lacks; moves the cursor behind it. The part begins a snapshot if deletions
    /// that the node lacks are forgotten.
    pub fn collect(&self, node: &str, cursor: &mut Cursor) -> Piece {
        self.read().collect(node, cursor)
    }

    /// Returns the whole update of an agent which has this freshness, and moves the cursor behind it. `None`
    /// if the update is not one that agents share; then [`Store::collect`] has it.
    pub fn take_common(
        &self,
        node: &str,
        cursor: &mut Cursor,
        sent: &Arc<Freshness>,
    ) -> Option<Ready> {
        let state = self.read();
        // One task encodes; others that need the same wait for it.
        let mut commons = self.commons.lock();
        commons.take(&state, node, cursor, sent)
    }

    /// Returns the way of an agent without anything: it takes the messages of the walk, then collects the rest. The
    /// first message begins a snapshot, if there is one.
    pub fn walk(&self, node: &str) -> Walk {
        self.walk_in_messages(node, PIECE_BYTES)
    }

    /// Returns the way of an agent without anything, in messages of at least so many bytes.
    pub(super) fn walk_in_messages(&self, node: &str, bytes: usize) -> Walk {
        let state = self.read();
        if state.shared.is_empty() {
            return Walk::default();
        }
        let zone = state.varied_zone(node).cloned();
        // One task encodes; others that need the same wait for it.
        let mut shelves = self.shelves.lock();
        shelves.retain(|_, encoded_snapshot| encoded_snapshot.is_fresh(&state));
        let new = || Arc::new(EncodedSnapshot::new(&state, zone.as_deref(), bytes));
        let encoded_snapshot = shelves.entry(zone.clone()).or_insert_with(new);
        Walk::along(encoded_snapshot)
    }

    /// Returns the way of an agent that holds objects with this digest and, if its epoch matches, is at `revision`.
    /// `None` if the digest says nothing here.
    pub fn resume(&self, node: &str, digest: Digest, revision: Option<u64>) -> Option<Way> {
        self.read().resume(node, digest, revision)
    }

    /// Returns the number of ranges by which a node's agent and this store can be compared.
    pub fn ranges(&self, node: &str) -> u16 {
        self.range_index(&self.read(), node).count()
    }

    /// Returns the encoded message that replaces the ranges in which a node's agent differs, and moves the cursor
    /// behind it: [`Store::collect`] has the node's own objects, and what changed since. `None` if the agent needs a
    /// snapshot.
    pub fn replace_ranges(&self, node: &str, digests: &[u8], cursor: &mut Cursor) -> Option<Bytes> {
        let state = self.read();
        let index = self.range_index(&state, node);
        index.replacement(&state, node, digests, cursor)
    }

    pub(super) fn range_index(&self, state: &State, node: &str) -> Arc<RangeIndex> {
        // One task computes; others that need the same wait for it.
        let mut indexes = self.indexes.lock();
        indexes.of(state, node)
    }

    /// Returns the facts of all nodes that have or had a Node object, by name.
    pub fn nodes(&self) -> BTreeMap<NodeName, Arc<NodeFacts>> {
        let facts: Vec<_> = {
            let state = self.read();
            state.views.values().filter_map(|view| view.facts.clone()).collect()
        };
        facts.into_iter().map(|node| (node.name.clone(), node)).collect()
    }

    /// Returns whether a Node of this name exists.
    pub fn knows(&self, node: &str) -> bool {
        let state = self.read();
        let facts = state.views.get(node).and_then(|view| view.facts.as_ref());
        facts.is_some_and(|facts| facts.known)
    }

    /// Returns the zone of a node, if it is known.
    pub fn zone(&self, node: &str) -> Option<Arc<str>> {
        let state = self.read();
        let facts = state.views.get(node).and_then(|view| view.facts.as_ref());
        facts.and_then(|facts| facts.zone.as_deref().map(Into::into))
    }

    /// Returns the digest of everything that a node must hold.
    pub fn digest(&self, node: &str) -> Digest {
        self.read().digest(node)
    }

    /// Returns the revision of the newest change that concerns a node.
    pub fn wanted(&self, node: &str) -> u64 {
        self.read().wanted(node)
    }

    /// Returns the revision of the newest change of a ServicePort that concerns a node.
    pub fn wanted_of(&self, node: &str, key: &ServiceKey) -> u64 {
        self.read().wanted_of(node, key)
    }

    /// Returns the trigger with this number, if it is still remembered.
    pub fn trigger(&self, id: u64) -> Option<Trigger> {
        self.read().triggers.get(id).cloned()
    }

    /// Returns when the first change after `revision` was published, if there is one and it is
    /// remembered.
    pub fn changed_after(&self, revision: u64) -> Option<Instant> {
        let moment = self.read().moment_after(revision)?;
        Some(moment.published_at)
    }

    pub(super) fn read(&self) -> RwLockReadGuard<'_, State> {
        // A panic while writing is a bug that tests find; readers must not multiply it.
        self.state.read()
    }

    pub(super) fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write()
    }
}

impl State {
    /// Returns how a ServicePort changed since a revision, after which it did.
    fn touched(&self, key: &ServiceKey, before: u64) -> ServiceChange {
        let shared = self.log.revision_of(&DesiredKey::Service(key.clone())).unwrap_or_default();
        ServiceChange {
            service: key.service.clone(),
            revision: self.revision,
            shared: shared > before,
        }
    }

    fn set_freshness(&mut self, freshness: &Freshness) {
        if *self.freshness != *freshness {
            self.freshness = Arc::new(freshness.clone());
        }
    }
}
