//! Services that the node keeps although the control plane does not name them (any more).
//!
//! ```text
//! named --absent from a snapshot that is not trusted--> kept --named again, deleted, trusted--> ..
//! ```
//!
//! The unit is a Service. A Service that a snapshot does not name is kept as a whole. A Service for
//! which a snapshot has no endpoints keeps its earlier endpoints. The node stops keeping a Service
//! when the control plane names it with endpoints, deletes it by name, or gives one of its frontends to
//! another Service, or when its absence becomes trusted. Kept Services are not part of the digest.
//!
//! The node plans and programs kept Services like all others.

mod frontends;
mod losses;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use kplane_model::{
    DesiredKey, DesiredObject, ServiceKey, ServiceName, ServicePort, ServiceProgram,
};

use self::frontends::{Frontend, frontends};
use self::losses::Losses;
use super::staged::Staged;
use super::{CliffGuard, Confidence, Desired, Dirty, Enforcement, Slot, first_key, now_ms};

/// Most names of Services in [`Held::examples`].
const EXAMPLES: usize = 8;

/// Services that a node serves although the control plane does not send them like this (any more). If
/// both numbers are 0, the agent does not know what the kernel serves: see [`Held::is_untouched`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// The number of Services that the control plane does not name.
    pub services: usize,
    /// The number of Services for which the control plane sends no endpoints (any more).
    pub without_endpoints: usize,
    /// The number of NetworkPolicies, and Pods of the node under them, that the control plane does not name.
    pub policies: usize,
    /// The reason why the absence is not trusted, human-readable.
    pub reason: String,
    /// The start of this state, milliseconds since 1970.
    pub since_ms: u64,
    /// The names of some of these Services, sorted.
    pub examples: Vec<String>,
}

impl Held {
    /// Returns whether the agent does not know what the kernel serves, and leaves the kernel as it
    /// is.
    pub fn is_untouched(&self) -> bool {
        self.services == 0 && self.without_endpoints == 0 && self.policies == 0
    }
}

/// The relation of an object to what the control plane sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    /// The control plane sends the object as it is.
    Named,
    /// The control plane names the object with empty content; the object keeps its earlier content.
    Bare,
    /// The control plane does not name it.
    Unnamed,
}

/// The parts of an update other than its objects.
#[derive(Debug)]
pub(super) struct Word {
    pub(super) confidence: Confidence,
    pub(super) doubt: String,
    pub(super) enforcement: Enforcement,
    pub(super) now_ms: u64,
}

/// The Services that are kept, and the reason.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// Services that the control plane does not name.
    gone: BTreeSet<ServiceName>,
    /// Services that the control plane names without endpoints.
    bare: BTreeSet<ServiceName>,
    /// Number of NetworkPolicies and Pods that the control plane does not name. With one, all parts of NetworkPolicies are
    /// kept that it does not name.
    policies: usize,
    /// Whether NetworkPolicies are kept until the control plane says whether nodes enforce any.
    until_said: bool,
    /// Whether the facts of the node are kept as well when the source does not know the node.
    node: bool,
    /// The objects that the control plane sent for those that are [`Backing::Bare`].
    said: HashMap<DesiredKey, Arc<DesiredObject>>,
    /// Whether Services are kept only until the control plane's data is complete, and not because of
    /// a cliff.
    until_whole: bool,
    reason: String,
    since_ms: u64,
    /// The frontends of ServicePorts that the control plane does not name, and their ServicePorts.
    frontends: HashMap<Frontend, ServiceKey>,
}

impl Ledger {
    pub(super) fn is_empty(&self) -> bool {
        self.gone.is_empty() && self.bare.is_empty() && self.policies == 0
    }

    fn has(&self, service: &ServiceName) -> bool {
        self.gone.contains(service) || self.bare.contains(service)
    }

    /// Returns whether an object stays that a snapshot does not name.
    pub(super) fn keeps(&self, key: &DesiredKey) -> bool {
        match key {
            DesiredKey::Service(key) => self.gone.contains(&key.service),
            DesiredKey::Local(key) => self.has(&key.service),
            DesiredKey::Node => self.node,
            DesiredKey::Policy(_) => self.policies > 0,
        }
    }

