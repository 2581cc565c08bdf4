//! An agent's position, and the objects that it lacks.

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use kplane_model::{DesiredKey, Digest, ServiceKey, ZoneName};

use super::state::{Blob, FIRST_REVISION, Moment, State, View};
use super::triggers::Sent;
use crate::freshness::Freshness;
use crate::trust::Trust;
use kplane_proto::v1::Enforcement;

/// Size of a message in bytes up to which objects are collected: far below every limit, and large
/// enough that framing costs nothing.
pub(super) const PIECE_BYTES: usize = 64 * 1024;

/// Approximate size of a deleted key in a message, in bytes.
pub(super) const DELETED_BYTES: usize = 64;

/// An agent's position: all that the control plane keeps of its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// Revision that the agent holds completely; 0 = nothing.
    base: u64,
    /// Newest revision whose changes of shared objects have been collected since.
    shared: u64,
    /// Newest revision whose changes of the node's own objects have been collected since.
    own: u64,
    /// Newest revision when collecting began.
    started: u64,
}

impl Cursor {
    /// Creates the cursor of an agent that holds `revision` completely, or nothing if it is 0.
    pub fn at(revision: u64) -> Self {
        Self {
            base: revision,
            shared: revision,
            own: revision,
            started: 0,
        }
    }

    /// Moves behind shared objects up to a revision, which an agent without anything got as they were at `state`.
    pub(super) fn pass(&mut self, revision: u64, state: u64) {
        self.shared = revision;
        self.started = state;
    }

    /// Returns whether changes up to `head` have not been collected, or collecting is not complete.
    pub fn is_behind(&self, head: u64) -> bool {
        self.base < head
    }

    /// Returns the revision that the agent holds completely; 0 = nothing.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Returns the newest revision up to which all changes have been collected.
    fn position(&self) -> u64 {
        self.shared.min(self.own)
    }

    /// Returns whether the agent can lack deletions up to a revision.
    fn lacks_deletions(&self, horizon: u64) -> bool {
        // An agent that began from nothing needs only those since it began.
        let holds_since = if self.base == 0 { self.started } else { self.base };
        !self.is_nothing() && self.position() < horizon && holds_since < horizon
    }

    /// Returns whether the agent has got nothing.
    fn is_nothing(&self) -> bool {
        self.base == 0 && self.is_fresh()
    }

    /// Returns whether nothing has been collected since the agent's last complete state.
    pub(super) fn is_fresh(&self) -> bool {
        self.base == self.shared && self.base == self.own
    }

    /// Returns whether a deletion must be named. An agent that begins from nothing needs it only if
    /// the object may have been sent since it began.
    fn names_deletion(&self, revision: u64) -> bool {
        self.base != 0 || revision > self.started
    }
}

/// A part of what an agent lacks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// The piece is the first of a snapshot: what the agent holds counts no more.
    pub snapshot: bool,
    /// Encoded objects.
    pub objects: Vec<Bytes>,
    /// Deleted objects.
    pub deleted: Vec<DesiredKey>,
    /// The end of the update; set when nothing is left.
    pub end: Option<PieceEnd>,
}

/// The agent's state after the last piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PieceEnd {
    /// Revision.
    pub revision: u64,
    /// Digest of everything that the agent holds.
    pub digest: Digest,
    /// Time at which the oldest change that the agent lacked was observed.
    pub changed_at: Option<SystemTime>,
    /// Triggers of the changes, oldest first; empty for an agent that began from nothing.
    pub triggers: Vec<Sent>,
    /// Trust that objects missing from the picture are gone.
    pub trust: Trust,
    /// Value of [`Head::trust`](super::Head::trust) that belongs to `trust`.
    pub trust_changes: u64,
    /// What is said of NetworkPolicies as a whole.
    pub enforcement: Enforcement,
    /// The versions of the source that the state contains.
    pub freshness: Arc<Freshness>,
}

