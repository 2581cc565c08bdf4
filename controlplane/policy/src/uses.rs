//! Numbers of users of things.

use std::collections::HashMap;
use std::hash::Hash;

/// Things that are in use, with the number of users.
#[derive(Debug)]
pub(crate) struct Uses<K>(HashMap<K, usize>);

impl<K> Default for Uses<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Clone + Eq + Hash> Uses<K> {
    /// Adds a user. Returns whether it is the first.
    pub(crate) fn add(&mut self, thing: &K) -> bool {
        if let Some(users) = self.0.get_mut(thing) {
            *users += 1;
            return false;
        }
        self.0.insert(thing.clone(), 1);
        true
    }

    /// Removes a user. Returns whether it was the last.
    pub(crate) fn remove(&mut self, thing: &K) -> bool {
        let Some(users) = self.0.get_mut(thing) else {
            return false;
        };
        *users -= 1;
        if *users > 0 {
            return false;
        }
        self.0.remove(thing);
        true
    }

    /// Returns whether a thing has users.
    pub(crate) fn has(&self, thing: &K) -> bool {
        self.0.contains_key(thing)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &K> {
        self.0.keys()
    }
}
