//! The state that an earlier process served, as the cache file holds it. It is remembered at first: the
//! control plane may continue from it, and a snapshot is compared with it. It comes into effect with the
//! first update, or without one while no control plane answers.
//!
//! The agent resumes from the file only if its objects add up to its digest. Otherwise the agent asks for a snapshot.

use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;

use kplane_model::{Cidr, DesiredKey, DesiredObject, Digest, ObjectHash};

use super::held::Backing;
use super::{Desired, Dirty, Freshness, Position, Slot, Standing};

/// Everything that an agent serves at one moment, for the cache file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedState {
    /// The last update that the agent took.
    pub position: Position,
    /// The digest of the objects as the control plane last sent them. Held objects are not part of it.
    pub digest: Digest,
    /// The time when a control plane last confirmed this state, milliseconds since 1970; 0 = not known.
    pub confirmed_ms: u64,
    /// The source: the cluster of the last control plane that named its cluster, or a folder (`folder_id`); empty = not
    /// known.
    pub cluster: Arc<str>,
    /// The newest changes of the source that the state contains.
    pub freshness: Freshness,
    /// The node's own address of each family as the Node object last named it.
    pub last_known: [Option<IpAddr>; 2],
    /// The ranges of the node's Pods as the Node object last named some of each family.
    pub pod_ranges: Vec<Cidr>,
    /// All objects.
    pub objects: Vec<Remembered>,
}

/// An object of a [`SavedState`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// The object as it is served.
    pub object: Arc<DesiredObject>,
    /// The hash of the object as the control plane last sent it; in a file that was read, of what the file has.
    pub hash: ObjectHash,
    /// Whether the control plane does not send the object like this (any more).
    pub held: bool,
}

/// Beginning of the identity of a folder. The identity of a cluster is a UID.
const FOLDER: &str = "folder ";
/// Longest path that such an identity contains in full, so that it is no longer than that of a cluster may be.
const MAX_PATH: usize = 56;

/// Returns the identity of a folder of manifests, in place of that of a cluster.
pub(crate) fn folder_id(path: &Path) -> String {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let text = path.to_string_lossy();
    if text.len() <= MAX_PATH {
        return format!("{FOLDER}{text}");
    }
    let mut hash = Digest::default();
    hash.add(ObjectHash::of(path.as_os_str().as_bytes()));
    format!("{FOLDER}with the hash {hash}")
}

/// Returns whether this is the identity of a folder.
pub(crate) fn is_folder(source: &str) -> bool {
    source.starts_with(FOLDER)
}

impl Desired {
    /// Returns whether the state is known to come from another cluster than this one.
    pub(crate) fn is_of_other_cluster(&self, theirs: &str) -> bool {
        !self.cluster.is_empty() && !theirs.is_empty() && *self.cluster != *theirs
    }

    /// Forgets what an earlier process served if it comes from another cluster, unless the kernel serves it: nothing is
    /// guarded that no kernel serves. Called before the first update.
    pub(crate) fn forget_if_foreign(&mut self, theirs: &str, serves: impl FnOnce() -> bool) {
        let remembered = self.standing == Standing::Remembered;
        if remembered && self.is_of_other_cluster(theirs) && !serves() {
            *self = Self::new(self.guard);
        }
    }

    /// Remembers the state that an earlier process served. Called before the first update.
    ///
    /// The control plane may continue from this state only if it is exactly what the control plane sent.
    /// It is not if something is held, invalid, or not understood by this version: then only a snapshot
    /// makes it complete.
    pub fn restore(&mut self, saved: SavedState) {
        for one in saved.objects {
            self.count(&one.object, u64::wrapping_add);
            let key = one.object.key();
            let backing = if one.held { Backing::Unnamed } else { Backing::Named };
            let slot = Slot {
                hash: one.hash,
                object: Some(one.object),
                backing,
            };
            if let Some(twice) = self.objects.insert(key, slot) {
                twice.object.iter().for_each(|old| self.count(old, u64::wrapping_sub));
            }
        }
        let mut sum = Digest::default();
        self.objects.values().for_each(|slot| sum.add(slot.hash));
        let nothing_held = self.objects.values().all(|slot| slot.backing == Backing::Named);
        self.exact = nothing_held && sum == saved.digest;
        self.digest = saved.digest;
        self.positions = vec![saved.position];
        self.knew_policies = true;
        self.cluster = saved.cluster;
        self.freshness = saved.freshness;
        self.last_known = saved.last_known;
        self.pod_ranges = saved.pod_ranges;
        self.note_node();
        self.note_all_sizes();
    }

    /// Returns the state in effect, which a control plane confirmed at this time; `None` if there is none.
    /// Costs one pointer for each object.
    pub fn saved_state(&self, confirmed_ms: u64) -> Option<SavedState> {
        let remembered = self.objects.values().filter_map(|slot| {
            Some(Remembered {
                object: slot.object.clone()?,
                hash: slot.hash,
                held: slot.backing != Backing::Named,
            })
        });
        Some(SavedState {
            position: self.position()?,
            digest: self.digest,
            confirmed_ms,
            cluster: self.cluster(),
            freshness: self.freshness.clone(),
            last_known: self.last_known,
            pod_ranges: self.pod_ranges.clone(),
            objects: remembered.collect(),
        })
    }

    /// Returns whether an earlier process served a Service. A state without any is no reason to change
    /// the kernel: no real cluster is empty.
    pub fn remembers_services(&self) -> bool {
        let mut keys = self.objects.keys();
        let remembered = self.standing == Standing::Remembered;
        remembered && keys.any(|key| matches!(key, DesiredKey::Service(_)))
    }

    /// Puts the remembered state into effect, because no control plane answers.
    pub fn serve_restored(&mut self) {
        if self.standing == Standing::Remembered && !self.positions.is_empty() {
            self.standing = Standing::Stale;
            self.keep_restored();
        }
    }

    /// Returns whether the state in effect is that of an earlier process, which no control plane has
    /// confirmed since.
    pub fn is_stale(&self) -> bool {
        self.standing == Standing::Stale
    }

    /// Returns the cluster of the last control plane that named its cluster; empty = not known.
    pub fn cluster(&self) -> Arc<str> {
        self.cluster.clone()
    }

    /// Returns the newest changes of the source that the state contains.
    pub fn freshness(&self) -> &Freshness {
        &self.freshness
    }

    /// Records the sizes of all Services.
    fn note_all_sizes(&mut self) {
        let services = self.objects.keys().filter_map(|key| match key {
            DesiredKey::Service(key) => Some(key.clone()),
            DesiredKey::Local(_) | DesiredKey::Node | DesiredKey::Policy(_) => None,
        });
        let mut all = Dirty {
            services: services.collect(),
            ..Dirty::default()
        };
        self.note_sizes(&mut all);
    }
}