/// The end of the desired state that an update leads to.
#[derive(Clone, Debug)]
pub struct Mark {
    /// Revision.
    pub revision: u64,
    /// Value of [`Head::trust`](super::Head::trust).
    pub trust_changes: u64,
    /// The versions of the source that the state contains.
    pub freshness: Arc<Freshness>,
}

impl PieceEnd {
    /// Returns the state that the agent has afterwards.
    pub fn mark(&self) -> Mark {
        Mark {
            revision: self.revision,
            trust_changes: self.trust_changes,
            freshness: Arc::clone(&self.freshness),
        }
    }
}

/// Read access; everything here is relative to a node.
impl State {
    /// Returns the zone of a node, if the zone has variants of its own.
    pub(super) fn varied_zone(&self, node: &str) -> Option<&ZoneName> {
        let zone = self.views.get(node)?.zone.as_ref()?;
        self.zone_digests.contains_key(zone).then_some(zone)
    }

    /// Returns whether deletions that an agent lacks are forgotten, so that it needs a snapshot.
    pub(super) fn forgot(&self, cursor: &Cursor) -> bool {
        cursor.lacks_deletions(self.horizon)
    }

    pub(super) fn collect(&self, node: &str, cursor: &mut Cursor) -> Piece {
        if self.forgot(cursor) {
            *cursor = Cursor::at(0);
        }
        let snapshot = cursor.is_nothing();
        if cursor.is_fresh() {
            cursor.started = self.revision;
        }
        let no_view = View::default();
        let view = self.views.get(node).unwrap_or(&no_view);
        let mut piece = Piece {
            snapshot,
            ..Piece::default()
        };
        let mut bytes = 0;
        for (revision, key, object) in self.lacking(node, view, *cursor) {
            if bytes >= PIECE_BYTES {
                return piece;
            }
            // Both kinds of objects come in the order of their changes.
            cursor.shared = cursor.shared.max(revision);
            cursor.own = cursor.own.max(revision);
            match object {
                Some(object) => {
                    bytes += object.len();
                    piece.objects.push(object);
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
            triggers: self.triggers.after(cursor.base, |revision, key| {
                self.serves(key) && self.wanted_of(node, key) >= revision
            }),
            trust: self.trust.clone(),
            trust_changes: self.trust_changes,
            enforcement: self.enforcement,
            freshness: Arc::clone(&self.freshness),
        });
        *cursor = Cursor::at(self.revision);
        piece
    }

    /// Returns everything that changed for a node after a cursor, oldest change first; without an
    /// encoded object, the key was deleted.
    pub(super) fn lacking<'a>(
        &'a self,
        node: &'a str,
        view: &'a View,
        cursor: Cursor,
    ) -> impl Iterator<Item = (u64, DesiredKey, Option<Bytes>)> {
        let mut shared = self
            .log
            .after(cursor.shared)
            .map(move |(revision, key)| {
                let shared = self.shared.get(key);
                (
                    revision,
                    key,
                    shared.map(|s| s.resolve(node, view.zone.as_deref())),
                )
            })
            // If not, another variant changed, and the agent already holds this one.
            .filter(move |(_, _, blob)| blob.is_none_or(|blob| blob.revision > cursor.base))
            .peekable();
        let mut own = view.log.after(cursor.own).peekable();
        let mut stranger = self.stranger_after(view, cursor.own);
        std::iter::from_fn(move || {
            let next_own = own.peek().map_or(u64::MAX, |(revision, _)| *revision);
            let next_shared = shared.peek().map_or(u64::MAX, |(revision, _, _)| *revision);
            if let Some(revision) = stranger.take_if(|at| *at < next_own.min(next_shared)) {
                return Some((revision, DesiredKey::Node, Some(self.stranger(node).0)));
            }
            match shared.next_if(|(revision, _, _)| *revision < next_own) {
                Some((revision, key, blob)) => {
                    let object = blob.map(|blob| blob.bytes.clone());
                    Some((revision, key.clone(), object))
                }
                None => own.next().map(|(revision, key)| {
                    // A variant for the node is in both logs.
                    shared.next_if(|(same, _, _)| *same == revision);
                    let blob = self.own_blob(view, node, key);
                    (revision, key.clone(), blob.map(|blob| blob.bytes.clone()))
                }),
            }
        })
    }

