//! Counts panics. A panic ends a task or a request and nothing else, so a program that goes on must say that it had one.

use std::panic;
use std::sync::Once;

use parking_lot::Mutex;

/// The panics of a process since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Panics {
    /// Their number.
    pub count: u64,
    /// File and line of the last one; empty if there was none.
    pub last: String,
}

/// The panics so far; `None` until they are counted.
static PANICS: Mutex<Option<Panics>> = Mutex::new(None);

/// Begins to count. The hook that was there before is called as well. Later calls do nothing.
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        *lock() = Some(Panics::default());
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |what| {
            if let Some(panics) = &mut *lock() {
                panics.count = panics.count.saturating_add(1);
                panics.last = what.location().map(ToString::to_string).unwrap_or_default();
            }
            previous(what);
        }));
    });
}

/// Returns the panics so far; `None` if the program does not count them.
pub fn seen() -> Option<Panics> {
    lock().clone()
}

fn lock() -> parking_lot::MutexGuard<'static, Option<Panics>> {
    PANICS.lock()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    static CALLS: AtomicU64 = AtomicU64::new(0);

    #[test]
    fn each_panic_counts_once_and_the_hook_of_before_is_called() {
        assert_eq!(seen(), None, "nobody counts");
        let default = panic::take_hook();
        panic::set_hook(Box::new(move |what| {
            CALLS.fetch_add(1, Ordering::Relaxed);
            default(what);
        }));
        install();
        install();
        assert_eq!(seen(), Some(Panics::default()));
        for n in 1..=2 {
            let ended = std::thread::spawn(|| panic!("on purpose")).join();
            assert!(ended.is_err());
            let panics = seen().unwrap();
            assert_eq!((panics.count, CALLS.load(Ordering::Relaxed)), (n, n));
            assert!(panics.last.contains("panics.rs:"), "{}", panics.last);
        }
    }
}
