//! A replica's source, scripted: what its lists and watches say, and the objects that follow from that.
//!
//! [`Source`] speaks as the reflectors do. [`View`] is the oracle of the control plane's cliff guard.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kplane_desired_state::admission::Enforce;
use kplane_desired_state::freshness::Versions;
use kplane_desired_state::k8s::Kind;
use kplane_desired_state::source::{Event, Located};

use crate::oracle::Marks;
use crate::plan::Flags;
use crate::truth::{Id, KINDS, OF_SERVICES, Object, Objects, SLICE_V6, SLICES, Truth};

/// The share of the Services, in percent, that may be lost at once, and the number that always may.
pub(crate) const CLIFF: (usize, usize) = (30, 2);

/// Versions after which a bookmark says that nothing else has happened.
const BOOKMARK: u64 = 8;

/// What a source says.
#[derive(Clone, Debug)]
pub(crate) enum Said {
    Begin(Kind),
    Listed(Id, u64, Arc<Object>),
    End(Kind),
    Put(Id, u64, Arc<Object>),
    Gone(Id),
    Vanished(Vec<Id>),
    Looked(Kind),
    Doubts(bool),
    Version(Kind, Versions),
}

impl Said {
    pub(crate) fn to_event(&self) -> Event {
        let located = |id: Id, object: &Object| {
            Box::new(Located {
                object: object.to_kubernetes(id),
                location: "".into(),
            })
        };
        match self {
            Self::Begin(kind) => Event::Init(*kind),
            Self::Listed(id, _, object) => Event::InitApply(located(*id, object)),
            Self::End(kind) => Event::InitDone(*kind),
            Self::Put(id, _, object) => Event::Apply(located(*id, object)),
            Self::Gone(id) => Event::Delete(id.to_kubernetes()),
            Self::Vanished(ids) => {
                Event::Vanished(ids.iter().map(|id| id.to_kubernetes()).collect())
            }
            Self::Looked(kind) => Event::Looked(*kind),
            Self::Doubts(true) => Event::Doubts(vec!["a part cannot be read".to_owned()]),
            Self::Doubts(false) => Event::Doubts(Vec::new()),
            Self::Version(kind, versions) => Event::Version(*kind, *versions),
        }
    }
}

/// What a source knows.
#[derive(Debug)]
pub(crate) struct Source {
    kinds: &'static [Kind],
    /// Watches say everything twice.
    repeats: bool,
    known: BTreeMap<Id, u64>,
    versions: BTreeMap<Kind, Versions>,
}

impl Source {
    /// Creates a source of Services, and of NetworkPolicies if there are some.
    pub(crate) fn new(policies: bool, repeats: bool) -> Self {
        Self {
            repeats,
            kinds: if policies { &KINDS } else { &KINDS[..OF_SERVICES] },
            known: BTreeMap::new(),
            versions: BTreeMap::new(),
        }
    }

    /// Returns the kinds of which a second list confirms the first.
    pub(crate) fn confirming(&self) -> impl Iterator<Item = Kind> + use<> {
        self.kinds.iter().copied().filter(|kind| *kind != Kind::Node)
    }

    /// Returns the first lists, which show the objects of a version, without some of them. Kinds come in two orders.
    pub(crate) fn begin(
        &mut self,
        truth: &Truth,
        version: u64,
        lacking: Lacking,
        reverse: bool,
    ) -> Vec<Vec<Said>> {
        let objects = truth.at(version);
        let mut batches = vec![vec![
            Said::Begin(Kind::ServiceCidr),
            Said::End(Kind::ServiceCidr),
        ]];
        let mut kinds = self.kinds.to_vec();
        if reverse && kinds.len() > OF_SERVICES {
            kinds.reverse();
        }
        for kind in kinds {
            let named = objects.iter().filter(|(id, _)| id.kind() == kind && !lacking.has(**id));
            let mut said = vec![Said::Begin(kind)];
            let mut changed = 0;
            for (id, (at, object)) in named {
                self.known.insert(*id, *at);
                changed = changed.max(*at);
                said.push(Said::Listed(*id, *at, Arc::clone(object)));
            }
            said.push(Said::End(kind));
            let versions = Versions {
                seen: version,
                changed,
            };
            said.push(self.version(kind, versions));
            batches.push(said);
        }
        batches
    }

