//! The order of last changes, and the digests of earlier states.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::Hash;

use kplane_model::{DesiredKey, Digest, NodeName};

/// Maximum number of earlier states whose digests are remembered, in some 100 bytes each: 40 s of 100 changes a second.
pub(super) const REMEMBERED: usize = 4_096;

/// Every key once, ordered by the revision of its last change. Keys of deleted objects stay until
/// [`Log::forget`], because an agent that is behind must learn of the deletion.
#[derive(Debug)]
pub(super) struct Log<K> {
    by_revision: BTreeMap<u64, K>,
    revision_of: HashMap<K, u64>,
}

/// A deleted key, remembered in one log.
#[derive(Debug)]
pub(super) struct Tombstone {
    pub(super) revision: u64,
    pub(super) node: Option<NodeName>,
    pub(super) key: DesiredKey,
}

impl<K> Default for Log<K> {
    fn default() -> Self {
        Self {
            by_revision: BTreeMap::new(),
            revision_of: HashMap::new(),
        }
    }
}

impl<K: Clone + Eq + Hash> Log<K> {
    /// Records that `key` changed at `revision`, which no other key of this log has.
    pub(super) fn note(&mut self, key: K, revision: u64) {
        if let Some(before) = self.revision_of.insert(key.clone(), revision) {
            self.by_revision.remove(&before);
        }
        self.by_revision.insert(revision, key);
    }

    /// Forgets a key.
    pub(super) fn forget(&mut self, key: &K) {
        if let Some(revision) = self.revision_of.remove(key) {
            self.by_revision.remove(&revision);
        }
    }

    /// Returns the revision of the key's last change.
    pub(super) fn revision_of(&self, key: &K) -> Option<u64> {
        self.revision_of.get(key).copied()
    }

    /// Returns the keys that changed after `revision`, oldest change first.
    pub(super) fn after(&self, revision: u64) -> impl Iterator<Item = (u64, &K)> {
        let from = revision.saturating_add(1);
        self.by_revision.range(from..).map(|(r, k)| (*r, k))
    }

    /// Returns the keys whose last change is after revision `after` and not after `up_to`, newest change first. There
    /// are none if `after` is not the smaller one: one end may be what an agent says, which panics a range of a
    /// `BTreeMap` that ends before it begins.
    pub(super) fn between(&self, after: u64, up_to: u64) -> impl Iterator<Item = (u64, &K)> {
        let first = after.checked_add(1).filter(|first| *first <= up_to);
        first
            .map(|first| self.by_revision.range(first..=up_to).rev())
            .into_iter()
            .flatten()
            .map(|(r, k)| (*r, k))
    }

    /// Returns all keys, newest change first.
    pub(super) fn newest_first(&self) -> impl Iterator<Item = (u64, &K)> {
        self.by_revision.iter().rev().map(|(r, k)| (*r, k))
    }
}

/// Digests of all default variants at earlier revisions.
#[derive(Debug, Default)]
pub(super) struct History {
    pub(super) revision_of: HashMap<Digest, u64>,
    pub(super) oldest_first: VecDeque<Digest>,
}

impl History {
    /// Remembers the digest at a revision. A state that comes back counts at its newest revision.
    pub(super) fn note(&mut self, digest: Digest, revision: u64) {
        if self.revision_of.insert(digest, revision).is_none() {
            self.oldest_first.push_back(digest);
        }
        if self.oldest_first.len() > REMEMBERED
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.revision_of.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_lies_between_two_revisions_that_are_equal_or_reversed() {
        let mut log = Log::default();
        for revision in 1..=3 {
            log.note(revision, revision);
        }
        let between = |after, up_to| -> Vec<u64> {
            log.between(after, up_to).map(|(revision, _)| revision).collect()
        };
        assert_eq!(between(1, 3), [3, 2], "newest first");
        assert_eq!(between(0, u64::MAX), [3, 2, 1]);
        for (after, up_to) in [
            (3, 3),
            (3, 1),
            (0, 0),
            (9, 4),
            (u64::MAX, 3),
            (u64::MAX, u64::MAX),
        ] {
            assert_eq!(between(after, up_to), [0; 0], "after {after} up to {up_to}");
        }
    }
}
