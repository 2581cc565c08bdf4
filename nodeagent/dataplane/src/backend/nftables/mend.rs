//! Brings a table back to what it should hold after others changed it, from what we know of it: nothing is
//! planned anew.

use std::collections::BTreeSet;
use std::time::Duration;

use kplane_model::Family;

use super::driver::StepError;
use super::element::Element;
use super::frontend::Ops;
use super::kernel::{Found, Guard, Kernel};
use super::structure::GroupOp;
use super::table::Table;
use super::watch::{Changed, Meddling};
use kplane_netlink::CommitError;

/// Others may go on changing rules while a table is put right; after so many times in a row it is up to
/// the engine, which waits longer and longer.
const ATTEMPTS: u32 = 16;

/// How often, and after which pause, a table is read again that is not as it should be.
const READ_AGAIN: u32 = 2;
const READ_PAUSE: Duration = Duration::from_millis(20);

/// Elements that go into a transaction together or not at all.
const TOGETHER: usize = 256;

/// What has to be done to a table.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    rebuild: bool,
    groups: Vec<Ops>,
    /// What is wrong, for people.
    what: String,
}

/// Brings a table to what it should hold, and says what was wrong with it, and by whom; `None` if nothing.
///
/// # Errors
/// [`StepError::Drifted`] when what was found has to be adopted first; what cannot be read or written.
pub(super) fn mend<K: Kernel>(
    kernel: &mut K,
    family: Family,
    table: &Table,
    meddling: Meddling,
) -> Result<Option<String>, StepError> {
    let mut meddling = meddling;
    for _ in 0..ATTEMPTS {
        let plan = match &meddling.changed {
            Changed::Elements(elements) => {
                let pairs = elements
                    .iter()
                    .map(|((set, key), now)| (table.element(*set, *key), *now));
                elements_plan(pairs)
            }
            Changed::Anything => read_plan(kernel, family, table)?,
        };
        let Some(plan) = plan else {
            return Ok(None);
        };
        match commit(kernel, family, &plan) {
            Ok(()) => return Ok(Some(format!("{}, {meddling}", plan.what))),
            Err(CommitError::GenerationMoved) => {}
            Err(error) => return Err(error.into()),
        }
        if let Some(more) = kernel.meddling(family)? {
            meddling.append(more);
        }
    }
    Err(StepError::Drifted(format!("{meddling}, all the time")))
}

fn commit<K: Kernel>(kernel: &mut K, family: Family, plan: &Plan) -> Result<(), CommitError> {
    let capacity = kernel.capacity(plan.rebuild);
    let (mut rebuild, mut guard) = (plan.rebuild, Guard::Head);
    let mut groups = &plan.groups[..];
    while rebuild || !groups.is_empty() {
        let (now, later) = groups.split_at(super::driver::fitting(groups, capacity));
        kernel.commit(family, rebuild, guard, now)?;
        // The rest of what has begun.
        (groups, rebuild, guard) = (later, false, Guard::None);
    }
    Ok(())
}

/// For elements as they should be and as they are.
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
    let groups = vec![ops];
    Some(Plan {
        rebuild: false,
        groups,
        what,
    })
}

fn differing(missing: usize, foreign: usize, example: &Element) -> String {
    let set = example.set.name();
    format!("{missing} elements were missing and {foreign} were not ours, one of them in set {set}")
}

/// Reads a table and plans from how it differs from what it should hold. A list of elements may lack some
/// while the kernel is about to enlarge a set, which it does by the way some time after many were added: a
/// difference counts if it stays.
fn read_plan<K: Kernel>(
    kernel: &mut K,
    family: Family,
    table: &Table,
) -> Result<Option<Plan>, StepError> {
    let mut plan = found_plan(table, kernel.read(family)?)?;
    for _ in 0..READ_AGAIN {
        if plan.as_ref().is_none_or(|plan| plan.rebuild) {
            break;
        }
        std::thread::sleep(READ_PAUSE);
        plan = found_plan(table, kernel.read(family)?)?;
    }
    Ok(plan)
}

/// For a table as it was found.
fn found_plan(table: &Table, found: Found) -> Result<Option<Plan>, StepError> {
    let (groups, found) = match found {
        Found::Ours(groups, elements) => (groups, elements),
        Found::Other(reason) => return Ok(Some(rebuild_plan(table, reason))),
    };
    if !groups.iter().copied().eq(table.groups()) {
        let reason = "the chains of session affinity are not ours".to_owned();
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
        groups: vec![ops],
        what,
    }))
}

/// Everything, on top of a fresh table.
fn rebuild_plan(table: &Table, what: String) -> Plan {
    let groups = table.groups().into_iter().map(GroupOp::Make);
    let chains = Ops {
        groups: groups.collect(),
        ..Ops::default()
    };
    let elements: Vec<Element> = table.elements().into_iter().collect();
    let elements = elements.chunks(TOGETHER).map(|chunk| Ops {
        add: chunk.to_vec(),
        ..Ops::default()
    });
    let groups = [chains].into_iter().chain(elements);
    Plan {
        rebuild: true,
        groups: groups.filter(|ops| ops.len() > 0).collect(),
        what,
    }
}