    /// Returns what a watch of a kind says next: some changes.
    pub(crate) fn watch(&mut self, truth: &Truth, kind: Kind, most: usize) -> Vec<Said> {
        let Some(mut versions) = self.versions.get(&kind).copied() else {
            return Vec::new();
        };
        let is_new = truth.after(kind, versions.seen).next().is_some();
        if !is_new && truth.head() < versions.seen + BOOKMARK {
            return Vec::new();
        }
        let mut said = Vec::new();
        let (mut last, mut all) = (versions.seen, true);
        for change in truth.after(kind, versions.seen) {
            if said.len() == most {
                all = false;
                break;
            }
            last = change.version;
            versions.changed = last;
            said.push(match &change.object {
                Some(object) => {
                    self.known.insert(change.id, last);
                    Said::Put(change.id, last, Arc::clone(object))
                }
                None => {
                    self.known.remove(&change.id);
                    Said::Gone(change.id)
                }
            });
        }
        if self.repeats {
            said = said.into_iter().flat_map(|one| [one.clone(), one]).collect();
        }
        // A bookmark may say that nothing else happened.
        versions.seen = if all && most > 2 { truth.head() } else { last };
        if self.versions.get(&kind) != Some(&versions) {
            said.push(self.version(kind, versions));
        }
        said
    }

    /// Returns what a later list of a kind says, which may lack some objects.
    pub(crate) fn list(&mut self, truth: &Truth, kind: Kind, lacking: Lacking) -> Vec<Said> {
        let Some(before) = self.versions.get(&kind).copied() else {
            return Vec::new();
        };
        let named: Objects = truth
            .now()
            .iter()
            .filter(|(id, _)| id.kind() == kind && !lacking.has(**id))
            .map(|(id, object)| (*id, object.clone()))
            .collect();
        let mut said = Vec::new();
        let mut changed = before.changed;
        for (id, (at, object)) in &named {
            changed = changed.max(*at);
            if self.known.get(id) != Some(at) {
                self.known.insert(*id, *at);
                said.push(Said::Put(*id, *at, Arc::clone(object)));
            }
        }
        let missing: Vec<Id> = self
            .known
            .keys()
            .filter(|id| id.kind() == kind && !named.contains_key(*id))
            .copied()
            .collect();
        self.known.retain(|id, _| !missing.contains(id));
        said.push(Said::Looked(kind));
        if !missing.is_empty() {
            // A deletion that only the list shows came after everything that was seen before.
            changed = changed.max(before.seen + 1).min(truth.head());
            said.push(Said::Vanished(missing));
        }
        let versions = Versions {
            seen: truth.head(),
            changed,
        };
        said.push(self.version(kind, versions));
        said
    }

    fn version(&mut self, kind: Kind, versions: Versions) -> Said {
        self.versions.insert(kind, versions);
        Said::Version(kind, versions)
    }
}

/// What a list lacks, as bits: Services, slices of Services, Pods, and other objects of NetworkPolicies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lacking {
    pub(crate) services: u16,
    pub(crate) slices: u16,
    pub(crate) pods: u16,
    pub(crate) policies: u16,
}

impl Lacking {
    fn has(self, id: Id) -> bool {
        match id {
            Id::Service(number) => self.services & (1 << number) != 0,
            Id::Slice(number, _) => self.slices & (1 << number) != 0,
            Id::Node(_) | Id::Ending(..) => false,
            Id::Pod(number) => self.pods & (1 << number) != 0,
            Id::Policy(number) => self.policies & (1 << number) != 0,
            Id::Tiers(number) => self.policies & (1 << (6 + number)) != 0,
            Id::Namespace(number) => self.policies & (1 << (9 + number)) != 0,
        }
    }
}

/// How much the absence of an object from a replica's state says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Trust {
    Partial,
    Whole,
    Confirmed,
}

