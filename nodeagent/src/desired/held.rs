//! What is kept although the control plane does not say it (any more).
//!
//! ```text
//! named --absent from a snapshot that is not believed--> kept --named again, deleted, believed--> ..
//! ```
//!
//! The unit is a Service. It is kept as a whole when a snapshot does not name it, or keeps the
//! endpoints that it had when a snapshot has none for it. It is no longer kept when the control
//! plane names it with endpoints, deletes it by name, gives one of its places to another Service, or
//! when absence comes to be believed. What is kept is no part of the digest.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{
    DesiredKey, DesiredObject, Family, Protocol, ServiceKey, ServiceName, ServicePort,
    ServiceProgram,
};

use super::staged::Staged;
use super::{CliffGuard, Confidence, Desired, Slot, Touched, first_key};

/// Names of Services in [`Held::examples`], at most.
const EXAMPLES: usize = 8;

/// What a node serves although the control plane does not say it (any more). Without any number
/// nothing is known of it: see [`Held::is_untouched`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Services that are not named.
    pub services: usize,
    /// Services that have no endpoints (any more).
    pub without_endpoints: usize,
    /// Why that is not believed, for people.
    pub reason: String,
    /// Since when, milliseconds since 1970.
    pub since_ms: u64,
    /// Some of them, sorted.
    pub examples: Vec<String>,
}

impl Held {
    /// Nothing is known of what is served: the kernel is left as it is.
    #[must_use]
    pub fn is_untouched(&self) -> bool {
        self.services == 0 && self.without_endpoints == 0
    }
}

/// How an object stands to what the control plane says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    /// It is what the control plane says.
    Named,
    /// The control plane names it with nothing in it: it keeps what it had.
    Bare,
    /// The control plane does not name it.
    Unnamed,
}

/// What an update says beside its objects.
#[derive(Debug)]
pub(super) struct Word {
    pub(super) confidence: Confidence,
    pub(super) doubt: String,
    pub(super) now_ms: u64,
}

/// The Services that are kept, and why.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// They are not named.
    gone: BTreeSet<ServiceName>,
    /// They are named and have no endpoints.
    bare: BTreeSet<ServiceName>,
    /// Facts of the node are kept as well when the source does not know the node.
    node: bool,
    /// What the control plane says of objects that are [`Backing::Bare`].
    said: HashMap<DesiredKey, Arc<DesiredObject>>,
    /// Not since a cliff, but until the picture is whole.
    until_whole: bool,
    reason: String,
    since_ms: u64,
    /// Whose the places of ServicePorts are that are not named.
    places: HashMap<Place, ServiceKey>,
}

/// Where packets or health checks arrive. Between those that are named the control plane decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Place {
    Address(IpAddr, Protocol, u16),
    NodePort(Family, Protocol, u16),
    HealthCheck(u16),
}

impl Ledger {
    fn is_empty(&self) -> bool {
        self.gone.is_empty() && self.bare.is_empty()
    }

    fn has(&self, service: &ServiceName) -> bool {
        self.gone.contains(service) || self.bare.contains(service)
    }

    /// Whether an object that a snapshot does not name stays.
    pub(super) fn keeps(&self, key: &DesiredKey) -> bool {
        match key {
            DesiredKey::Service(key) => self.gone.contains(&key.service),
            DesiredKey::Local(key) => self.has(&key.service),
            DesiredKey::Node => self.node,
        }
    }

    /// Whether an object still stays that the control plane names with nothing in it.
    pub(super) fn keeps_content(&self, slot: &Slot) -> bool {
        match slot.object.as_deref() {
            Some(DesiredObject::Service(program)) => self.has(&program.port.key.service),
            Some(DesiredObject::Node(_)) => self.node,
            Some(DesiredObject::Local(_)) | None => false,
        }
    }

    /// Services of an update that are kept until then.
    pub(super) fn concerned(&self, staged: &Staged) -> BTreeSet<ServiceName> {
        if self.is_empty() {
            return BTreeSet::new();
        }
        let services = staged.named.keys().filter_map(service_of);
        services.filter(|name| self.has(name)).cloned().collect()
    }

    /// An object is named anew, or gone.
    pub(super) fn forget(&mut self, key: &DesiredKey, slot: &Slot) {
        match (slot.backing, slot.service()) {
            (Backing::Unnamed, Some(program)) => {
                let key = &program.port.key;
                for place in places(&program.port) {
                    if self.places.get(&place) == Some(key) {
                        self.places.remove(&place);
                    }
                }
            }
            (Backing::Bare, _) => drop(self.said.remove(key)),
            (Backing::Unnamed | Backing::Named, _) => {}
        }
    }

