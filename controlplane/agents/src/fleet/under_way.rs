//! The updates that are on their way to one agent: how much more a stream may send.
//!
//! A connection takes far more than an agent reads in a second, and what it took cannot be joined with newer changes
//! any more. So a stream does not send more while an old update is on its way: the change waits in the store, where
//! all changes of a key become one. A fleet that gets more changes than it can take is then late by little more than
//! the patience, instead of later and later.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// Time that an update may be on its way before others wait, beyond the time over which agents spread their reports.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time after which others no longer wait: the agent may hold an update back, and says so in its own time.
const GIVE_UP: Duration = Duration::from_secs(12);
/// Shortest time between two updates that are noted: a few notes show how old the oldest is.
const APART: Duration = Duration::from_millis(250);
/// Maximum number of notes. Without an answer, there are not more than patience allows; this bounds them in any case.
const MAX_NOTES: usize = 64;

/// Notes of updates that an agent has not reported as received, oldest first.
#[derive(Debug, Default)]
pub(super) struct UnderWay {
    notes: VecDeque<(u64, Instant)>,
    /// A stream waits since the last answer.
    waits: bool,
}

impl UnderWay {
    /// Notes that an update to this revision was sent.
    pub(super) fn sent(&mut self, revision: u64, now: Instant) {
        let lately = |(_, at): &(u64, Instant)| now.saturating_duration_since(*at) < APART;
        if !self.notes.back().is_some_and(lately) && self.notes.len() < MAX_NOTES {
            self.notes.push_back((revision, now));
        }
    }

    /// Notes that the agent has this revision. Returns whether a stream that waits should look again.
    pub(super) fn arrived(&mut self, revision: u64) -> bool {
        let before = self.notes.len();
        while self.notes.front().is_some_and(|(r, _)| *r <= revision) {
            self.notes.pop_front();
        }
        self.waits && self.notes.len() < before && std::mem::take(&mut self.waits)
    }

    /// Returns whether the stream should wait until the agent has received more; `spread` is the time over which
    /// agents spread their reports.
    pub(super) fn is_full(&mut self, spread: impl FnOnce() -> Duration, now: Instant) -> bool {
        let age = |at: Instant| now.saturating_duration_since(at);
        let oldest = self.notes.front().map(|(_, at)| age(*at));
        if oldest.is_some_and(|age| age >= GIVE_UP) {
            self.notes.clear();
        }
        // The spread costs a lock that all streams share: an update of the last second does not need it.
        let old = oldest.filter(|age| (PATIENCE..GIVE_UP).contains(age));
        self.waits = old.is_some_and(|age| age >= PATIENCE + spread());
        self.waits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread() -> Duration {
        Duration::from_millis(500)
    }

    fn after(start: Instant, millis: u64) -> Instant {
        start + Duration::from_millis(millis)
    }

    #[test]
    fn a_stream_waits_while_an_old_update_is_under_way() {
        let (mut way, start) = (UnderWay::default(), Instant::now());
        way.sent(1, start);
        way.sent(2, after(start, 1_400));
        assert!(!way.is_full(spread, after(start, 1_499)));
        assert!(way.is_full(spread, after(start, 1_500)));
        assert!(!way.arrived(0), "nothing new has arrived");
        assert!(way.arrived(1), "the stream looks again");
        assert!(!way.is_full(spread, after(start, 2_000)));
        assert!(!way.arrived(2), "no stream waits");
    }

    #[test]
    fn after_a_while_a_stream_no_longer_waits() {
        let (mut way, start) = (UnderWay::default(), Instant::now());
        way.sent(1, start);
        assert!(way.is_full(spread, after(start, 11_999)));
        assert!(!way.is_full(spread, after(start, 12_000)));
        way.sent(2, after(start, 12_000));
        assert!(!way.is_full(spread, after(start, 13_000)));
        assert!(way.is_full(spread, after(start, 13_500)));
    }

    #[test]
    fn notes_are_few() {
        let (mut way, start) = (UnderWay::default(), Instant::now());
        (0..1_000).for_each(|n| way.sent(n, after(start, n)));
        assert_eq!(way.notes.len(), 4);
        (0..1_000).for_each(|n| way.sent(n, after(start, n * 1_000)));
        assert_eq!(way.notes.len(), MAX_NOTES);
    }
}
