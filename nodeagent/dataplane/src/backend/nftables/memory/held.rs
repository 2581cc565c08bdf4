//! One table in memory: the chains of its layout, and what its sets hold.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{EndpointAddr, Family, Protocol, ip_bits};

use super::super::affinity::Group;
use super::super::affinity_id::AffinityId;
use super::super::chain::{Chain, NftRule};
use super::super::clients::{Client, Remembered};
use super::super::element::{Data, Element, Key};
use super::super::frontend::{Ops, place_of};
use super::super::schema::Set;
use super::super::structure::GroupOp;
use super::super::tables::TableLayout;
use crate::plan::FrontendAddr;

/// The fields of a key as numbers; 0 behind the last one.
pub(super) type Loaded = [u128; 4];

/// What the kernel holds of one table.
#[derive(Clone, Debug)]
pub(crate) struct HeldTable {
    pub(super) layout: TableLayout,
    /// The chains with a hook.
    pub(super) base: Arc<[Chain]>,
    /// The other constant chains.
    pub(super) chains: Arc<BTreeMap<Cow<'static, str>, Chain>>,
    sets: BTreeMap<Set, BTreeMap<Loaded, HeldElement>>,
    groups: BTreeMap<AffinityId, Group>,
    pub(in crate::backend::nftables) clients: BTreeMap<AffinityId, Vec<Client>>,
}

#[derive(Clone, Copy, Debug)]
struct HeldElement {
    /// The largest value of the key's last field, of which only ranges have several.
    last: u128,
    element: Element,
}

impl PartialEq for HeldTable {
    fn eq(&self, other: &Self) -> bool {
        self.elements().eq(other.elements()) && self.groups == other.groups
    }
}

impl HeldTable {
    /// Returns an empty table.
    pub(crate) fn new(family: Family, layout: TableLayout) -> Self {
        let settings = layout.settings();
        let has = |rule: &NftRule| rule.is_in(settings);
        let mut chains = layout.chains(family);
        chains.iter_mut().for_each(|chain| chain.rules.retain(has));
        let (base, others): (Vec<_>, Vec<_>) =
            chains.into_iter().partition(|chain| chain.hook.is_some());
        let others = others.into_iter().map(|chain| (chain.name.clone(), chain)).collect();
        Self {
            layout,
            base: base.into(),
            chains: Arc::new(others),
            sets: BTreeMap::new(),
            groups: BTreeMap::new(),
            clients: BTreeMap::new(),
        }
    }

    pub(crate) fn elements(&self) -> impl Iterator<Item = Element> {
        self.sets.values().flat_map(BTreeMap::values).map(|held| held.element)
    }

    pub(in crate::backend::nftables) fn groups(&self) -> impl Iterator<Item = Group> {
        self.groups.values().copied()
    }

    pub(super) fn group(&self, id: AffinityId) -> Option<&Group> {
        self.groups.get(&id)
    }

    /// Returns the element that a set has for a key.
    pub(super) fn find(&self, set: Set, key: Loaded) -> Option<&Element> {
        let last = last_field(set);
        let (from, held) = self.sets.get(&set)?.range(..=key).next_back()?;
        let is_it = from[..last] == key[..last] && key[last] <= held.last;
        is_it.then_some(&held.element)
    }

    /// Applies a transaction; `None` if the kernel refuses it, and then the table is of no use. `refused` is an address that
    /// it does not take.
    pub(crate) fn apply(&mut self, groups: &[Ops]) -> Option<()> {
        groups
            .iter()
            .flat_map(|ops| &ops.delete)
            .try_for_each(|element| self.delete(element))?;
        groups
            .iter()
            .flat_map(|ops| &ops.groups)
            .try_for_each(|op| self.change_group(*op))?;
        let lead_somewhere = self.groups.values().all(|group| {
            let leads = group.inside_apart || group.shared;
            !leads || self.groups.contains_key(&group.id.other())
        });
        let mut added = groups.iter().flat_map(|ops| &ops.add);
        let all_added = added.try_for_each(|element| self.add(element));
        all_added.filter(|()| lead_somewhere)
    }

    fn delete(&mut self, element: &Element) -> Option<()> {
        let (key, _) = bounds(element.key);
        let gone = self.sets.get_mut(&element.set)?.remove(&key)?;
        (gone.element == *element).then_some(())
    }

    fn add(&mut self, element: &Element) -> Option<()> {
        let Element { set, key, data } = *element;
        let leads_somewhere = leads_to(element).is_none_or(|id| self.groups.contains_key(&id));
        if !key.fits(set) || data.is_some() != set.is_map() || !leads_somewhere {
            return None;
        }
        let (from, to) = bounds(key);
        let at = last_field(set);
        let held = HeldElement {
            last: to.unwrap_or(from[at]),
            element: *element,
        };
        let mut until = from;
        until[at] = held.last;
        // An element that overlaps this one covers its end, or begins within it.
        let is_free = from <= until && self.find(set, until).is_none();
        let elements = self.sets.entry(set).or_default();
        let is_free = is_free && elements.range(from..=until).next().is_none();
        if is_free {
            elements.insert(from, held);
        }
        is_free.then_some(())
    }

    fn change_group(&mut self, op: GroupOp) -> Option<()> {
        let is_fine = match op {
            GroupOp::Make(group) => self.groups.insert(group.id, group).is_none(),
            GroupOp::Rewrite(group) => self.groups.insert(group.id, group).is_some(),
            GroupOp::Drop(group) => {
                let is_used = self.elements().any(|element| leads_to(&element) == Some(group.id));
                self.clients.remove(&group.id);
                !is_used && self.groups.remove(&group.id) == Some(group)
            }
        };
        is_fine.then_some(())
    }

