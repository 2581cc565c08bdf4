//! The store: what the index writes and every stream reads.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::SystemTime;

use kplane_model::{Digest, NodeFacts, NodeName, ServiceKey};
use tokio::sync::watch;

use super::blob::Encoded;
use super::cursor::{Cursor, Piece};
use super::state::{FIRST_REVISION, State, view_of};
use super::{Publication, Trigger};
use crate::trust::Trust;

/// Publications whose time is remembered, to tell how old the oldest missing change is.
const REMEMBERED_TIMES: usize = 4_096;

/// The newest state, for those who wait for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// Revision of the newest change.
    pub revision: u64,
    /// The source has delivered a complete picture: before that nobody is served.
    pub synced: bool,
    /// How often the trust in the picture has changed.
    pub trust: u64,
}

/// Latest encoded state of every object. Written by the index, read by every stream.
#[derive(Debug)]
pub struct Store {
    epoch: u64,
    state: RwLock<State>,
    head: watch::Sender<Head>,
}

impl Store {
    /// An empty store. `epoch` is random for each start of the control plane.
    #[must_use]
    pub fn new(epoch: u64) -> Self {
        Self {
            epoch,
            state: RwLock::default(),
            head: watch::Sender::new(Head {
                revision: FIRST_REVISION,
                ..Head::default()
            }),
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

    /// Says how far the picture is believed. Streams tell it with their next update, and with one that
    /// changes nothing if there is no other.
    pub fn set_trust(&self, trust: Trust) {
        let mut state = self.write();
        if state.trust == trust {
            return;
        }
        state.trust = trust;
        state.trust_changes += 1;
        let changes = state.trust_changes;
        drop(state);
        self.head
            .send_modify(|head| head.trust = head.trust.max(changes));
    }

    /// How far the picture is believed.
    #[must_use]
    pub fn trust(&self) -> Trust {
        self.read().trust.clone()
    }

    /// Publishes changes; what is equal to what was published before is left out. Returns the
    /// newest revision.
    pub fn publish(&self, mut publication: Publication) -> u64 {
        // Each is dropped when it has been encoded: at a start there are many.
        let encoded: Vec<_> = std::mem::take(&mut publication.services)
            .into_iter()
            .map(|(key, published)| (key, published.as_ref().map(Encoded::new)))
            .collect();
        let mut state = self.write();
        let first = state.revision + 1;
        let mut changed = Vec::new();
        for (key, encoded) in encoded {
            let before = state.revision;
            match encoded {
                Some(encoded) => state.upsert(&key, encoded),
                None => state.delete(&key),
            }
            if state.revision != before {
                changed.push(key);
            }
        }
        state.triggers.note(first, &publication.triggers, &changed);
        for node in &publication.nodes {
            state.set_node(node.clone());
        }
        if let Some(cidrs) = &publication.service_cidrs {
            state.set_service_cidrs(cidrs);
        }
        self.finish(state, first, publication.observed_at)
    }

    /// A stream about a node begins: what is said of the node is remembered until [`Store::leave`],
    /// whatever becomes of the objects that mention it.
    pub fn attend(&self, name: &NodeName) {
        let mut state = self.write();
        let since = state.freed_at;
        view_of(&mut state.views, name, since).agents += 1;
    }

    /// A stream about a node ends.
    pub fn leave(&self, name: &NodeName) {
        let mut state = self.write();
        if let Some(view) = state.views.get_mut(name) {
            view.agents = view.agents.saturating_sub(1);
        }
        state.free_if_vacant(name);
    }

    /// Notes when the changes since revision `first` were observed, and tells of the newest.
    fn finish(
        &self,
        mut state: RwLockWriteGuard<'_, State>,
        first: u64,
        observed_at: SystemTime,
    ) -> u64 {
        let revision = state.revision;
        if revision >= first {
            state.times.push_back((first, observed_at));
            if state.times.len() > REMEMBERED_TIMES {
                state.times.pop_front();
            }
        }
        state.forget_old_tombstones();
        drop(state);
        // Never back: others may have published more, and told of it, since the lock was given up.
        self.head.send_if_modified(|head| {
            let newer = revision > head.revision;
            head.revision = head.revision.max(revision);
            newer
        });
        revision
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
        // What was deleted for a node before it was forgotten can only be told by a snapshot.
        let view = state.views.get(node);
        let since = view.map_or(state.freed_at, |view| view.since);
        let known = state.horizon.max(since).max(1)..=state.revision;
        revision.filter(|r| known.contains(r)).map(Cursor::at)
    }

    /// Facts of all nodes that are Nodes, or were: by name.
    #[must_use]
    pub fn nodes(&self) -> BTreeMap<NodeName, Arc<NodeFacts>> {
        let facts: Vec<_> = {
            let state = self.read();
            let facts = state.views.values().filter_map(|view| view.facts.clone());
            facts.collect()
        };
        let named = facts.into_iter().map(|node| (node.name.clone(), node));
        named.collect()
    }

    /// Whether there is a Node of this name.
    #[must_use]
    pub fn knows(&self, node: &str) -> bool {
        let state = self.read();
        let facts = state.views.get(node).and_then(|view| view.facts.as_ref());
        facts.is_some_and(|facts| facts.known)
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
        self.read().wanted_of(node, key)
    }

    /// What a trigger's number stands for, while it is remembered.
    #[must_use]
    pub fn trigger(&self, id: u64) -> Option<Trigger> {
        self.read().triggers.get(id).cloned()
    }

    /// When the first change after `revision` was observed, if there is one and it is remembered.
    #[must_use]
    pub fn changed_after(&self, revision: u64) -> Option<SystemTime> {
        self.read().changed_after(revision)
    }

    pub(super) fn read(&self) -> RwLockReadGuard<'_, State> {
        // A panic while writing is a bug that tests find; readers must not multiply it.
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}
