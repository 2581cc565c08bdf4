//! An update whose objects are decoded, before it becomes part of the desired state.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use kplane_model::{DesiredKey, DesiredObject, ObjectHash};
use kplane_proto::convert::{ConvertError, decode_object, key_of_object};
use kplane_proto::v1 as pb;

use super::Change;

/// The changes of an update by name. The last change to a name counts.
#[derive(Debug, Default)]
pub(super) struct Staged {
    /// New objects, or `None` for objects that are gone.
    pub(super) named: BTreeMap<DesiredKey, Option<StagedObject>>,
    /// Objects whose names are unreadable, including those of unknown kinds.
    pub(super) nameless: Vec<ObjectHash>,
    /// The errors of the nameless objects.
    pub(super) nameless_errors: Vec<ConvertError>,
    /// The number of objects and names of kinds that this version does not know.
    pub(super) unknown_kinds: u64,
    /// Whether a deletion names nothing that this version understands.
    unreadable_deletion: bool,
}

/// A name, and the new object or `None` for a deletion.
type NamedChange = (DesiredKey, Option<StagedObject>);

/// An object with a name.
#[derive(Debug)]
pub(super) struct StagedObject {
    pub(super) hash: ObjectHash,
    pub(super) object: Result<Arc<DesiredObject>, ConvertError>,
}

impl Staged {
    pub(super) fn convert(changes: Vec<Change>) -> Self {
        let mut staged = Self::default();
        let named = changes.into_iter().filter_map(|change| match change {
            Change::Object(encoded) => staged.object(encoded),
            Change::Gone(key) => staged.gone(key),
        });
        // The map is built at once, because its input is usually sorted already.
        let named = named.collect();
        Self { named, ..staged }
    }

    /// Returns whether every change has a name, so that the digest can be computed.
    pub(super) fn is_readable(&self) -> bool {
        self.nameless.is_empty() && !self.unreadable_deletion
    }

    fn object(&mut self, encoded: Bytes) -> Option<NamedChange> {
        let hash = ObjectHash::of(&encoded);
        let (key, object) = match decode_object(encoded.clone()) {
            Ok(Some(object)) => (Some(object.key()), Ok(object)),
            Ok(None) => {
                self.unknown_kinds += 1;
                self.nameless.push(hash);
                return None;
            }
            Err(error) => (key_of_object(encoded), Err(error)),
        };
        match (key, object) {
            (Some(key), object) => {
                let object = object.map(Arc::new);
                Some((key, Some(StagedObject { hash, object })))
            }
            (None, object) => {
                self.nameless.push(hash);
                self.nameless_errors.extend(object.err());
                None
            }
        }
    }

    fn gone(&mut self, key: pb::ObjectKey) -> Option<NamedChange> {
        let Ok(key) = DesiredKey::try_from(key) else {
            self.unknown_kinds += 1;
            self.unreadable_deletion = true;
            return None;
        };
        Some((key, None))
    }
}
