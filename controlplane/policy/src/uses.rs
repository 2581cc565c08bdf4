//! Numbers of users of things.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

/// Things that somebody uses, with the number of users.
#[derive(Debug)]
pub(crate) struct Uses<K> {
    users: HashMap<K, usize>,
    /// Things that got their first user, or lost their last one, since this was last taken away.
    pub(crate) changed: HashSet<K>,
}

impl<K> Default for Uses<K> {
    fn default() -> Self {
        Self {
            users: HashMap::new(),
            changed: HashSet::new(),
        }
    }
}

impl<K: Clone + Eq + Hash> Uses<K> {
    /// Adds a user. Returns whether it is the first.
    pub(crate) fn add(&mut self, thing: &K) -> bool {
        if let Some(users) = self.users.get_mut(thing) {
            *users += 1;
            return false;
        }
        self.users.insert(thing.clone(), 1);
        self.changed.insert(thing.clone());
        true
    }

    /// Removes a user. Returns whether it was the last.
    pub(crate) fn remove(&mut self, thing: &K) -> bool {
        let Some(users) = self.users.get_mut(thing) else {
            return false;
        };
        *users -= 1;
        if *users > 0 {
            return false;
        }
        self.users.remove(thing);
        self.changed.insert(thing.clone());
        true
    }

    /// Returns whether a thing has users.
    pub(crate) fn has(&self, thing: &K) -> bool {
        self.users.contains_key(thing)
    }
}
