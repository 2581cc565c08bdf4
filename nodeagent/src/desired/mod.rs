//! What the node must have, as the control plane last said it.
//!
//! Owner: the engine's thread. Synchronous, without I/O. Invariants:
//! * An update is taken as a whole or not at all, and only when its digest fits.
//! * Only a deletion by name, or the end of a complete snapshot, removes an object.
//! * (epoch, revision) never goes back within an epoch, whichever replica is asked.
//! * An object that makes no sense replaces nothing: what was there before it stays, and the object
//!   is named in the report until it makes sense or goes away.

mod oversized;
mod staged;
mod update;

#[cfg(test)]
pub(crate) mod fixture;
#[cfg(test)]
mod tests;

pub use update::{Change, Collector, Position, Refusal, Remedy, Trigger, Update, now_ms};

use std::collections::{BTreeMap, BTreeSet};

use kplane_model::{
    DesiredKey, DesiredObject, Digest, Family, LocalEndpoints, NodeFacts, ObjectHash, Protocol,
    ServiceKey, ServiceName, ServiceProgram,
};

use oversized::Oversized;
use staged::{Staged, StagedObject};

/// Epochs whose revisions are remembered: more replicas than an agent rotates through.
const MAX_EPOCHS: usize = 16;

/// Objects without a readable name that are kept for the report.
const MAX_NAMELESS: usize = 16;

/// What a node must have.
#[derive(Debug, Default)]
pub struct Desired {
    objects: BTreeMap<DesiredKey, Slot>,
    /// Objects that make no sense, by name.
    rejects: BTreeMap<DesiredKey, Reject>,
    /// The latest objects of the last snapshot, or since, whose names cannot be told.
    nameless: Vec<Reject>,
    digest: Digest,
    /// `digest` was computed from all objects since the last snapshot, none taken on trust.
    exact: bool,
    /// The newest position of each epoch, the current epoch last; empty before the first snapshot.
    positions: Vec<Position>,
    counts: [Counts; 2],
    oversized: Oversized,
}

/// What the control plane holds under a name.
#[derive(Debug)]
struct Slot {
    /// Of the object as it was last sent, sensible or not: this is what the digest counts.
    hash: ObjectHash,
    /// The last object that made sense. Boxed: nodes of the map are never full.
    object: Option<Box<DesiredObject>>,
}

/// Why an object is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    /// What is wrong with it.
    pub reason: String,
    /// Since when, milliseconds since 1970.
    pub since_ms: u64,
}

/// Totals of one family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// ServicePorts.
    pub services: u64,
    /// Their endpoints for policy Cluster.
    pub endpoints: u64,
}

/// What changed in one family, for the metrics (section (h)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// ServicePorts that are new, gone, or reached by other addresses, ports or rules.
    pub services: u64,
    /// ServicePorts whose endpoints, of the cluster or of the node, are different.
    pub endpoints: u64,
}

/// What an agent tells the control plane that it holds already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resume {
    /// The last update.
    pub position: Position,
    /// Of all objects held.
    pub digest: Digest,
}

/// What an update changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// ServicePorts that are new, changed or gone, or whose local endpoints are.
    pub services: BTreeSet<ServiceKey>,
    /// The node's facts are different: everything is planned anew.
    pub node_changed: bool,
    /// Objects of the update that make no sense; the name is missing where it cannot be told.
    pub rejects: Vec<(Option<DesiredKey>, String)>,
    /// Objects and names of the update that are of a kind unknown to this version.
    pub unknown_kinds: u64,
    /// How much of what changed, each family.
    pub changes: [Changes; 2],
}

/// One ServicePort with what the node itself adds to it.
pub type View<'a> = (&'a ServiceProgram, Option<&'a LocalEndpoints>);

impl Desired {
    /// The last update that was taken; `None` before the first complete snapshot.
    #[must_use]
    pub fn position(&self) -> Option<Position> {
        self.positions.last().copied()
    }

    /// What to ask the control plane to go on from; `None` asks for a snapshot.
    #[must_use]
    pub fn resume(&self) -> Option<Resume> {
        let position = self.position().filter(|_| self.exact)?;
        Some(Resume {
            position,
            digest: self.digest,
        })
    }

    /// Facts of the node, if the control plane said any.
    #[must_use]
    pub fn node(&self) -> Option<&NodeFacts> {
        match self.objects.get(&DesiredKey::Node)?.object.as_deref()? {
            DesiredObject::Node(node) => Some(node),
            DesiredObject::Service(_) | DesiredObject::Local(_) => None,
        }
    }