    /// Returns whether an object that the control plane names with empty content still keeps its own.
    pub(super) fn keeps_content(&self, slot: &Slot) -> bool {
        match slot.object.as_deref() {
            Some(DesiredObject::Service(program)) => self.has(&program.port.key.service),
            Some(DesiredObject::Node(_)) => self.node,
            Some(DesiredObject::Local(_) | DesiredObject::Policy(_)) | None => false,
        }
    }

    /// Returns the Services that are kept so far and that an update names.
    pub(super) fn concerned(&self, staged: &Staged) -> BTreeSet<ServiceName> {
        if self.is_empty() {
            return BTreeSet::new();
        }
        staged
            .named
            .keys()
            .filter_map(service_of)
            .filter(|name| self.has(name))
            .cloned()
            .collect()
    }

    /// Forgets an object that is named anew, or gone.
    pub(super) fn forget(&mut self, key: &DesiredKey, slot: &Slot) {
        match (slot.backing, slot.service()) {
            (Backing::Unnamed, Some(program)) => {
                let key = &program.port.key;
                for place in frontends(&program.port) {
                    if self.frontends.get(&place) == Some(key) {
                        self.frontends.remove(&place);
                    }
                }
            }
            (Backing::Bare, _) => drop(self.said.remove(key)),
            (Backing::Unnamed | Backing::Named, _) => {}
        }
    }

    /// Returns ServicePorts that are not named and have a frontend that now belongs to another
    /// ServicePort.
    pub(super) fn losers(&self, object: &DesiredObject) -> BTreeSet<ServiceKey> {
        let DesiredObject::Service(program) = object else {
            return BTreeSet::new();
        };
        if self.frontends.is_empty() {
            return BTreeSet::new();
        }
        frontends(&program.port)
            .filter_map(|place| self.frontends.get(&place))
            .filter(|key| **key != program.port.key)
            .cloned()
            .collect()
    }

    /// Merges an object from the control plane with the existing one: a kept Service keeps its
    /// endpoints.
    pub(super) fn merge(
        &mut self,
        new: Arc<DesiredObject>,
        old: Option<&DesiredObject>,
    ) -> (Arc<DesiredObject>, Backing) {
        let merged = match (&*new, old) {
            (DesiredObject::Service(now), Some(DesiredObject::Service(old)))
                if self.has(&now.port.key.service) && !serves(now) && serves(old) =>
            {
                // The endpoints were chosen for these policies, and may be of no use for others.
                let port = ServicePort {
                    internal_policy: old.port.internal_policy,
                    external_policy: old.port.external_policy,
                    ..now.port.clone()
                };
                DesiredObject::Service(ServiceProgram {
                    port,
                    dead: Vec::new(),
                    ..old.clone()
                })
            }
            (DesiredObject::Node(now), Some(DesiredObject::Node(old)))
                if self.node && !now.known && old.known =>
            {
                DesiredObject::Node(old.clone())
            }
            _ => return (new, Backing::Named),
        };
        self.said.insert(new.key(), new);
        (Arc::new(merged), Backing::Bare)
    }

    fn doubt(&mut self, word: &Word) {
        self.until_whole = true;
        self.reason = match word.doubt.as_str() {
            "" => "the control plane could not read all of its source".to_owned(),
            doubt => doubt.to_owned(),
        };
    }

    fn cliff(&mut self, lost: &Losses) {
        self.until_whole = false;
        let gone = (!self.gone.is_empty()).then(|| {
            format!(
                "{} of {} Services would be removed at once",
                self.gone.len(),
                lost.services
            )
        });
        let bare = (!self.bare.is_empty()).then(|| {
            let (bare, all) = (self.bare.len(), lost.serving);
            format!("{bare} of {all} Services would lose all endpoints at once")
        });
        let policies = (self.policies > 0).then(|| {
            let policies = self.policies;
            if self.until_said {
                format!("{policies} NetworkPolicies and Pods are not known to the control plane")
            } else {
                format!("{policies} NetworkPolicies and Pods would be removed at once")
            }
        });
        let reasons = gone.into_iter().chain(bare).chain(policies);
        self.reason = Vec::from_iter(reasons).join(", ");
    }

    /// Records since when Services are kept. Called after every update.
    fn date(&mut self, now_ms: u64) {
        if self.is_empty() {
            self.since_ms = 0;
        } else if self.since_ms == 0 {
            self.since_ms = now_ms;
        }
    }
}