    /// ServicePorts that are not named and have a place that another one has now.
    pub(super) fn losers(&self, object: &DesiredObject) -> BTreeSet<ServiceKey> {
        let DesiredObject::Service(program) = object else {
            return BTreeSet::new();
        };
        if self.places.is_empty() {
            return BTreeSet::new();
        }
        let owners = places(&program.port).filter_map(|place| self.places.get(&place));
        let others = owners.filter(|key| **key != program.port.key);
        others.cloned().collect()
    }

    /// What an object becomes that the control plane sends, in view of the one before it.
    pub(super) fn merge(
        &mut self,
        new: Arc<DesiredObject>,
        old: Option<&DesiredObject>,
    ) -> (Arc<DesiredObject>, Backing) {
        let merged = match (&*new, old) {
            (DesiredObject::Service(now), Some(DesiredObject::Service(old)))
                if self.has(&now.port.key.service) && !serves(now) && serves(old) =>
            {
                DesiredObject::Service(ServiceProgram {
                    port: now.port.clone(),
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
                "{} of {} Services would go at once",
                self.gone.len(),
                lost.services
            )
        });
        let bare = (!self.bare.is_empty()).then(|| {
            let (bare, all) = (self.bare.len(), lost.serving);
            format!("{bare} of {all} Services would lose all endpoints at once")
        });
        self.reason = Vec::from_iter(gone.into_iter().chain(bare)).join(", ");
    }

    /// Called after every update.
    fn date(&mut self, now_ms: u64) {
        if self.is_empty() {
            self.since_ms = 0;
        } else if self.since_ms == 0 {
            self.since_ms = now_ms;
        }
    }
}

/// What a snapshot lacks of what is there.
#[derive(Debug, Default)]
struct Losses {
    /// Services that are there.
    services: usize,
    /// Those of them that have endpoints.
    serving: usize,
    gone: BTreeSet<ServiceName>,
    bare: BTreeSet<ServiceName>,
}

impl Desired {
    /// What is served although the control plane does not say it (any more).
    #[must_use]
    pub fn held(&self) -> Option<Held> {
        let held = &self.held;
        if held.is_empty() {
            return None;
        }
        let examples = held.gone.iter().take(EXAMPLES);
        let examples: BTreeSet<_> = examples.chain(held.bare.iter().take(EXAMPLES)).collect();
        let examples = examples.into_iter().take(EXAMPLES);
        Some(Held {
            services: held.gone.len(),
            without_endpoints: held.bare.len(),
            reason: held.reason.clone(),
            since_ms: held.since_ms,
            examples: examples.map(ToString::to_string).collect(),
        })
    }

    /// How many Services are served although the control plane does not say it.
    #[must_use]
    pub fn held_services(&self) -> usize {
        self.held.gone.len() + self.held.bare.len()
    }

    /// Decides what is kept of what a snapshot lacks.
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
        let held = &mut self.held;
        held.gone = std::mem::take(&mut lost.gone);
        held.bare = std::mem::take(&mut lost.bare);
        held.node = !held.is_empty() || confidence == Confidence::Partial;
        match confidence {
            Confidence::Partial => held.doubt(word),
            Confidence::Whole | Confidence::Confirmed => held.cliff(&lost),
        }
    }

    fn losses(&self, staged: &Staged) -> Losses {
        // A Service of which something is deleted by name, or makes no sense, lacks nothing.
        let mut named = BTreeMap::<&ServiceName, bool>::new();
        for (key, change) in &staged.named {
            if let DesiredKey::Service(key) = key {
                let program = change
                    .as_ref()
                    .and_then(|object| object.object.as_ref().ok());
                let has = program.is_none_or(|object| match &**object {
                    DesiredObject::Service(program) => serves(program),
                    DesiredObject::Local(_) | DesiredObject::Node(_) => false,
                });
                *named.entry(&key.service).or_default() |= has;
            }
        }
        let mut lost = Losses::default();
        for (service, served) in self.by_service() {
            lost.services += 1;
            lost.serving += usize::from(served);
            match named.get(service) {
                None => drop(lost.gone.insert(service.clone())),
                Some(false) if served => drop(lost.bare.insert(service.clone())),
                Some(_) => {}
            }
        }
        lost
    }

    /// Services that are there, and whether they have endpoints. Work: all ServicePorts.
    fn by_service(&self) -> Vec<(&ServiceName, bool)> {
        let mut services: Vec<(&ServiceName, bool)> = Vec::new();
        for program in self.objects.values().filter_map(Slot::service) {
            let (name, served) = (&program.port.key.service, serves(program));
            match services.last_mut() {
                Some((last, any)) if *last == name => *any |= served,
                _ => services.push((name, served)),
            }
        }
        services
    }

