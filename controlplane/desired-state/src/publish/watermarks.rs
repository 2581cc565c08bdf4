//! The place of a Service's newest state in the order of changes: which revision a node must hold, and when it was
//! published. All of it is computed on request.

use std::collections::{BTreeSet, HashSet};
use std::time::SystemTime;

use kplane_model::{DesiredKey, Digest, ServiceKey, ServiceName};

use super::Store;
use super::state::{Moment, State};

/// Maximum number of changes that are checked when an agent reports a newer revision. An agent that was away for
/// longer is measured by the newest ones.
const PASSED: usize = 1_024;

/// Maximum number of publications that operators are shown.
pub const MAX_POINTS: usize = 1_024;

/// A publication, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    /// The revision after it.
    pub revision: u64,
    /// Time at which the control plane observed the first of its changes.
    pub at: SystemTime,
    /// Number of objects that changed.
    pub changes: u64,
}

/// The ServicePorts of one Service that the store has, or had since a reader began to follow the Service. The store
/// itself remembers a deleted one for as long as agents may need to learn of it.
#[derive(Clone, Debug)]
pub struct Followed {
    service: ServiceName,
    keys: BTreeSet<ServiceKey>,
    /// Revision up to which changes have been read.
    seen: u64,
    served: bool,
}

impl Followed {
    /// Begins to follow a Service.
    pub fn new(service: ServiceName) -> Self {
        Self {
            service,
            keys: BTreeSet::new(),
            seen: 0,
            served: false,
        }
    }

    /// Returns the name of the Service.
    pub fn service(&self) -> &ServiceName {
        &self.service
    }

    /// Returns whether a port of the Service is published.
    pub fn is_served(&self) -> bool {
        self.served
    }

    /// Returns whether a port of the Service is published, or is known to be deleted.
    pub fn is_known(&self) -> bool {
        !self.keys.is_empty()
    }
}

impl Store {
    /// Reads the changes since the last call: all of them at first, and few afterwards.
    pub fn follow(&self, followed: &mut Followed) {
        let state = self.read();
        for (_, key) in state.log.after(followed.seen) {
            let port = key.service();
            if let Some(port) = port.filter(|port| port.service == followed.service) {
                followed.keys.insert(port.clone());
            }
        }
        followed.seen = state.revision;
        let mut keys = followed.keys.iter();
        followed.served = keys.any(|key| state.serves(key));
    }

    /// Returns the revision of the newest change of a Service that concerns a node, deletions included; 0 = none.
    pub fn wanted_of_service(&self, node: &str, followed: &Followed) -> u64 {
        let state = self.read();
        let wanted = followed.keys.iter().map(|key| state.wanted_of(node, key)).max();
        // All of it may have been deleted and forgotten.
        wanted.unwrap_or(state.horizon)
    }

    /// Returns the digest of everything that any node must hold of a Service. It is equal at replicas that publish the
    /// same, and that of nothing for a Service that is not served.
    pub fn digest_of_service(&self, followed: &Followed) -> Digest {
        let state = self.read();
        let mut digest = Digest::default();
        let shared = |key: &ServiceKey| {
            let shared = state.shared.get(&DesiredKey::Service(key.clone()))?;
            Some((key.clone(), shared))
        };
        for (key, shared) in followed.keys.iter().filter_map(shared) {
            let variants = shared.by_zone.values().chain(shared.by_node.values());
            let local = DesiredKey::Local(key);
            let views = shared.local_nodes.iter().filter_map(|node| state.views.get(node));
            let locals = views.filter_map(|view| view.objects.get(&local));
            for blob in [&shared.default].into_iter().chain(variants).chain(locals) {
                digest.add(blob.hash);
            }
        }
        digest
    }

    /// Returns the latest publications, oldest first.
    pub fn points(&self) -> Vec<Point> {
        let state = self.read();
        let hidden = state.times.len().saturating_sub(MAX_POINTS);
        let times = state.times.iter().skip(hidden);
        let ends = times.clone().skip(1).map(|next| next.first - 1).chain([state.revision]);
        times
            .zip(ends)
            .map(|(moment, revision)| Point {
                revision,
                at: moment.observed_at,
                changes: revision - moment.first + 1,
            })
            .collect()
    }

    /// Returns the publication with this revision, if it is still remembered.
    pub fn moment_of(&self, revision: u64) -> Option<Moment> {
        self.read().moment_of(revision)
    }

    /// Returns the publications that brought a node something new after revision `after` and up to `up_to`, oldest
    /// first. Changes of the ServicePorts in `except` do not count.
    pub fn passed(
        &self,
        node: &str,
        after: u64,
        up_to: u64,
        except: &HashSet<ServiceKey>,
    ) -> Vec<Moment> {
        if after >= up_to {
            return Vec::new();
        }
        self.read().passed(node, after, up_to, except)
    }
}

impl State {
    fn passed(
        &self,
        node: &str,
        after: u64,
        up_to: u64,
        except: &HashSet<ServiceKey>,
    ) -> Vec<Moment> {
        let view = self.views.get(node);
        let zone = view.and_then(|view| view.zone.as_deref());
        let concerns = |key: &DesiredKey| {
            let variant = self.shared.get(key).map(|s| s.resolve(node, zone));
            let excepted = key.service().is_some_and(|port| except.contains(port));
            variant.is_none_or(|blob| blob.revision > after) && !excepted
        };
        let shared =
            self.log.between(after, up_to).filter(|(_, key)| concerns(key)).map(|(r, _)| r);
        let own = view
            .into_iter()
            .flat_map(|v| v.log.between(after, up_to))
            .map(|(revision, _)| revision);
        let revisions = shared.take(PASSED).chain(own.take(PASSED));
        let mut passed: Vec<Moment> = revisions.filter_map(|r| self.moment_of(r)).collect();
        passed.sort_unstable_by_key(|moment| moment.first);
        passed.dedup_by_key(|moment| moment.first);
        passed
    }
}

#[cfg(test)]
mod tests;
