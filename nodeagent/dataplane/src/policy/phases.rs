//! The transactions of a change, each of which waits for the one before.
//!
//! A packet looks into several sets, one after the other, and a transaction may come in between. So an earlier look-up may
//! see the old state and a later one the new state, never the other way round. Sets of ranges may show a transaction a
//! moment later than others. Whatever happens, a packet must get the verdict of the state before or after.
//!
//! 1. Rows of ports that decisions of tiers lead to: no decision leads there yet.
//! 2. Decisions about numbers that no address has yet, and stricter ones.
//! 3. What becomes allowed, and what it refers to: nothing leads there yet, or it leads on to what is allowed.
//! 4. Addresses that become something else: Pods that change their class, and ranges that are cut anew. Overlapping
//!    ranges cannot exist together, so old ones are replaced at once. What both are allowed is there. What rules and tiers
//!    take an address for changes in one transaction, and so does which Pods tiers decide about from now on.
//! 5. Which Pods are known and isolated. A Pod that goes stays isolated, since a packet may have found it to be known.
//! 6. What is no longer allowed or used. The ranges of the node come last too: the Pods in them are known by now.
//! 7. All other decisions of tiers, and then the rows to which none leads.
//!
//! Of two changes that come together and have nothing to do with each other, such as another label and a rule that is
//! replaced, a packet may see one without the other. If a decision of a tier becomes stricter for some ports and less
//! strict for others while addresses change their numbers, it counts as stricter.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use super::held::{ElementChange, element};
use crate::backend::nftables::{Key, Ops, PolicySet};

/// Elements that go into a transaction together.
const TOGETHER: usize = 256;

/// Returns the operations of a change, by phase. `stays` says whether a Pod's address is known after the change, and
/// `is_early` whether a decision of a tier comes first.
pub(super) fn phases(
    changes: &[ElementChange],
    stays: impl Fn(IpAddr) -> bool,
    is_early: impl Fn(&ElementChange) -> bool,
) -> Vec<Vec<Ops>> {
    let replaced = replaced(changes);
    let tiers = changes.iter().filter(|change| change.place.0 == PolicySet::TierPeers);
    let renumbered: HashSet<Key> = tiers.map(|change| change.place.1).collect();
    let mut phases: [Vec<&ElementChange>; 8] = Default::default();
    for change in changes {
        let (set, key) = change.place;
        let phase = match (set, change.before.is_some(), change.after.is_some()) {
            (PolicySet::RowAll | PolicySet::RowPorts, _, true) => 0,
            (PolicySet::RowAll | PolicySet::RowPorts, _, false) => 7,
            (PolicySet::Decisions(..), ..) if is_early(change) => 1,
            (PolicySet::Decisions(..), ..) => 6,
            (PolicySet::TierPeers | PolicySet::TierBlocks, ..) => 3,
            (PolicySet::Peers, ..) if renumbered.contains(&key) => 3,
            // With the numbers: the decisions that a Pod has by now may be why others lose theirs.
            (PolicySet::Tiered(_), false, _) => 3,
            (PolicySet::LocalPods, ..) | (PolicySet::Isolated(_), false, _) => 4,
            (PolicySet::Isolated(_) | PolicySet::Tiered(_), ..) => match key {
                Key::Ip(ip) if stays(ip) => 4,
                _ => 5,
            },
            (PolicySet::LocalRanges, ..) => 5,
            (PolicySet::Blocks | PolicySet::Ranges(_), ..) if replaced.contains(&group(change)) => {
                3
            }
            (_, true, true) => 3,
            (_, false, _) => 2,
            (_, true, false) => 5,
        };
        phases[phase].push(change);
    }
    let whole = |phase: usize, change: &ElementChange| match phase {
        3 => matches!(
            change.place.0,
            PolicySet::Blocks | PolicySet::Ranges(_) | PolicySet::TierBlocks
        ),
        4 => true,
        _ => change.place.0 == PolicySet::LocalRanges,
    };
    phases
        .into_iter()
        .enumerate()
        .map(|(phase, changes)| {
            let (whole, mut rest): (Vec<&ElementChange>, Vec<&ElementChange>) =
                changes.into_iter().partition(|change| whole(phase, change));
            if phase == 3 {
                rest.sort_unstable_by_key(|change| change.place.1);
            }
            [&whole[..]]
                .into_iter()
                .chain(lots(&rest))
                .filter(|lot| !lot.is_empty())
                .map(ops)
                .collect()
        })
        .filter(|lots: &Vec<Ops>| !lots.is_empty())
        .collect()
}

/// Cuts changes into lots. Those next to each other with the same key stay together.
fn lots<'a, 'b>(mut changes: &'a [&'b ElementChange]) -> Vec<&'a [&'b ElementChange]> {
    let mut lots = Vec::new();
    while !changes.is_empty() {
        let mut end = changes.len().min(TOGETHER);
        while end < changes.len() && changes[end].place.1 == changes[end - 1].place.1 {
            end += 1;
        }
        let (lot, rest) = changes.split_at(end);
        lots.push(lot);
        changes = rest;
    }
    lots
}

fn ops(changes: &[&ElementChange]) -> Ops {
    let mut ops = Ops::default();
    for change in changes {
        let element = |value| element(change.place, value);
        ops.delete.extend(change.before.map(element));
        ops.add.extend(change.after.map(element));
    }
    ops
}

/// Those ranges that exclude each other in the kernel if they overlap.
fn group(change: &ElementChange) -> (PolicySet, Option<Key>) {
    let (set, key) = change.place;
    let ranges = match key {
        Key::GrantPorts(pod, number, protocol, ..) => {
            Some(Key::GrantPort(pod, number, protocol, 0))
        }
        _ => None,
    };
    (set, ranges)
}

/// Returns the groups of ranges of which some go and others come.
fn replaced(changes: &[ElementChange]) -> HashSet<(PolicySet, Option<Key>)> {
    let mut groups: HashMap<_, (bool, bool)> = HashMap::new();
    for change in changes {
        if matches!(change.place.0, PolicySet::Blocks | PolicySet::Ranges(_)) {
            let (goes, comes) = groups.entry(group(change)).or_default();
            *goes |= change.before.is_some();
            *comes |= change.after.is_some();
        }
    }
    groups
        .into_iter()
        .filter(|(_, (goes, comes))| *goes && *comes)
        .map(|(group, _)| group)
        .collect()
}
