//! A complete list on its way.
//!
//! The first list of all is handed on as it comes: there is nothing that it could damage. Later
//! ones are held back until they are complete and believed.

use super::memory::{Census, Memory};
use super::transport::{Page, Said, Unreadable};
use crate::k8s::{Kind, Object, ObjectId};
use crate::source::{Event, Located};

/// A change within a list: while a streaming list comes, the world goes on.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all are objects")]
enum Change {
    Put(Object),
    Gone(ObjectId),
}

/// A list that is not complete yet.
#[derive(Debug, Default)]
pub(super) struct Gathering {
    /// Handed on already.
    direct: bool,
    named: Census,
    held: Vec<Change>,
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
                memory.strike(&mut self.named, &id);
                if self.direct {
                    return Some(Event::Delete(id));
                }
                self.held.push(Change::Gone(id));
                None
            }
            Said::Unreadable(unreadable, _) => {
                self.unreadable.push(unreadable);
                None
            }
            Said::Bookmark { .. } => None,
        }
    }

    fn put(&mut self, memory: &Memory, object: Object) -> Option<Event> {
        memory.note(&mut self.named, &object.id());
        if self.direct {
            return Some(Event::InitApply(located(object)));
        }
        self.held.push(Change::Put(object));
        None
    }

    /// What the list names.
    pub(super) fn named(&self) -> &Census {
        &self.named
    }

    /// The list counts.
    pub(super) fn accept(self, kind: Kind) -> (Census, Vec<Unreadable>, Vec<Event>) {
        let mut events = Vec::with_capacity(self.held.len() + 2);
        if !self.direct {
            events.push(Event::Init(kind));
        }
        events.extend(self.held.into_iter().map(|change| match change {
            Change::Put(object) => Event::InitApply(located(object)),
            Change::Gone(id) => Event::Delete(id),
        }));
        events.push(Event::InitDone(kind));
        (self.named, self.unreadable, events)
    }

    /// The list counts for what it names, not for what it lacks.
    pub(super) fn additions(self, memory: &mut Memory) -> Vec<Event> {
        let objects = self.held.into_iter().filter_map(|change| match change {
            Change::Put(object) => Some(object),
            Change::Gone(_) => None,
        });
        objects
            .map(|object| {
                memory.put(&object.id());
                Event::Apply(located(object))
            })
            .collect()
    }
}

/// An object of this source: it has no place but its name.
pub(super) fn located(object: Object) -> Box<Located> {
    Box::new(Located {
        object,
        location: "".into(),
    })
}
