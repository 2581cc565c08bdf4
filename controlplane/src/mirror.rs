//! The mirror: what a relay knows of the picture of the control plane that it follows. It takes the place of the index.
//!
//! The store holds the objects, as the other control plane encoded them. The mirror remembers their names, and decides
//! which of them stay although a later picture lacks them (invariant: absence). It is synchronous and does no I/O.

mod book;
mod kept;
mod view;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Instant, SystemTime};

use kplane_model::{Cidr, Issue, NodeFacts, NodeName, Reason, ServiceKey};

use self::book::Book;
use self::kept::{Cause, Kept};
use crate::freshness::Freshness;
use crate::index::{CliffGuard, Held, Loss, Picture, Totals};
use crate::publish::{PortChange, Relayed};
use crate::source::relayed::Heard;
use crate::source::{Batch, Event};
use crate::trust::Trust;

/// The names of another control plane's objects, and what is kept of them.
#[derive(Debug)]
pub struct Mirror {
    guard: CliffGuard,
    book: Book,
    nodes: BTreeSet<NodeName>,
    service_cidrs: Vec<Cidr>,
    /// A complete picture has been read.
    synced: bool,
    kept: Option<Kept>,
    /// Trust of the other control plane in its picture.
    trust: Trust,
    /// The trust that the operator of this control plane has confirmed.
    answered: Option<Trust>,
    freshness: Freshness,
    current_at: Instant,
    /// Problems with the way to the other control plane.
    issues: Vec<Issue>,
}

/// The result of a batch.
#[derive(Debug, Default)]
pub struct Reflection {
    /// Changes to publish.
    pub publication: Option<Relayed>,
    /// The list of issues changed.
    pub issues_changed: bool,
    /// The set of kept objects changed.
    pub held_changed: bool,
    /// More objects are kept; another list of the origin could confirm that they are gone.
    pub held_more: bool,
}

/// Changes of ServicePorts and nodes that are to be published.
#[derive(Debug, Default)]
struct Changes {
    ports: BTreeMap<ServiceKey, Option<PortChange>>,
    nodes: BTreeMap<NodeName, Option<NodeFacts>>,
}

impl Mirror {
    /// Creates a mirror that has heard nothing.
    #[must_use]
    pub fn new(guard: CliffGuard) -> Self {
        Self {
            guard,
            book: Book::default(),
            nodes: BTreeSet::new(),
            service_cidrs: Vec::new(),
            synced: false,
            kept: None,
            trust: Trust::default(),
            answered: None,
            freshness: Freshness::default(),
            current_at: Instant::now(),
            issues: Vec::new(),
        }
    }

