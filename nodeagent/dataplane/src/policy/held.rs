//! The elements of a family's table: how many parts of the policies need each, and what a change does to them.

use std::collections::HashMap;
use std::net::IpAddr;

use kplane_model::{Direction, Protocol};

use crate::backend::nftables::{Data, Element, Key, PolicySet, Set};

/// A place for an element.
pub(super) type ElementId = (PolicySet, Key);

/// The content of a place: an element with a number or without.
pub(super) type Value = Option<u32>;

/// The content of a place before and after a change; `None` = no element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ElementChange {
    pub(super) place: ElementId,
    pub(super) before: Option<Value>,
    pub(super) after: Option<Value>,
}

/// What a Pod may do: connections with the other ends of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grant {
    pub(super) direction: Direction,
    pub(super) pod: IpAddr,
    pub(super) number: u32,
    /// Protocol, first and last port of the destination; `None` = everything.
    pub(super) ports: Option<(Protocol, u16, u16)>,
}

/// Those port ranges that exclude each other in the kernel if they overlap.
type Neighbours = (Direction, IpAddr, u32, Protocol);

/// A range of ports, and how often policies have it.
type CountedRange = ((u16, u16), u32);

/// Counted elements, and the port ranges of which some are unions.
#[derive(Debug, Default)]
pub(super) struct Held {
    elements: HashMap<ElementId, (u32, Value)>,
    /// Port ranges as policies have them, with how often. The kernel gets their unions.
    ranges: HashMap<Neighbours, Vec<CountedRange>>,
    /// What places of a change held before it; `None` while nobody wants to know.
    before: Option<HashMap<ElementId, Option<Value>>>,
}

/// Returns the element of a place.
pub(super) fn element((set, key): ElementId, value: Value) -> Element {
    Element {
        set: Set::Policy(set),
        key,
        data: value.map(Data::Number),
    }
}

/// Returns the place and the value of an element; `None` for one of Services.
pub(super) fn place(element: &Element) -> Option<(ElementId, Value)> {
    let Set::Policy(set) = element.set else {
        return None;
    };
    let value = match element.data {
        Some(Data::Number(number)) => Some(number),
        _ => None,
    };
    Some(((set, element.key), value))
}

impl Held {
    /// Returns what differs from other elements, those before.
    pub(super) fn changes_from(&self, before: &[Element]) -> Vec<ElementChange> {
        let before: HashMap<ElementId, Value> = before.iter().filter_map(place).collect();
        let gone = before.iter().map(|(place, value)| ElementChange {
            place: *place,
            before: Some(*value),
            after: self.get(*place),
        });
        let new =
            self.all()
                .filter(|(place, _)| !before.contains_key(place))
                .map(|(place, value)| ElementChange {
                    place,
                    before: None,
                    after: Some(value),
                });
        gone.chain(new).filter(|change| change.before != change.after).collect()
    }

    /// Records changes from now on, if it does not yet.
    pub(super) fn record(&mut self) {
        self.before.get_or_insert_default();
    }

    /// Ends [`Held::record`]; returns what places held that may differ.
    pub(super) fn recorded(&mut self) -> HashMap<ElementId, Option<Value>> {
        self.before.take().unwrap_or_default()
    }

    /// Returns what differs since [`Held::record`].
    pub(super) fn changes(&mut self) -> Vec<ElementChange> {
        let before = self.recorded().into_iter();
        before
            .map(|(place, before)| ElementChange {
                place,
                before,
                after: self.get(place),
            })
            .filter(|change| change.before != change.after)
            .collect()
    }

