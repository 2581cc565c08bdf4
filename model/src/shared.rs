//! Texts that many objects have.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;

/// Maximum number of different texts that a thread remembers.
const REMEMBERED: usize = 4_096;

thread_local! {
    static SEEN: RefCell<HashSet<Arc<str>>> = RefCell::default();
}

/// Returns a text that many objects have, such as a node's name or a namespace: they share one copy, which takes neither
/// memory nor an allocation for each. A thread remembers 4,096 texts.
pub fn shared(text: &str) -> Arc<str> {
    SEEN.with_borrow_mut(|seen| {
        if let Some(known) = seen.get(text) {
            return Arc::clone(known);
        }
        if seen.len() >= REMEMBERED {
            seen.clear();
        }
        let text = Arc::<str>::from(text);
        seen.insert(Arc::clone(&text));
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_share_texts_and_the_memory_is_bounded() {
        assert!(Arc::ptr_eq(&shared("node-1"), &shared("node-1")));
        for number in 0..2 * REMEMBERED {
            assert_eq!(*shared(&number.to_string()), *number.to_string());
        }
        assert!(SEEN.with_borrow(HashSet::len) <= REMEMBERED);
    }
}
