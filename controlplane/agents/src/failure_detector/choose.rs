//! Which nodes are asked about a quiet one. Pure.

use std::collections::{BTreeMap, VecDeque};

use kplane_model::{NodeName, ZoneName};

/// Number of neighbours that are asked whether they reach a node.
const NEIGHBOURS: usize = 5;
/// Number of nodes that are asked at all. The others only tell whether they are there: if many are not, this replica
/// is cut off.
const ASKED: usize = 16;

/// A node whose stream is alive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Neighbour {
    pub(super) node: NodeName,
    pub(super) zone: Option<ZoneName>,
}

/// A node that is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AskedNode {
    pub(super) node: NodeName,
    pub(super) zone: Option<ZoneName>,
    /// Another node, which a neighbour must reach if its word is to count; `None` for a witness.
    pub(super) control: Option<NodeName>,
}

/// Chooses nodes, in turn from each zone; each `turn` begins with others.
pub(super) fn choose(all: &[Neighbour], about: &NodeName, turn: u64) -> Vec<AskedNode> {
    let mut zones = BTreeMap::<Option<&ZoneName>, VecDeque<&Neighbour>>::new();
    for neighbour in all.iter().filter(|neighbour| neighbour.node != *about) {
        let zone = zones.entry(neighbour.zone.as_ref());
        zone.or_default().push_back(neighbour);
    }
    let turn = usize::try_from(turn).unwrap_or(0).wrapping_mul(NEIGHBOURS);
    let mut zones: Vec<_> = zones.into_values().collect();
    for zone in &mut zones {
        let len = zone.len();
        zone.rotate_left(turn % len);
    }
    let mut chosen = Vec::new();
    while chosen.len() < ASKED && zones.iter().any(|zone| !zone.is_empty()) {
        chosen.extend(zones.iter_mut().filter_map(VecDeque::pop_front));
    }
    chosen.truncate(ASKED);
    let neighbours = chosen.len().min(NEIGHBOURS);
    let control = |at: usize| {
        let other = (at + 1) % neighbours.max(1);
        let other = if at < neighbours && other != at { chosen.get(other) } else { None };
        other.map(|other| other.node.clone())
    };
    chosen
        .iter()
        .enumerate()
        .map(|(at, of)| AskedNode {
            node: of.node.clone(),
            zone: of.zone.clone(),
            control: control(at),
        })
        .collect()
}