    /// Takes an object for one that the control plane does not name and that stays.
    pub(super) fn keep(&mut self, key: &DesiredKey, touched: &mut Touched) {
        let Some(slot) = self.objects.get_mut(key) else {
            return;
        };
        if slot.object.is_none() {
            return self.remove(key, touched);
        }
        slot.backing = Backing::Unnamed;
        self.rejects.remove(key);
        if let Some(program) = slot.service() {
            let key = &program.port.key;
            let places = places(&program.port).map(|place| (place, key.clone()));
            self.held.places.extend(places);
        }
    }

    /// Works out anew how a Service is kept of which something has changed.
    pub(super) fn settle(&mut self, service: &ServiceName, touched: &mut Touched) {
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
            return self.release(service, touched);
        }
        // It is named again, without endpoints: it keeps those, but no ports that it has not.
        self.held.gone.remove(service);
        self.held.bare.insert(service.clone());
        for key in self.keys_of(service) {
            let slot = self.objects.get(&key);
            let unnamed = slot.is_some_and(|slot| slot.backing == Backing::Unnamed);
            if unnamed && matches!(key, DesiredKey::Service(_)) {
                self.remove(&key, touched);
            }
        }
    }

    /// What an update that is no snapshot means for what is kept.
    pub(super) fn weigh(&mut self, word: &Word, touched: &mut Touched) {
        if self.held.is_empty() && !self.held.node {
            return;
        }
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
        let there = self.by_service();
        let lost = Losses {
            services: there.len(),
            serving: there.iter().filter(|(_, served)| *served).count(),
            ..Losses::default()
        };
        if !believed.is_cliff(self.held.gone.len(), lost.services) {
            for service in std::mem::take(&mut self.held.gone) {
                self.release(&service, touched);
            }
        }
        if !believed.is_cliff(self.held.bare.len(), lost.serving) {
            for service in std::mem::take(&mut self.held.bare) {
                self.release(&service, touched);
            }
        }
        self.held.cliff(&lost);
        if self.held.is_empty() {
            self.held.node = false;
            self.let_go(&DesiredKey::Node, touched);
        }
    }

    pub(super) fn date_held(&mut self, now_ms: u64) {
        self.held.date(now_ms);
    }

    /// Believes what the control plane says of a Service.
    fn release(&mut self, service: &ServiceName, touched: &mut Touched) {
        self.held.gone.remove(service);
        self.held.bare.remove(service);
        for key in self.keys_of(service) {
            self.let_go(&key, touched);
        }
    }

    /// Makes an object what the control plane says it is.
    fn let_go(&mut self, key: &DesiredKey, touched: &mut Touched) {
        let Some(slot) = self.objects.get(key) else {
            return;
        };
        match slot.backing {
            Backing::Named => {}
            Backing::Unnamed => self.remove(key, touched),
            Backing::Bare => {
                if let Some(said) = self.held.said.remove(key) {
                    self.exchange(key, &said, touched);
                }
            }
        }
    }

    /// Everything that there is of a Service. Work: its ports.
    fn keys_of(&self, service: &ServiceName) -> Vec<DesiredKey> {
        let first = first_key(service);
        let of = |first: DesiredKey| {
            let keys = self.objects.range(first..).map(|(key, _)| key);
            keys.take_while(|key| service_of(key) == Some(service))
        };
        // Both kinds are sorted by Service.
        let ports = of(DesiredKey::Service(first.clone()));
        let ports = ports.take_while(|key| matches!(key, DesiredKey::Service(_)));
        ports.chain(of(DesiredKey::Local(first))).cloned().collect()
    }
}

/// Some endpoint is usable, somewhere.
fn serves(program: &ServiceProgram) -> bool {
    program.has_any || !program.endpoints.is_empty()
}

fn service_of(key: &DesiredKey) -> Option<&ServiceName> {
    match key {
        DesiredKey::Service(key) | DesiredKey::Local(key) => Some(&key.service),
        DesiredKey::Node => None,
    }
}

fn places(port: &ServicePort) -> impl Iterator<Item = Place> + '_ {
    let (protocol, family) = (port.key.protocol, port.key.family);
    let addresses = std::iter::once(&port.cluster_ip)
        .chain(&port.external_ips)
        .chain(&port.load_balancer_ips);
    addresses
        .map(move |ip| Place::Address(*ip, protocol, port.port))
        .chain(
            port.node_port
                .map(|number| Place::NodePort(family, protocol, number)),
        )
        .chain(port.health_check_node_port.map(Place::HealthCheck))
}
