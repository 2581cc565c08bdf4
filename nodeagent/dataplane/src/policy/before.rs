//! The elements of a content, now and before a change.

use std::collections::BTreeSet;

use super::content::Content;
use super::held::{ElementChange, element};
use crate::backend::nftables::{Contents, Element, Key, Set};

impl Contents for Content {
    fn elements(&self) -> BTreeSet<Element> {
        self.held
            .all()
            .map(|(place, value)| element(place, value))
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
        let mut changes = self.changes.iter();
        match changes.find(|change| (Set::Policy(change.place.0), change.place.1) == (set, key)) {
            Some(change) => change.before.map(|before| element(change.place, before)),
            None => self.content.element(set, key),
        }
    }
}
