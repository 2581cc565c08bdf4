//! The state that an agent holds: of each key the number of its object, and the digest of all.

use kplane_model::{DesiredKey, Digest, RangeDigests, Ranges};
use kplane_proto::DIGEST_SCHEMA;
use kplane_proto::v1::ResumeToken;

use super::catalog::{End, Piece, Tables};

/// The kind of an update.
#[derive(Clone, Debug, Default)]
enum Kind {
    #[default]
    Changes,
    Ranges(Ranges),
    Snapshot,
}

/// The state of one agent, and the pieces of an update that has not ended.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// By number of the key.
    objects: Vec<u32>,
    digest: Digest,
    epoch: u64,
    revision: u64,
    staged: Vec<(u32, u32)>,
    kind: Kind,
}

/// The outcome of an update.
#[derive(Debug, Default)]
pub(super) struct Taken {
    /// Changes of one object: the number of the change before, 0 if none, and now.
    pub(super) moved: Vec<(u64, u64)>,
    /// Objects, or the whole state, that are older than before.
    pub(super) back: u64,
    /// Objects that are gone.
    pub(super) vanished: u64,
    /// The digest is not the one that the control plane states.
    pub(super) differs: bool,
}

impl Held {
    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    pub(super) fn len(&self) -> usize {
        self.objects.iter().filter(|number| **number != 0).count()
    }

    /// Returns the number of keys that may have an object.
    pub(super) fn keys(&self) -> usize {
        self.objects.len()
    }

    /// Returns the claim with which the agent connects.
    pub(super) fn token(&self) -> Option<ResumeToken> {
        (self.epoch != 0).then(|| ResumeToken {
            schema: DIGEST_SCHEMA,
            epoch: self.epoch,
            revision: self.revision,
            digest: self.digest.to_bytes().to_vec(),
        })
    }

    /// Forgets the pieces of an update that never ended.
    pub(super) fn begin_stream(&mut self) {
        self.staged = Vec::new();
        self.kind = Kind::Changes;
    }

    /// Returns the number of the change that made a key's object.
    pub(super) fn stamp(&self, tables: &Tables, key: usize) -> u64 {
        let number = self.objects.get(key).copied().unwrap_or_default();
        tables.object(number).map_or(0, |object| object.stamp)
    }

    pub(super) fn ranges(&self, tables: &Tables, count: u16) -> RangeDigests {
        let mut digests = RangeDigests::new(count);
        for (key, object) in (0..).zip(&self.objects) {
            if let Some(key @ DesiredKey::Service(_)) = tables.key(key)
                && let Some(object) = tables.object(*object)
            {
                digests.add(key, object.hash);
            }
        }
        digests
    }

    /// Takes a piece; returns what came of the update if it ends.
    pub(super) fn push(&mut self, tables: &Tables, epoch: u64, piece: &Piece) -> Option<Taken> {
        if piece.snapshot || piece.ranges.is_some() {
            self.staged.clear();
            self.kind = match &piece.ranges {
                Some(ranges) => Kind::Ranges(ranges.clone()),
                None => Kind::Snapshot,
            };
        }
        // Most updates have one piece.
        let Some(end) = piece.end else {
            self.staged.extend_from_slice(&piece.changes);
            return None;
        };
        let staged = std::mem::take(&mut self.staged);
        let changes = staged.iter().chain(&piece.changes).copied();
        Some(self.commit(tables, epoch, changes, end))
    }

    fn commit(
        &mut self,
        tables: &Tables,
        epoch: u64,
        changes: impl Iterator<Item = (u32, u32)>,
        end: End,
    ) -> Taken {
        let mut taken = Taken {
            back: u64::from(self.epoch == epoch && end.revision < self.revision),
            ..Taken::default()
        };
        let before = match std::mem::take(&mut self.kind) {
            Kind::Changes => None,
            Kind::Ranges(ranges) => Some(self.clear(tables, |key| match key {
                DesiredKey::Service(_) => ranges.contain(key),
                DesiredKey::Policy(part) => !part.is_shared() || ranges.contain(key),
                DesiredKey::Local(_) => true,
                DesiredKey::Node => false,
            })),
            Kind::Snapshot => Some(self.clear(tables, |_| true)),
        };
        for (key, object) in changes {
            let old = self.exchange(tables, key, object);
            if before.is_none() {
                note(tables, old, object, &mut taken);
            }
        }
        for (key, old) in (0..).zip(before.unwrap_or_default()) {
            let now = self.objects.get(key).copied().unwrap_or_default();
            note(tables, old, now, &mut taken);
        }
        taken.differs = self.digest != end.digest;
        (self.epoch, self.revision) = (epoch, end.revision);
        taken
    }

    /// Removes objects; returns the state before.
    fn clear(&mut self, tables: &Tables, of: impl Fn(&DesiredKey) -> bool) -> Vec<u32> {
        let before = self.objects.clone();
        for key in (0..).take(before.len()) {
            if tables.key(key).is_some_and(&of) {
                self.exchange(tables, key, 0);
            }
        }
        before
    }

    /// Puts an object in the place of another; returns the other.
    fn exchange(&mut self, tables: &Tables, key: u32, object: u32) -> u32 {
        let Ok(place) = usize::try_from(key) else {
            return 0;
        };
        if self.objects.len() <= place {
            self.objects.resize(place + 1, 0);
        }
        let old = std::mem::replace(&mut self.objects[place], object);
        if let Some(old) = tables.object(old) {
            self.digest.remove(old.hash);
        }
        if let Some(new) = tables.object(object) {
            self.digest.add(new.hash);
        }
        old
    }
}

/// Compares the objects of a key before and after an update.
fn note(tables: &Tables, old: u32, new: u32, taken: &mut Taken) {
    let stamp = |number| tables.object(number).map_or(0, |object| object.stamp);
    let (before, after) = (stamp(old), stamp(new));
    taken.vanished += u64::from(old != 0 && new == 0);
    if new != 0 && after < before {
        taken.back += 1;
    }
    if after > before {
        taken.moved.push((before, after));
    }
}
