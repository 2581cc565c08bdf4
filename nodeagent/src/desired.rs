//! The desired state of the node, as the control plane last sent it.
//!
//! Owner: the engine's thread. Synchronous, without I/O. Invariants:
//! * An update is taken as a whole or not at all, and only when its digest fits.
//! * An object is removed only by a deletion by name, or at the end of a complete snapshot whose
//!   omissions are trusted. Objects that are kept because an omission is not trusted are served and
//!   marked: see `held`.
//! * (epoch, revision) never goes back within an epoch, whichever replica the agent uses.
//! * Across epochs no state is taken of which the source's versions are older (see `freshness`), unless
//!   the stream has found that all replicas show an older one.
//! * An invalid object replaces nothing. The previous object stays, and the report names the invalid
//!   one until it becomes valid or goes away.

mod commit;
mod enforcement;
mod freshness;
mod guard;
mod held;
mod last_known;
mod oversized;
mod policies;
mod ranges;
mod restored;
mod staged;
mod update;

#[cfg(test)]
pub(crate) mod fixture;
#[cfg(test)]
mod tests;

pub use enforcement::Enforcement;
pub use freshness::{Freshness, Lag, Offer};
pub use guard::{CliffGuard, Confidence};
pub use held::Held;
pub use restored::{Remembered, SavedState};
pub(crate) use restored::{folder_id, is_folder};
pub use staged::Staged;
pub use update::{Collector, Position, Refusal, Remedy, Trigger, Update, now_ms};

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{
    Cidr, DesiredKey, DesiredObject, Digest, Family, KeyParts, LocalEndpoints, NodeFacts,
    ObjectHash, PolicyKey, Protocol, ServiceKey, ServiceName, ServiceProgram,
};

use held::{Backing, Ledger, Word};
use oversized::Oversized;

/// Most epochs whose revisions are remembered: more than the replicas that an agent rotates through.
const MAX_EPOCHS: usize = 16;

/// Most objects without a readable name that are kept for the report.
const MAX_NAMELESS: usize = 16;

/// The desired state of a node.
#[derive(Debug, Default)]
pub struct Desired {
    objects: BTreeMap<DesiredKey, Slot>,
    /// Invalid objects, by name.
    rejects: BTreeMap<DesiredKey, Reject>,
    /// The latest objects without a readable name, of the last snapshot or later updates.
    nameless: Vec<Reject>,
    digest: Digest,
    /// Whether `digest` was computed from all objects since the last snapshot, instead of being taken
    /// from the control plane.
    exact: bool,
    /// The newest position of each epoch, the current epoch last; empty if there is neither a snapshot nor a cache
    /// file.
    positions: Vec<Position>,
    standing: Standing,
    /// The cluster of the last control plane that named its cluster; empty = not known.
    cluster: Arc<str>,
    /// The newest changes of the source that the state contains.
    freshness: Freshness,
    counts: [Counts; 2],
    oversized: Oversized,
    guard: CliffGuard,
    /// The confidence of the last update, and the reason if it is low.
    confidence: (Confidence, String),
    /// The word of the last update about NetworkPolicies.
    enforcement: Enforcement,
    /// A control plane has named the NetworkPolicies that there are, in this process or before.
    knew_policies: bool,
    /// The objects that are kept although the control plane does not send them like this.
    held: Ledger,
    /// The node's own address of each family as the Node object last named it.
    last_known: [Option<IpAddr>; 2],
    /// The ranges of the node's Pods as the Node object last named some of each family.
    pod_ranges: Vec<Cidr>,
}

/// The origin of the state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Standing {
    /// An earlier process served it, if there is any. It is not in effect.
    #[default]
    Remembered,
    /// An earlier process served it. It is in effect until a control plane answers.
    Stale,
    /// A control plane sent or confirmed it in this process.
    Confirmed,
}

/// The state of one name.
#[derive(Debug)]
struct Slot {
    /// The hash of the object as it was last sent, valid or not. The digest counts this hash, unless
    /// the object is not named any more.
    hash: ObjectHash,
    /// The last valid object. Shared with the thread that writes the cache file.
    object: Option<Arc<DesiredObject>>,
    backing: Backing,
}

