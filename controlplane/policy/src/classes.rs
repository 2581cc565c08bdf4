//! Classes of Pods that no rule can tell apart.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use kplane_model::{NamedPort, PeerClass, PeerId};

use crate::Selector;
use crate::identity::{Encoding, Kind, namespace_id};
use crate::lookup::Labelled;
use crate::pods::PodEntry;
use crate::rules::PortName;
use crate::texts::LabelSet;
use crate::uses::Uses;

/// Differences between Pods of a namespace that matter: label keys that peers of rules use, and ports that egress rules
/// name.
#[derive(Debug, Default)]
pub(crate) struct Distinctions {
    pub(crate) keys: Uses<Arc<str>>,
    pub(crate) ports: Uses<PortName>,
}

/// Pods of a namespace with the same [`Distinctions`].
#[derive(Debug)]
pub(crate) struct Class {
    pub(crate) namespace: Arc<str>,
    /// The labels that rules can ask for.
    pub(crate) labels: LabelSet,
    ports: Box<[NamedPort]>,
    /// Number of Pods in it.
    pods: usize,
}

/// All classes.
#[derive(Debug, Default)]
pub(crate) struct Classes {
    classes: HashMap<PeerId, Class>,
    labelled: Labelled<Arc<str>, PeerId>,
    /// Classes without Pods: they go unless a Pod comes.
    empty: BTreeSet<PeerId>,
    /// Classes that came or went.
    pub(crate) changed: BTreeSet<PeerId>,
}

impl Classes {
    /// Puts a Pod into its class. Returns the class, and whether it is new.
    pub(crate) fn join(
        &mut self,
        namespace: &Arc<str>,
        pod: &PodEntry,
        distinctions: &Distinctions,
    ) -> (PeerId, bool) {
        let labels = pod.labels.iter();
        let labels = labels.filter(|(key, _)| distinctions.keys.has(key));
        let named = |port: &&NamedPort| (Arc::clone(&port.name), port.protocol);
        let ports = pod.ports.iter();
        let ports = ports.filter(|port| distinctions.ports.has(&named(port)));
        let mut encoding = Encoding::new(Kind::Class);
        let encoding = encoding.text(namespace).labels(labels.clone());
        let id = encoding.ports(ports.clone()).id();
        if let Some(class) = self.classes.get_mut(&id) {
            class.pods += 1;
            self.empty.remove(&id);
            return (id, false);
        }
        let class = Class {
            namespace: Arc::clone(namespace),
            labels: labels.cloned().collect(),
            ports: ports.cloned().collect(),
            pods: 1,
        };
        self.labelled.insert(namespace, &class.labels, &id);
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
        let mut removed = Vec::new();
        for id in std::mem::take(&mut self.empty) {
            if let Some(class) = self.classes.remove(&id) {
                self.labelled.remove(&class.namespace, &class.labels, &id);
                self.changed.insert(id);
                removed.push((id, class));
            }
        }
        removed
    }

    pub(crate) fn len(&self) -> usize {
        self.classes.len()
    }

    pub(crate) fn get(&self, id: PeerId) -> Option<&Class> {
        self.classes.get(&id)
    }

    /// Returns the classes of a namespace.
    pub(crate) fn of_namespace(
        &self,
        namespace: &Arc<str>,
    ) -> impl Iterator<Item = (PeerId, &Class)> {
        let ids = self.labelled.of_scope(namespace);
        ids.filter_map(|id| Some((*id, self.get(*id)?)))
    }

    /// Returns the classes of a namespace, or of all namespaces, that a selector selects.
    pub(crate) fn selected<'a>(
        &'a self,
        namespace: Option<&'a Arc<str>>,
        selector: &'a Selector,
    ) -> impl Iterator<Item = (PeerId, &'a Class)> {
        let ids = self.labelled.candidates(namespace, selector);
        let classes = ids.filter_map(|id| Some((*id, self.get(*id)?)));
        classes.filter(|(_, class)| class.labels.meet(selector))
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
