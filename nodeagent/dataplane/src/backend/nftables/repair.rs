//! Repairs a table after changes by other programs. The repair uses only what kplane knows of the table;
//! nothing is planned again.
//!
//! Only the elements that the kernel reported are repaired; if the report does not name them, the whole table is read
//! back. The kernel refuses a commit after a transaction that kplane has not seen. So repairs come before a change,
//! and the change meets the table for which it was computed. Verification reads everything back, and then uses the
//! same code.

use std::collections::BTreeSet;

use super::access::{FoundTable, Guard, TableAccess};
use super::affinity::Group;
use super::element::{Element, Key};
use super::frontend::Ops;
use super::schema::Set;
use super::structure::GroupOp;
use super::transactions::{Ground, each_transaction};
use super::watch::{Changed, Drift};
use crate::backend::driver::StepError;
use kplane_netlink::{CommitError, NetlinkError};

/// Most attempts to repair a table while other programs go on changing rules. After that, the engine takes
/// over, with growing pauses.
const ATTEMPTS: u32 = 16;

/// Number of further reads of a table that differs.
const READ_AGAIN: u32 = 2;

/// Elements of one group of operations in a rebuild. A group goes into one transaction as a whole.
const TOGETHER: usize = 256;

/// What the kernel must hold in a table.
pub(crate) trait Contents {
    /// Returns every element.
    fn elements(&self) -> BTreeSet<Element>;

    /// Returns every element, set by set, in the order in which an empty table takes them. Within a set, only ranges have an
    /// order.
    fn by_set(&self) -> Vec<Element> {
        self.elements().into_iter().collect()
    }

    /// Returns further elements that close what the others open as long as some of them are missing.
    fn closing(&self) -> Vec<Element> {
        Vec::new()
    }

    /// Returns the element in a set under a key.
    fn element(&self, set: Set, key: Key) -> Option<Element>;

    /// Returns every group of session affinity.
    fn groups(&self) -> BTreeSet<Group> {
        BTreeSet::new()
    }
}

/// The operations that repair a table.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    /// A table that is gone is replaced as another one is: its elements come set by set, and not Service by Service.
    rebuild: bool,
    /// Operations of which each part waits for the one before.
    phases: Vec<Vec<Ops>>,
    /// The difference, human-readable.
    what: String,
}

/// Repairs a table. Returns the difference, and the program that caused it; `None` if there was no
/// difference.
///
/// # Errors
/// [`StepError::Drifted`] when the content of the table has to be adopted first. Other errors when the table
/// cannot be read or written.
pub(super) fn repair_table<K: TableAccess + ?Sized>(
    kernel: &mut K,
    table: &impl Contents,
    drift: Drift,
) -> Result<Option<String>, StepError> {
    let mut drift = drift;
    for _ in 0..ATTEMPTS {
        let plan = match &drift.changed {
            Changed::Elements(elements) => {
                let pairs =
                    elements.iter().map(|((set, key), now)| (table.element(*set, *key), *now));
                elements_plan(pairs)
            }
            Changed::Anything => read_plan(kernel, table)?,
        };
        let Some(plan) = plan else {
            return Ok(None);
        };
        match commit(kernel, &plan) {
            Ok(()) => return Ok(Some(format!("{}, {drift}", plan.what))),
            Err(CommitError::GenerationMoved) => {}
            Err(error) => return Err(error.into()),
        }
        if let Some(more) = kernel.drift().map_err(unreadable)? {
            drift.append(more);
        }
    }
    Err(StepError::Drifted(format!("{drift}, all the time")))
}

/// The table or the kernel's reports about it could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read table kplane back: {0}")]
struct UnreadableTable(NetlinkError);

/// Returns the error of a step that reads.
pub(super) fn unreadable(error: NetlinkError) -> StepError {
    StepError::read(UnreadableTable(error))
}

fn commit<K: TableAccess + ?Sized>(kernel: &mut K, plan: &Plan) -> Result<(), CommitError> {
    let capacity = [false, true].map(|rebuild| kernel.capacity(rebuild));
    let mut ground = if plan.rebuild { Ground::Other } else { Ground::Table };
    // After the first transaction, the kernel has begun to apply the repair.
    let mut guard = Guard::Head;
    for groups in &plan.phases {
        each_transaction(ground, groups, capacity, |part| {
            let guard = std::mem::replace(&mut guard, Guard::None);
            kernel.commit(part.rebuild, guard, part.groups).map(drop)
        })?;
        ground = Ground::Table;
    }
    Ok(())
}

