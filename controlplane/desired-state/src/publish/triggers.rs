//! Triggers: the changes in the cluster that led to new endpoints, and their times. Agents measure
//! from these times until the kernel holds the result.
//!
//! A trigger goes to an agent with the update that brings the node other endpoints of its Service.
//! A trigger whose change makes no difference to the data path is not sent: kube-proxy would count
//! it, and measure the time of no change at all. Names stay here: agents know triggers by number.

use std::collections::{BTreeMap, VecDeque};

use kplane_model::{Family, ServiceKey, ServiceName};

use kplane_proto::v1 as pb;

use super::Trigger;

/// Maximum number of triggers that are remembered, for agents that are behind and to interpret
/// their reports: 40 s of 100 changes a second. With names and few ports, each takes 200 bytes.
const REMEMBERED: usize = 4_096;

/// Maximum number of ports of a Service that are checked to decide whether a trigger concerns a
/// node. Nearly always all ports have the same endpoints.
const KEYS: usize = 8;

/// Maximum number of triggers in one update (4 kB); of more, the oldest are left out.
const PER_UPDATE: usize = 256;

/// A trigger as it is sent to an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Number of the trigger within this control plane's epoch.
    pub id: u64,
    /// The family whose endpoints changed.
    pub family: Family,
    /// Time of the change, milliseconds since 1970.
    pub at_ms: u64,
}

impl From<Sent> for pb::Trigger {
    fn from(sent: Sent) -> Self {
        Self {
            id: sent.id,
            family: pb::Family::from(sent.family).into(),
            at_ms: sent.at_ms,
        }
    }
}

/// The latest triggers, by number.
#[derive(Debug, Default)]
pub(super) struct TriggerLog {
    /// Number of triggers so far.
    given: u64,
    /// The latest triggers; the last one is the newest.
    latest: VecDeque<Entry>,
}

#[derive(Debug)]
struct Entry {
    trigger: Trigger,
    /// First revision of the publication with the change.
    revision: u64,
    /// ServicePorts that the change affects.
    keys: Box<[ServiceKey]>,
}

impl TriggerLog {
    /// Adds the triggers of a publication that began at `revision` and changed these ServicePorts.
    pub(super) fn note(&mut self, revision: u64, triggers: &[Trigger], changed: &[ServiceKey]) {
        if triggers.is_empty() {
            return;
        }
        let mut ports: BTreeMap<&ServiceName, Vec<&ServiceKey>> = BTreeMap::new();
        for key in changed {
            ports.entry(&key.service).or_default().push(key);
        }
        for trigger in triggers {
            let ports = ports
                .get(&trigger.service)
                .into_iter()
                .flatten()
                .filter(|key| key.family == trigger.family);
            let keys: Box<[_]> = ports.take(KEYS).map(|key| (*key).clone()).collect();
            if keys.is_empty() {
                continue;
            }
            if self.latest.len() == REMEMBERED {
                self.latest.pop_front();
            }
            self.given += 1;
            self.latest.push_back(Entry {
                trigger: trigger.clone(),
                revision,
                keys,
            });
        }
    }

    /// Returns the trigger with this number, if it is still remembered.
    pub(super) fn get(&self, id: u64) -> Option<&Trigger> {
        let back = usize::try_from(self.given.checked_sub(id)?).ok()?;
        let place = self.latest.len().checked_sub(back + 1)?;
        Some(&self.latest.get(place)?.trigger)
    }

    /// Returns the triggers after a revision that `concerns` accepts, by the first revision of the publication and one of
    /// the ServicePorts; oldest first. None for an agent that begins from nothing.
    pub(super) fn after(
        &self,
        base: u64,
        concerns: impl Fn(u64, &ServiceKey) -> bool,
    ) -> Vec<Sent> {
        if base == 0 {
            return Vec::new();
        }
        let concerns = |entry: &Entry| entry.keys.iter().any(|key| concerns(entry.revision, key));
        let mut sent: Vec<Sent> = self
            .newest_after(base)
            .filter(|(_, entry)| concerns(entry))
            .take(PER_UPDATE)
            .map(|(id, entry)| Sent {
                id,
                family: entry.trigger.family,
                at_ms: entry.trigger.at_ms,
            })
            .collect();
        sent.reverse();
        sent
    }

    /// Returns the triggers after a revision with their numbers, newest first.
    fn newest_after(&self, revision: u64) -> impl Iterator<Item = (u64, &Entry)> {
        self.latest
            .iter()
            .rev()
            .enumerate()
            .take_while(move |(_, entry)| entry.revision > revision)
            .map(|(back, entry)| (self.given - back as u64, entry))
    }
}

#[cfg(test)]
mod tests;
