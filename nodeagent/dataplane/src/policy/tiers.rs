//! ClusterNetworkPolicies: which number an address has, and what is decided for each Pod of the node about each number.
//!
//! A decision leads to a row of ports. A row never changes: rows with other actions have other numbers.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{DecisionRow, PeerId, PodName, PortActions};

use super::blocks::Range;
use super::held::ElementId;

/// The parts of decisions for some Pods.
pub(super) type DecisionRows = BTreeMap<u8, Vec<DecisionRow>>;

/// The objects, and what follows from them.
#[derive(Debug, Default)]
pub(super) struct Tiers {
    pub(super) policies: BTreeSet<Arc<str>>,
    pub(super) peers: HashMap<IpAddr, PeerId>,
    pub(super) spans: BTreeMap<(IpAddr, IpAddr), PeerId>,
    /// The spans that do not overlap an earlier one, once they were put into the table, in order.
    pub(super) ranges: Vec<Range>,
    pub(super) are_spans_stale: bool,
    pub(super) decisions: HashMap<PeerId, DecisionRows>,
    pub(super) pods_of: HashMap<PeerId, BTreeSet<PodName>>,
    pub(super) rows: HashMap<PortActions, u32>,
    pub(super) actions: HashMap<u32, PortActions>,
    /// How many places lead to a row; those that lost the last one stay until the next change.
    pub(super) users: HashMap<u32, usize>,
    pub(super) touched: HashSet<u32>,
    /// The rows of a place, with how many Pods have each. Two Pods may have the same address for a while.
    pub(super) reasons: HashMap<ElementId, Vec<(u32, u32)>>,
    /// How many addresses and ranges have a number.
    pub(super) members: HashMap<u32, usize>,
}

impl Tiers {
    pub(super) fn row(&mut self, actions: &PortActions, fresh: impl FnOnce() -> u32) -> u32 {
        if let Some(number) = self.rows.get(actions) {
            return *number;
        }
        let number = fresh();
        self.rows.insert(actions.clone(), number);
        self.actions.insert(number, actions.clone());
        number
    }

    /// Counts a place that leads to a row, or may do so again.
    pub(super) fn count(&mut self, row: u32, there: bool) {
        self.touched.insert(row);
        let users = self.users.entry(row).or_default();
        if there {
            *users += 1;
        } else {
            *users = users.saturating_sub(1);
        }
        if *users == 0 {
            self.users.remove(&row);
        }
    }

    /// Forgets rows that nothing led to at the last change.
    pub(super) fn forget_rows(&mut self) {
        let users = &self.users;
        self.rows.retain(|_, number| users.contains_key(number));
        self.actions.retain(|number, _| users.contains_key(number));
    }

    /// Returns the number of the span with an address.
    pub(super) fn find(&self, ip: IpAddr) -> Option<u32> {
        let at = self.ranges.partition_point(|range| range.last < ip);
        let range = self.ranges.get(at).filter(|range| range.first <= ip);
        range.map(|range| range.number)
    }

    /// Returns whether a Pod's decisions are known, if there are any.
    pub(super) fn knows(&self, subject: Option<PeerId>) -> bool {
        subject.is_none_or(|subject| self.decisions.contains_key(&subject))
    }

    /// Returns the rows with their numbers.
    #[cfg(test)]
    pub(super) fn rows(&self) -> impl Iterator<Item = (&PortActions, u32)> {
        self.rows.iter().map(|(actions, number)| (actions, *number))
    }

    /// Returns all identities that objects name.
    pub(super) fn named(&self) -> impl Iterator<Item = PeerId> {
        self.decisions
            .values()
            .flat_map(BTreeMap::values)
            .flatten()
            .flat_map(|row| row.peers.iter().copied())
            .chain(self.peers.values().copied())
            .chain(self.spans.values().copied())
    }
}
