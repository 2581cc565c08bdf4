//! When a node reached which revision: a short list for each node, from which the time of any change is derived.
//!
//! There is no table of nodes and changes. A node that has reached a revision holds everything that was published with
//! it or before. When the list is full, its older half loses every second entry, so it reaches far back and is precise
//! about the latest changes.

use std::collections::VecDeque;
use std::time::SystemTime;

use kplane_model::NodeName;
use kplane_proto::v1::Step;
use kplane_util::clock::millis;

use super::timings::ago;
use super::{AgentRegistry, Session};

/// Maximum number of entries of a node: 2.3 KiB.
const POINTS: usize = 96;

/// A revision, and the time since which the kernel has held it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Point {
    revision: u64,
    at_ms: u64,
    /// Whether the revisions since the entry before were reached at this time. If not, some may have been reached before.
    exact: bool,
}

/// The list of a node.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    points: VecDeque<Point>,
}

/// When a node had a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// Since this time, milliseconds since 1970.
    At(u64),
    /// Since this time or an earlier one.
    By(u64),
    /// Not yet, as far as is known.
    NotYet,
}

impl Progress {
    /// Notes that the kernel holds a revision since a time, in milliseconds since 1970.
    pub(super) fn note(&mut self, revision: u64, at_ms: u64) {
        let last = self.points.back();
        if last.is_some_and(|last| last.revision >= revision) {
            return;
        }
        // Since when the kernel has held the first revision is not known: it may be older than the stream.
        let exact = last.is_some();
        self.points.push_back(Point {
            revision,
            at_ms,
            exact,
        });
        if self.points.len() > POINTS {
            self.thin();
        }
    }

    /// Removes every second entry of the older half.
    fn thin(&mut self) {
        let half = self.points.len() / 2;
        let mut number = 0;
        let mut lost = false;
        self.points.retain_mut(|point| {
            number += 1;
            let goes = number <= half && number % 2 == 1;
            if !goes && std::mem::take(&mut lost) {
                point.exact = false;
            }
            lost |= goes;
            !goes
        });
    }

    /// Returns when the node had a revision.
    pub fn when(&self, revision: u64) -> Reached {
        let before = self.points.partition_point(|point| point.revision < revision);
        match self.points.get(before) {
            None => Reached::NotYet,
            Some(point) if point.exact => Reached::At(point.at_ms),
            Some(point) => Reached::By(point.at_ms),
        }
    }

    /// Returns the newest revision; 0 = none.
    pub fn newest(&self) -> u64 {
        self.points.back().map_or(0, |point| point.revision)
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.points.len()
    }
}

impl Session {
    /// Notes which revisions a report says to be in the kernel, and since when.
    pub(super) fn note_progress(&self, steps: &[Step], applied: u64) {
        let now = SystemTime::now();
        let mut agents = self.agents.lock();
        let agent = agents.by_node.get_mut(&self.node);
        let Some(agent) = agent.filter(|agent| agent.session == self.number) else {
            return;
        };
        for step in steps.iter().filter(|step| step.revision <= applied) {
            let at = now.checked_sub(ago(step)).unwrap_or(now);
            agent.progress.note(step.revision, millis(at));
        }
        agent.progress.note(applied, millis(now));
    }
}

impl AgentRegistry {
    /// Returns when each node had a revision, and the newest revision that it holds. `visit` must be short: streams wait for it.
    pub fn reached(&self, revision: u64, mut visit: impl FnMut(&NodeName, Reached, u64)) {
        let agents = self.lock();
        for (node, agent) in &agents.by_node {
            visit(node, agent.progress.when(revision), agent.progress.newest());
        }
    }

    /// Returns the memory of these times, in bytes.
    pub fn progress_bytes(&self) -> usize {
        let agents = self.lock();
        agents
            .by_node
            .values()
            .map(|agent| agent.progress.points.capacity() * size_of::<Point>())
            .sum()
    }

    /// Returns when one node had a revision, and the newest revision that it holds; `None` if the node has no agent.
    pub fn reached_by(&self, node: &str, revision: u64) -> Option<(Reached, u64)> {
        let agents = self.lock();
        let progress = &agents.by_node.get(node)?.progress;
        Some((progress.when(revision), progress.newest()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_the_latest_revisions_are_exact_and_those_of_old_ones_are_bounds() {
        let mut progress = Progress::default();
        assert_eq!(progress.when(1), Reached::NotYet);
        for revision in 1..=10_000 {
            progress.note(revision * 2, 1_000 + revision);
        }
        assert!(progress.len() <= POINTS);
        assert_eq!(progress.when(20_000), Reached::At(11_000));
        assert_eq!(progress.when(19_999), Reached::At(11_000));
        assert_eq!(progress.when(20_001), Reached::NotYet);
        let oldest = progress.when(1);
        assert!(
            matches!(oldest, Reached::By(ms) if ms >= 1_001),
            "{oldest:?}"
        );
        // Whatever was thinned out, no time is too early, and none is called exact that is not.
        for revision in (2..=20_000).step_by(2) {
            let truth = 1_000 + revision / 2;
            match progress.when(revision) {
                Reached::At(ms) => assert_eq!(ms, truth, "{revision}"),
                Reached::By(ms) => assert!(ms >= truth, "{revision}"),
                Reached::NotYet => panic!("{revision}"),
            }
        }
    }

    #[test]
    fn a_revision_that_is_taken_back_and_applied_again_keeps_its_first_time() {
        let mut progress = Progress::default();
        progress.note(5, 100);
        progress.note(9, 200);
        progress.note(7, 300);
        progress.note(9, 400);
        assert_eq!(progress.when(9), Reached::At(200));
        assert_eq!(progress.newest(), 9);
    }
}
