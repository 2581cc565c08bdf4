//! The transactions of a change, each of which waits for the one before.
//!
//! A packet looks into several sets, one after the other, and a transaction may come in between. So an earlier look-up may
//! see the old state and a later one the new state, never the other way round. Sets of ranges may show a transaction a
//! moment later than others. Whatever happens, a packet must get the verdict of the state before or after.
//!
//! 1. What becomes allowed, and what it refers to: nothing leads there yet, or it leads on to what is allowed.
//! 2. Addresses that become something else: Pods that change their class, and ranges that are cut anew. Overlapping
//!    ranges cannot exist together, so old ones are replaced at once. What both are allowed is there.
//! 3. Which Pods are known and isolated. A Pod that goes stays isolated, since a packet may have found it to be known.
//! 4. What is no longer allowed or used. The ranges of the node come last too: the Pods in them are known by now.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use super::held::{Change, element};
use crate::backend::nftables::{Key, Ops, PolicySet};

/// Elements that go into a transaction together.
const TOGETHER: usize = 256;

/// Returns the operations of a change, by phase. `stays` says whether a Pod's address is known after the change.
pub(super) fn phases(changes: &[Change], stays: impl Fn(IpAddr) -> bool) -> Vec<Vec<Ops>> {
    let replaced = replaced(changes);
    let mut phases: [Vec<&Change>; 4] = Default::default();
    for change in changes {
        let (set, key) = change.place;
        let phase = match (set, change.before.is_some(), change.after.is_some()) {
            (PolicySet::LocalPods, ..) | (PolicySet::Isolated(_), false, _) => 2,
            (PolicySet::Isolated(_), ..) => match key {
                Key::Ip(ip) if stays(ip) => 2,
                _ => 3,
            },
            (PolicySet::LocalRanges, ..) => 3,
            (PolicySet::Blocks | PolicySet::Ranges(_), ..) if replaced.contains(&group(change)) => {
                1
            }
            (_, true, true) => 1,
            (_, false, _) => 0,
            (_, true, false) => 3,
        };
        phases[phase].push(change);
    }
    let whole = |phase: usize, change: &Change| match phase {
        1 => matches!(change.place.0, PolicySet::Blocks | PolicySet::Ranges(_)),
        2 => true,
        _ => change.place.0 == PolicySet::LocalRanges,
    };
    let phases = phases.into_iter().enumerate().map(|(phase, changes)| {
        let (whole, rest): (Vec<&Change>, Vec<&Change>) =
            changes.into_iter().partition(|change| whole(phase, change));
        let lots = [&whole[..]].into_iter().chain(rest.chunks(TOGETHER));
        lots.filter(|lot| !lot.is_empty()).map(ops).collect()
    });
    phases.filter(|lots: &Vec<Ops>| !lots.is_empty()).collect()
}

fn ops(changes: &[&Change]) -> Ops {
    let mut ops = Ops::default();
    for change in changes {
        let element = |value| element(change.place, value);
        ops.delete.extend(change.before.map(element));
        ops.add.extend(change.after.map(element));
    }
    ops
}

/// Those ranges that exclude each other in the kernel if they overlap.
fn group(change: &Change) -> (PolicySet, Option<Key>) {
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
fn replaced(changes: &[Change]) -> HashSet<(PolicySet, Option<Key>)> {
    let mut groups: HashMap<_, (bool, bool)> = HashMap::new();
    for change in changes {
        if matches!(change.place.0, PolicySet::Blocks | PolicySet::Ranges(_)) {
            let (goes, comes) = groups.entry(group(change)).or_default();
            *goes |= change.before.is_some();
            *comes |= change.after.is_some();
        }
    }
    let replaced = groups
        .into_iter()
        .filter(|(_, (goes, comes))| *goes && *comes);
    replaced.map(|(group, _)| group).collect()
}
