//! Indexes of labels: objects that a selector may select, and selectors that may select an object.
//!
//! Objects and selectors belong to scopes, such as namespaces. An index narrows down by one requirement that names
//! values; callers check the others.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::sync::Arc;

use crate::Selector;
use crate::texts::LabelSet;

/// Objects by value and scope.
type ByValue<S, T> = BTreeMap<(Arc<str>, S), BTreeSet<T>>;

/// Objects by scope and labels.
#[derive(Debug)]
pub(crate) struct Labelled<S, T> {
    all: HashMap<S, BTreeSet<T>>,
    keys: HashMap<Arc<str>, ByValue<S, T>>,
}

impl<S, T> Default for Labelled<S, T> {
    fn default() -> Self {
        Self {
            all: HashMap::new(),
            keys: HashMap::new(),
        }
    }
}

impl<S: Clone + Default + Ord + Hash, T: Clone + Ord> Labelled<S, T> {
    pub(crate) fn insert(&mut self, scope: &S, labels: &LabelSet, object: &T) {
        let of_scope = self.all.entry(scope.clone()).or_default();
        of_scope.insert(object.clone());
        for (key, value) in labels.iter() {
            let of_key = self.keys.entry(Arc::clone(key)).or_default();
            let objects = of_key.entry((Arc::clone(value), scope.clone()));
            objects.or_default().insert(object.clone());
        }
    }

    pub(crate) fn remove(&mut self, scope: &S, labels: &LabelSet, object: &T) {
        remove_from(&mut self.all, scope, object);
        for (key, value) in labels.iter() {
            let Some(of_key) = self.keys.get_mut(key) else {
                continue;
            };
            let place = (Arc::clone(value), scope.clone());
            if let Some(objects) = of_key.get_mut(&place) {
                objects.remove(object);
                if objects.is_empty() {
                    of_key.remove(&place);
                }
            }
            if of_key.is_empty() {
                self.keys.remove(key);
            }
        }
    }

    /// Returns the objects of a scope, or of all scopes, that a selector may select.
    pub(crate) fn candidates<'a>(
        &'a self,
        scope: Option<&'a S>,
        selector: &'a Selector,
    ) -> impl Iterator<Item = &'a T> {
        self.sets(scope, selector).flatten()
    }

    /// Returns the number of these objects.
    pub(crate) fn count(&self, scope: Option<&S>, selector: &Selector) -> usize {
        self.sets(scope, selector).map(BTreeSet::len).sum()
    }

    fn sets<'a>(
        &'a self,
        scope: Option<&'a S>,
        selector: &'a Selector,
    ) -> Box<dyn Iterator<Item = &'a BTreeSet<T>> + 'a> {
        match (scope, selector.pivot()) {
            (Some(scope), None) => Box::new(self.all.get(scope).into_iter()),
            (None, None) => Box::new(self.all.values()),
            (Some(scope), Some((key, values))) => {
                let of_key = self.keys.get(key).into_iter();
                let place = move |value: &Arc<str>| (Arc::clone(value), scope.clone());
                Box::new(of_key.flat_map(move |of_key| {
                    values.iter().filter_map(move |v| of_key.get(&place(v)))
                }))
            }
            (None, Some((key, values))) => {
                let of_key = self.keys.get(key).into_iter();
                Box::new(of_key.flat_map(move |of_key| {
                    values.iter().flat_map(move |v| scopes_with(of_key, v))
                }))
            }
        }
    }
}

/// Returns the objects of each scope that have a value.
fn scopes_with<'a, S: Default + Ord, T>(
    of_key: &'a ByValue<S, T>,
    value: &'a Arc<str>,
) -> impl Iterator<Item = &'a BTreeSet<T>> {
    of_key
        .range((Arc::clone(value), S::default())..)
        .take_while(move |((v, _), _)| v == value)
        .map(|(_, objects)| objects)
}

/// Owners of label selectors, by namespace.
#[derive(Debug)]
pub(crate) struct Selectors<S, T> {
    by_label: HashMap<(S, Arc<str>, Arc<str>), BTreeSet<T>>,
    /// Selectors of which no requirement names values.
    others: HashMap<S, BTreeSet<T>>,
}

impl<S, T> Default for Selectors<S, T> {
    fn default() -> Self {
        Self {
            by_label: HashMap::new(),
            others: HashMap::new(),
        }
    }
}

impl<S: Clone + Eq + Hash, T: Clone + Ord> Selectors<S, T> {
    pub(crate) fn insert(&mut self, scope: &S, selector: &Selector, item: &T) {
        let Some((key, values)) = selector.pivot() else {
            let others = self.others.entry(scope.clone()).or_default();
            others.insert(item.clone());
            return;
        };
        for value in values {
            let place = (scope.clone(), Arc::clone(key), Arc::clone(value));
            let items = self.by_label.entry(place).or_default();
            items.insert(item.clone());
        }
    }

    pub(crate) fn remove(&mut self, scope: &S, selector: &Selector, item: &T) {
        let Some((key, values)) = selector.pivot() else {
            remove_from(&mut self.others, scope, item);
            return;
        };
        for value in values {
            let place = (scope.clone(), Arc::clone(key), Arc::clone(value));
            remove_from(&mut self.by_label, &place, item);
        }
    }

    /// Returns what may select an object of a scope with these labels.
    pub(crate) fn candidates<'a>(
        &'a self,
        scope: &'a S,
        labels: &'a LabelSet,
    ) -> impl Iterator<Item = &'a T> {
        labels
            .iter()
            .map(|(k, v)| (scope.clone(), Arc::clone(k), Arc::clone(v)))
            .filter_map(|place| self.by_label.get(&place))
            .chain(self.others.get(scope))
            .flatten()
    }
}

fn remove_from<K: Eq + Hash, T: Ord>(map: &mut HashMap<K, BTreeSet<T>>, key: &K, item: &T) {
    if let Some(items) = map.get_mut(key) {
        items.remove(item);
        if items.is_empty() {
            map.remove(key);
        }
    }
}
