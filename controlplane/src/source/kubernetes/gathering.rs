//! A complete list on its way.
//!
//! The first list of all is handed on as it comes: there is nothing that it could damage. Of later
//! ones only objects that differ from what is known are held, until the list is complete and
//! believed; then the differences are told, and nothing else.

use std::collections::BTreeMap;

use super::memory::{Census, Memory};
use super::transport::{Page, Said, Unreadable};
use crate::k8s::{Kind, Object, ObjectId};
use crate::source::{Event, Located};

/// A list that is not complete yet.
#[derive(Debug, Default)]
pub(super) struct Gathering {
    /// The first of all: handed on already.
    direct: bool,
    named: Census,
    /// What the list shows otherwise than it is known. While a streaming list comes the world goes
    /// on, so an object may come several times.
    differing: BTreeMap<ObjectId, Object>,
    unreadable: Vec<Unreadable>,
}

impl Gathering {
    /// Begins a list.
    pub(super) fn new(memory: &Memory) -> Self {
        Self {
            direct: memory.seen() == 0,
            ..Self::default()
        }
    }

    /// What to tell at the beginning.
    pub(super) fn begin(&self, kind: Kind) -> Vec<Event> {
        Vec::from_iter(self.direct.then_some(Event::Init(kind)))
    }

    /// Takes in a page; returns what is to be told at once.
    pub(super) fn page(&mut self, memory: &Memory, page: Page) -> Vec<Event> {
        self.unreadable.extend(page.unreadable);
        let puts = page.objects.into_iter();
        puts.filter_map(|object| self.put(memory, object)).collect()
    }

    /// Takes in a part of a streaming list; returns what is to be told at once.
    pub(super) fn said(&mut self, memory: &Memory, said: Said) -> Option<Event> {
        match said {
            Said::Put(object, _) => self.put(memory, object),
            Said::Gone(id, _) => {
                self.named.strike(&id);
                self.differing.remove(&id);
                self.unreadable.retain(|one| !one.is(&id));
                self.direct.then_some(Event::Delete(id))
            }
            Said::Unreadable(unreadable, _) => {
                self.unreadable.push(unreadable);
                None
            }
            Said::Bookmark { .. } => None,
        }
    }

    fn put(&mut self, memory: &Memory, object: Object) -> Option<Event> {
        let id = object.id();
        let news = memory.note(&mut self.named, &object);
        self.unreadable.retain(|one| !one.is(&id));
        if self.direct {
            return Some(Event::InitApply(located(object)));
        }
        if news {
            self.differing.insert(id, object);
        } else {
            self.differing.remove(&id);
        }
        None
    }

    /// The list is complete. Returns what it names; what cannot be read stays as it is known.
    pub(super) fn complete(&mut self, memory: &Memory) -> &Census {
        memory.keep(&mut self.named, &self.unreadable);
        &self.named
    }

    /// It is the first of all.
    pub(super) fn is_first(&self) -> bool {
        self.direct
    }

    /// Objects that it names.
    pub(super) fn len(&self) -> usize {
        self.named.len()
    }

    /// The list counts: what it changes, and what cannot be read. What is gone comes last, so that
    /// nothing is taken away before its replacement is there; it is a second look at what others before
    /// it lacked, and at what it lacks itself if it is `confirmed`.
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
            let (first, second) = match confirmed {
                true => (vanished, looked),
                false => (looked, vanished),
            };
            applied(self.differing).chain(first).chain(second).collect()
        };
        memory.replace(version, self.named);
        (events, self.unreadable)
    }

    /// The list counts for what it names, not for what it lacks.
    pub(super) fn additions(self, memory: &mut Memory) -> Vec<Event> {
        for object in self.differing.values() {
            memory.put(object);
        }
        applied(self.differing).collect()
    }
}

fn applied(objects: BTreeMap<ObjectId, Object>) -> impl Iterator<Item = Event> {
    let objects = objects.into_values();
    objects.map(|object| Event::Apply(located(object)))
}

/// An object of this source: it has no place but its name.
pub(super) fn located(object: Object) -> Box<Located> {
    Box::new(Located {
        object,
        location: "".into(),
    })
}

#[cfg(test)]
mod tests;
