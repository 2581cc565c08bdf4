//! Comparison of the state with a control plane's by key ranges, for an agent that comes from another replica.

use kplane_model::{DesiredKey, PolicyKey, RangeDigests, Ranges};

use super::held::Backing;
use super::staged::{Staged, StagedObject};
use super::{Desired, Slot};

impl Desired {
    /// Returns the digests of so many ranges, a power of two; `None` if only a snapshot makes the state complete.
    pub fn ranges(&self, count: u16) -> Option<RangeDigests> {
        if !self.is_comparable() {
            return None;
        }
        let mut digests = RangeDigests::new(count);
        for (key, slot) in self.shared() {
            digests.add(key, slot.hash);
        }
        Some(digests)
    }

    /// Returns whether the state is exactly what a control plane sent, with nothing kept or invalid.
    pub(super) fn is_comparable(&self) -> bool {
        let as_sent = |slot: &Slot| slot.backing == Backing::Named && slot.object.is_some();
        let intact = self.rejects.is_empty() && self.nameless.is_empty();
        self.exact && intact && self.objects.values().all(as_sent)
    }

    /// Names the shared objects of all other ranges as they are, so that an update that replaces some ranges is a snapshot.
    pub(super) fn name_others(&self, ranges: &Ranges, staged: &mut Staged) {
        let others = self.shared().filter(|(key, _)| !ranges.contain(key));
        for (key, slot) in others {
            let Some(object) = slot.object.clone() else {
                continue;
            };
            let as_it_is = StagedObject {
                hash: slot.hash,
                object: Ok(object),
            };
            staged.named.entry(key.clone()).or_insert(Some(as_it_is));
        }
    }

    /// Returns the objects that nodes share.
    fn shared(&self) -> impl Iterator<Item = (&DesiredKey, &Slot)> {
        self.objects.iter().filter(|(key, _)| match key {
            DesiredKey::Service(_) => true,
            DesiredKey::Policy(key) => PolicyKey::is_shared(key),
            DesiredKey::Local(_) | DesiredKey::Node => false,
        })
    }
}

#[cfg(test)]
mod tests;