/// The reason why an object is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    /// The problem of the object.
    pub reason: String,
    /// The start of the problem, milliseconds since 1970.
    pub since_ms: u64,
}

/// Totals of one family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// The number of ServicePorts.
    pub services: u64,
    /// The number of their endpoints for policy Cluster.
    pub endpoints: u64,
}

/// The number of changes in one family, for the metrics (section (h)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// ServicePorts that are new, gone, or reached by other addresses, ports or rules.
    pub services: u64,
    /// ServicePorts whose endpoints, of the cluster or of the node, are different.
    pub endpoints: u64,
}

/// The state that an agent reports when it connects, so that the control plane can continue from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resume {
    /// The last update that the agent took.
    pub position: Position,
    /// The digest of all objects held.
    pub digest: Digest,
}

/// The changes that an update made.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Dirty {
    /// ServicePorts that are new, changed or gone, or whose local endpoints are.
    pub services: BTreeSet<ServiceKey>,
    /// Parts of NetworkPolicies that are new, changed or gone.
    pub policies: Vec<PolicyKey>,
    /// Whether the node's facts changed, so that everything is planned anew.
    pub node_changed: bool,
    /// Invalid objects of the update; the name is missing where it is unreadable.
    pub rejects: Vec<(Option<DesiredKey>, String)>,
    /// The number of objects and names in the update whose kind this version does not know.
    pub unknown_kinds: u64,
    /// The number of changes in each family.
    pub changes: [Changes; 2],
}

/// One ServicePort with its endpoints on this node.
pub type View<'a> = (&'a ServiceProgram, Option<&'a LocalEndpoints>);

impl Desired {
    /// Creates an empty state with a limit on how much may go at once.
    pub fn new(guard: CliffGuard) -> Self {
        Self {
            guard,
            ..Self::default()
        }
    }

    /// Returns the position of the state in effect; `None` before there is one.
    pub fn position(&self) -> Option<Position> {
        let last = self.positions.last().copied();
        if self.standing == Standing::Remembered { None } else { last }
    }

    /// Returns the state from which the control plane may continue; `None` asks for a snapshot. A state
    /// that is only remembered will do.
    pub fn resume(&self) -> Option<Resume> {
        if !self.exact {
            return None;
        }
        let position = self.positions.last()?;
        Some(Resume {
            position: *position,
            digest: self.digest,
        })
    }

    /// Returns the digest of all objects that the control plane sent.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Returns the confidence of the last update, and why the control plane's data is not complete.
    pub fn confidence(&self) -> (Confidence, &str) {
        (self.confidence.0, &self.confidence.1)
    }

    /// Returns the facts of the node, if the control plane sent any.
    pub fn node(&self) -> Option<&NodeFacts> {
        match self.objects.get(&DesiredKey::Node)?.object.as_deref()? {
            DesiredObject::Node(node) => Some(node),
            DesiredObject::Service(_) | DesiredObject::Local(_) | DesiredObject::Policy(_) => None,
        }
    }

