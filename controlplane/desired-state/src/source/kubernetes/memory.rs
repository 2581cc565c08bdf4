//! Memory of the known objects of a kind; decides whether a complete list may be believed. Pure.
//!
//! For each object, the memory keeps the name and a hash of the fields that kplane reads. This is
//! enough to compute the changes of a later list without a second copy of all objects.
//!
//! A list may show an older state than one that was seen, or lack most of the known objects. Such a
//! list may be true: a backup was restored, or a namespace was deleted. It may also be false: a
//! replica lags behind, etcd lost its data, or a proxy filters by permissions. The list counts when
//! it has been confirmed; until then all objects stay.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use tokio::time::Instant;

use super::transport::Unreadable;
use crate::freshness::Versions;
use crate::k8s::{Kind, Object, ObjectId};

/// Number of lists that must agree before a doubtful one counts.
const CONFIRMATIONS: u32 = 2;
/// Pause between these lists when they show an older state.
const BACKWARDS_PAUSE: Duration = Duration::from_secs(2);
/// Pause between these lists when they lack many objects.
const SHRUNK_PAUSE: Duration = Duration::from_secs(3);
/// Time for which lists must be empty, where every real server has objects.
pub(super) const EMPTY_FOR: Duration = Duration::from_secs(60);
/// Pause between lists during that time.
const EMPTY_PAUSE: Duration = Duration::from_secs(5);
/// Number of missing objects from which a list is doubtful, unless all are missing: fewer are
/// normal.
const MANY: usize = 10;

/// Objects by name, each with a hash of the fields that kplane reads (not of its
/// `resourceVersion`).
///
/// The hash is `SipHash` with a key of this process, so no author of objects can create collisions.
/// Two states of an object collide by chance once in 2^64. A list then hides this change until the
/// next change of the object. Changes from a watch are never compared.
#[derive(Debug, Default)]
pub(super) struct Census {
    objects: HashMap<ObjectId, u64>,
}

impl Census {
    pub(super) fn len(&self) -> usize {
        self.objects.len()
    }
}

/// The memory of a kind.
#[derive(Debug)]
pub(super) struct Memory {
    kind: Kind,
    hasher: RandomState,
    /// Objects that were passed on to the index.
    known: Census,
    /// The newest resource version that was seen.
    seen: u64,
    /// Resource version of the newest change that is known, or less: a list does not show deletions.
    changed: u64,
    doubt: Option<Doubt>,
}

/// The reasons why a list is not believed yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Doubt {
    reasons: Reasons,
    /// Resource version of the last doubtful list.
    version: u64,
    first_at: Instant,
    confirmations: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reasons {
    backwards: bool,
    shrunk: bool,
    emptied: bool,
    known: usize,
    listed: usize,
    missing: usize,
}

/// The decision about a complete list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The list is believed.
    Accept,
    /// The list was doubtful and is believed, because earlier lists agree.
    Confirmed,
    /// The named objects are newer than the known ones, but missing objects may still exist: list
    /// again.
    KeepMissing(Hold),
    /// The list is older than the known state: list again.
    Ignore(Hold),
}

/// A list that does not count yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hold {
    /// Pause before the next list.
    pub(super) pause: Duration,
    /// The reason, human-readable.
    pub(super) reason: String,
}

impl Memory {
    pub(super) fn new(kind: Kind) -> Self {
        Self {
            kind,
            hasher: RandomState::new(),
            known: Census::default(),
            seen: 0,
            changed: 0,
            doubt: None,
        }
    }

    /// Returns the newest resource version that was seen.
    pub(super) fn seen(&self) -> u64 {
        self.seen
    }

    /// Returns whether no object is known.
    pub(super) fn is_empty(&self) -> bool {
        self.known.len() == 0
    }

    /// Records that everything up to a resource version was seen.
    pub(super) fn advance(&mut self, version: u64) {
        self.seen = self.seen.max(version);
    }

    /// Records a change with this resource version.
    pub(super) fn change(&mut self, version: u64) {
        self.advance(version);
        self.changed = self.changed.max(version);
    }

    /// Returns the versions up to which everything has been passed on to the index.
    pub(super) fn versions(&self) -> Versions {
        Versions {
            seen: self.seen,
            changed: self.changed,
        }
    }

    /// Records that an object was passed on to the index.
    pub(super) fn put(&mut self, object: &Object) {
        let hash = self.hash(object);
        self.known.objects.insert(object.id(), hash);
    }

    /// Records that an object's deletion was passed on to the index.
    pub(super) fn gone(&mut self, id: &ObjectId) {
        self.known.objects.remove(id);
    }

    /// Adds an object of a list to a census; returns true if the object is new or changed.
    pub(super) fn note(&self, census: &mut Census, object: &Object) -> bool {
        let hash = self.hash(object);
        let id = object.id();
        let known = self.known.objects.get_key_value(&id);
        let news = known.is_none_or(|(_, known)| *known != hash);
        // The known name is shared, so that a list makes no second copy of it.
        let id = known.map_or(id, |(known, _)| known.clone());
        census.objects.insert(id, hash);
        news
    }

