//! One place where packets arrive, encoded as elements of the table.

use kplane_model::{Cidr, EndpointAddr};

use super::affinity_id::AffinityId;
use super::element::{Data, Destination, Element, Key, NodePort};
use super::schema::{Balancer, Class, Set};
use super::structure::GroupOp;
use super::word::Word;
use crate::plan::{Frontend, FrontendAddr, Origin, Unserved, disjoint};

/// The table's content for one place. Unlike in a plan, each endpoint has an index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    /// Endpoints by index: for all clients, or for clients outside if `inside` is set.
    pub(super) slots: Vec<EndpointAddr>,
    /// Endpoints by index for clients inside the cluster, where these clients have their own endpoints.
    pub(super) inside: Option<Vec<EndpointAddr>>,
    pub(super) masquerade: bool,
    /// Whether the place is the address of a Service inside the cluster.
    pub(super) cluster_ip: bool,
    pub(super) unserved: Option<Unserved>,
    /// Sources that may use the place, sorted and disjoint; empty = all.
    pub(super) ranges: Vec<Cidr>,
    pub(super) sticky: Option<Sticky>,
}

/// Session affinity of one place: the groups that remember the endpoints of its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sticky {
    /// The group of clients that use `slots`.
    pub(super) group: AffinityId,
    /// The group of clients that use `inside`, where these clients have their own endpoints.
    pub(super) inside: Option<AffinityId>,
}

impl Entry {
    /// Returns the entry for a plan. As many endpoints as possible keep their indices.
    pub(super) fn next(before: Option<&Self>, plan: &Frontend, sticky: Option<Sticky>) -> Self {
        let slots = before.map_or(&[][..], |b| &b.slots);
        let inside = before.and_then(|b| b.inside.as_deref()).unwrap_or_default();
        let wanted_inside = plan.inside.as_deref().filter(|endpoints| !endpoints.is_empty());
        let entry = Self {
            slots: place(slots, &plan.endpoints),
            inside: wanted_inside.map(|wanted| place(inside, wanted)),
            masquerade: plan.masquerade,
            cluster_ip: plan.origin == Origin::ClusterIp,
            unserved: plan.unserved,
            ranges: disjoint(&plan.source_ranges),
            sticky: None,
        };
        // Where no client gets an endpoint, there is nothing to remember.
        let sticky = if entry.is_served() { sticky } else { None };
        let inside = |sticky: Sticky| Sticky {
            inside: if entry.inside.is_some() { sticky.inside } else { None },
            ..sticky
        };
        Self {
            sticky: sticky.map(inside),
            ..entry
        }
    }

    /// Returns whether any client reaches an endpoint.
    fn is_served(&self) -> bool {
        !self.slots.is_empty() || self.inside.is_some()
    }
}

/// Gives each wanted endpoint (sorted, unique) an index. Endpoints keep the indices that they have, as far as
/// the indices stay without gaps; the other endpoints fill the gaps.
fn place(before: &[EndpointAddr], wanted: &[EndpointAddr]) -> Vec<EndpointAddr> {
    let stays = |endpoint: &EndpointAddr| wanted.binary_search(endpoint).is_ok();
    let mut placed: Vec<Option<EndpointAddr>> = before
        .iter()
        .take(wanted.len())
        .map(|endpoint| Some(*endpoint).filter(stays))
        .collect();
    placed.resize(wanted.len(), None);
    let mut kept: Vec<EndpointAddr> = placed.iter().flatten().copied().collect();
    kept.sort_unstable();
    let mut others = wanted.iter().filter(|endpoint| kept.binary_search(endpoint).is_err());
    // There are as many gaps as remaining endpoints: both are `wanted` without `kept`.
    placed
        .into_iter()
        .filter_map(|slot| slot.or_else(|| others.next().copied()))
        .collect()
}