    /// Returns one ServicePort; `None` when it does not exist (any more).
    pub fn service(&self, key: &ServiceKey) -> Option<View<'_>> {
        let slot = self.objects.get(&DesiredKey::Service(key.clone()))?;
        let DesiredObject::Service(program) = slot.object.as_deref()? else {
            return None;
        };
        let local = self.objects.get(&DesiredKey::Local(key.clone()));
        Some((program, local.and_then(Slot::local)))
    }

    /// Returns all ServicePorts of one Service, in both families, by key. Work: its ports.
    pub fn ports_of(&self, service: &ServiceName) -> impl Iterator<Item = View<'_>> {
        let first = DesiredKey::Service(first_key(service));
        let ours = move |key: &DesiredKey| matches!(key, DesiredKey::Service(key) if key.service == *service);
        self.objects
            .range(first..)
            .take_while(move |(key, _)| ours(key))
            .filter_map(|(_, slot)| {
                let program = slot.service()?;
                let local = DesiredKey::Local(program.port.key.clone());
                Some((program, self.objects.get(&local).and_then(Slot::local)))
            })
    }

    /// Returns all ServicePorts of a family, by key.
    pub fn services(&self, family: Family) -> impl Iterator<Item = View<'_>> {
        // Both are sorted by key, so they are read in parallel and not by a search for each key.
        let mut locals = self.objects.values().filter_map(Slot::local).peekable();
        self.objects
            .values()
            .filter_map(Slot::service)
            .filter(move |program| program.port.key.family == family)
            .map(move |program| {
                let key = &program.port.key;
                while locals.next_if(|local| local.key < *key).is_some() {}
                (program, locals.next_if(|local| local.key == *key))
            })
    }

    /// Returns the totals of a family.
    pub fn counts(&self, family: Family) -> Counts {
        self.counts[family as usize]
    }

    /// Returns the invalid objects, first those whose names are readable.
    pub fn rejects(&self) -> impl Iterator<Item = (Option<&DesiredKey>, &Reject)> {
        self.rejects
            .iter()
            .map(|(key, reject)| (Some(key), reject))
            .chain(self.nameless.iter().map(|reject| (None, reject)))
    }

    /// Takes an update.
    ///
    /// # Errors
    /// [`Refusal`]: nothing of the update was taken.
    pub fn apply(&mut self, update: Update) -> Result<Dirty, Refusal> {
        self.check_position(&update)?;
        let goes_back = self.check_freshness(&update)?;
        let whole = update.is_whole();
        let Update {
            ranges,
            position,
            digest: expected,
            arrived_at_ms: now_ms,
            confidence,
            doubt,
            enforcement,
            cluster,
            offer,
            changes: mut staged,
            ..
        } = update;
        if let Some(ranges) = &ranges {
            self.name_others(ranges, &mut staged);
        }
        let (digest, exact) = self.digest_after(whole, &staged, expected);
        if digest != expected {
            return Err(Refusal::Digest {
                position,
                computed: digest,
                expected,
            });
        }
        let is_heir = self.is_of(position);
        self.digest = digest;
        self.exact = exact;
        self.standing = Standing::Confirmed;
        if goes_back {
            self.freshness.replace(&offer);
        } else {
            self.freshness.join(&offer);
        }
        if !cluster.is_empty() {
            self.cluster = cluster;
        }
        self.note_enforcement(enforcement);
        self.advance(position);
        let judged = match confidence {
            Confidence::Whole if is_heir => Confidence::Confirmed,
            confidence => confidence,
        };
        let word = Word {
            confidence: judged,
            doubt,
            enforcement,
            now_ms,
        };
        let dirty = self.commit(whole, staged, &word);
        self.confidence = (confidence, word.doubt);
        self.note_node();
        Ok(dirty)
    }

    /// Returns whether the state is exactly one of the control plane of a position. It has named all of it, so what it does not
    /// name in a snapshot is gone, as in a difference: it forgets deletions where there are more than objects.
    fn is_of(&self, position: Position) -> bool {
        let last = self.positions.last();
        self.exact && self.held.is_empty() && last.is_some_and(|last| last.epoch == position.epoch)
    }

    fn check_position(&self, update: &Update) -> Result<(), Refusal> {
        let got = update.position;
        let known = self.exact || self.standing == Standing::Confirmed;
        if !known && !update.snapshot {
            return Err(Refusal::NoSnapshot { position: got });
        }
        if update.ranges.is_some() && !self.is_comparable() {
            return Err(Refusal::NotComparable { position: got });
        }
        let held = self.positions.iter().find(|held| held.epoch == got.epoch);
        match held {
            Some(held) if got.revision < held.revision => Err(Refusal::Older { held: *held, got }),
            _ => Ok(()),
        }
    }

    /// Returns whether the state of an update is older than the state before, and is taken all the same:
    /// it is of another cluster, or all replicas show an older one (invariant: forward).
    fn check_freshness(&self, update: &Update) -> Result<bool, Refusal> {
        if self.is_of_other_cluster(&update.cluster) {
            return Ok(true);
        }
        match update.offer.lag(&self.freshness) {
            Some(lag) if !update.may_go_back => Err(Refusal::Behind(lag)),
            lag => Ok(lag.is_some()),
        }
    }

    /// Returns the digest after an update, and whether it is known exactly. An object without a
    /// readable name may replace any other, so the digest of a delta with such an object is taken
    /// from the control plane. The digest of a snapshot is always computed, because a snapshot names
    /// everything.
    fn digest_after(&self, snapshot: bool, staged: &Staged, expected: Digest) -> (Digest, bool) {
        let mut digest = if snapshot {
            let mut digest = Digest::default();
            staged.nameless.iter().for_each(|hash| digest.add(*hash));
            digest
        } else if staged.is_readable() {
            self.digest
        } else {
            return (expected, false);
        };
        let mut slots = self.in_order(staged.named.len());
        for (key, change) in &staged.named {
            let reported = |slot: &&Slot| slot.backing != Backing::Unnamed;
            if !snapshot && let Some(old) = slots(key).filter(reported) {
                digest.remove(old.hash);
            }
            if let Some(new) = change {
                digest.add(new.hash);
            }
        }
        (digest, snapshot || self.exact)
    }

    /// Returns a way to look up so many keys in ascending order.
    fn in_order<'a>(&'a self, count: usize) -> impl FnMut(&DesiredKey) -> Option<&'a Slot> {
        let is_walk = self.is_walk(count);
        let mut objects = self.objects.iter().peekable();
        move |wanted: &DesiredKey| {
            if !is_walk {
                return self.objects.get(wanted);
            }
            while objects.next_if(|(key, _)| *key < wanted).is_some() {}
            let (_, slot) = objects.next_if(|(key, _)| *key == wanted)?;
            Some(slot)
        }
    }

    /// Returns whether a walk over all objects is less work than to look for so many.
    fn is_walk(&self, count: usize) -> bool {
        count > self.objects.len() / 16
    }

    fn advance(&mut self, to: Position) {
        self.positions.retain(|held| held.epoch != to.epoch);
        if self.positions.len() == MAX_EPOCHS {
            self.positions.remove(0);
        }
        self.positions.push(to);
    }
}

