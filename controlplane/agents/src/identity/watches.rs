//! Open watches of the status API: a bounded number for all callers, and for one caller.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

/// The largest part of all watches that one caller may have open: one in this many.
const SHARE: usize = 2;

/// The open watches.
#[derive(Debug)]
pub(super) struct Watches {
    most: usize,
    by_caller: Mutex<HashMap<String, usize>>,
}

/// The right to one watch, until the value is dropped.
#[derive(Debug)]
pub struct WatchPermit {
    watches: Arc<Watches>,
    caller: String,
}

/// The reason why no more watches may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    /// All callers together have too many.
    All,
    /// The caller has too many.
    Caller,
}

impl Watches {
    /// Creates the count of at most `most` watches.
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            by_caller: Mutex::default(),
        })
    }

    /// Counts one more watch of a caller.
    pub(super) fn begin(self: &Arc<Self>, caller: String) -> Result<WatchPermit, Full> {
        let mut by_caller = self.lock();
        // There are no more callers than watches.
        if by_caller.values().sum::<usize>() >= self.most {
            return Err(Full::All);
        }
        let open = by_caller.get(&caller).copied().unwrap_or(0);
        if open >= self.most.div_ceil(SHARE) {
            return Err(Full::Caller);
        }
        by_caller.insert(caller.clone(), open + 1);
        drop(by_caller);
        Ok(WatchPermit {
            watches: Arc::clone(self),
            caller,
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        // Each change is one step, so a panic elsewhere leaves the counts usable.
        self.by_caller.lock()
    }
}

impl Drop for WatchPermit {
    fn drop(&mut self) {
        let mut by_caller = self.watches.lock();
        match by_caller.get_mut(&self.caller) {
            Some(open) if *open > 1 => *open -= 1,
            _ => drop(by_caller.remove(&self.caller)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_caller_leaves_watches_to_others() {
        let watches = Watches::new(5);
        let begin = |caller: &str| watches.begin(caller.to_owned());
        let greedy: Vec<_> = (0..3).map(|_| begin("a").unwrap()).collect();
        assert_eq!(begin("a").unwrap_err(), Full::Caller);
        let (_b, c) = (begin("b").unwrap(), begin("c").unwrap());
        assert_eq!(begin("d").unwrap_err(), Full::All);
        drop(c);
        let _d = begin("d").unwrap();
        drop(greedy);
        let _a = begin("a").unwrap();
        assert_eq!(watches.lock().len(), 3);
    }
}
