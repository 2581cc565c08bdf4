//! What an operator asks for: which nodes, in which direction, how many at a time.

use std::collections::BTreeSet;

use super::record::Direction;

/// Nodes that an operator chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Chosen {
    /// All nodes.
    All,
    /// The nodes with these names.
    Named(BTreeSet<String>),
}

impl Chosen {
    /// Returns whether a node is chosen.
    pub(crate) fn has(&self, node: &str) -> bool {
        match self {
            Self::All => true,
            Self::Named(names) => names.contains(node),
        }
    }
}

/// A migration as an operator asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) direction: Direction,
    pub(crate) chosen: Chosen,
    /// Most nodes that are on their way at the same time, at least 1.
    pub(crate) at_a_time: usize,
}
