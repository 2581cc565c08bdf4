//! The shortest way from what an agent holds to what it must hold.
//!
//! The agent may come from another replica, whose revisions mean nothing here. So what counts is the digest of what it
//! holds: of the state now, or of an earlier state that this replica remembers. Otherwise the digests of key ranges are
//! compared, and ranges that differ are sent. A snapshot is the last resort.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use kplane_model::{Digest, RangeDigests, ZoneName, range_of, ranges_for};
use kplane_proto::shared::frame;
use kplane_proto::v1::{ServerMessage, Update, server_message};

use super::cursor::{Cursor, PIECE_BYTES};
use super::state::State;

/// Number of changes after which an index of ranges is made anew. Each of them makes one range differ that need not.
const STALE_AFTER: usize = 8;

/// How an agent gets from what it holds to what it must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The agent holds what it must hold.
    Equal(Cursor),
    /// The agent gets what changed since.
    Changes(Cursor),
}

impl Way {
    /// Returns the agent's position.
    pub fn cursor(self) -> Cursor {
        match self {
            Self::Equal(cursor) | Self::Changes(cursor) => cursor,
        }
    }
}

impl State {
    /// Returns the way of an agent that holds objects with this digest and, if its epoch matches, is at `revision`.
    pub(super) fn resume(&self, node: &str, digest: Digest, revision: Option<u64>) -> Option<Way> {
        if digest == self.digest(node) {
            return Some(Way::Equal(Cursor::at(self.revision)));
        }
        // If only shared objects changed since, this is the digest of the others then.
        let shared = digest.minus(self.digest_beside_default(node));
        let remembered = self.history.revision_of.get(&shared).copied();
        // Only a snapshot can report deletions from before the node was forgotten.
        let view = self.views.get(node);
        let since = view.map_or(self.freed_at, |view| view.since);
        let known = self.horizon.max(since).max(1)..=self.revision;
        let mut revisions = [revision, remembered].into_iter().flatten();
        let revision = revisions.find(|revision| known.contains(revision))?;
        Some(Way::Changes(Cursor::at(revision)))
    }
}

/// The shared objects by ranges, as nodes of one zone get them.
#[derive(Debug)]
pub(super) struct RangeIndex {
    revision: u64,
    digests: RangeDigests,
    objects: Vec<Vec<Bytes>>,
}

impl RangeIndex {
    pub(super) fn new(state: &State, zone: Option<&str>) -> Self {
        let count = ranges_for(state.shared.len());
        let mut index = Self {
            revision: state.revision,
            digests: RangeDigests::new(count),
            objects: vec![Vec::new(); usize::from(count)],
        };
        for (key, shared) in &state.shared {
            let blob = shared.resolve_zone(zone);
            index.digests.add(key, blob.hash);
            if let Some(objects) = index.objects.get_mut(usize::from(range_of(key, count))) {
                objects.push(blob.bytes.clone());
            }
        }
        index
    }

    pub(super) fn count(&self) -> u16 {
        self.digests.count()
    }

    /// Returns whether few objects changed since.
    pub(super) fn is_fresh(&self, state: &State) -> bool {
        let changed = state.log.after(self.revision);
        changed.take(STALE_AFTER).count() < STALE_AFTER
    }

    /// Returns the message that replaces the ranges in which a node's agent differs, and moves the cursor behind it.
    /// `None` if so much differs that a snapshot is better, or the digests are of other ranges.
    pub(super) fn replacement(
        &self,
        state: &State,
        node: &str,
        digests: &[u8],
        cursor: &mut Cursor,
    ) -> Option<Bytes> {
        let differing = self.digests_of(state, node).differing(digests)?;
        let ranges = differing.iter().map(usize::from);
        let objects: Vec<Bytes> =
            ranges.filter_map(|range| self.objects.get(range)).flatten().cloned().collect();
        if objects.iter().map(Bytes::len).sum::<usize>() > PIECE_BYTES {
            return None;
        }
        let update = Update {
            objects,
            ranges: differing.to_bytes().into(),
            ..Update::default()
        };
        *cursor = Cursor::at(0);
        cursor.pass(self.revision, self.revision);
        let kind = Some(server_message::Kind::Update(update));
        Some(frame(&ServerMessage { kind }))
    }

    /// Returns the digests as a node's agent has them: with variants for the node.
    fn digests_of(&self, state: &State, node: &str) -> RangeDigests {
        let mut digests = self.digests.clone();
        let Some(view) = state.views.get(node) else {
            return digests;
        };
        for (_, key) in view.log.after(0) {
            let shared = state.shared.get(key);
            if let Some((shared, own)) = shared.and_then(|s| Some((s, s.by_node.get(node)?))) {
                digests.remove(key, shared.resolve_zone(view.zone.as_deref()).hash);
                digests.add(key, own.hash);
            }
        }
        digests
    }
}

/// The latest index of each zone that has variants of its own, and of all other zones.
#[derive(Debug, Default)]
pub(super) struct RangeIndexes(HashMap<Option<ZoneName>, Arc<RangeIndex>>);

impl RangeIndexes {
    /// Returns the index for a node.
    pub(super) fn of(&mut self, state: &State, node: &str) -> Arc<RangeIndex> {
        let zone = state.varied_zone(node).cloned();
        self.0.retain(|_, index| index.is_fresh(state));
        let new = || Arc::new(RangeIndex::new(state, zone.as_deref()));
        Arc::clone(self.0.entry(zone.clone()).or_insert_with(new))
    }
}

#[cfg(test)]
mod tests;