    pub(super) fn len(&self) -> usize {
        self.elements.len()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (ElementId, Value)> {
        self.elements.iter().map(|(place, (_, value))| (*place, *value))
    }

    pub(super) fn get(&self, place: ElementId) -> Option<Value> {
        self.elements.get(&place).map(|(_, value)| *value)
    }

    /// Returns whether a place has an element.
    pub(super) fn has(&self, set: PolicySet, key: Key) -> bool {
        self.elements.contains_key(&(set, key))
    }

    /// Returns the number under a key of a map.
    pub(super) fn number(&self, set: PolicySet, key: Key) -> Option<u32> {
        self.get((set, key)).flatten()
    }

    fn touch(&mut self, place: ElementId) {
        if let Some(before) = &mut self.before {
            let now = self.elements.get(&place).map(|(_, value)| *value);
            before.entry(place).or_insert(now);
        }
    }

    /// Adds an element, or one more reason for it.
    pub(super) fn add(&mut self, place: ElementId, value: Value) {
        self.touch(place);
        self.elements.entry(place).or_insert((0, value)).0 += 1;
    }

    /// Takes back what [`Held::add`] did.
    pub(super) fn remove(&mut self, place: ElementId) {
        self.touch(place);
        if let Some((count, _)) = self.elements.get_mut(&place) {
            *count -= 1;
            if *count == 0 {
                self.elements.remove(&place);
            }
        }
    }

    /// Adds an element, or takes that back.
    pub(super) fn count(&mut self, place: ElementId, value: Value, there: bool) {
        if there { self.add(place, value) } else { self.remove(place) }
    }

    /// Sets a number, or removes it.
    pub(super) fn set(&mut self, place: ElementId, number: Option<u32>) {
        if number.is_none() && !self.elements.contains_key(&place) {
            return;
        }
        self.touch(place);
        match number {
            Some(_) => drop(self.elements.insert(place, (1, number))),
            None => drop(self.elements.remove(&place)),
        }
    }

    /// Adds what a part of a policy allows, or takes it back.
    pub(super) fn allow(&mut self, grant: Grant, there: bool) {
        let Grant {
            direction,
            pod,
            number,
            ports,
        } = grant;
        let place = match ports {
            None => (PolicySet::All(direction), Key::Grant(pod, number)),
            Some((protocol, first, last)) if first == last => {
                let key = Key::GrantPort(pod, number, protocol, first);
                (PolicySet::Ports(direction), key)
            }
            Some((protocol, first, last)) => {
                let neighbours = (direction, pod, number, protocol);
                return self.range(neighbours, (first, last), there);
            }
        };
        self.count(place, None, there);
    }

    fn range(&mut self, neighbours: Neighbours, range: (u16, u16), there: bool) {
        let ranges = self.ranges.entry(neighbours).or_default();
        let old = unions(ranges);
        let at = ranges.iter().position(|(other, _)| *other == range);
        match (at, there) {
            (Some(at), true) => ranges[at].1 += 1,
            (None, true) => ranges.push((range, 1)),
            (Some(at), false) if ranges[at].1 > 1 => ranges[at].1 -= 1,
            (Some(at), false) => drop(ranges.swap_remove(at)),
            (None, false) => {}
        }
        let new = unions(ranges);
        if ranges.is_empty() {
            self.ranges.remove(&neighbours);
        }
        let (direction, pod, number, protocol) = neighbours;
        let place = |(first, last)| {
            let key = Key::GrantPorts(pod, number, protocol, first, last);
            (PolicySet::Ranges(direction), key)
        };
        for gone in old.iter().filter(|range| !new.contains(range)) {
            self.remove(place(*gone));
        }
        for come in new.iter().filter(|range| !old.contains(range)) {
            self.add(place(*come), None);
        }
    }

    /// Returns whether a port is in a range that a Pod may use.
    pub(super) fn in_range(&self, neighbours: Neighbours, port: u16) -> bool {
        self.ranges
            .get(&neighbours)
            .into_iter()
            .flatten()
            .any(|((first, last), _)| (*first..=*last).contains(&port))
    }
}

/// Returns the fewest ranges that cover the same ports, without those that only touch.
fn unions(ranges: &[CountedRange]) -> Vec<(u16, u16)> {
    let mut sorted: Vec<(u16, u16)> = ranges.iter().map(|(range, _)| *range).collect();
    sorted.sort_unstable();
    let mut unions: Vec<(u16, u16)> = Vec::with_capacity(sorted.len());
    for (first, last) in sorted {
        match unions.last_mut() {
            Some(union) if first <= union.1 => union.1 = union.1.max(last),
            _ => unions.push((first, last)),
        }
    }
    unions
}