impl Desired {
    /// Returns what the node serves although the control plane does not send it like this (any more).
    pub fn held(&self) -> Option<Held> {
        let held = &self.held;
        if held.is_empty() {
            return None;
        }
        let examples: BTreeSet<_> =
            held.gone.iter().take(EXAMPLES).chain(held.bare.iter().take(EXAMPLES)).collect();
        let examples = examples.into_iter().take(EXAMPLES);
        Some(Held {
            services: held.gone.len(),
            without_endpoints: held.bare.len(),
            policies: held.policies,
            reason: held.reason.clone(),
            since_ms: held.since_ms,
            examples: examples.map(ToString::to_string).collect(),
        })
    }

    /// Returns how many Services the node serves although the control plane does not send them like
    /// this.
    pub fn held_services(&self) -> usize {
        self.held.gone.len() + self.held.bare.len() + self.held.policies
    }

    /// Records which Services the earlier process kept. The next snapshot decides again.
    pub(super) fn keep_restored(&mut self) {
        let kept = self.objects.iter().filter(|(_, slot)| slot.backing != Backing::Named);
        self.held.gone = kept.filter_map(|(key, _)| service_of(key)).cloned().collect();
        self.held.policies = usize::from(self.keeps_policies());
        "they were kept before the agent started".clone_into(&mut self.held.reason);
        self.held.date(now_ms());
    }

    /// Decides which of the Services that a snapshot lacks are kept.
    pub(super) fn judge(&mut self, staged: &Staged, word: &Word) {
        let mut lost = self.losses(staged);
        let (guard, confidence) = (self.guard, word.confidence);
        let holds = |lost: usize, all| guard.holds(confidence, lost, all);
        if !holds(lost.gone.len(), lost.services) {
            lost.gone.clear();
        }
        if !holds(lost.bare.len(), lost.serving) {
            lost.bare.clear();
        }
        let believed = word.enforcement.confidence(confidence);
        let policies = self.kept_policies(staged, believed);
        let held = &mut self.held;
        (held.policies, held.until_said) = (policies, believed.is_none());
        held.gone = std::mem::take(&mut lost.gone);
        held.bare = std::mem::take(&mut lost.bare);
        held.node = !held.is_empty() || confidence == Confidence::Partial;
        match confidence {
            Confidence::Partial => held.doubt(word),
            Confidence::Whole | Confidence::Confirmed => held.cliff(&lost),
        }
    }

    /// Marks an object as kept although the control plane does not name it.
    pub(super) fn keep(&mut self, key: &DesiredKey, dirty: &mut Dirty) {
        let Some(slot) = self.objects.get_mut(key) else {
            return;
        };
        if slot.object.is_none() {
            return self.remove(key, dirty);
        }
        slot.backing = Backing::Unnamed;
        self.rejects.remove(key);
        if let Some(program) = slot.service() {
            let key = &program.port.key;
            let frontends = frontends(&program.port).map(|place| (place, key.clone()));
            self.held.frontends.extend(frontends);
        }
    }

    /// Decides again how a Service is kept after a part of it has changed.
    pub(super) fn settle(&mut self, service: &ServiceName, dirty: &mut Dirty) {
        let (mut unnamed, mut named, mut bare, mut served) = (false, false, false, false);
        for key in self.keys_of(service) {
            let Some(slot) = self.objects.get(&key) else {
                continue;
            };
            if let Some(program) = slot.service() {
                unnamed |= slot.backing == Backing::Unnamed;
                named |= slot.backing != Backing::Unnamed;
                bare |= slot.backing == Backing::Bare;
                served |= slot.backing == Backing::Named && serves(program);
            } else if matches!(key, DesiredKey::Service(_)) {
                named = true;
            }
        }
        if unnamed && !named {
            return;
        }
        if !bare || served {
            return self.release(service, dirty);
        }
        // The Service is named again, without endpoints. It keeps its endpoints, but not the ports
        // that are not named.
        self.held.gone.remove(service);
        self.held.bare.insert(service.clone());
        for key in self.keys_of(service) {
            let slot = self.objects.get(&key);
            let unnamed = slot.is_some_and(|slot| slot.backing == Backing::Unnamed);
            if unnamed && matches!(key, DesiredKey::Service(_)) {
                self.remove(&key, dirty);
            }
        }
    }

