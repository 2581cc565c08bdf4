//! The transactions in which operations reach the kernel: as few as possible, each small enough, and in an
//! order in which every state in between serves packets correctly.
//!
//! The kernel makes new elements of a set of ranges (`nft_set_pipapo`) visible a moment after it has
//! increased the generation, when new elements of hash sets are visible already: `nf_tables_commit` calls
//! `nft_set_commit_update` last. A destination that is guarded before its ranges are visible would drop
//! clients in that moment, and the kernel may preempt the committing thread within it. So the ranges of a
//! destination that becomes guarded go into a transaction before the rest. The ranges of a destination that
//! is no longer guarded are deleted in a transaction after the rest. Ranges without a guard have no effect.

use std::borrow::Cow;
use std::collections::BTreeSet;

use super::element::{Destination, Element, Key};
use super::frontend::Ops;
use super::schema::Set;

/// The state of the kernel where a change begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ground {
    /// The table. The change goes on with it.
    Table,
    /// Another table, which the first transaction replaces. Few transactions follow, because what it served is
    /// missing meanwhile.
    Other,
    /// No table, so nothing is served, and it is filled step by step ([`FIRST_STEP`]).
    Nothing,
}

/// Number of elements of the first transaction of a table that has just been created. Each further one at most doubles the
/// table: the kernel enlarges the buckets of a hash set once in a transaction, and in the background after it
/// (`rhashtable_insert_rehash`), so that all further elements of the same transaction make longer and longer lists.
const FIRST_STEP: usize = 4_096;

/// The operations of one transaction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transaction<'a> {
    /// Whether the transaction begins with a fresh table.
    pub(super) rebuild: bool,
    pub(super) groups: &'a [Ops],
}

/// Sends operations. `capacity` holds the number of elements that fit into a transaction, without and with a fresh
/// table. The first error ends the work.
pub(super) fn each_transaction<E>(
    ground: Ground,
    groups: &[Ops],
    capacity: [usize; 2],
    mut send: impl FnMut(Transaction<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let mut rebuild = ground != Ground::Table;
    let mut sent = 0;
    let phases = if rebuild {
        // A table that does not exist yet guards no destination.
        vec![Cow::Borrowed(groups)]
    } else {
        phases(groups)
    };
    for phase in &phases {
        let mut groups = &phase[..];
        while rebuild || !groups.is_empty() {
            let step = match ground {
                Ground::Nothing => FIRST_STEP.max(sent),
                Ground::Table | Ground::Other => usize::MAX,
            };
            let room = capacity[usize::from(rebuild)].min(step);
            let (now, later) = groups.split_at(fitting(groups, room));
            sent += now.iter().map(Ops::weight).sum::<usize>();
            send(Transaction {
                rebuild,
                groups: now,
            })?;
            (groups, rebuild) = (later, false);
        }
    }
    Ok(())
}

/// Returns how many of the first groups fit into a transaction of `capacity` elements; at least one.
fn fitting(groups: &[Ops], capacity: usize) -> usize {
    let mut weight = 0;
    let fits = |ops: &&Ops| {
        weight += ops.weight();
        weight <= capacity
    };
    groups.iter().take_while(fits).count().max(1).min(groups.len())
}

/// Splits the operations of a change into transactions that must follow each other. Most changes need only
/// one.
fn phases(groups: &[Ops]) -> Vec<Cow<'_, [Ops]>> {
    let added = guarded(groups.iter().flat_map(|ops| &ops.add));
    let deleted = guarded(groups.iter().flat_map(|ops| &ops.delete));
    if added == deleted {
        return vec![Cow::Borrowed(groups)];
    }
    let (mut before, mut after) = (Ops::default(), Ops::default());
    let mut main: Vec<Ops> = groups.to_vec();
    for ops in &mut main {
        let comes = |element: &mut Element| is_range_of(element, &added, &deleted);
        before.add.extend(ops.add.extract_if(.., comes));
        let goes = |element: &mut Element| is_range_of(element, &deleted, &added);
        after.delete.extend(ops.delete.extract_if(.., goes));
    }
    main.retain(|ops| ops.len() > 0);
    [vec![before], main, vec![after]]
        .into_iter()
        .filter(|groups| groups.iter().any(|ops| ops.len() > 0))
        .map(Cow::Owned)
        .collect()
}

