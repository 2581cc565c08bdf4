//! Claims of files to objects; of several claims to one identity the first counts.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use kplane_model::{Issue, ObjectRef, Reason};

use super::document::FilePosition;
use crate::k8s::{Object, ObjectId};

/// An object that a file holds, or held when it was last parsed.
#[derive(Clone, Debug)]
pub(super) struct ObjectClaim {
    /// The object is not in the file's current content; any object that is goes before it.
    pub(super) kept: bool,
    pub(super) file: Arc<str>,
    /// Position in the file.
    pub(super) index: usize,
    pub(super) place: FilePosition,
    pub(super) object: Arc<Object>,
}

/// All claims of all files.
#[derive(Debug, Default)]
pub(super) struct ObjectClaims {
    /// Sorted by rank, never empty.
    by_id: HashMap<ObjectId, Vec<ObjectClaim>>,
    count: usize,
    /// Identities with several claims.
    contested: BTreeSet<ObjectId>,
}

impl ObjectClaim {
    fn rank(&self) -> (bool, &str, usize) {
        (self.kept, &self.file, self.index)
    }
}

impl fmt::Display for ObjectClaim {
    /// Prints the object's place for the operator.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.file, self.place)
    }
}

impl ObjectClaims {
    pub(super) fn len(&self) -> usize {
        self.count
    }

    pub(super) fn contains(&self, id: &ObjectId) -> bool {
        self.by_id.contains_key(id)
    }

    /// Returns the claim that counts.
    pub(super) fn first(&self, id: &ObjectId) -> Option<&ObjectClaim> {
        self.by_id.get(id)?.first()
    }

    pub(super) fn add(&mut self, id: ObjectId, claim: ObjectClaim) {
        self.count += 1;
        let claims = self.by_id.entry(id).or_default();
        let at = claims.partition_point(|other| other.rank() < claim.rank());
        claims.insert(at, claim);
    }

    /// Removes all claims of a file; returns the first-ranked one of each object.
    pub(super) fn release(
        &mut self,
        file: &Arc<str>,
        ids: &HashSet<ObjectId>,
    ) -> Vec<(ObjectId, ObjectClaim)> {
        let mut released = Vec::with_capacity(ids.len());
        for id in ids {
            let Some(claims) = self.by_id.get_mut(id) else {
                continue;
            };
            let before = claims.len();
            if let Some(first) = claims.iter().find(|claim| claim.file == *file) {
                released.push((id.clone(), first.clone()));
                claims.retain(|claim| claim.file != *file);
                self.count -= before - claims.len();
            }
            if claims.is_empty() {
                self.by_id.remove(id);
            }
        }
        released.sort_by(|(_, a), (_, b)| a.rank().cmp(&b.rank()));
        released
    }

    /// Drops kept claims to an object that some file holds now, and records whether several files
    /// do.
    pub(super) fn settle(&mut self, id: &ObjectId) {
        let mut contested = false;
        if let Some(claims) = self.by_id.get_mut(id) {
            if claims.first().is_some_and(|first| !first.kept) {
                let before = claims.len();
                claims.retain(|claim| !claim.kept);
                self.count -= before - claims.len();
            }
            contested = claims.len() > 1;
        }
        if contested {
            self.contested.insert(id.clone());
        } else {
            self.contested.remove(id);
        }
    }

    /// Returns an issue for every claim that does not count because an earlier one does.
    pub(super) fn duplicates(&self) -> impl Iterator<Item = Issue> {
        self.contested.iter().flat_map(|id| {
            let claims = self.by_id.get(id).map_or(&[][..], Vec::as_slice);
            let first = claims.first();
            claims.iter().skip(1).map(move |claim| {
                let object = ObjectRef::new(id.kind.as_str(), &id.namespace, &id.name);
                let reason = first.map_or_else(String::new, |first| {
                    format!("is refused because {first} has the same object; remove one of the two")
                });
                Issue::error(Reason::DuplicateObject, object, reason).at(claim.to_string())
            })
        })
    }
}