    /// Adds the known state of objects in a list that cannot be read.
    pub(super) fn keep(&self, census: &mut Census, unreadable: &[Unreadable]) {
        let unreadable: HashSet<_> =
            unreadable.iter().map(|one| (&*one.namespace, &*one.name)).collect();
        if unreadable.is_empty() {
            return;
        }
        for (id, hash) in &self.known.objects {
            // The slices of a legacy Endpoints object are called `<its name>/...`.
            let name = id.name.split('/').next().unwrap_or_default();
            if unreadable.contains(&(&*id.namespace, name)) {
                census.objects.entry(id.clone()).or_insert(*hash);
            }
        }
    }

    /// Returns the known objects that are not in a list, sorted.
    pub(super) fn missing(&self, named: &Census) -> Vec<ObjectId> {
        let mut missing: Vec<_> = self.unnamed(named).cloned().collect();
        missing.sort();
        missing
    }

    fn unnamed<'a>(&'a self, named: &'a Census) -> impl Iterator<Item = &'a ObjectId> {
        self.known.objects.keys().filter(|id| !named.objects.contains_key(id))
    }

    /// Decides about a complete list with these objects and this resource version.
    pub(super) fn judge(&mut self, version: u64, named: &Census, now: Instant) -> Verdict {
        let reasons = self.reasons(version, named);
        if !reasons.any() {
            self.doubt = None;
            return Verdict::Accept;
        }
        let doubt = match self.doubt.take() {
            Some(doubt) if doubt.reasons.agree(reasons) && version >= doubt.version => Doubt {
                reasons,
                version,
                confirmations: doubt.confirmations + 1,
                ..doubt
            },
            _ => Doubt {
                reasons,
                version,
                first_at: now,
                confirmations: 0,
            },
        };
        let long_enough = !reasons.lost() || now - doubt.first_at >= EMPTY_FOR;
        if doubt.confirmations >= CONFIRMATIONS && long_enough {
            return Verdict::Confirmed;
        }
        let hold = Hold {
            pause: reasons.pause(),
            reason: reasons.explain(self.kind),
        };
        self.doubt = Some(doubt);
        if reasons.backwards {
            Verdict::Ignore(hold)
        } else {
            Verdict::KeepMissing(hold)
        }
    }

    /// Replaces the known state by an accepted list, even if the list is older. `changed` is the newest
    /// version among its objects.
    pub(super) fn replace(&mut self, version: u64, changed: u64, named: Census) {
        // Deletions that only the list shows came after everything that was seen before.
        let deleted = self.unnamed(&named).next().map(|_| self.seen + 1);
        let before = (version >= self.seen).then_some(self.changed.max(deleted.unwrap_or(0)));
        self.changed = changed.max(before.unwrap_or(0)).min(version);
        self.known = named;
        self.seen = version;
        self.doubt = None;
    }

    fn reasons(&self, version: u64, named: &Census) -> Reasons {
        let known = self.known.objects.len();
        let missing = self.unnamed(named).count();
        let never_empty = matches!(self.kind, Kind::Service | Kind::EndpointSlice);
        Reasons {
            backwards: version < self.seen,
            shrunk: missing > 0 && (missing == known || (missing >= MANY && missing * 2 > known)),
            emptied: never_empty && known > 0 && named.objects.is_empty(),
            known,
            listed: named.objects.len(),
            missing,
        }
    }

    fn hash(&self, object: &Object) -> u64 {
        self.hasher.hash_one(object)
    }
}

impl Reasons {
    fn any(self) -> bool {
        self.backwards || self.shrunk || self.emptied
    }

    /// Returns whether the server seems to have lost its data: such a list is believed only after a
    /// minute.
    fn lost(self) -> bool {
        self.emptied || (self.backwards && self.shrunk)
    }

    /// Returns whether two lists raise the same doubts, so that the second confirms the first.
    fn agree(self, other: Self) -> bool {
        (self.backwards, self.shrunk, self.emptied)
            == (other.backwards, other.shrunk, other.emptied)
    }

    fn pause(self) -> Duration {
        if self.lost() {
            EMPTY_PAUSE
        } else if self.shrunk {
            SHRUNK_PAUSE
        } else {
            BACKWARDS_PAUSE
        }
    }

    /// Explains the doubt without numbers that differ between lists, so that a lasting problem is
    /// reported once.
    fn explain(self, kind: Kind) -> String {
        if self.emptied {
            format!(
                "a complete list of {kind}s is empty although {} are known, and no cluster is without \
                 any; all of them stay in force until this has been so for {} s. Did etcd lose its \
                 data?",
                self.known,
                EMPTY_FOR.as_secs()
            )
        } else if self.lost() {
            format!(
                "a complete list of {kind}s is older than what was seen before and lacks {} of {} \
                 that are known; all of them stay in force until this has been so for {} s. Did etcd \
                 lose its data?",
                self.missing,
                self.known,
                EMPTY_FOR.as_secs()
            )
        } else if self.backwards {
            format!(
                "a complete list of {kind}s is older than what was seen before; nothing of it counts \
                 until {CONFIRMATIONS} more say so. Was etcd restored from a backup?"
            )
        } else {
            format!(
                "a complete list of {kind}s lacks {} of {} that are known; they stay in force until \
                 {CONFIRMATIONS} more say so",
                self.missing, self.known
            )
        }
    }
}

#[cfg(test)]
mod tests;