/// The objects that a replica must publish after what its source said.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    /// The number of changes of objects, and of those that NetworkPolicies are about.
    pub(crate) change: u64,
    pub(crate) policy_change: u64,
    /// What the replica says of NetworkPolicies.
    enforces: Option<Enforce>,
    cliff: (usize, usize),
    pub(crate) objects: Objects,
    /// The nodes that the replica finds out of reach.
    pub(crate) marks: Marks,
    /// Objects that are kept although the source does not name them.
    held: BTreeSet<Id>,
    pub(crate) versions: BTreeMap<Kind, Versions>,
    listed: BTreeSet<Kind>,
    looked: BTreeSet<Kind>,
    doubt: bool,
    answered: bool,
    confirmed: bool,
}

impl View {
    pub(crate) fn new(flags: Flags) -> Self {
        Self {
            enforces: flags.policies,
            cliff: flags.cliff,
            ..Self::default()
        }
    }

    pub(crate) fn is_synced(&self) -> bool {
        Kind::ALL.iter().all(|kind| self.listed.contains(kind))
    }

    /// Returns whether everything is listed that NetworkPolicies are about.
    pub(crate) fn has_policies(&self) -> bool {
        self.enforces == Some(Enforce::On) && KINDS.iter().all(|kind| self.listed.contains(kind))
    }

    /// Returns what the replica says of NetworkPolicies.
    pub(crate) fn policies(&self) -> Option<Enforce> {
        self.enforces
    }

    pub(crate) fn trust(&self) -> Trust {
        match (self.doubt && !self.answered, self.confirmed) {
            (true, _) => Trust::Partial,
            (false, true) => Trust::Confirmed,
            (false, false) => Trust::Whole,
        }
    }

    /// Takes in a batch.
    pub(crate) fn hear(&mut self, said: &[Said]) {
        let (services, live) = (self.services(), self.is_synced());
        let served = self.with_endpoints();
        let mut unnamed = BTreeSet::new();
        for one in said {
            match one {
                Said::Listed(id, at, object) | Said::Put(id, at, object) => {
                    unnamed.remove(id);
                    self.put(*id, *at, object);
                }
                Said::Gone(id) => {
                    unnamed.remove(id);
                    self.let_go(*id);
                }
                Said::Vanished(ids) => unnamed.extend(ids.iter().copied()),
                Said::Looked(kind) => self.looked(*kind, &mut unnamed),
                Said::Begin(_) => {}
                Said::End(kind) => {
                    self.changes(false);
                    self.listed.insert(*kind);
                }
                Said::Doubts(doubt) => {
                    self.answered &= *doubt;
                    self.doubt = *doubt;
                }
                Said::Version(kind, versions) => drop(self.versions.insert(*kind, *versions)),
            }
        }
        let cliff =
            live && (self.is_cliff(&unnamed, services, &served) || self.is_policy_cliff(&unnamed));
        for id in unnamed {
            let of_held =
                matches!(id, Id::Slice(service, _) if self.held.contains(&Id::Service(service)));
            if (cliff || of_held) && self.objects.contains_key(&id) {
                self.held.insert(id);
            } else {
                self.let_go(id);
            }
        }
    }

    /// The replica finds some nodes out of reach, by their bits, and some of them dead.
    pub(crate) fn mark(&mut self, suspected: u8, dead: u8) {
        self.changes(true);
        self.marks.change(&self.objects, suspected, dead);
    }

    /// An operator approves the state.
    pub(crate) fn approve(&mut self) {
        self.answered = self.doubt;
        self.confirmed = true;
        for id in std::mem::take(&mut self.held) {
            self.let_go(id);
        }
    }

    pub(crate) fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    fn changes(&mut self, services_only: bool) {
        self.change += 1;
        self.policy_change += u64::from(!services_only);
    }

    fn put(&mut self, id: Id, at: u64, object: &Arc<Object>) {
        self.changes(!id.is_for_policies());
        self.held.remove(&id);
        self.objects.insert(id, (at, Arc::clone(object)));
        self.marks.note(id, object);
        self.ends(id);
        if let Id::Slice(service, _) = id
            && has_pods(object)
        {
            let of = (0..SLICES).map(|number| Id::Slice(service, number));
            for other in of.filter(|other| self.held.contains(other)).collect::<Vec<_>>() {
                self.let_go(other);
            }
        }
    }

    fn let_go(&mut self, id: Id) {
        self.changes(!id.is_for_policies());
        self.held.remove(&id);
        if self.objects.remove(&id).is_some() {
            self.ends(id);
        }
    }