    /// One ServicePort; `None` when there is (no longer) one.
    #[must_use]
    pub fn service(&self, key: &ServiceKey) -> Option<View<'_>> {
        let slot = self.objects.get(&DesiredKey::Service(key.clone()))?;
        let DesiredObject::Service(program) = slot.object.as_deref()? else {
            return None;
        };
        let local = self.objects.get(&DesiredKey::Local(key.clone()));
        Some((program, local.and_then(Slot::local)))
    }

    /// All ServicePorts of one Service, in both families, by key. Work: its ports.
    pub fn ports_of(&self, service: &ServiceName) -> impl Iterator<Item = View<'_>> {
        // The least key of the Service: all its ports follow.
        let first = DesiredKey::Service(ServiceKey {
            service: service.clone(),
            port_name: "".into(),
            protocol: Protocol::Tcp,
            family: Family::V4,
        });
        let ours = move |key: &DesiredKey| matches!(key, DesiredKey::Service(key) if key.service == *service);
        let ports = self.objects.range(first..);
        let ports = ports.take_while(move |(key, _)| ours(key));
        ports.filter_map(|(_, slot)| {
            let program = slot.service()?;
            let local = DesiredKey::Local(program.port.key.clone());
            Some((program, self.objects.get(&local).and_then(Slot::local)))
        })
    }

    /// All ServicePorts of a family, by key.
    pub fn services(&self, family: Family) -> impl Iterator<Item = View<'_>> {
        // Both are sorted by key: they are read side by side instead of looking up each.
        let mut locals = self.objects.values().filter_map(Slot::local).peekable();
        let programs = self.objects.values().filter_map(Slot::service);
        programs
            .filter(move |program| program.port.key.family == family)
            .map(move |program| {
                let key = &program.port.key;
                while locals.next_if(|local| local.key < *key).is_some() {}
                (program, locals.next_if(|local| local.key == *key))
            })
    }

    /// Totals of a family.
    #[must_use]
    pub fn counts(&self, family: Family) -> Counts {
        self.counts[family as usize]
    }

    /// Objects that make no sense, first those whose names can be told.
    pub fn rejects(&self) -> impl Iterator<Item = (Option<&DesiredKey>, &Reject)> {
        let named = self.rejects.iter().map(|(key, reject)| (Some(key), reject));
        named.chain(self.nameless.iter().map(|reject| (None, reject)))
    }

    /// Takes an update.
    ///
    /// # Errors
    /// [`Refusal`]: nothing of the update was taken.
    pub fn apply(&mut self, update: Update) -> Result<Touched, Refusal> {
        self.check_position(&update)?;
        let Update {
            snapshot,
            position,
            digest: expected,
            arrived_at_ms,
            ..
        } = update;
        let staged = Staged::convert(update.changes);
        let (digest, exact) = self.digest_after(snapshot, &staged, expected);
        if digest != expected {
            return Err(Refusal::Digest {
                position,
                computed: digest,
                expected,
            });
        }
        self.digest = digest;
        self.exact = exact;
        self.advance(position);
        Ok(self.commit(snapshot, staged, arrived_at_ms))
    }

    fn check_position(&self, update: &Update) -> Result<(), Refusal> {
        let got = update.position;
        if self.positions.is_empty() && !update.snapshot {
            return Err(Refusal::NoSnapshot { position: got });
        }
        let held = self.positions.iter().find(|held| held.epoch == got.epoch);
        match held {
            Some(held) if got.revision < held.revision => Err(Refusal::Older { held: *held, got }),
            _ => Ok(()),
        }
    }

    /// The digest after an update, and whether it is known exactly. An object without a readable
    /// name may replace any other, so that a delta with one is taken on trust; a snapshot never
    /// is, since it names everything.
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
        for (key, change) in &staged.named {
            if let Some(old) = self.objects.get(key).filter(|_| !snapshot) {
                digest.remove(old.hash);
            }
            if let Some(new) = change {
                digest.add(new.hash);
            }
        }
        (digest, snapshot || self.exact)
    }

    fn advance(&mut self, to: Position) {
        self.positions.retain(|held| held.epoch != to.epoch);
        if self.positions.len() == MAX_EPOCHS {
            self.positions.remove(0);
        }
        self.positions.push(to);
    }

    fn commit(&mut self, snapshot: bool, staged: Staged, now_ms: u64) -> Touched {
        let mut touched = Touched {
            unknown_kinds: staged.unknown_kinds,
            ..Touched::default()
        };
        if snapshot {
            self.nameless.clear();
            let named = |key: &DesiredKey| matches!(staged.named.get(key), Some(Some(_)));
            let gone: Vec<_> = self
                .objects
                .keys()
                .filter(|key| !named(key))
                .cloned()
                .collect();
            gone.iter().for_each(|key| self.remove(key, &mut touched));
        }
        for (key, change) in staged.named {
            match change {
                Some(object) => self.put(key, object, now_ms, &mut touched),
                None => self.remove(&key, &mut touched),
            }
        }
        self.note_sizes(&mut touched);
        for error in staged.nameless_errors {
            let reason = error.to_string();
            touched.rejects.push((None, reason.clone()));
            if self.nameless.len() == MAX_NAMELESS {
                self.nameless.remove(0);
            }
            let since_ms = now_ms;
            self.nameless.push(Reject { reason, since_ms });
        }
        touched
    }

    fn put(&mut self, key: DesiredKey, new: StagedObject, now_ms: u64, touched: &mut Touched) {
        let held = self.objects.get_mut(&key);
        if held.as_ref().is_some_and(|slot| slot.hash == new.hash) {
            return;
        }
        let object = match new.object {
            Ok(object) => object,
            Err(error) => {
                let reason = error.to_string();
                touched.rejects.push((Some(key.clone()), reason.clone()));
                match held {
                    Some(slot) => slot.hash = new.hash,
                    None => {
                        let hash = new.hash;
                        self.objects
                            .insert(key.clone(), Slot { hash, object: None });
                    }
                }
                let since_ms = self.rejects.get(&key).map_or(now_ms, |old| old.since_ms);
                self.rejects.insert(key, Reject { reason, since_ms });
                return;
            }
        };
        let old = held.and_then(|slot| slot.object.take());
        self.rejects.remove(&key);
        self.count(&object, u64::wrapping_add);
        touched.add(&key);
        touched.count(&object, old.as_deref());
        if let Some(old) = old {
            self.count(&old, u64::wrapping_sub);
        }
        let slot = Slot {
            hash: new.hash,
            object: Some(object),
        };
        self.objects.insert(key, slot);
    }

    fn remove(&mut self, key: &DesiredKey, touched: &mut Touched) {
        self.rejects.remove(key);
        if let Some(Slot {
            object: Some(old), ..
        }) = self.objects.remove(key)
        {
            self.count(&old, u64::wrapping_sub);
            touched.add(key);
            touched.count(&old, None);
        }
    }

    fn count(&mut self, object: &DesiredObject, op: fn(u64, u64) -> u64) {
        if let DesiredObject::Service(program) = object {
            let counts = &mut self.counts[program.port.key.family as usize];
            counts.services = op(counts.services, 1);
            counts.endpoints = op(counts.endpoints, program.endpoints.len() as u64);
        }
    }
}

