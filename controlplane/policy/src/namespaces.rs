//! Namespaces and their labels.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::lookup::Labelled;
use crate::texts::{LabelSet, Texts};
use crate::{Labels, Selector};

/// The label that each namespace has, with its name as value (NP6).
const NAME: &str = "kubernetes.io/metadata.name";

/// All namespaces that exist. No selector selects another one, except for the empty selector: that selects all.
#[derive(Debug, Default)]
pub(crate) struct NamespaceLabels {
    texts: Texts,
    labels: HashMap<Arc<str>, LabelSet>,
    labelled: Labelled<(), Arc<str>>,
    /// Labels of changed namespaces as they were at the last call of `take`.
    pub(crate) before: BTreeMap<Arc<str>, Option<LabelSet>>,
}

impl NamespaceLabels {
    pub(crate) fn put(&mut self, name: &Arc<str>, mut labels: Labels) {
        labels.insert(NAME.into(), Arc::clone(name));
        let labels = self.texts.share_labels(&labels);
        if self.labels.get(name) != Some(&labels) {
            self.delete(name);
            self.labelled.insert(&(), &labels, name);
            self.labels.insert(Arc::clone(name), labels);
        }
    }

    pub(crate) fn delete(&mut self, name: &Arc<str>) {
        let old = self.labels.remove(name);
        if let Some(old) = &old {
            self.labelled.remove(&(), old, name);
        }
        self.before.entry(Arc::clone(name)).or_insert(old);
    }

    pub(crate) fn len(&self) -> usize {
        self.labels.len()
    }

    /// Returns a namespace's labels; `None` = it does not exist.
    pub(crate) fn get(&self, name: &str) -> Option<&LabelSet> {
        self.labels.get(name)
    }

    /// Returns a namespace's labels, and what they were at the last call of `take` if they changed.
    pub(crate) fn versions(&self, name: &Arc<str>) -> impl Iterator<Item = Option<&LabelSet>> {
        self.before.get(name).map(Option::as_ref).into_iter().chain([self.get(name)])
    }

    /// Returns whether a selector selects a namespace.
    pub(crate) fn meet(&self, name: &str, selector: &Selector) -> bool {
        let labels = self.get(name);
        labels.map_or(selector.is_everything(), |labels| labels.meet(selector))
    }

    /// Returns the namespaces that exist and that a selector selects.
    pub(crate) fn selected<'a>(
        &'a self,
        selector: &'a Selector,
    ) -> impl Iterator<Item = &'a Arc<str>> {
        let candidates = self.labelled.candidates(Some(&()), selector);
        candidates.filter(|name| self.meet(name, selector))
    }
}
