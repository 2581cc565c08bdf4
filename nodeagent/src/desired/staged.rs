//! The changes of an update: read as their pieces arrive, before the update becomes part of the desired state.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use kplane_model::{DesiredKey, DesiredObject, ObjectHash};
use kplane_proto::convert::{ConvertError, decode_object, key_of_object};
use kplane_proto::v1 as pb;

/// One change of an update.
#[derive(Clone, Debug)]
pub(super) struct Change(ReadChange);

/// The content of a change.
#[derive(Clone, Debug)]
enum ReadChange {
    /// A new object, or `None` for one that is gone.
    Named(DesiredKey, Option<StagedObject>),
    /// An object without a readable name: of a kind that this version does not know, or with this error.
    Nameless(ObjectHash, Option<ConvertError>),
    /// A deletion that names nothing that this version understands.
    UnknownDeletion,
}

/// New objects, or `None` for objects that are gone.
pub(super) type NamedChanges = BTreeMap<DesiredKey, Option<StagedObject>>;

/// The changes of an update by name, worked out while the engine does other things. The last change to a name counts.
#[derive(Debug, Default)]
pub struct Staged {
    pub(super) named: NamedChanges,
    /// Objects whose names are unreadable, including those of unknown kinds.
    pub(super) nameless: Vec<ObjectHash>,
    /// The errors of the nameless objects.
    pub(super) nameless_errors: Vec<ConvertError>,
    /// The number of objects and names of kinds that this version does not know.
    pub(super) unknown_kinds: u64,
    /// Whether a deletion names nothing that this version understands.
    unreadable_deletion: bool,
}

/// An object with a name.
#[derive(Clone, Debug)]
pub(super) struct StagedObject {
    pub(super) hash: ObjectHash,
    pub(super) object: Result<Arc<DesiredObject>, ConvertError>,
}

impl Change {
    /// Reads an encoded object.
    pub(super) fn object(encoded: Bytes) -> Self {
        let hash = ObjectHash::of(&encoded);
        Self(match decode_object(encoded.clone()) {
            Ok(Some(object)) => {
                let (key, object) = (object.key(), Ok(Arc::new(object)));
                ReadChange::Named(key, Some(StagedObject { hash, object }))
            }
            Ok(None) => ReadChange::Nameless(hash, None),
            Err(error) => match key_of_object(encoded) {
                Some(key) => {
                    let object = Err(error);
                    ReadChange::Named(key, Some(StagedObject { hash, object }))
                }
                None => ReadChange::Nameless(hash, Some(error)),
            },
        })
    }

    /// Reads the name of an object that is gone.
    pub(super) fn gone(key: pb::ObjectKey) -> Self {
        let key = DesiredKey::try_from(key);
        Self(key.map_or(ReadChange::UnknownDeletion, |key| {
            ReadChange::Named(key, None)
        }))
    }
}

impl Staged {
    pub(super) fn of(changes: Vec<Change>) -> Self {
        let mut staged = Self::default();
        let named = changes.into_iter().filter_map(|Change(change)| match change {
            ReadChange::Named(key, object) => Some((key, object)),
            ReadChange::Nameless(hash, error) => {
                staged.unknown_kinds += u64::from(error.is_none());
                staged.nameless.push(hash);
                staged.nameless_errors.extend(error);
                None
            }
            ReadChange::UnknownDeletion => {
                staged.unknown_kinds += 1;
                staged.unreadable_deletion = true;
                None
            }
        });
        // The map is built at once, because its input is usually sorted already.
        let named = named.collect();
        Self { named, ..staged }
    }

    /// Returns how many changes there are.
    pub fn len(&self) -> usize {
        self.named.len() + self.nameless.len() + usize::from(self.unreadable_deletion)
    }

    /// Returns whether there is no change.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether every change has a name, so that the digest can be computed.
    pub(super) fn is_readable(&self) -> bool {
        self.nameless.is_empty() && !self.unreadable_deletion
    }
}
