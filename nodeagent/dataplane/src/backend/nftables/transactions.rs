//! The transactions in which operations reach the kernel: as few as possible, each small enough, and in an
//! order in which every state in between serves packets correctly.

use std::borrow::Cow;

use super::frontend::Ops;
use super::phases::phases;

/// The operations of one transaction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part<'a> {
    /// Whether this is the first transaction, so that nothing is applied yet.
    pub(super) first: bool,
    /// Whether the transaction begins with a fresh table.
    pub(super) rebuild: bool,
    pub(super) groups: &'a [Ops],
}

/// Sends operations, on top of a fresh table if `rebuild`. `capacity` holds the number of elements that fit
/// into a transaction, without and with a fresh table. The first error ends the work.
pub(super) fn each_transaction<E>(
    rebuild: bool,
    groups: &[Ops],
    capacity: [usize; 2],
    mut send: impl FnMut(Part<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let (mut rebuild, mut first) = (rebuild, true);
    let phases = match rebuild {
        // A table that does not exist yet guards no destination.
        true => vec![Cow::Borrowed(groups)],
        false => phases(groups),
    };
    for phase in &phases {
        let mut groups = &phase[..];
        while rebuild || !groups.is_empty() {
            let (now, later) = groups.split_at(fitting(groups, capacity[usize::from(rebuild)]));
            send(Part {
                first,
                rebuild,
                groups: now,
            })?;
            (groups, rebuild, first) = (later, false, false);
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
    groups
        .iter()
        .take_while(fits)
        .count()
        .max(1)
        .min(groups.len())
}
