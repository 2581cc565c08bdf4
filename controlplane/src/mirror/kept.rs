//! What stays published although the other control plane's picture lacks it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::SystemTime;

use kplane_model::{NodeName, ServiceKey};

use super::book::Book;
use crate::index::{EXAMPLES, Held};
use crate::publish::PortChange;

/// The reason why absence is not believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// The source was not read completely.
    Doubt(Arc<str>),
    /// Too much would go at once.
    Cliff(String),
}

/// Everything that the picture lacks and that is still published.
#[derive(Debug)]
pub(super) struct Kept {
    /// ServicePorts, with their state in the picture: gone, or without the endpoints that they had.
    pub(super) ports: BTreeMap<ServiceKey, Option<PortChange>>,
    pub(super) nodes: BTreeSet<NodeName>,
    /// The reason; `None` until it has been decided that they stay.
    pub(super) cause: Option<Cause>,
    pub(super) since: SystemTime,
}

impl Kept {
    pub(super) fn new(since: SystemTime) -> Self {
        Self {
            ports: BTreeMap::new(),
            nodes: BTreeSet::new(),
            cause: None,
            since,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ports.is_empty() && self.nodes.is_empty()
    }

    /// Sets the reason; returns whether it is another one.
    pub(super) fn explain(&mut self, cause: Cause) -> bool {
        let cause = Some(cause);
        let is_new = self.cause != cause;
        self.cause = cause;
        is_new
    }

    /// Takes single changes: those of ServicePorts that stay without their endpoints in the picture are taken out of
    /// `changes`, and all others end what is kept. Returns whether something is kept no more.
    pub(super) fn let_through(
        &mut self,
        changes: &mut BTreeMap<ServiceKey, Option<PortChange>>,
    ) -> bool {
        let ours = changes.keys().filter(|key| self.ports.contains_key(*key));
        let ours: Vec<ServiceKey> = ours.cloned().collect();
        let mut released = false;
        for key in ours {
            let picture = self.ports.remove(&key).flatten();
            let Some(Some(change)) = changes.get_mut(&key) else {
                // It was deleted by name.
                released = true;
                continue;
            };
            let was_there = picture.is_some();
            let mut whole = picture.unwrap_or_default();
            whole.merge(std::mem::take(change));
            whole.whole = true;
            let program = whole.program.as_ref();
            if program.is_some_and(|program| program.has_any || !was_there) {
                *change = whole;
                released = true;
            } else {
                changes.remove(&key);
                self.ports.insert(key, was_there.then_some(whole));
            }
        }
        released
    }

    pub(super) fn describe(&self, book: &Book) -> Held {
        let (gone, bare) = book.lost(self);
        let mut examples: Vec<_> = gone.iter().chain(&bare).take(EXAMPLES).copied().collect();
        examples.sort();
        let reason = match &self.cause {
            Some(Cause::Doubt(doubt)) => Arc::clone(doubt),
            Some(Cause::Cliff(cliff)) => format!(
                "they are missing from the picture of the control plane that this relay follows, and {cliff}"
            )
            .into(),
            None => "".into(),
        };
        Held {
            services: gone.len(),
            without_endpoints: bare.len(),
            reason,
            since: self.since,
            examples: examples.into_iter().cloned().collect(),
        }
    }
}
