//! Complete lists: objects that a list did not name are gone when the list ends, and not before.

use std::collections::HashMap;

use crate::k8s::{Kind, ObjectId};

/// Existing objects, and lists in progress.
#[derive(Debug, Default)]
pub(super) struct Resync(HashMap<Kind, Objects>);

/// The objects of one kind.
#[derive(Debug, Default)]
struct Objects {
    /// Each object that exists, with the number of the list that named it last.
    present: HashMap<ObjectId, u32>,
    /// Number of the last list that began.
    list: u32,
    under_way: bool,
    listed: bool,
}

impl Resync {
    /// Begins a list; a list in progress is discarded.
    pub(super) fn begin(&mut self, kind: Kind) {
        let objects = self.0.entry(kind).or_default();
        objects.list = objects.list.wrapping_add(1);
        objects.under_way = true;
    }

    /// Records that an object exists.
    pub(super) fn seen(&mut self, id: ObjectId) {
        let objects = self.0.entry(id.kind).or_default();
        objects.present.insert(id, objects.list);
    }

    /// Records that an object is gone.
    pub(super) fn gone(&mut self, id: &ObjectId) {
        if let Some(objects) = self.0.get_mut(&id.kind) {
            objects.present.remove(id);
        }
    }

    /// Ends a list; returns the objects that it did not name. Without a beginning, the list is
    /// ignored.
    pub(super) fn finish(&mut self, kind: Kind) -> Vec<ObjectId> {
        let Some(objects) = self.0.get_mut(&kind).filter(|objects| objects.under_way) else {
            return Vec::new();
        };
        (objects.under_way, objects.listed) = (false, true);
        let list = objects.list;
        objects
            .present
            .extract_if(|_, named| *named != list)
            .map(|(id, _)| id)
            .collect()
    }

    /// Returns the number of objects of a kind that the source names.
    pub(super) fn count(&self, kind: Kind) -> usize {
        self.0.get(&kind).map_or(0, |objects| objects.present.len())
    }

    /// Returns whether each of these kinds has been listed once.
    pub(super) fn has(&self, kinds: &[Kind]) -> bool {
        let is_listed = |kind| self.0.get(kind).is_some_and(|objects| objects.listed);
        kinds.iter().all(is_listed)
    }
}
