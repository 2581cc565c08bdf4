//! A visit to the connections and flows of a thread, a few at a time, so that data does not wait for it.

use std::fmt;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use kplane_model::{ProxyConnection, ServiceKey};

use super::{Command, Owner, Worker};

/// Places of connections and flows that a step visits: less than 0.1 ms if all are wanted.
const AT_ONCE: usize = 64;

/// The action for each connection, with the index of its ServicePort in the question.
pub(crate) type Show = Box<dyn Fn(usize, ProxyConnection) + Send + Sync>;

/// The question of a visit.
pub(crate) struct Look {
    pub(crate) keys: Vec<ServiceKey>,
    pub(crate) until: Instant,
    pub(crate) each: Show,
}

/// A visit that goes on from a place. Its end drops `_done`.
#[derive(Clone)]
pub(crate) struct Visit {
    pub(crate) look: Arc<Look>,
    pub(crate) from: usize,
    pub(crate) _done: mpsc::Sender<()>,
}

impl fmt::Debug for Visit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Visit");
        text.field("from", &self.from).finish_non_exhaustive()
    }
}

impl Worker {
    /// Visits some places, and comes back for the rest when events had their turn.
    pub(super) fn visit(&self, visit: Visit) {
        let look = &visit.look;
        let end = visit.from.saturating_add(AT_ONCE);
        let show = |key: &ServiceKey, shown: Option<ProxyConnection>| {
            let index = look.keys.iter().position(|wanted| wanted == key);
            if let (Some(index), Some(shown)) = (index, shown) {
                (look.each)(index, shown);
            }
        };
        let is_wanted = |key: &ServiceKey| look.keys.contains(key);
        for place in visit.from..end {
            match self.slots.get(place).map(|slot| &slot.entry) {
                Some(Owner::Pair(pair)) if is_wanted(pair.key()) => {
                    show(pair.key(), pair.shown(&self.core));
                }
                Some(Owner::Connecting(of)) if is_wanted(of.key()) => {
                    show(of.key(), of.shown(&self.core));
                }
                _ => {}
            }
            if let Some((key, flow)) = self.flows.shown(&self.core, place) {
                show(key, Some(flow));
            }
        }
        let all = self.slots.capacity().max(self.flows.places());
        if end < all && Instant::now() < look.until {
            let rest = Visit { from: end, ..visit };
            self.core.shared.inboxes[self.core.index].send(Command::Visit(rest));
        }
    }
}
