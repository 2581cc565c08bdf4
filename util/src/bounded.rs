//! Maps that hold what happened lately, and lists from outside, in bounded memory.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};

/// Makes room for one more entry in a map of at most `most`: removes the entries that are not worth keeping, and all of
/// them if that is not enough.
pub fn make_room<K: Eq + Hash, V, S: BuildHasher>(
    map: &mut HashMap<K, V, S>,
    most: usize,
    keep: impl Fn(&V) -> bool,
) {
    if map.len() >= most {
        map.retain(|_, value| keep(value));
    }
    if map.len() >= most {
        map.clear();
    }
}

/// Cuts a list, and gives the memory behind its end back.
pub fn cut<T>(list: &mut Vec<T>, most: usize) {
    list.truncate(most);
    list.shrink_to_fit();
}
