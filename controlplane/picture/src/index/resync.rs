//! Complete lists: objects that a list did not name are gone when the list ends, and not before.

use std::collections::{HashMap, HashSet};

use crate::k8s::{Kind, ObjectId};

/// Existing objects, and lists in progress.
#[derive(Debug, Default)]
pub(super) struct Resync {
    present: HashMap<Kind, HashSet<ObjectId>>,
    under_way: HashMap<Kind, HashSet<ObjectId>>,
    listed: HashSet<Kind>,
}

impl Resync {
    /// Begins a list; a list in progress is discarded.
    pub(super) fn begin(&mut self, kind: Kind) {
        self.under_way.insert(kind, HashSet::new());
    }

    /// Records that an object exists.
    pub(super) fn seen(&mut self, id: ObjectId) {
        if let Some(named) = self.under_way.get_mut(&id.kind) {
            named.insert(id.clone());
        }
        self.present.entry(id.kind).or_default().insert(id);
    }

    /// Records that an object is gone.
    pub(super) fn gone(&mut self, id: &ObjectId) {
        for lists in [&mut self.under_way, &mut self.present] {
            if let Some(list) = lists.get_mut(&id.kind) {
                list.remove(id);
            }
        }
    }

    /// Ends a list; returns the objects that it did not name. Without a beginning, the list is
    /// ignored.
    pub(super) fn finish(&mut self, kind: Kind) -> Vec<ObjectId> {
        let Some(named) = self.under_way.remove(&kind) else {
            return Vec::new();
        };
        self.listed.insert(kind);
        let mut before = self.present.remove(&kind).unwrap_or_default();
        before.retain(|id| !named.contains(id));
        self.present.insert(kind, named);
        before.into_iter().collect()
    }

    /// Returns the number of objects of a kind that the source names.
    pub(super) fn count(&self, kind: Kind) -> usize {
        self.present.get(&kind).map_or(0, HashSet::len)
    }

    /// Returns whether each of these kinds has been listed once.
    pub(super) fn has(&self, kinds: &[Kind]) -> bool {
        kinds.iter().all(|kind| self.listed.contains(kind))
    }
}
