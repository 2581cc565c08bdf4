//! Applies an update to the objects.

use std::sync::Arc;

use kplane_model::{DesiredKey, DesiredObject, ObjectHash};
use kplane_proto::convert::ConvertError;

use super::held::{Backing, Word};
use super::policies::first_policy;
use super::staged::{NamedChanges, Staged, StagedObject};
use super::{Desired, Dirty, MAX_NAMELESS, Reject, Slot};

/// Most objects that are dropped at once.
const ASIDE: usize = 4_096;

impl Desired {
    pub(super) fn commit(&mut self, snapshot: bool, mut staged: Staged, word: &Word) -> Dirty {
        let mut dirty = Dirty {
            unknown_kinds: staged.unknown_kinds,
            ..Dirty::default()
        };
        if snapshot {
            self.nameless.clear();
            self.judge(&staged, word);
        }
        let merges = self.held.is_empty() && (snapshot || self.is_walk(staged.named.len()));
        let policies = merges.then(|| staged.named.split_off(&first_policy()));
        if snapshot {
            self.sort_out(&staged, merges, &mut dirty);
        }
        let concerned = self.held.concerned(&staged);
        if let Some(policies) = policies {
            let invalid = self.merge_policies(policies, snapshot, &mut dirty);
            staged.named.extend(invalid);
        }
        for (key, change) in staged.named {
            match change {
                Some(object) => self.put(key, object, word.now_ms, &mut dirty),
                None => self.remove(&key, &mut dirty),
            }
        }
        for service in concerned {
            self.settle(&service, &mut dirty);
        }
        for error in staged.nameless_errors {
            self.note_nameless(&error, word.now_ms, &mut dirty);
        }
        if !snapshot {
            self.weigh(word, &mut dirty);
        }
        self.date_held(word.now_ms);
        self.note_sizes(&mut dirty);
        dirty
    }

    /// Keeps or removes the objects that a snapshot does not name, and that [`Desired::merge_policies`] does not remove.
    fn sort_out(&mut self, staged: &Staged, merges: bool, dirty: &mut Dirty) {
        let is_merged = |key: &&DesiredKey| merges && matches!(key, DesiredKey::Policy(_));
        let ours = self.objects.keys().take_while(|key| !is_merged(key));
        let unnamed = ours.filter(|key| !staged.named.contains_key(*key));
        for key in Vec::from_iter(unnamed.cloned()) {
            if self.held.keeps(&key) {
                self.keep(&key, dirty);
            } else {
                self.remove(&key, dirty);
            }
        }
    }

    fn note_nameless(&mut self, error: &ConvertError, since_ms: u64, dirty: &mut Dirty) {
        let reason = error.to_string();
        dirty.rejects.push((None, reason.clone()));
        if self.nameless.len() == MAX_NAMELESS {
            self.nameless.remove(0);
        }
        self.nameless.push(Reject { reason, since_ms });
    }

    fn put(&mut self, key: DesiredKey, new: StagedObject, now_ms: u64, dirty: &mut Dirty) {
        let before = self.objects.get(&key);
        if before.is_some_and(|slot| slot.hash == new.hash && self.is_as_said(slot)) {
            return;
        }
        let object = match new.object {
            Ok(object) => object,
            Err(error) => return self.reject(key, new.hash, &error, now_ms, dirty),
        };
        self.rejects.remove(&key);
        if let Some(slot) = before {
            self.held.forget(&key, slot);
        }
        let old = before.and_then(|slot| slot.object.as_deref());
        let (object, backing) = self.held.merge(object, old);
        match self.objects.get_mut(&key) {
            Some(slot) => (slot.hash, slot.backing) = (new.hash, backing),
            None => {
                let slot = Slot {
                    hash: new.hash,
                    object: None,
                    backing,
                };
                self.objects.insert(key.clone(), slot);
            }
        }
        if self.exchange_for(&key, &object, dirty) {
            self.evict(&object, dirty);
        }
    }

    /// Returns whether the object can stay as it is if the control plane sends the same encoding
    /// again.
    fn is_as_said(&self, slot: &Slot) -> bool {
        match slot.backing {
            Backing::Named => true,
            Backing::Unnamed => false,
            Backing::Bare => self.held.keeps_content(slot),
        }
    }

    /// Records that an object is invalid; the object before it stays.
    fn reject(
        &mut self,
        key: DesiredKey,
        hash: ObjectHash,
        error: &ConvertError,
        now_ms: u64,
        dirty: &mut Dirty,
    ) {
        let reason = error.to_string();
        dirty.rejects.push((Some(key.clone()), reason.clone()));
        match self.objects.get_mut(&key) {
            Some(slot) => {
                slot.hash = hash;
                if slot.backing == Backing::Unnamed {
                    self.held.forget(&key, slot);
                    slot.backing = Backing::Named;
                }
            }
            None => {
                let slot = Slot {
                    hash,
                    object: None,
                    backing: Backing::Named,
                };
                self.objects.insert(key.clone(), slot);
            }
        }
        let since_ms = self.rejects.get(&key).map_or(now_ms, |old| old.since_ms);
        self.rejects.insert(key, Reject { reason, since_ms });
    }

