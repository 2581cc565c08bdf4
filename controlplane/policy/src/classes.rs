//! Classes of Pods that no rule can tell apart.
//!
//! A class follows from its Pods alone. So no policy, whosever it is, changes the class of a Pod.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use kplane_model::{NamedPort, PeerClass, PeerId};

use crate::identity::{Encoding, Kind, namespace_id};
use crate::pods::PodEntry;
use crate::texts::LabelSet;

/// Pods of a namespace with the same labels and the same named ports.
#[derive(Debug)]
pub(crate) struct Class {
    pub(crate) namespace: Arc<str>,
    pub(crate) labels: LabelSet,
    ports: Arc<[NamedPort]>,
    /// Number of Pods in it.
    pods: usize,
}

/// All classes.
#[derive(Debug, Default)]
pub(crate) struct Classes {
    classes: HashMap<PeerId, Class>,
    /// Classes without Pods: they go unless a Pod comes.
    empty: BTreeSet<PeerId>,
    /// Classes that came or went.
    pub(crate) changed: BTreeSet<PeerId>,
}

impl Classes {
    /// Puts a Pod into its class, with which it shares what they have in common. Returns the class, and whether it is new.
    pub(crate) fn join(&mut self, namespace: &Arc<str>, pod: &mut PodEntry) -> (PeerId, bool) {
        let id = Encoding::new(Kind::Class)
            .text(namespace)
            .labels(pod.labels.iter())
            .ports(pod.ports.iter())
            .id();
        if let Some(class) = self.classes.get_mut(&id) {
            class.pods += 1;
            pod.labels = class.labels.clone();
            pod.ports = Arc::clone(&class.ports);
            self.empty.remove(&id);
            return (id, false);
        }
        let class = Class {
            namespace: Arc::clone(namespace),
            labels: pod.labels.clone(),
            ports: Arc::clone(&pod.ports),
            pods: 1,
        };
        self.classes.insert(id, class);
        self.changed.insert(id);
        (id, true)
    }

    /// Takes a Pod out of a class.
    pub(crate) fn leave(&mut self, id: PeerId) {
        if let Some(class) = self.classes.get_mut(&id) {
            class.pods -= 1;
            if class.pods == 0 {
                self.empty.insert(id);
            }
        }
    }

    /// Removes the classes that have no Pods, and returns them.
    pub(crate) fn remove_empty(&mut self) -> Vec<(PeerId, Class)> {
        let empty = std::mem::take(&mut self.empty).into_iter();
        let removed: Vec<_> =
            empty.filter_map(|id| Some((id, self.classes.remove(&id)?))).collect();
        self.changed.extend(removed.iter().map(|(id, _)| *id));
        removed
    }

    pub(crate) fn len(&self) -> usize {
        self.classes.len()
    }

    pub(crate) fn get(&self, id: PeerId) -> Option<&Class> {
        self.classes.get(&id)
    }

    /// Returns the object that agents get; `None` = there is no such class.
    pub(crate) fn object(&self, id: PeerId) -> Option<PeerClass> {
        let class = self.get(id)?;
        Some(PeerClass {
            id,
            parent: namespace_id(&class.namespace),
            namespace: Arc::clone(&class.namespace),
            ports: class.ports.to_vec(),
        })
    }
}