impl Slot {
    fn service(&self) -> Option<&ServiceProgram> {
        match self.object.as_deref()? {
            DesiredObject::Service(program) => Some(program),
            DesiredObject::Local(_) | DesiredObject::Node(_) => None,
        }
    }

    fn local(&self) -> Option<&LocalEndpoints> {
        match self.object.as_deref()? {
            DesiredObject::Local(local) => Some(local),
            DesiredObject::Service(_) | DesiredObject::Node(_) => None,
        }
    }
}

impl Touched {
    fn add(&mut self, key: &DesiredKey) {
        match key {
            DesiredKey::Service(key) | DesiredKey::Local(key) => {
                self.services.insert(key.clone());
            }
            DesiredKey::Node => self.node_changed = true,
        }
    }
    /// Counts what differs between an object and what was or will be in its place.
    fn count(&mut self, object: &DesiredObject, other: Option<&DesiredObject>) {
        let (key, services, endpoints) = match (object, other) {
            (DesiredObject::Service(new), Some(DesiredObject::Service(old))) => {
                let endpoints = new.endpoints != old.endpoints || new.has_any != old.has_any;
                (&new.port.key, new.port != old.port, endpoints)
            }
            (DesiredObject::Service(new), _) => (&new.port.key, true, new.has_any),
            (DesiredObject::Local(local), _) => (&local.key, false, true),
            (DesiredObject::Node(_), _) => return,
        };
        let changes = &mut self.changes[key.family as usize];
        changes.services += u64::from(services);
        changes.endpoints += u64::from(endpoints);
    }
}