    /// Returns when the configuration of a node without a Node object last changed, if that was
    /// after `position`.
    fn stranger_after(&self, view: &View, position: u64) -> Option<u64> {
        let changed = view.facts.is_none().then_some(self.strangers_revision);
        changed.filter(|revision| *revision > position)
    }

    pub(super) fn own_blob<'a>(
        &'a self,
        view: &'a View,
        node: &str,
        key: &DesiredKey,
    ) -> Option<&'a Blob> {
        match key {
            DesiredKey::Service(_) => {
                let shared = self.shared.get(key)?;
                Some(shared.resolve(node, view.zone.as_deref()))
            }
            DesiredKey::Local(_) | DesiredKey::Node | DesiredKey::Policy(_) => {
                view.objects.get(key)
            }
        }
    }

    pub(super) fn digest(&self, node: &str) -> Digest {
        self.default_digest.plus(self.digest_beside_default(node))
    }

    /// Returns what a node's digest adds to that of all default variants.
    pub(super) fn digest_beside_default(&self, node: &str) -> Digest {
        let no_view = View::default();
        let view = self.views.get(node).unwrap_or(&no_view);
        let mut digest = view.digest;
        if view.facts.is_none() {
            digest.add(self.stranger(node).1);
        }
        let zone = view.zone.as_ref().and_then(|zone| self.zone_digests.get(zone));
        zone.copied().unwrap_or_default().plus(view.variants_digest).plus(digest)
    }

    /// Returns whether a ServicePort is published.
    pub(super) fn serves(&self, key: &ServiceKey) -> bool {
        self.shared.contains_key(&DesiredKey::Service(key.clone()))
    }

    pub(super) fn wanted(&self, node: &str) -> u64 {
        let view = self.views.get(node);
        let zone = view.and_then(|v| v.zone.as_deref());
        let own = view.and_then(|v| v.log.newest_first().next()).map_or(0, |(r, _)| r);
        let stranger = view.is_none_or(|view| view.facts.is_none());
        let own = own.max(if stranger { self.strangers_revision } else { 0 });
        let mut shared = self.log.newest_first();
        let concerns = |revision: u64, key: &DesiredKey| {
            let blob = self.shared.get(key).map(|s| s.resolve(node, zone));
            blob.is_none_or(|blob| blob.revision == revision)
        };
        let newest = shared.find(|(revision, key)| *revision <= own || concerns(*revision, key));
        newest.map_or(own, |(revision, _)| revision.max(own))
    }

    pub(super) fn wanted_of(&self, node: &str, key: &ServiceKey) -> u64 {
        let view = self.views.get(node);
        let zone = view.and_then(|v| v.zone.as_deref());
        let port = DesiredKey::Service(key.clone());
        let shared = match self.shared.get(&port) {
            Some(shared) => shared.resolve(node, zone).revision,
            // Its deletion may be forgotten.
            None => self.log.revision_of(&port).unwrap_or(self.horizon),
        };
        let own = view.map_or(0, |view| {
            let revision = |key| view.log.revision_of(&key).unwrap_or(0);
            revision(DesiredKey::Local(key.clone())).max(revision(port))
        });
        shared.max(own)
    }

    /// Returns when the first change after `revision` was observed.
    pub(super) fn changed_after(&self, revision: u64) -> Option<SystemTime> {
        let moment = self.moment_after(revision)?;
        Some(moment.observed_at)
    }

    pub(super) fn moment_after(&self, revision: u64) -> Option<Moment> {
        if revision >= self.revision {
            return None;
        }
        // An agent that holds nothing lacks the first publication.
        let revision = revision.max(FIRST_REVISION);
        self.moment_of(revision.checked_add(1)?)
    }

    /// Returns the last publication that begins at or before a revision.
    pub(super) fn moment_of(&self, revision: u64) -> Option<Moment> {
        let after = self.times.partition_point(|m| m.first <= revision);
        self.times.get(after.checked_sub(1)?).copied()
    }
}
