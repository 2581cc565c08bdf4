//! Transactions on one table under the guard that no other program changed it.

use kplane_model::Family;

use super::access::{Cost, Guard, TableAccess};
use super::frontend::Ops;
use super::repair::{Contents, repair_table, unreadable};
use super::transactions::{Ground, each_transaction};
use super::watch::Drift;
use crate::backend::Verification;
use crate::backend::driver::StepError;
use kplane_netlink::CommitError;

/// Most attempts to write under the guard. Other programs may change their rules while kplane writes. After
/// this many such conflicts in a row, kplane writes without the guard. The kernel reports afterwards whether
/// another program changed kplane's table.
const ATTEMPTS: u32 = 64;

/// A change of one table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Send<'a> {
    pub(super) family: Family,
    pub(super) ground: Ground,
    /// Operations of which each part waits for the one before.
    pub(super) phases: &'a [&'a [Ops]],
    /// Whether they go on with a change that the kernel has begun to apply.
    pub(super) begun: bool,
}

/// Commits a change if nothing happened to the table since its content, `before`, was last known. Changes by other
/// programs are repaired first; they are named in `repaired`.
pub(super) fn send<K: TableAccess + ?Sized>(
    kernel: &mut K,
    before: &impl Contents,
    change: Send<'_>,
    repaired: &mut Option<String>,
) -> Result<Cost, StepError> {
    let capacity = [false, true].map(|rebuild| kernel.capacity(rebuild));
    let (mut total, mut begun) = (Cost::default(), change.begun);
    for groups in change.phases {
        let ground = if begun { Ground::Table } else { change.ground };
        each_transaction(ground, groups, capacity, |part| {
            let cost = if begun {
                let rest = kernel.commit(false, Guard::None, part.groups);
                // The kernel has begun to apply the change.
                rest.map_err(StepError::interrupted)?
            } else {
                let first = Send {
                    phases: &[part.groups],
                    ..change
                };
                commit_guarded(kernel, before, first, repaired)?
            };
            begun = true;
            total.bytes += cost.bytes;
            total.encode += cost.encode;
            total.kernel += cost.kernel;
            Ok::<(), StepError>(())
        })?;
    }
    Ok(total)
}

fn commit_guarded<K: TableAccess + ?Sized>(
    kernel: &mut K,
    before: &impl Contents,
    Send {
        family,
        ground,
        phases,
        ..
    }: Send<'_>,
    repaired: &mut Option<String>,
) -> Result<Cost, StepError> {
    let rebuild = ground != Ground::Table;
    let groups = phases.first().copied().unwrap_or_default();
    for _ in 0..ATTEMPTS {
        match kernel.commit(rebuild, Guard::Head, groups) {
            Err(CommitError::GenerationMoved) => {}
            result => return Ok(result?),
        }
        // A table that is replaced as a whole may hold anything.
        let drift = kernel.drift().map_err(unreadable)?;
        if !rebuild && let Some(drift) = drift {
            *repaired = repair_table(kernel, before, drift)?.or(repaired.take());
        }
    }
    tracing::warn!(
        %family,
        "other programs change their rules all the time; writing without the guard"
    );
    Ok(kernel.commit(rebuild, Guard::None, groups)?)
}

/// Repairs changes by other programs. A change that cannot be repaired from what kplane knows of the
/// table is drift. After drift, the engine applies everything again.
pub(super) fn repair<K: TableAccess + ?Sized>(
    kernel: &mut K,
    table: &impl Contents,
    drift: Drift,
) -> Result<Verification, StepError> {
    match repair_table(kernel, table, drift) {
        Ok(repaired) => Ok(repaired.map_or(Verification::Equal, Verification::Repaired)),
        Err(known @ (StepError::Read(_) | StepError::Drifted(_))) => Err(known),
        Err(error) => Err(StepError::Drifted(format!("cannot repair it: {error}"))),
    }
}
