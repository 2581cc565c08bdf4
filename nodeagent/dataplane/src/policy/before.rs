//! The elements of a content, now and before a change.

use std::collections::{BTreeMap, BTreeSet};

use super::content::Content;
use super::held::{ElementChange, element};
use crate::backend::nftables::{Contents, Element, Key, PolicySet, Set};

impl Contents for Content {
    fn elements(&self) -> BTreeSet<Element> {
        self.held.all().map(|(place, value)| element(place, value)).collect()
    }

    /// A node may have hundreds of thousands: to sort them all takes longer than anything else but the kernel. If one
    /// transaction cannot have them all, what closes comes first, and Pods become known last: a Pod that is unknown in a
    /// range of this node is closed.
    fn by_set(&self) -> Vec<Element> {
        let turn = |set: PolicySet| match set {
            PolicySet::LocalPods => 2,
            _ => u8::from(!set.closes()),
        };
        let mut sets = BTreeMap::<(u8, PolicySet), Vec<Element>>::new();
        for (place, value) in self.held.all() {
            let elements = sets.entry((turn(place.0), place.0)).or_default();
            elements.push(element(place, value));
        }
        let is_range = |element: &Element| {
            let key = element.key;
            matches!(
                key,
                Key::Range(_) | Key::Span(..) | Key::GrantPorts(..) | Key::Row(..)
            )
        };
        let mut all = Vec::with_capacity(self.held.len());
        for (_, mut elements) in sets {
            if elements.first().is_some_and(is_range) {
                elements.sort_unstable();
            }
            all.append(&mut elements);
        }
        all
    }

    /// A Pod that only tiers restrict is open until all that they say is there, so it is isolated meanwhile.
    fn closing(&self) -> Vec<Element> {
        self.held
            .all()
            .filter_map(|((set, key), _)| match set {
                PolicySet::Tiered(direction) => Some((PolicySet::Isolated(direction), key)),
                _ => None,
            })
            .filter(|(set, key)| !self.held.has(*set, *key))
            .map(|place| element(place, None))
            .collect()
    }

    fn element(&self, set: Set, key: Key) -> Option<Element> {
        let Set::Policy(set) = set else { return None };
        let value = self.held.get((set, key))?;
        Some(element((set, key), value))
    }
}

/// The content before a change that it has taken over.
#[derive(Debug)]
pub(super) struct Before<'a> {
    pub(super) content: &'a Content,
    pub(super) changes: &'a [ElementChange],
}

impl Contents for Before<'_> {
    fn elements(&self) -> BTreeSet<Element> {
        let mut elements = self.content.elements();
        for change in self.changes {
            if let Some(after) = change.after {
                elements.remove(&element(change.place, after));
            }
            elements.extend(change.before.map(|before| element(change.place, before)));
        }
        elements
    }

    fn element(&self, set: Set, key: Key) -> Option<Element> {
        match self
            .changes
            .iter()
            .find(|change| (Set::Policy(change.place.0), change.place.1) == (set, key))
        {
            Some(change) => change.before.map(|before| element(change.place, before)),
            None => self.content.element(set, key),
        }
    }
}
