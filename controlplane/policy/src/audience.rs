//! Nodes that have an object of their own.

use std::collections::HashMap;

use kplane_model::{NodeName, PolicyKey, PolicyObject};

use crate::PolicyChanges;
use crate::uses::Uses;

/// The nodes that have an object, and how many reasons each has for it.
#[derive(Debug, Default)]
pub(crate) struct Audience {
    nodes: Uses<NodeName>,
    /// Nodes whose first reason came, or whose last one went, and whether they had the object at the last call of `take`.
    had: HashMap<NodeName, bool>,
}

/// The nodes that have an object now, or had it at the last call of `take`.
#[derive(Debug)]
pub(crate) struct Moves {
    /// Those that did not have it.
    pub(crate) came: Vec<NodeName>,
    pub(crate) stayed: Vec<NodeName>,
    /// Those that do not have it any more.
    pub(crate) left: Vec<NodeName>,
}

impl Audience {
    pub(crate) fn add(&mut self, node: &NodeName) {
        if self.nodes.add(node) {
            self.had.entry(node.clone()).or_insert(false);
        }
    }

    pub(crate) fn remove(&mut self, node: &NodeName) {
        if self.nodes.remove(node) {
            self.had.entry(node.clone()).or_insert(true);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Returns how the nodes changed since the last call.
    pub(crate) fn take(&mut self) -> Moves {
        let had = std::mem::take(&mut self.had);
        let stayed = self
            .nodes
            .iter()
            .filter(|node| had.get(*node) != Some(&false))
            .cloned()
            .collect();
        let (before, new): (Vec<_>, Vec<_>) = had.into_iter().partition(|(_, had)| *had);
        let name = |(node, _): (NodeName, bool)| node;
        Moves {
            came: new.into_iter().map(name).filter(|node| self.nodes.has(node)).collect(),
            stayed,
            left: before.into_iter().map(name).filter(|node| !self.nodes.has(node)).collect(),
        }
    }
}

impl Moves {
    /// Returns the nodes that have the object now.
    pub(crate) fn now(&self) -> impl Iterator<Item = &NodeName> {
        self.came.iter().chain(&self.stayed)
    }

    /// Returns the nodes that had the object.
    pub(crate) fn before(&self) -> impl Iterator<Item = &NodeName> {
        self.stayed.iter().chain(&self.left)
    }

    /// Returns whether other nodes have the object than before.
    pub(crate) fn differ(&self) -> bool {
        !self.came.is_empty() || !self.left.is_empty()
    }

    /// Publishes an object (`None` = it is gone) to the nodes that lack it, and takes it from those that have it and should
    /// not. `was` says whether it was there, and whether as it is now.
    pub(crate) fn publish(
        &self,
        changes: &mut PolicyChanges,
        key: PolicyKey,
        (was, object): (Was, Option<PolicyObject>),
    ) {
        let gone: Vec<_> = match (was, &object) {
            (Was::Absent, _) => Vec::new(),
            (_, None) => self.before().cloned().collect(),
            (_, Some(_)) => self.left.clone(),
        };
        changes.push_own(key.clone(), None, gone);
        if let Some(object) = object {
            let nodes = match was {
                Was::Same => self.came.clone(),
                Was::Absent | Was::Other => self.now().cloned().collect(),
            };
            changes.push_own(key, Some(object), nodes);
        }
    }
}

/// What an object was at the last call of `take`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Was {
    Absent,
    Same,
    Other,
}

impl Was {
    /// Compares an object, or its digest, with that of before.
    pub(crate) fn of<T: PartialEq>(before: Option<&T>, now: Option<&T>) -> Self {
        match before {
            None => Self::Absent,
            _ if before == now => Self::Same,
            Some(_) => Self::Other,
        }
    }
}