/// Plans the repair of elements, given as pairs of wanted and actual element.
fn elements_plan(pairs: impl Iterator<Item = (Option<Element>, Option<Element>)>) -> Option<Plan> {
    let mut ops = Ops::default();
    let (mut missing, mut foreign) = (0_usize, 0_usize);
    for (wanted, now) in pairs.filter(|(wanted, now)| wanted != now) {
        missing += usize::from(wanted.is_some());
        foreign += usize::from(now.is_some());
        ops.delete.extend(now);
        ops.add.extend(wanted);
    }
    let example = ops.add.first().or(ops.delete.first())?;
    let what = differing(missing, foreign, example);
    Some(Plan {
        rebuild: false,
        phases: vec![vec![ops]],
        what,
    })
}

fn differing(missing: usize, foreign: usize, example: &Element) -> String {
    let set = example.set.name();
    format!(
        "{missing} elements were missing and {foreign} were another program's, one of them in set {set}"
    )
}

/// Reads a table, and plans the repair of its differences. A list of elements may lack some while the kernel
/// enlarges a set, which it does in the background some time after many elements were added. So a difference
/// counts only if it stays.
fn read_plan<K: TableAccess + ?Sized>(
    kernel: &mut K,
    table: &impl Contents,
) -> Result<Option<Plan>, StepError> {
    let capacity = kernel.capacity(true);
    let mut plan = found_plan(table, kernel.read().map_err(unreadable)?, capacity)?;
    for _ in 0..READ_AGAIN {
        if plan.as_ref().is_none_or(|plan| plan.rebuild) {
            break;
        }
        kernel.pause();
        plan = found_plan(table, kernel.read().map_err(unreadable)?, capacity)?;
    }
    Ok(plan)
}

/// Plans the repair of a table from the content that was found in the kernel.
fn found_plan(
    table: &impl Contents,
    found: FoundTable,
    capacity: usize,
) -> Result<Option<Plan>, StepError> {
    let (groups, found) = match found {
        FoundTable::Ours(groups, elements) => (groups, elements),
        FoundTable::Other(reason) => return Ok(Some(rebuild_plan(table, capacity, reason))),
    };
    if !groups.iter().copied().eq(table.groups()) {
        let reason = "the chains of session affinity are not kplane's".to_owned();
        return Err(StepError::Drifted(reason));
    }
    let expected = table.elements();
    let found: BTreeSet<Element> = found.into_iter().collect();
    let add: Vec<Element> = expected.difference(&found).copied().collect();
    let delete: Vec<Element> = found.difference(&expected).copied().collect();
    let Some(example) = add.first().or(delete.first()) else {
        return Ok(None);
    };
    let what = differing(add.len(), delete.len(), example);
    let ops = Ops {
        delete,
        add,
        ..Ops::default()
    };
    Ok(Some(Plan {
        rebuild: false,
        phases: vec![vec![ops]],
        what,
    }))
}

/// Plans the repair that creates the table anew with all of its content.
fn rebuild_plan(table: &impl Contents, capacity: usize, what: String) -> Plan {
    Plan {
        rebuild: true,
        phases: everything(table, capacity),
        what,
    }
}

/// Returns the operations that fill an empty table, in the order of the sets, by phase. `capacity` is the number of elements
/// that a transaction with a new table takes.
pub(crate) fn everything(table: &impl Contents, capacity: usize) -> Vec<Vec<Ops>> {
    let chains = Ops {
        groups: table.groups().into_iter().map(GroupOp::Make).collect(),
        ..Ops::default()
    };
    let elements = table.by_set();
    let closing = if elements.len() > capacity { table.closing() } else { Vec::new() };
    let closes = |element: &Element| matches!(element.set, Set::Policy(set) if set.closes());
    let (closers, others) = elements.split_at(elements.partition_point(closes));
    let add = |part: &[Element]| Ops {
        add: part.to_vec(),
        ..Ops::default()
    };
    // A table with a part of what closes is open: it is one group, which no transaction has half of.
    let closers = add(&[&closing, closers].concat());
    let groups = [chains, closers].into_iter().chain(others.chunks(TOGETHER).map(add));
    let fill = groups.filter(|ops| ops.len() > 0).collect();
    let mut phases = vec![fill];
    if !closing.is_empty() {
        phases.push(vec![Ops {
            delete: closing,
            ..Ops::default()
        }]);
    }
    phases
}