    /// Removes elements, as another program may. Each element is asked with its number.
    pub(in crate::backend::nftables) fn remove(
        &mut self,
        goes: impl Fn(usize, &Element) -> bool,
    ) -> Vec<Element> {
        let mut at = 0..;
        let goes = |element: &Element| at.next().is_some_and(|at| goes(at, element));
        let gone: Vec<_> = self.elements().filter(goes).collect();
        gone.iter().filter(|element| self.delete(element).is_some()).copied().collect()
    }

    /// Adds the elements of a copy that are not there, as another program may; returns those that fit.
    pub(super) fn restore(&mut self, copy: &Self) -> Vec<Element> {
        copy.elements().filter(|element| self.add(element).is_some()).collect()
    }

    /// Returns the clients that a group remembers; `None` if there is no such group.
    pub(in crate::backend::nftables) fn clients(&self, group: AffinityId) -> Option<Vec<Client>> {
        self.groups.get(&group)?;
        Some(self.clients.get(&group).cloned().unwrap_or_default())
    }

    pub(super) fn forget(&mut self, group: AffinityId, gone: &[Client]) -> Option<()> {
        let clients = self.clients.get_mut(&group)?;
        let are_there = gone.iter().all(|client| clients.contains(client));
        clients.retain(|client| !gone.contains(client));
        are_there.then_some(())
    }

    /// Returns the endpoint that a group remembers for a client.
    pub(super) fn remembered(&self, group: AffinityId, ip: IpAddr) -> Option<EndpointAddr> {
        match self.clients.get(&group)?.iter().find(|client| client.ip == ip)?.endpoint {
            Remembered::Whole(endpoint) => Some(endpoint),
            Remembered::Part(_) => None,
        }
    }

    /// Remembers a client's endpoints, as packets do.
    pub(super) fn remember(&mut self, ip: IpAddr, endpoints: Vec<(AffinityId, EndpointAddr)>) {
        for (group, endpoint) in endpoints {
            let clients = self.clients.entry(group).or_default();
            clients.retain(|client| client.ip != ip);
            let endpoint = Remembered::Whole(endpoint);
            clients.push(Client { ip, endpoint });
        }
    }
}

/// Returns the place of the last field of a set's keys.
fn last_field(set: Set) -> usize {
    set.fields().len().saturating_sub(1)
}

/// Returns the group to whose chains an element leads.
fn leads_to(element: &Element) -> Option<AffinityId> {
    match element.data? {
        Data::Endpoint(_) | Data::Number(_) | Data::Draw(..) => None,
        Data::Pick(id) | Data::Keep(id) | Data::Split(id) => Some(id),
    }
}

/// Returns whether an element is one of a place with this address, leads to it, or allows a Pod with it something.
pub(super) fn names(element: &Element, ip: IpAddr) -> bool {
    let endpoint = element.data.and_then(Data::endpoint);
    let is_place =
        matches!(place_of(element.key), Some(FrontendAddr::Address { ip: at, .. }) if at == ip);
    let pod = match element.key {
        Key::Grant(pod, _) | Key::GrantPort(pod, ..) | Key::GrantPorts(pod, ..) => Some(pod),
        _ => None,
    };
    is_place || endpoint.is_some_and(|endpoint| endpoint.ip == ip) || pod == Some(ip)
}

/// Returns the fields of a key with their first values, and the last value of the last one if it is a range.
fn bounds(key: Key) -> (Loaded, Option<u128>) {
    let ip = ip_bits;
    let number = |number: u32| u128::from(number);
    let proto = |protocol: Protocol| u128::from(protocol.number());
    let port = |port: u16| u128::from(port);
    let (fields, last) = match key {
        Key::Service(at) => (vec![ip(at.ip), proto(at.protocol), port(at.port)], None),
        Key::NodePort(at) => (vec![proto(at.protocol), port(at.port)], None),
        Key::Ip(at) => (vec![ip(at)], None),
        Key::Hairpin(at) => (
            vec![ip(at.ip), ip(at.ip), proto(at.protocol), port(at.port)],
            None,
        ),
        Key::Range(range) => (vec![ip(range.first())], Some(ip(range.last()))),
        Key::FirewallSource(at, range) => {
            let fields = vec![
                ip(at.ip),
                proto(at.protocol),
                port(at.port),
                ip(range.first()),
            ];
            (fields, Some(ip(range.last())))
        }
        Key::ServiceSlot(at, index) => (
            vec![ip(at.ip), proto(at.protocol), port(at.port), number(index)],
            None,
        ),
        Key::NodePortSlot(at, index) => {
            (vec![proto(at.protocol), port(at.port), number(index)], None)
        }
        Key::Number(of) => (vec![number(of)], None),
        Key::Loop(at) => (vec![ip(at), ip(at)], None),
        Key::Span(first, last) => (vec![ip(first)], Some(ip(last))),
        Key::Grant(pod, of) => (vec![ip(pod), number(of)], None),
        Key::GrantPort(pod, of, protocol, at) => {
            (vec![ip(pod), number(of), proto(protocol), port(at)], None)
        }
        Key::GrantPorts(pod, of, protocol, first, last) => (
            vec![ip(pod), number(of), proto(protocol), port(first)],
            Some(port(last)),
        ),
        Key::Row(row, protocol, first, last) => (
            vec![number(row), proto(protocol), port(first)],
            Some(port(last)),
        ),
    };
    (
        std::array::from_fn(|at| fields.get(at).copied().unwrap_or(0)),
        last,
    )
}