/// Returns the smallest key of a Service; all its ports follow.
fn first_key(service: &ServiceName) -> ServiceKey {
    ServiceKey::from(KeyParts {
        service: service.clone(),
        port_name: "".into(),
        protocol: Protocol::Tcp,
        family: Family::V4,
    })
}

impl Slot {
    fn service(&self) -> Option<&ServiceProgram> {
        match self.object.as_deref()? {
            DesiredObject::Service(program) => Some(program),
            DesiredObject::Local(_) | DesiredObject::Node(_) | DesiredObject::Policy(_) => None,
        }
    }

    fn local(&self) -> Option<&LocalEndpoints> {
        match self.object.as_deref()? {
            DesiredObject::Local(local) => Some(local),
            DesiredObject::Service(_) | DesiredObject::Node(_) | DesiredObject::Policy(_) => None,
        }
    }
}

impl Dirty {
    fn add(&mut self, key: &DesiredKey) {
        match key {
            DesiredKey::Service(key) | DesiredKey::Local(key) => {
                self.services.insert(key.clone());
            }
            DesiredKey::Node => self.node_changed = true,
            DesiredKey::Policy(key) => self.policies.push(key.clone()),
        }
    }
    /// Updates the totals for the difference between an object and the one before or after it.
    fn count(&mut self, object: &DesiredObject, other: Option<&DesiredObject>) {
        let (key, services, endpoints) = match (object, other) {
            (DesiredObject::Service(new), Some(DesiredObject::Service(old))) => {
                let endpoints = new.endpoints != old.endpoints || new.has_any != old.has_any;
                (&new.port.key, new.port != old.port, endpoints)
            }
            (DesiredObject::Service(new), _) => (&new.port.key, true, new.has_any),
            (DesiredObject::Local(local), _) => (&local.key, false, true),
            (DesiredObject::Node(_) | DesiredObject::Policy(_), _) => return,
        };
        let changes = &mut self.changes[key.family as usize];
        changes.services += u64::from(services);
        changes.endpoints += u64::from(endpoints);
    }
}