    /// Returns whether a complete picture has been read.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.synced
    }

    /// Returns the totals of what is published.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.book.totals()
    }

    /// Returns the versions of the source that the picture contains.
    #[must_use]
    pub fn freshness(&self) -> &Freshness {
        &self.freshness
    }

    /// Returns the time at which the control plane that reads the objects was last in touch with their origin. Before
    /// anything was heard, this is the time of the start.
    #[must_use]
    pub fn current_at(&self) -> Instant {
        self.current_at
    }

    /// Returns the trust in the picture: that of the other control plane, unless the operator has confirmed it here.
    #[must_use]
    pub fn trust(&self) -> Trust {
        match self.answered.as_ref() == Some(&self.trust) {
            true => Trust::Confirmed,
            false => self.trust.clone(),
        }
    }

    /// Returns a summary of the objects that are published although the other control plane does not have them.
    #[must_use]
    pub fn held(&self) -> Option<Held> {
        self.kept.as_ref().map(|kept| kept.describe(&self.book))
    }

    /// Returns whether an approval would change anything.
    #[must_use]
    pub fn needs_approval(&self) -> bool {
        self.synced && (self.kept.is_some() || self.trust() != Trust::Confirmed)
    }

    /// Returns the part of the picture that an approval names. Only relays have the same names in it.
    #[must_use]
    pub fn picture(&self) -> Picture {
        let kept = self.kept.as_ref();
        let ports = kept.into_iter().flat_map(|kept| kept.ports.keys());
        let nodes = kept.into_iter().flat_map(|kept| &kept.nodes);
        let names = ports.map(ToString::to_string);
        let names = names.chain(nodes.map(|node| format!("Node {node}")));
        let unnamed = self.held().map_or(0, |held| held.services);
        let services = self.totals().services.saturating_sub(unnamed);
        let trust = self.trust();
        let doubt = Some(trust.doubt()).filter(|doubt| !doubt.is_empty());
        Picture::new(names, doubt, services)
    }

    /// Returns all problems, sorted.
    #[must_use]
    pub fn issues(&self) -> Vec<Issue> {
        let held = self
            .held()
            .map(|held| Issue::of_source(Reason::Held, held.to_string()));
        let mut issues: Vec<_> = self.issues.iter().cloned().chain(held).collect();
        issues.sort();
        issues
    }

    /// Applies a batch.
    pub fn apply(&mut self, batch: Batch) -> Reflection {
        let mut reflection = Reflection::default();
        for event in batch.events {
            match event {
                Event::Relayed(heard) => self.hear(*heard, &mut reflection),
                Event::Issues(issues) => {
                    reflection.issues_changed |= issues != self.issues;
                    self.issues = issues;
                }
                // Other sources.
                _ => {}
            }
        }
        reflection.issues_changed |= reflection.held_changed;
        reflection
    }

    /// Removes everything that is kept, because the operator has confirmed the picture. Returns what was kept.
    pub fn approve(&mut self, at: SystemTime) -> (Option<Held>, Reflection) {
        let held = self.held();
        self.answered = Some(self.trust.clone());
        let mut reflection = Reflection::default();
        let mut changes = Changes::default();
        self.release(&mut changes, &mut reflection);
        reflection.issues_changed = reflection.held_changed;
        reflection.publication = self.publish(changes, None, at);
        (held, reflection)
    }

    /// Takes in what the other control plane said.
    fn hear(&mut self, heard: Heard, reflection: &mut Reflection) {
        let Heard {
            snapshot,
            ports,
            nodes,
            unread_nodes,
            service_cidrs,
            changed_at,
            triggers,
            trust,
            freshness,
            current_at,
        } = heard;
        self.trust = trust;
        self.freshness = freshness;
        self.current_at = current_at;
        let mut changes = Changes { ports, nodes };
        if snapshot {
            self.compare(&mut changes, &unread_nodes, reflection);
        } else {
            self.let_through(&mut changes, reflection);
        }
        self.reconsider(&mut changes, reflection);
        let cidrs = (service_cidrs != self.service_cidrs || !self.synced).then_some(service_cidrs);
        reflection.publication = self.publish(changes, cidrs, changed_at);
        if let Some(relayed) = &mut reflection.publication {
            relayed.triggers = triggers;
        }
        self.synced = true;
    }

    /// Compares a new picture with what is published, and decides what becomes of everything that it lacks.
    fn compare(
        &mut self,
        changes: &mut Changes,
        unread_nodes: &BTreeSet<NodeName>,
        reflection: &mut Reflection,
    ) {
        let kept_before = self.kept.take();
        let gone = self
            .book
            .keys()
            .filter(|key| !changes.ports.contains_key(key));
        let gone: BTreeSet<ServiceKey> = gone.cloned().collect();
        let bare = self.book.emptied_by(&changes.ports);
        let is_there =
            |node: &&NodeName| changes.nodes.contains_key(*node) || unread_nodes.contains(*node);
        let nodes: BTreeSet<NodeName> = self
            .nodes
            .iter()
            .filter(|node| !is_there(node))
            .cloned()
            .collect();
        let mut lost = Kept::new(SystemTime::now());
        for key in gone {
            lost.ports.insert(key, None);
        }
        for key in bare {
            let change = changes.ports.remove(&key);
            lost.ports.insert(key, change.flatten());
        }
        lost.nodes = nodes;
        if let Some(before) = &kept_before {
            lost.since = before.since;
        }
        self.kept = Some(lost).filter(|lost| !lost.is_empty());
        reflection.held_changed |= kept_before.is_some();
    }

    /// Takes single changes of what is kept: the other control plane has an object again, or deleted it by name.
    fn let_through(&mut self, changes: &mut Changes, reflection: &mut Reflection) {
        let Some(kept) = &mut self.kept else {
            return;
        };
        reflection.held_changed |= kept.let_through(&mut changes.ports);
        for node in changes.nodes.keys() {
            reflection.held_changed |= kept.nodes.remove(node);
        }
        self.kept.take_if(|kept| kept.is_empty());
    }

    /// Decides whether what the picture lacks is kept, by the trust in the picture.
    fn reconsider(&mut self, changes: &mut Changes, reflection: &mut Reflection) {
        let Some(kept) = &mut self.kept else {
            return;
        };
        let is_answered = self.answered.as_ref() == Some(&self.trust);
        let cause = match &self.trust {
            Trust::Confirmed => None,
            Trust::Partial(doubt) if !is_answered => Some(Cause::Doubt(doubt.clone())),
            Trust::Partial(_) | Trust::Whole if self.guard.guards_absence() => {
                let loss = Loss {
                    nodes: kept.nodes.len(),
                    of_nodes: self.nodes.len(),
                    ..self.book.loss(kept)
                };
                self.guard.cliff(loss).map(Cause::Cliff)
            }
            Trust::Partial(_) | Trust::Whole => None,
        };
        let Some(cause) = cause else {
            self.release(changes, reflection);
            return;
        };
        let is_new = kept.explain(cause);
        reflection.held_changed |= is_new;
        reflection.held_more |= is_new;
    }

    /// Lets go of everything that is kept.
    fn release(&mut self, changes: &mut Changes, reflection: &mut Reflection) {
        let Some(kept) = self.kept.take() else {
            return;
        };
        reflection.held_changed |= kept.cause.is_some();
        changes.ports.extend(kept.ports);
        let nodes = kept.nodes.into_iter();
        changes.nodes.extend(nodes.map(|node| (node, None)));
    }

    /// Records what is about to be published.
    fn publish(
        &mut self,
        changes: Changes,
        service_cidrs: Option<Vec<Cidr>>,
        observed_at: SystemTime,
    ) -> Option<Relayed> {
        if changes.ports.is_empty() && changes.nodes.is_empty() && service_cidrs.is_none() {
            return None;
        }
        for (key, change) in &changes.ports {
            self.book.note(key, change.as_ref());
        }
        if let Some(cidrs) = &service_cidrs {
            self.service_cidrs.clone_from(cidrs);
        }
        let mut nodes = Vec::with_capacity(changes.nodes.len());
        for (name, facts) in changes.nodes {
            match &facts {
                Some(_) => drop(self.nodes.insert(name.clone())),
                None => drop(self.nodes.remove(&name)),
            }
            // A node without a Node object does not count as being drained.
            nodes.push(facts.unwrap_or_else(|| NodeFacts {
                name,
                eligible: true,
                ..NodeFacts::default()
            }));
        }
        Some(Relayed {
            ports: changes.ports,
            nodes,
            service_cidrs,
            observed_at,
            triggers: Vec::new(),
        })
    }
}