    /// Removes ServicePorts that the control plane does not name from places that belong to another
    /// Service now, and parts of NetworkPolicies whose addresses belong to other parts now.
    fn evict(&mut self, object: &DesiredObject, dirty: &mut Dirty) {
        for loser in self.held.losers(object) {
            tracing::info!(service = %loser, "stopped keeping a ServicePort, because another \
                Service now owns its address or node port");
            self.remove(&DesiredKey::Service(loser.clone()), dirty);
            self.remove(&DesiredKey::Local(loser.clone()), dirty);
            self.settle(&loser.service, dirty);
        }
        for loser in self.outdated_by(object) {
            tracing::info!(part = %loser, "stopped keeping a part of NetworkPolicies, because another \
                one now owns its addresses");
            self.remove(&DesiredKey::Policy(loser), dirty);
        }
    }

    /// Replaces an object and records the difference. Returns whether there is one.
    fn exchange_for(
        &mut self,
        key: &DesiredKey,
        new: &Arc<DesiredObject>,
        dirty: &mut Dirty,
    ) -> bool {
        let Some(slot) = self.objects.get_mut(key) else {
            return false;
        };
        if slot.object.as_ref() == Some(new) {
            return false;
        }
        let old = slot.object.replace(new.clone());
        self.count(new, u64::wrapping_add);
        dirty.add(key);
        dirty.count(new, old.as_deref());
        if let Some(old) = old {
            self.count(&old, u64::wrapping_sub);
        }
        true
    }

    /// Replaces an object like `exchange_for`, for an object that matches the control plane from now
    /// on.
    pub(super) fn exchange(
        &mut self,
        key: &DesiredKey,
        new: &Arc<DesiredObject>,
        dirty: &mut Dirty,
    ) {
        if let Some(slot) = self.objects.get_mut(key) {
            slot.backing = Backing::Named;
        }
        self.exchange_for(key, new, dirty);
    }

    pub(super) fn remove(&mut self, key: &DesiredKey, dirty: &mut Dirty) {
        self.rejects.remove(key);
        let Some(slot) = self.objects.remove(key) else {
            return;
        };
        self.held.forget(key, &slot);
        if let Some(old) = slot.object {
            self.count(&old, u64::wrapping_sub);
            dirty.add(key);
            dirty.count(&old, None);
        }
    }

    /// Takes over the parts of NetworkPolicies of an update in one walk over all objects, and removes those that a snapshot
    /// does not name. A thread of its own drops what was there before: changes of Services do not wait for that. Returns
    /// the invalid ones.
    fn merge_policies(
        &mut self,
        new: NamedChanges,
        snapshot: bool,
        dirty: &mut Dirty,
    ) -> NamedChanges {
        let mut old = self.objects.split_off(&first_policy()).into_iter().peekable();
        let mut merged = Vec::with_capacity(new.len());
        let (mut others, mut gone, mut invalid) = (Vec::new(), Vec::new(), NamedChanges::new());
        for (key, change) in new {
            while let Some(other) = old.next_if(|(before, _)| *before < key) {
                others.push(other);
            }
            let before = old.next_if(|(before, _)| *before == key).map(|(_, slot)| slot);
            let after = match change {
                Some(new) if new.object.is_err() => {
                    merged.extend(before.map(|slot| (key.clone(), slot)));
                    invalid.insert(key, Some(new));
                    continue;
                }
                Some(StagedObject { hash, object }) => object.ok().map(|object| Slot {
                    hash,
                    object: Some(object),
                    backing: Backing::Named,
                }),
                None => None,
            };
            let [then, now] = [&before, &after].map(|slot| slot.as_ref()?.object.as_ref());
            if then != now {
                dirty.add(&key);
            }
            self.rejects.remove(&key);
            merged.extend(after.map(|slot| (key, slot)));
            gone.extend(before);
        }
        others.extend(old);
        if snapshot {
            for (key, slot) in others.drain(..) {
                self.rejects.remove(&key);
                if slot.object.is_some() {
                    dirty.add(&key);
                }
                gone.push(slot);
            }
        }
        let services = std::mem::take(&mut self.objects).into_iter();
        self.objects = services.chain(merged).chain(others).collect();
        if gone.len() > ASIDE {
            // Without a thread, they are dropped here.
            drop(std::thread::Builder::new().spawn(move || drop(gone)));
        }
        invalid
    }

    pub(super) fn count(&mut self, object: &DesiredObject, op: fn(u64, u64) -> u64) {
        if let DesiredObject::Service(program) = object {
            let counts = &mut self.counts[program.port.key.family as usize];
            counts.services = op(counts.services, 1);
            counts.endpoints = op(counts.endpoints, program.endpoints.len() as u64);
        }
    }
}
