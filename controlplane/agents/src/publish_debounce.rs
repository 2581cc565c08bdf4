//! The pace of announcements to agents: changes go out at once while they are few, and together while they are many. Pure.
//!
//! An announcement costs about the same with one change as with a hundred, and as much for each agent. So a large fleet
//! gets fewer: one that followed the pace of a small fleet would be late by what waits in all connections.

use std::time::Duration;

use tokio::time::Instant;

/// Changes that are all announced at once in the time that a change waits for others: 20 a second in a small fleet.
const IN_TIME: u32 = 2;

/// Number of changes in a burst that are announced at once.
const BURST: u32 = 5;

/// Maximum time that a change waits for others in a fleet of up to 4,000 agents.
const TOGETHER: Duration = Duration::from_millis(100);

/// The same for each agent of a larger fleet: two cores need half of that for an update, with the agent's answer.
const PER_AGENT: Duration = Duration::from_micros(25);

/// Maximum time that a change waits for others in any fleet.
const LONGEST: Duration = Duration::from_secs(1);

/// The rate of announcements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PublishDebounce {
    /// Time to which the announcements so far reach, at one for each interval.
    spent: Instant,
    /// The last announcement.
    last: Instant,
    due: Option<Instant>,
    /// The interval of changes that are all announced at once.
    each: Duration,
}

/// Returns how long a change waits for others at most, with so many agents.
fn together(agents: usize) -> Duration {
    let agents = u32::try_from(agents).unwrap_or(u32::MAX);
    PER_AGENT.saturating_mul(agents).clamp(TOGETHER, LONGEST)
}

impl PublishDebounce {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            spent: now,
            last: now,
            due: None,
            each: TOGETHER / IN_TIME,
        }
    }

    /// Notes a change for a fleet of so many agents; returns whether it is to be announced at once. If not, [`PublishDebounce::due`] says when.
    pub(crate) fn change(&mut self, now: Instant, agents: usize) -> bool {
        if self.due.is_some() {
            return false;
        }
        let together = together(agents);
        self.each = together / IN_TIME;
        let spent = self.spent.max(now);
        let at_once = spent - now <= self.each * (BURST - 1);
        if at_once {
            (self.spent, self.last) = (spent + self.each, now);
        } else {
            self.due = Some(now.max(self.last + together));
        }
        at_once
    }

    /// Returns when changes are to be announced together; `None` if none waits.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Notes that everything that waited is announced.
    pub(crate) fn announced(&mut self, now: Instant) {
        if self.due.take().is_some() {
            (self.spent, self.last) = (now + self.each * BURST, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the times in milliseconds at which changes at these times are announced.
    fn announcements(changes: impl IntoIterator<Item = u64>) -> Vec<u64> {
        announcements_to(1_000, changes)
    }

    /// The same with so many agents.
    fn announcements_to(agents: usize, changes: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let start = Instant::now();
        let mut publish_debounce = PublishDebounce::new(start);
        let mut announced = Vec::new();
        for change in changes {
            let now = start + Duration::from_millis(change);
            if let Some(due) = publish_debounce.due().filter(|due| *due <= now) {
                publish_debounce.announced(due);
                announced.push(due);
            }
            if publish_debounce.change(now, agents) {
                announced.push(now);
            }
        }
        announced.extend(publish_debounce.due());
        let ms = announced.into_iter().map(|at| (at - start).as_millis());
        ms.map(|ms| u64::try_from(ms).unwrap()).collect()
    }

    #[test]
    fn few_changes_are_announced_at_once() {
        let slow: Vec<u64> = (0..100).map(|n| n * 50).collect();
        assert_eq!(announcements(slow.clone()), slow);
        let bursts: Vec<u64> = (0..10).flat_map(|n| [n * 300, n * 300 + 1]).collect();
        assert_eq!(announcements(bursts.clone()), bursts);
    }

    #[test]
    fn many_changes_are_announced_ten_times_a_second() {
        let announced = announcements((0..1_000).map(|n| n * 10));
        assert!((100..110).contains(&announced.len()), "{announced:?}");
        let gaps = announced.windows(2).map(|pair| pair[1] - pair[0]);
        assert!(gaps.max().unwrap() <= 110);
        assert!(*announced.last().unwrap() >= 9_990, "nothing is left out");
    }

    #[test]
    fn a_large_fleet_gets_fewer_announcements() {
        for (agents, gap) in [(2_000, 100), (10_000, 250), (100_000, 1_000)] {
            let announced = announcements_to(agents, (0..1_000).map(|n| n * 10));
            let gaps = announced.windows(2).map(|pair| pair[1] - pair[0]);
            let longest = gaps.max().unwrap();
            assert!(
                (gap..=gap + 10).contains(&longest),
                "{agents}: {longest} ms"
            );
        }
        assert_eq!(
            announcements_to(10_000, [0, 1, 2]),
            [0, 1, 2],
            "few changes do not wait"
        );
    }

    #[test]
    fn no_change_waits_longer_than_that() {
        // The sixth change of a burst is announced without another one.
        let announced = announcements([0, 1, 2, 3, 4, 5]);
        assert_eq!(announced, [0, 1, 2, 3, 4, 104]);
    }

    #[test]
    fn a_change_waits_since_the_last_announcement_and_not_since_it_came() {
        let announced = announcements_to(8_000, (0..40).map(|n| n * 50));
        let gaps: Vec<u64> = announced.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(gaps[gaps.len() - 4..], [200; 4], "{announced:?}");
    }
}