    /// Applies the confidence of an update that is no snapshot to the Services that are kept.
    pub(super) fn weigh(&mut self, word: &Word, dirty: &mut Dirty) {
        if self.held.is_empty() && !self.held.node {
            return;
        }
        let until_whole = self.held.until_whole;
        self.weigh_services(word, dirty);
        self.weigh_policies(word, until_whole, dirty);
        if self.held.is_empty() && word.confidence != Confidence::Partial {
            self.held.node = false;
            self.let_go(&DesiredKey::Node, dirty);
        }
    }

    fn weigh_policies(&mut self, word: &Word, until_whole: bool, dirty: &mut Dirty) {
        let Some(confidence) = word.enforcement.confidence(word.confidence) else {
            return;
        };
        let until_said = std::mem::take(&mut self.held.until_said);
        let guard = match confidence {
            Confidence::Partial => return,
            Confidence::Confirmed => CliffGuard {
                enabled: false,
                ..self.guard
            },
            Confidence::Whole if until_whole || until_said => self.guard,
            Confidence::Whole => return,
        };
        if !self.is_policy_cliff(guard) {
            self.held.policies = 0;
            self.release_policies(dirty);
        }
        let present = self.present();
        self.held.cliff(&present);
    }

    /// Returns how many Services there are, and how many of them have endpoints; nothing of them is lost.
    fn present(&self) -> Losses {
        let there = self.by_service();
        Losses {
            services: there.len(),
            serving: there.iter().filter(|(_, served)| *served).count(),
            ..Losses::default()
        }
    }

    fn weigh_services(&mut self, word: &Word, dirty: &mut Dirty) {
        let believed = match word.confidence {
            Confidence::Partial => {
                if !self.held.is_empty() {
                    self.held.doubt(word);
                }
                return;
            }
            Confidence::Confirmed => CliffGuard {
                enabled: false,
                ..self.guard
            },
            Confidence::Whole if self.held.until_whole => self.guard,
            Confidence::Whole => return,
        };
        let lost = self.present();
        if !believed.is_cliff(self.held.gone.len(), lost.services) {
            for service in std::mem::take(&mut self.held.gone) {
                self.release(&service, dirty);
            }
        }
        if !believed.is_cliff(self.held.bare.len(), lost.serving) {
            for service in std::mem::take(&mut self.held.bare) {
                self.release(&service, dirty);
            }
        }
        self.held.cliff(&lost);
    }

    pub(super) fn date_held(&mut self, now_ms: u64) {
        self.held.date(now_ms);
    }

    /// Stops keeping a Service: its objects become those that the control plane sends.
    fn release(&mut self, service: &ServiceName, dirty: &mut Dirty) {
        self.held.gone.remove(service);
        self.held.bare.remove(service);
        for key in self.keys_of(service) {
            self.let_go(&key, dirty);
        }
    }

    /// Replaces an object by the one that the control plane sends.
    fn let_go(&mut self, key: &DesiredKey, dirty: &mut Dirty) {
        let Some(slot) = self.objects.get(key) else {
            return;
        };
        match slot.backing {
            Backing::Named => {}
            Backing::Unnamed => self.remove(key, dirty),
            Backing::Bare => {
                if let Some(said) = self.held.said.remove(key) {
                    self.exchange(key, &said, dirty);
                }
            }
        }
    }

    /// Returns the keys of all objects of a Service. Work: its ports.
    fn keys_of(&self, service: &ServiceName) -> Vec<DesiredKey> {
        let first = first_key(service);
        let of = |first: DesiredKey| {
            self.objects
                .range(first..)
                .map(|(key, _)| key)
                .take_while(|key| service_of(key) == Some(service))
        };
        // Keys of both kinds are sorted by Service.
        of(DesiredKey::Service(first.clone()))
            .take_while(|key| matches!(key, DesiredKey::Service(_)))
            .chain(of(DesiredKey::Local(first)))
            .cloned()
            .collect()
    }
}

/// Returns whether the Service has a usable endpoint anywhere in the cluster.
fn serves(program: &ServiceProgram) -> bool {
    program.has_any || !program.endpoints.is_empty()
}

fn service_of(key: &DesiredKey) -> Option<&ServiceName> {
    match key {
        DesiredKey::Service(key) | DesiredKey::Local(key) => Some(&key.service),
        DesiredKey::Node | DesiredKey::Policy(_) => None,
    }
}
