//! Texts, labels and lists that many objects share.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;

use crate::{Labels, Selector};

/// Minimum number of things between two sweeps.
const SWEEP: usize = 4_096;

/// One copy of each thing. Copies that nobody uses any more go in sweeps, each time that the number has doubled.
#[derive(Debug)]
pub(crate) struct Copies<T: ?Sized> {
    copies: HashSet<Arc<T>>,
    /// Number of things that causes the next sweep.
    limit: usize,
}

/// One copy of each text.
pub(crate) type Texts = Copies<str>;

impl<T: ?Sized> Default for Copies<T> {
    fn default() -> Self {
        Self {
            copies: HashSet::new(),
            limit: 0,
        }
    }
}

impl<T: ?Sized + Eq + Hash> Copies<T>
where
    for<'a> Arc<T>: From<&'a T>,
{
    /// Returns the shared copy of a thing.
    pub(crate) fn share(&mut self, thing: &T) -> Arc<T> {
        if let Some(copy) = self.copies.get(thing) {
            return Arc::clone(copy);
        }
        if self.copies.len() >= self.limit.max(SWEEP) {
            self.copies.retain(|copy| Arc::strong_count(copy) > 1);
            self.limit = self.copies.len() * 2;
        }
        let copy = Arc::from(thing);
        self.copies.insert(Arc::clone(&copy));
        copy
    }
}

impl Texts {
    /// Returns labels that consist of shared copies.
    pub(crate) fn share_labels(&mut self, labels: &Labels) -> LabelSet {
        labels.iter().map(|(k, v)| (self.share(k), self.share(v))).collect()
    }
}

/// Labels in little memory, sorted by key. A copy takes none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LabelSet(Arc<[(Arc<str>, Arc<str>)]>);

/// Collects labels that are sorted by key.
impl FromIterator<(Arc<str>, Arc<str>)> for LabelSet {
    fn from_iter<I: IntoIterator<Item = (Arc<str>, Arc<str>)>>(labels: I) -> Self {
        Self(labels.into_iter().collect())
    }
}

impl LabelSet {
    /// Returns the labels, sorted by key.
    pub(crate) fn iter(&self) -> std::slice::Iter<'_, (Arc<str>, Arc<str>)> {
        self.0.iter()
    }

    /// Returns the value of a label.
    pub(crate) fn get(&self, key: &str) -> Option<&Arc<str>> {
        let at = self.0.binary_search_by(|(k, _)| (**k).cmp(key)).ok()?;
        self.0.get(at).map(|(_, value)| value)
    }

    /// Returns whether a selector selects an object with these labels.
    pub(crate) fn meet(&self, selector: &Selector) -> bool {
        selector.holds(|key| self.get(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_that_nobody_uses_go() {
        let mut texts = Texts::default();
        let kept = texts.share("kept");
        for number in 0..10 * SWEEP {
            texts.share(&number.to_string());
        }
        assert!(texts.copies.len() <= 2 * SWEEP);
        assert!(Arc::ptr_eq(&kept, &texts.share("kept")));
    }
}
