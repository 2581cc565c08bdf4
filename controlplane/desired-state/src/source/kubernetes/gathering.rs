//! A complete list in progress.
//!
//! The very first list is passed on as it arrives, because there is nothing that it could damage.
//! Of later lists, only objects that differ from the known ones are kept until the list is complete
//! and believed. Then only the differences are passed on.

use super::memory::{Census, Memory};
use super::transport::{ObjectPage, Unreadable};
use crate::k8s::{Kind, Object};
use crate::source::{Event, Located};

/// A list that is not complete yet.
#[derive(Debug, Default)]
pub(super) struct Gathering {
    /// This is the very first list, which is passed on at once.
    direct: bool,
    named: Census,
    /// Objects that differ from the known ones.
    differing: Vec<Object>,
    unreadable: Vec<Unreadable>,
    /// The newest resource version among the objects.
    changed: u64,
}

impl Gathering {
    /// Begins a list.
    pub(super) fn new(memory: &Memory) -> Self {
        Self {
            direct: memory.seen() == 0,
            ..Self::default()
        }
    }

    /// Returns the events at the beginning of the list.
    pub(super) fn begin(&self, kind: Kind) -> Vec<Event> {
        Vec::from_iter(self.direct.then_some(Event::Init(kind)))
    }

    /// Takes in a page; returns the events to pass on at once.
    pub(super) fn page(&mut self, memory: &Memory, page: ObjectPage) -> Vec<Event> {
        self.unreadable.extend(page.unreadable);
        self.changed = self.changed.max(page.changed);
        page.objects.into_iter().filter_map(|object| self.put(memory, object)).collect()
    }

    fn put(&mut self, memory: &Memory, object: Object) -> Option<Event> {
        let news = memory.note(&mut self.named, &object);
        if self.direct {
            return Some(Event::InitApply(located(object)));
        }
        if news {
            self.differing.push(object);
        }
        None
    }

    /// Completes the list. Returns the objects that it names; objects that cannot be read keep
    /// their known state.
    pub(super) fn complete(&mut self, memory: &Memory) -> &Census {
        memory.keep(&mut self.named, &self.unreadable);
        &self.named
    }

    /// Returns whether this is the very first list.
    pub(super) fn is_first(&self) -> bool {
        self.direct
    }

    /// Returns the number of objects that the list names.
    pub(super) fn len(&self) -> usize {
        self.named.len()
    }

    /// Accepts the list; returns the events for its changes, and the objects that cannot be read.
    /// Removed objects come last, so that nothing is removed before its replacement exists. The
    /// list confirms that objects which earlier lists lacked are gone; if `confirmed`, also objects
    /// that it lacks itself.
    pub(super) fn accept(
        self,
        kind: Kind,
        memory: &mut Memory,
        version: u64,
        confirmed: bool,
    ) -> (Vec<Event>, Vec<Unreadable>) {
        let events = if self.direct {
            vec![Event::InitDone(kind)]
        } else {
            let missing = memory.missing(&self.named);
            let vanished = (!missing.is_empty()).then_some(Event::Vanished(missing));
            let looked = Some(Event::Looked(kind));
            let (first, second) = if confirmed { (vanished, looked) } else { (looked, vanished) };
            applied(self.differing).chain(first).chain(second).collect()
        };
        memory.replace(version, self.changed, self.named);
        (events, self.unreadable)
    }

    /// Accepts only the objects that the list names; missing ones stay.
    pub(super) fn additions(self, memory: &mut Memory) -> Vec<Event> {
        for object in &self.differing {
            memory.put(object);
        }
        applied(self.differing).collect()
    }
}

fn applied(objects: Vec<Object>) -> impl Iterator<Item = Event> {
    objects.into_iter().map(|object| Event::Apply(located(object)))
}

/// Wraps an object; objects of this source have no place but their name.
pub(super) fn located(object: Object) -> Box<Located> {
    Box::new(Located {
        object,
        location: "".into(),
    })
}

#[cfg(test)]
mod tests;