/// Element operations: all of `delete` come before all of `add`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ops {
    pub(crate) delete: Vec<Element>,
    /// Operations on groups, between `delete` and `add`.
    pub(super) groups: Vec<GroupOp>,
    pub(crate) add: Vec<Element>,
}

impl Ops {
    /// Room that the objects of a group take in a transaction, compared with one element.
    const GROUP_WEIGHT: usize = 24;

    /// Number of operations.
    pub(crate) fn len(&self) -> usize {
        self.delete.len() + self.groups.len() + self.add.len()
    }

    /// Returns the room that the operations take in a transaction, in elements.
    pub(super) fn weight(&self) -> usize {
        self.len() + self.groups.len() * Self::GROUP_WEIGHT
    }
}

/// Returns the operations that turn one entry into another; none for common parts.
pub(super) fn diff(at: FrontendAddr, before: Option<&Entry>, after: Option<&Entry>) -> Ops {
    let place = FrontendKeys::of(at);
    let old = before.map(|entry| place.members(entry)).unwrap_or_default();
    let new = after.map(|entry| place.members(entry)).unwrap_or_default();
    let mut ops = Ops {
        delete: old.iter().filter(|element| !new.contains(element)).copied().collect(),
        groups: Vec::new(),
        add: new.iter().filter(|element| !old.contains(element)).copied().collect(),
    };
    let slots = |entry: Option<&Entry>| entry.map(|e| e.slots.clone()).unwrap_or_default();
    let inside = |entry: Option<&Entry>| entry.and_then(|e| e.inside.clone()).unwrap_or_default();
    place.diff_slots(place.balancer, &slots(before), &slots(after), &mut ops);
    place.diff_slots(
        place.inside_balancer,
        &inside(before),
        &inside(after),
        &mut ops,
    );
    ops
}

/// Returns all elements of an entry.
pub(super) fn elements(at: FrontendAddr, entry: &Entry) -> Vec<Element> {
    diff(at, None, Some(entry)).add
}

/// Returns the place to which an element with this key belongs, if there is one.
pub(super) fn place_of(key: Key) -> Option<FrontendAddr> {
    let address = |Destination { ip, protocol, port }| FrontendAddr::Address { ip, protocol, port };
    match key {
        Key::Service(destination)
        | Key::ServiceSlot(destination, _)
        | Key::FirewallSource(destination, _) => Some(address(destination)),
        Key::NodePort(port) | Key::NodePortSlot(port, _) => Some(FrontendAddr::NodePort {
            protocol: port.protocol,
            port: port.port,
        }),
        Key::Ip(_)
        | Key::Hairpin(_)
        | Key::Range(_)
        | Key::Number(_)
        | Key::Loop(_)
        | Key::Span(..)
        | Key::Grant(..)
        | Key::GrantPort(..)
        | Key::GrantPorts(..)
        | Key::Row(..) => None,
    }
}

/// The sets and keys of one place.
struct FrontendKeys {
    key: Key,
    balancer: Balancer,
    inside_balancer: Balancer,
    by_address: bool,
}

impl FrontendKeys {
    fn of(at: FrontendAddr) -> Self {
        match at {
            FrontendAddr::Address { ip, protocol, port } => Self {
                key: Key::Service(Destination { ip, protocol, port }),
                balancer: Balancer::Service,
                inside_balancer: Balancer::InsideService,
                by_address: true,
            },
            FrontendAddr::NodePort { protocol, port } => Self {
                key: Key::NodePort(NodePort { protocol, port }),
                balancer: Balancer::Nodeport,
                inside_balancer: Balancer::InsideNodeport,
                by_address: false,
            },
        }
    }

