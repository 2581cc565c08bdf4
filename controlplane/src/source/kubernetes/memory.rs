//! What is remembered of a kind, and whether a complete list may be believed. Pure.
//!
//! Of an object its name and a hash of what is read of it are remembered: enough to tell what a
//! later list changes, without a second copy of everything.
//!
//! A list that comes from an older state than one that was seen, or that lacks most of what was
//! there, may be the truth (a backup was put back, a namespace was deleted) or a lie (a replica that
//! lags behind, an etcd that lost its data, permissions of a strange proxy). It counts when it has
//! been confirmed; until then everything stays.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use tokio::time::Instant;

use super::transport::Unreadable;
use crate::k8s::{Kind, Object, ObjectId};

/// Lists that must say the same before a doubtful one counts.
const CONFIRMATIONS: u32 = 2;
/// Time between them for a list from the past.
const BACKWARDS_PAUSE: Duration = Duration::from_secs(2);
/// Time between them for a list that lacks many objects.
const SHRUNK_PAUSE: Duration = Duration::from_secs(3);
/// Time for which there must be nothing at all, where every real server has something.
pub(super) const EMPTY_FOR: Duration = Duration::from_secs(60);
/// Time between lists meanwhile.
const EMPTY_PAUSE: Duration = Duration::from_secs(5);
/// Fewer missing objects than this are everyday life, unless they are all.
const MANY: usize = 10;

/// Objects by name, each with a hash of what is read of it (so not of its `resourceVersion`).
///
/// The hash is `SipHash` with a key of this process, so nobody can write objects that share one. Two
/// states of an object do by chance, once in 2^64: a list then hides this change, until the next
/// change of the object. Changes that a watch tells are never compared.
#[derive(Debug, Default)]
pub(super) struct Census {
    objects: HashMap<ObjectId, u64>,
}

impl Census {
    pub(super) fn len(&self) -> usize {
        self.objects.len()
    }

    /// An object is not there after all.
    pub(super) fn strike(&mut self, id: &ObjectId) {
        self.objects.remove(id);
    }
}

/// What is remembered of a kind.
#[derive(Debug)]
pub(super) struct Memory {
    kind: Kind,
    hasher: RandomState,
    /// Objects that the index was told of.
    known: Census,
    /// The newest state that was seen.
    seen: u64,
    doubt: Option<Doubt>,
}

/// Why a list is not believed yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Doubt {
    reasons: Reasons,
    /// The state that the last such list showed.
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

/// What to do with a complete list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is the truth.
    Accept,
    /// It was doubted, and is the truth all the same: others before it said so, too.
    Confirmed,
    /// What it names is newer than what is known, but what it lacks may be there: list again.
    KeepMissing(Hold),
    /// It is older than what is known: list again.
    Ignore(Hold),
}

/// A list that does not count yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hold {
    /// When to list again.
    pub(super) pause: Duration,
    /// For people.
    pub(super) reason: String,
}

impl Memory {
    pub(super) fn new(kind: Kind) -> Self {
        Self {
            kind,
            hasher: RandomState::new(),
            known: Census::default(),
            seen: 0,
            doubt: None,
        }
    }

    /// The newest state that was seen.
    pub(super) fn seen(&self) -> u64 {
        self.seen
    }

    /// Everything up to a state was seen.
    pub(super) fn advance(&mut self, version: u64) {
        self.seen = self.seen.max(version);
    }

    /// The index is told of an object.
    pub(super) fn put(&mut self, object: &Object) {
        let hash = self.hash(object);
        self.known.objects.insert(object.id(), hash);
    }

    /// The index is told that an object is gone.
    pub(super) fn gone(&mut self, id: &ObjectId) {
        self.known.strike(id);
    }

    /// A list names an object; true if that is news.
    pub(super) fn note(&self, census: &mut Census, object: &Object) -> bool {
        let hash = self.hash(object);
        let id = object.id();
        let known = self.known.objects.get_key_value(&id);
        let news = known.is_none_or(|(_, known)| *known != hash);
        // The name that is known is shared, so that a list makes no second copy of it.
        let id = known.map_or(id, |(known, _)| known.clone());
        census.objects.insert(id, hash);
        news
    }

    /// A list names objects that cannot be read: what is known of them stays.
    pub(super) fn keep(&self, census: &mut Census, unreadable: &[Unreadable]) {
        let unreadable: HashSet<_> = unreadable
            .iter()
            .map(|one| (&*one.namespace, &*one.name))
            .collect();
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

    /// What is known and not in a list, sorted.
    pub(super) fn missing(&self, named: &Census) -> Vec<ObjectId> {
        let mut missing: Vec<_> = self.unnamed(named).cloned().collect();
        missing.sort();
        missing
    }

    fn unnamed<'a>(&'a self, named: &'a Census) -> impl Iterator<Item = &'a ObjectId> {
        let known = self.known.objects.keys();
        known.filter(|id| !named.objects.contains_key(id))
    }

    /// A list is complete: it names these objects and shows this state.
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

    /// A list counts: this is what there is, also if it is older than what was there.
    pub(super) fn replace(&mut self, version: u64, named: Census) {
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

    /// As if a database had lost its data: it takes a minute to be believed.
    fn lost(self) -> bool {
        self.emptied || (self.backwards && self.shrunk)
    }

    /// The same doubts: the list before is confirmed.
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

    /// Without numbers that change from list to list: a problem that stays is told once.
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