    /// Pods are named where NetworkPolicies are enforced.
    fn ends(&mut self, id: Id) {
        if self.enforces == Some(Enforce::On) && matches!(id, Id::Slice(..) | Id::Ending(..)) {
            self.marks.end(&self.objects, id);
        }
    }

    fn looked(&mut self, kind: Kind, unnamed: &mut BTreeSet<Id>) {
        self.looked.insert(kind);
        let kinds = if self.enforces == Some(Enforce::On) {
            &KINDS[..]
        } else {
            &KINDS[..OF_SERVICES]
        };
        self.confirmed |=
            kinds.iter().all(|kind| *kind == Kind::Node || self.looked.contains(kind));
        let agreed: Vec<Id> = self
            .held
            .iter()
            .filter(|id| id.kind() == kind)
            .copied()
            .chain(unnamed.extract_if(.., |id| id.kind() == kind))
            .collect();
        agreed.into_iter().for_each(|id| self.let_go(id));
    }

    fn services(&self) -> usize {
        self.objects.keys().filter(|id| matches!(id, Id::Service(_))).count()
    }

    fn with_endpoints(&self) -> BTreeSet<u8> {
        let has = |number: u8, dual: bool| {
            (0..SLICES)
                .filter(|slice| dual || *slice != SLICE_V6)
                .filter_map(|slice| self.objects.get(&Id::Slice(number, slice)))
                .any(|(_, object)| has_pods(object))
        };
        self.objects
            .iter()
            .filter_map(|(id, (_, object))| match (id, &**object) {
                (Id::Service(number), Object::Service(service)) => {
                    has(*number, service.dual).then_some(*number)
                }
                _ => None,
            })
            .collect()
    }

    fn is_cliff(&self, unnamed: &BTreeSet<Id>, all: usize, served: &BTreeSet<u8>) -> bool {
        let held = self.held.iter().filter(|id| matches!(id, Id::Service(_))).count();
        let services: BTreeSet<u8> = unnamed
            .iter()
            .filter_map(|id| match id {
                Id::Service(number) if self.objects.contains_key(id) => Some(*number),
                _ => None,
            })
            .collect();
        let theirs: BTreeSet<u8> = unnamed
            .iter()
            .filter_map(|id| match id {
                Id::Slice(service, _) if self.objects.contains_key(id) => Some(*service),
                _ => None,
            })
            .collect();
        let left = |number: u8| {
            (0..SLICES).map(|slice| Id::Slice(number, slice)).any(|id| {
                let stays = !unnamed.contains(&id) && !self.held.contains(&id);
                stays && self.objects.get(&id).is_some_and(|(_, object)| has_pods(object))
            })
        };
        let emptied = theirs.iter().filter(|number| {
            let named = !services.contains(*number) && !self.held.contains(&Id::Service(**number));
            named && served.contains(*number) && !left(**number)
        });
        is_cliff(self.cliff, services.len(), all.saturating_sub(held))
            || is_cliff(
                self.cliff,
                emptied.count(),
                served.len().saturating_sub(held),
            )
    }
}

impl View {
    /// Returns whether too many objects of one kind of those that NetworkPolicies are about are not named.
    fn is_policy_cliff(&self, unnamed: &BTreeSet<Id>) -> bool {
        let kinds: [&[Kind]; 3] = [
            &[Kind::NetworkPolicy, Kind::ClusterNetworkPolicy],
            &[Kind::Namespace],
            &[Kind::Pod],
        ];
        kinds.into_iter().any(|kinds| {
            let of = |id: &&Id| kinds.contains(&id.kind()) && !self.held.contains(id);
            let lost = unnamed.iter().filter(of).count();
            is_cliff(self.cliff, lost, self.objects.keys().filter(of).count())
        })
    }
}

/// Returns whether so many lost Services are a cliff to a guard.
pub(crate) fn is_cliff((share, least): (usize, usize), lost: usize, of: usize) -> bool {
    lost >= least && lost * 100 > of * share
}

fn has_pods(object: &Object) -> bool {
    matches!(object, Object::Slice(pods) if !pods.is_empty())
}
