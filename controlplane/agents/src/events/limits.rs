//! Limits on the number of events, so that neither one object nor all together fill the API server.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::{Event, Object};

/// Maximum number of events of one object in a burst, and the time until one more is allowed, as in
/// client-go.
const OBJECT_BURST: u32 = 25;
const OBJECT_REFILL: Duration = Duration::from_secs(300);
/// Maximum number of objects whose events are counted. Above it, the objects that were quiet for
/// longest are forgotten.
const OBJECTS: usize = 4_096;
/// Maximum number of events that wait for the API server. About 1 kB each.
const QUEUE: usize = 1_000;

/// A bounded queue of events that wait.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: VecDeque<Event>,
    spent: HashMap<Object, Bucket>,
    /// Number of events that were refused since the start.
    pub(super) dropped: u64,
}

/// A bucket that is not full.
#[derive(Debug)]
struct Bucket {
    tokens: u32,
    since: Instant,
}

impl Bucket {
    fn refill(&mut self, now: Instant) {
        let steps = now.saturating_duration_since(self.since).as_secs() / OBJECT_REFILL.as_secs();
        let steps = u32::try_from(steps).unwrap_or(u32::MAX);
        self.tokens = self.tokens.saturating_add(steps).min(OBJECT_BURST);
        // The age of the machine bounds the result, so it cannot overflow.
        self.since += OBJECT_REFILL * steps.min(OBJECT_BURST);
        if self.tokens == OBJECT_BURST {
            self.since = now;
        }
    }
}

impl Queue {
    /// Adds an event to the queue, or counts it as dropped.
    pub(super) fn push(&mut self, event: Event, now: Instant) {
        if self.waiting.len() >= QUEUE || !self.spend(&event.object, now) {
            self.dropped += 1;
            return;
        }
        self.waiting.push_back(event);
    }

    /// Takes the next event.
    pub(super) fn pop(&mut self) -> Option<Event> {
        self.waiting.pop_front()
    }

    /// Puts back an event that could not be written.
    pub(super) fn put_back(&mut self, event: Event) {
        self.waiting.push_front(event);
    }

    /// Returns whether the queue is empty.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    fn spend(&mut self, object: &Object, now: Instant) -> bool {
        if !self.spent.contains_key(object) {
            self.forget(now);
        }
        let full = Bucket {
            tokens: OBJECT_BURST,
            since: now,
        };
        let bucket = self.spent.entry(object.clone()).or_insert(full);
        bucket.refill(now);
        let Some(rest) = bucket.tokens.checked_sub(1) else {
            return false;
        };
        bucket.tokens = rest;
        true
    }

    /// Makes room for one more object.
    fn forget(&mut self, now: Instant) {
        if self.spent.len() < OBJECTS {
            return;
        }
        self.spent.retain(|_, bucket| {
            bucket.refill(now);
            bucket.tokens < OBJECT_BURST
        });
        while self.spent.len() >= OBJECTS {
            let quietest = self.spent.iter().max_by_key(|(_, bucket)| bucket.tokens);
            let Some(object) = quietest.map(|(object, _)| object.clone()) else {
                return;
            };
            self.spent.remove(&object);
        }
    }
}