    /// Returns the elements apart from the endpoints: a handful, whatever the number of endpoints.
    fn members(&self, entry: &Entry) -> Vec<Element> {
        let element = |set, key, data| Element { set, key, data };
        let mut members = Vec::with_capacity(4);
        if let Some(word) = self.word(entry) {
            let set = if self.by_address { Set::Places } else { Set::Nodeports };
            members.push(element(set, self.key, Some(Data::Number(word.0))));
        }
        members.extend(self.sticky_members(entry));
        // Only addresses have source ranges (A8).
        if let (Key::Service(destination), false) = (self.key, entry.ranges.is_empty()) {
            members.push(element(Set::FirewallServices, self.key, None));
            members.extend(entry.ranges.iter().map(|range| {
                let key = Key::FirewallSource(destination, *range);
                element(Set::FirewallSources, key, None)
            }));
        }
        members
    }

    /// Returns the word of the place; `None` if rules have nothing to do there.
    fn word(&self, entry: &Entry) -> Option<Word> {
        let served = entry.is_served();
        let guarded = self.by_address && !entry.ranges.is_empty();
        let bits = [
            (served && entry.masquerade, Word::MASQUERADE),
            (
                served && self.by_address && entry.cluster_ip,
                Word::CLUSTER_IP,
            ),
            (
                self.by_address && (guarded || !entry.cluster_ip),
                Word::EXTERNAL,
            ),
            (entry.inside.is_some(), Word::INSIDE),
            (entry.sticky.is_some(), Word::STICKY),
            (entry.unserved == Some(Unserved::Reject), Word::REJECT),
            (entry.unserved == Some(Unserved::Drop), Word::DROP),
            (!self.by_address, Word::NODEPORT),
        ];
        let word = bits
            .into_iter()
            .filter(|(is_set, _)| *is_set)
            .fold(Word(Word::OURS), |word, (_, bit)| Word(word.0 | bit));
        let inside = entry.inside.as_ref().map_or(0, Vec::len);
        (served || guarded || entry.unserved.is_some()).then_some(
            word.with(self.balancer, Class::of(entry.slots.len()))
                .with(self.inside_balancer, Class::of(inside)),
        )
    }

    fn sticky_members(&self, entry: &Entry) -> impl Iterator<Item = Element> {
        let pick = |balancer, id| (Set::Sticky(balancer), Data::Pick(id));
        let sticky = entry.sticky;
        let outside = if entry.slots.is_empty() { None } else { sticky };
        let outside = outside.map(|sticky| pick(self.balancer, sticky.group));
        let inside = sticky.and_then(|sticky| sticky.inside);
        let inside_pick = inside.map(|id| pick(self.inside_balancer, id));
        let remember = if self.by_address { Set::RememberServices } else { Set::RememberNodeports };
        let keep = sticky.map(|sticky| match sticky.inside {
            None => (remember, Data::Keep(sticky.group)),
            Some(_) => (remember, Data::Split(sticky.group)),
        });
        let key = self.key;
        [outside, inside_pick, keep]
            .into_iter()
            .flatten()
            .map(move |(set, data)| Element {
                set,
                key,
                data: Some(data),
            })
    }

    fn diff_slots(
        &self,
        balancer: Balancer,
        before: &[EndpointAddr],
        after: &[EndpointAddr],
        ops: &mut Ops,
    ) {
        let element = |index: usize, endpoint: EndpointAddr| Element {
            set: Set::Endpoints(balancer),
            key: self.slot(index),
            data: Some(Data::Endpoint(endpoint)),
        };
        for index in 0..before.len().max(after.len()) {
            let (old, new) = (before.get(index), after.get(index));
            if old == new {
                continue;
            }
            ops.delete.extend(old.map(|endpoint| element(index, *endpoint)));
            ops.add.extend(new.map(|endpoint| element(index, *endpoint)));
        }
    }

    fn slot(&self, index: usize) -> Key {
        // An index is always below `Class::MAX_ENDPOINTS`.
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        match self.key {
            Key::NodePort(port) => Key::NodePortSlot(port, index),
            Key::Service(destination) => Key::ServiceSlot(destination, index),
            other => other,
        }
    }
}
