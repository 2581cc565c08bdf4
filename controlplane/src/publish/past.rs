//! Earlier states of all ServicePorts, for `kpctl rollback`.
//!
//! The past is a list of undone changes: what each ServicePort was before a revision changed it. Going back to a revision
//! publishes, for each ServicePort that changed since, what it was before the first of these changes. That is a new
//! revision like any other, so agents need to know nothing of it. What the source changes meanwhile is put off.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::SystemTime;

use kplane_model::{DesiredKey, NodeName, ServiceKey};

use super::Store;
use super::blob::Encoded;
use super::state::{Blob, State};
use crate::freshness::Freshness;

/// Maximum number of states that can be chosen.
pub const MAX_POINTS: usize = 1_024;
/// Maximum number of undone changes, and of the bytes of their objects.
const MAX_CHANGES: usize = 100_000;
const MAX_BYTES: usize = 32 << 20;

/// A state that can be chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    /// Its revision.
    pub revision: u64,
    /// Time at which it was published.
    pub at: SystemTime,
    /// Number of ServicePorts that changed with it.
    pub changes: usize,
    /// The versions of the source that it contained.
    pub freshness: Arc<Freshness>,
}

/// The past.
#[derive(Debug, Default)]
pub(super) struct Past {
    /// The complete states from which on changes are kept, oldest first; empty before the first.
    points: VecDeque<Point>,
    undone: VecDeque<Undone>,
    bytes: usize,
    /// What the source says while an earlier state is published: ServicePorts, or that they are gone.
    put_off: Option<BTreeMap<ServiceKey, Option<Encoded>>>,
}

/// What a ServicePort was before a revision.
#[derive(Debug)]
struct Undone {
    revision: u64,
    key: ServiceKey,
    before: Option<Encoded>,
    bytes: usize,
}

/// The state is older than what is remembered, or there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this control plane does not remember that state")]
pub struct Forgotten;

impl Past {
    /// Adds a state that can be chosen.
    pub(super) fn add(&mut self, point: Point) {
        self.points.push_back(point);
        if self.points.len() > MAX_POINTS {
            self.points.pop_front();
        }
    }

    /// Adds what a ServicePort was before a revision.
    fn note(&mut self, revision: u64, key: ServiceKey, before: Option<Encoded>) {
        if self.points.is_empty() {
            return;
        }
        let bytes = before.as_ref().map_or(0, Encoded::bytes);
        self.bytes += bytes;
        self.undone.push_back(Undone {
            revision,
            key,
            before,
            bytes,
        });
        while self.undone.len() > MAX_CHANGES || self.bytes > MAX_BYTES {
            let Some(oldest) = self.undone.pop_front() else {
                return;
            };
            self.bytes -= oldest.bytes;
            // The states before this change cannot be restored any more.
            self.points
                .retain(|point| point.revision >= oldest.revision);
        }
    }

    /// Returns the states that can be chosen, oldest first.
    pub(super) fn points(&self) -> impl DoubleEndedIterator<Item = &Point> {
        self.points.iter()
    }

    /// Returns what was published at a revision, of all ServicePorts that have changed since.
    pub(super) fn at(&self, revision: u64) -> BTreeMap<ServiceKey, Option<Encoded>> {
        let since = self
            .undone
            .partition_point(|undone| undone.revision <= revision);
        let mut before = BTreeMap::new();
        // The first change since then counts.
        for undone in self.undone.iter().skip(since).rev() {
            before.insert(undone.key.clone(), undone.before.clone());
        }
        before
    }
}

impl Store {
    /// Returns the states that can be chosen, oldest first.
    #[must_use]
    pub fn points(&self) -> Vec<Point> {
        self.read().past.points.iter().cloned().collect()
    }

    /// Returns whether an earlier state is published.
    #[must_use]
    pub fn is_rolled_back(&self) -> bool {
        self.read().past.put_off.is_some()
    }

    /// Publishes the state at an earlier revision again, until [`Store::go_on`]. Returns the new revision.
    ///
    /// # Errors
    /// [`Forgotten`].
    pub fn roll_back(&self, to: u64) -> Result<u64, Forgotten> {
        let mut state = self.write();
        if !state.past.points.iter().any(|point| point.revision == to) {
            return Err(Forgotten);
        }
        let first = state.revision + 1;
        let mut put_off = state.past.put_off.take().unwrap_or_default();
        for (key, before) in state.past.at(to) {
            let now = state.encoded(&key);
            put_off.entry(key.clone()).or_insert(now);
            state.publish_port(&key, before);
        }
        state.past.put_off = Some(put_off);
        let revision = self.finish(state, first, SystemTime::now());
        self.announce();
        Ok(revision)
    }

    /// Publishes what the source says again, after [`Store::roll_back`]. Returns the new revision.
    pub fn go_on(&self) -> u64 {
        let mut state = self.write();
        let first = state.revision + 1;
        for (key, latest) in state.past.put_off.take().unwrap_or_default() {
            state.publish_port(&key, latest);
        }
        let revision = self.finish(state, first, SystemTime::now());
        self.announce();
        revision
    }
}

impl State {
    /// Makes the present state one that can be chosen later; it began with a revision.
    pub(super) fn remember(&mut self, first: u64) {
        let changes = usize::try_from(self.revision - first + 1).unwrap_or(usize::MAX);
        self.past.add(Point {
            revision: self.revision,
            at: SystemTime::now(),
            changes,
            freshness: Arc::clone(&self.freshness),
        });
    }

    /// Publishes a ServicePort of the source, or that it is gone, unless an earlier state is published.
    pub(super) fn publish_or_put_off(&mut self, key: &ServiceKey, encoded: Option<Encoded>) {
        match &mut self.past.put_off {
            Some(put_off) => drop(put_off.insert(key.clone(), encoded)),
            None => self.publish_port(key, encoded),
        }
    }

    /// Publishes a ServicePort, or that it is gone, and remembers what it was.
    fn publish_port(&mut self, key: &ServiceKey, encoded: Option<Encoded>) {
        // Before the first complete state, nothing is remembered.
        let remembers = !self.past.points.is_empty();
        let before = remembers.then(|| self.encoded(key)).flatten();
        let revision = self.revision;
        match encoded {
            Some(encoded) => self.upsert(key, encoded),
            None => self.delete(key),
        }
        if self.revision != revision {
            self.past.note(self.revision, key.clone(), before);
        }
    }

    /// Returns what is published of a ServicePort.
    fn encoded(&self, key: &ServiceKey) -> Option<Encoded> {
        let shared = self.shared.get(key)?;
        let raw = |blob: &Blob| (blob.bytes.clone(), blob.hash);
        let raws = |by: &BTreeMap<NodeName, Blob>| {
            let by = by.iter();
            by.map(|(name, blob)| (name.clone(), raw(blob))).collect()
        };
        let local = DesiredKey::Local(key.clone());
        let locals = shared.local_nodes.iter().filter_map(|node| {
            let blob = self.views.get(node)?.objects.get(&local)?;
            Some((node.clone(), raw(blob)))
        });
        Some(Encoded {
            default: raw(&shared.default),
            by_zone: raws(&shared.by_zone),
            by_node: raws(&shared.by_node),
            local: locals.collect(),
        })
    }
}

#[cfg(test)]
mod tests;
