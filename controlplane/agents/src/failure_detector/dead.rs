//! Which suspected nodes count as dead, so that connections to their endpoints end. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use kplane_model::NodeName;

use super::judge::{OLD, Time};

/// Ages of a suspicion at which a node becomes dead. Later it was one of too many.
const DIES: Range<Duration> = Duration::from_secs(10)..OLD;

/// The suspected nodes, those of other replicas among them.
#[derive(Debug, Default)]
pub(super) struct DeadNodes {
    /// Since when this replica has known of each suspicion without a break. What others say of its age does not count.
    known: BTreeMap<NodeName, Time>,
    dead: BTreeSet<NodeName>,
}

impl DeadNodes {
    /// Takes the suspected nodes of now; returns those that are dead. Nobody new is while more than `most` are suspected
    /// lately.
    pub(super) fn look<'a>(
        &mut self,
        now: Time,
        suspected: impl Iterator<Item = &'a NodeName>,
        most: usize,
    ) -> BTreeSet<NodeName> {
        let mut before = std::mem::take(&mut self.known);
        self.known = suspected
            .map(|node| (node.clone(), before.remove(node).unwrap_or(now)))
            .collect();
        let ages = self.known.values().map(|since| now.saturating_sub(*since));
        let few = ages.filter(|age| *age < OLD).count() <= most;
        let dies = |since: Time| few && DIES.contains(&now.saturating_sub(since));
        let dead = self
            .known
            .iter()
            .filter(|(node, since)| self.dead.contains(*node) || dies(**since));
        self.dead = dead.map(|(node, _)| node.clone()).collect();
        self.dead.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn nodes(numbers: Range<u32>) -> Vec<NodeName> {
        numbers.map(|number| format!("n{number}").into()).collect()
    }

    /// Plays all seconds of a range; returns the first one at which a node was dead.
    fn dies(dead: &mut DeadNodes, seconds: Range<u32>, suspected: Range<u32>) -> Option<u32> {
        let suspected = nodes(suspected);
        seconds
            .into_iter()
            .find(|at| !dead.look(S * *at, suspected.iter(), 3).is_empty())
    }

    #[test]
    fn a_node_is_dead_once_it_was_suspected_for_ten_seconds() {
        let mut dead = DeadNodes::default();
        assert_eq!(dies(&mut dead, 0..100, 0..1), Some(10));
        // It stays so for as long as it is suspected, and others do not hasten it.
        assert_eq!(
            dead.look(S * 11, nodes(0..5).iter(), 3),
            nodes(0..1).into_iter().collect()
        );
        assert_eq!(dies(&mut dead, 12..13, 0..0), None);
        assert_eq!(dies(&mut dead, 13..100, 0..1), Some(23));
    }

    #[test]
    fn a_node_that_flaps_is_not_dead() {
        let mut dead = DeadNodes::default();
        for round in (0..1_000).step_by(10) {
            assert_eq!(dies(&mut dead, round..round + 9, 0..1), None);
            assert_eq!(dies(&mut dead, round + 9..round + 10, 0..0), None);
        }
    }

    /// A replica may say that all nodes are suspected, and have been for an hour.
    #[test]
    fn too_many_at_once_are_never_dead() {
        let mut dead = DeadNodes::default();
        assert_eq!(dies(&mut dead, 0..10_000, 0..4), None);
        // Those that were old do not count for others.
        assert_eq!(dies(&mut dead, 10_000..10_100, 0..6), Some(10_010));
        let found = dead.look(S * 10_011, nodes(0..6).iter(), 3);
        assert_eq!(found, nodes(4..6).into_iter().collect());
    }
}