/// Returns the destinations that these elements guard.
fn guarded<'a>(elements: impl Iterator<Item = &'a Element>) -> BTreeSet<Destination> {
    let guards = elements.filter(|element| element.set == Set::FirewallServices);
    let destination = |element: &Element| match element.key {
        Key::Service(destination) => Some(destination),
        _ => None,
    };
    guards.filter_map(destination).collect()
}

/// Returns whether an element is a range of a destination that is in one set and not in the other.
fn is_range_of(
    element: &Element,
    these: &BTreeSet<Destination>,
    but: &BTreeSet<Destination>,
) -> bool {
    match element.key {
        Key::FirewallSource(destination, _) => {
            these.contains(&destination) && !but.contains(&destination)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use kplane_model::Protocol;

    use super::*;

    fn destination(octet: u8) -> Destination {
        Destination {
            ip: [198, 51, 100, octet].into(),
            protocol: Protocol::Tcp,
            port: 80,
        }
    }

    fn guard(octet: u8) -> Element {
        Element {
            set: Set::FirewallServices,
            key: Key::Service(destination(octet)),
            data: None,
        }
    }

    fn range(octet: u8, range: &str) -> Element {
        Element {
            set: Set::FirewallSources,
            key: Key::FirewallSource(destination(octet), range.parse().unwrap()),
            data: None,
        }
    }

    fn ops(delete: &[Element], add: &[Element]) -> Ops {
        Ops {
            delete: delete.to_vec(),
            add: add.to_vec(),
            ..Ops::default()
        }
    }

    #[test]
    fn a_table_that_serves_nobody_yet_is_filled_step_by_step() {
        let elements: Vec<Element> = (0..250).map(guard).collect();
        let groups = vec![ops(&[], &elements); 100];
        let transactions = |ground| {
            let mut sent = Vec::new();
            let result = each_transaction(ground, &groups, [usize::MAX; 2], |part| {
                sent.push((part.rebuild, part.groups.len()));
                Ok::<(), ()>(())
            });
            result.map(|()| sent)
        };
        let step = |groups| (false, groups);
        let steps = vec![(true, 16), step(16), step(32), step(36)];
        assert_eq!(transactions(Ground::Nothing), Ok(steps));
        assert_eq!(transactions(Ground::Other), Ok(vec![(true, 100)]));
        assert_eq!(transactions(Ground::Table), Ok(vec![(false, 100)]));
    }

    fn split(groups: &[Ops]) -> Vec<Vec<Ops>> {
        phases(groups).into_iter().map(Cow::into_owned).collect()
    }

    #[test]
    fn ranges_are_there_before_the_guard_and_go_after_it() {
        let groups = [
            ops(&[], &[guard(1), range(1, "10.0.0.0/8")]),
            ops(&[range(2, "10.0.0.0/8"), guard(2)], &[]),
        ];
        let expected = vec![
            vec![ops(&[], &[range(1, "10.0.0.0/8")])],
            vec![ops(&[], &[guard(1)]), ops(&[guard(2)], &[])],
            vec![ops(&[range(2, "10.0.0.0/8")], &[])],
        ];
        assert_eq!(split(&groups), expected);
    }

    /// The set makes all of its elements visible at once. Overlapping ranges cannot exist together.
    #[test]
    fn ranges_of_a_destination_that_stays_guarded_are_replaced_at_once() {
        let change = ops(&[range(1, "10.0.0.0/8")], &[range(1, "10.1.0.0/16")]);
        assert_eq!(split(slice::from_ref(&change)), vec![vec![change.clone()]]);
        let handed_on = ops(
            &[guard(1), range(1, "10.0.0.0/8")],
            &[guard(1), range(1, "10.0.0.0/9")],
        );
        assert_eq!(
            split(slice::from_ref(&handed_on)),
            vec![vec![handed_on.clone()]]
        );
        assert_eq!(split(&[]), vec![Vec::<Ops>::new()]);
    }
}
