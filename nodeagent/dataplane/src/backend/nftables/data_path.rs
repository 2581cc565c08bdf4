//! One family of the nftables backend: its table, and how it is read, changed and repaired.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use kplane_model::{Family, ServiceKey};

use super::DESCRIPTION;
use super::access::{ABSENT, FoundTable, KernelTables as _, Namespace, TableAccess};
use super::adopt::{adopt, serves};
use super::affinity_id::AffinityId;
use super::guarded::{Send, repair, send};
use super::policies::PolicyTables;
use super::probe::{ProbeError, probe};
use super::repair::{Contents as _, unreadable};
use super::schema::TableSettings;
use super::slices::{Expected, SlicedRead, check};
use super::stale::{self, Turns};
use super::table::{StagedTable, Table};
use super::transactions::Ground;
use crate::backend::driver::{DataPath, StepError};
use crate::backend::{Applied, Backend, Change, Kind, OpenError, Verification, open_sides};
use crate::plan::FrontendAddr;
use kplane_netlink::CommitError;

/// One family's table: `table ip kplane` or `table ip6 kplane`.
#[derive(Debug)]
pub(super) struct NftDataPath {
    family: Family,
    kernel: Box<dyn TableAccess>,
    turns: Turns,
}

/// The content of the kernel's table.
#[derive(Debug)]
pub(super) struct KnownTable {
    table: Table,
    /// The state of the kernel before the next transaction.
    ground: Ground,
    expected: Expected,
    read: SlicedRead,
}

impl From<CommitError> for StepError {
    fn from(error: CommitError) -> Self {
        match error {
            CommitError::Rejected { .. } | CommitError::Refused(_) => Self::Refused(error.into()),
            error => Self::interrupted(error),
        }
    }
}

/// Opens the backend for this thread's network namespace, after a check that the kernel accepts kplane's
/// table.
///
/// # Errors
/// [`OpenError`] names the missing part.
pub(super) fn open(settings: TableSettings) -> Result<Backend, OpenError> {
    let error = |reason: String| OpenError::new(DESCRIPTION.name, reason);
    match probe(&Family::ALL) {
        Ok(()) => {}
        // A kernel without IPv6 still serves IPv4. Changes of IPv6 fail with their own errors.
        Err(ProbeError::Missing {
            family: Family::V6,
            missing,
        }) => {
            tracing::info!(
                missing,
                "this kernel cannot run the IPv6 table; serving IPv4 only"
            );
        }
        Err(problem) => return Err(error(problem.to_string())),
    }
    let namespace = Namespace::open().map_err(|problem| error(problem.to_string()))?;
    let policies = PolicyTables::shared(Arc::new(namespace.clone()));
    let table = |family| {
        Ok(NftDataPath::new(
            family,
            namespace.table(family, settings.into()),
        ))
    };
    let sides = open_sides::<NftDataPath>(DESCRIPTION.name, table)?;
    Ok(Backend {
        notifications: Some(Box::new(namespace)),
        policies,
        serving: Some(Kind::Nftables.serving([None; 2])),
        ..Backend::new(&DESCRIPTION, sides)
    })
}

impl NftDataPath {
    pub(super) fn new(family: Family, kernel: Box<dyn TableAccess>) -> Self {
        Self {
            family,
            kernel,
            turns: Turns::default(),
        }
    }

    /// Forgets clients of these groups whose endpoint is gone, so that they get a new endpoint.
    fn forget_stale(&mut self, table: &Table, groups: impl IntoIterator<Item = AffinityId>) {
        for id in groups {
            let Some(endpoints) = table.may_remember(id) else {
                continue;
            };
            if let Err(problem) = stale::forget_stale(&mut *self.kernel, id, endpoints) {
                self.turns.failed(id);
                let family = self.family;
                tracing::warn!(
                    %family, group = ?id, %problem,
                    "some clients with session affinity keep an endpoint that is gone; the agent searches for \
                     them again when it reads the table back"
                );
            }
        }
    }
}

impl DataPath for NftDataPath {
    type Content = KnownTable;
    type Staged = StagedTable;

    fn family(&self) -> Family {
        self.family
    }

    fn adopt(&mut self) -> Result<KnownTable, StepError> {
        let family = self.family;
        match self.kernel.read().map_err(unreadable)? {
            FoundTable::Ours(groups, elements) => {
                let table = adopt(&groups, &elements);
                let expected = Expected::of(&elements);
                let (elements, strays) = (elements.len(), table.strays.len());
                tracing::info!(%family, elements, strays, "adopted table kplane of the kernel");
                Ok(KnownTable {
                    table,
                    ground: Ground::Table,
                    expected,
                    read: SlicedRead::default(),
                })
            }
            FoundTable::Other(reason) => {
                tracing::info!(%family, reason, "creating table kplane");
                Ok(KnownTable {
                    table: Table::default(),
                    ground: if reason == ABSENT { Ground::Nothing } else { Ground::Other },
                    expected: Expected::default(),
                    read: SlicedRead::default(),
                })
            }
        }
    }

    fn frontends<'c>(content: &'c KnownTable, key: &ServiceKey) -> &'c [FrontendAddr] {
        content.table.frontends(key)
    }

    fn stage(
        &mut self,
        content: &mut KnownTable,
        change: Change<'_>,
        applied: &mut Applied,
    ) -> Result<StagedTable, StepError> {
        let mut staged = content.table.stage(change);
        applied.operations = staged.len() as u64;
        applied.failures.append(&mut staged.failures);
        Ok(staged)
    }

    fn commit(
        &mut self,
        content: &mut KnownTable,
        staged: &mut StagedTable,
        applied: &mut Applied,
    ) -> Result<(), StepError> {
        let (table, repaired) = (&content.table, &mut applied.repaired);
        let change = Send {
            begun: false,
            family: self.family,
            ground: content.ground,
            phases: &[&staged.groups],
        };
        let cost = send(&mut *self.kernel, table, change, repaired)?;
        applied.bytes += cost.bytes;
        applied.encode += cost.encode;
        applied.kernel += cost.kernel;
        Ok(())
    }

    fn accept(
        &mut self,
        content: &mut KnownTable,
        mut staged: StagedTable,
        _applied: &mut Applied,
    ) {
        let stale = std::mem::take(&mut staged.stale);
        content.expected.record(&staged.groups);
        content.table.accept(staged);
        content.ground = Ground::Table;
        self.forget_stale(&content.table, stale);
    }

    fn check(&mut self, content: &mut KnownTable) -> Result<Verification, StepError> {
        let KnownTable {
            table,
            expected,
            read,
            ..
        } = content;
        let outcome = check(&mut *self.kernel, table, expected, read)?;
        if outcome == Verification::Equal {
            // This repeats what an earlier attempt failed to do.
            let groups = table.groups().into_iter().map(|group| group.id);
            let groups = self.turns.next(&groups.collect());
            self.forget_stale(table, groups);
        }
        Ok(outcome)
    }

    fn repair(&mut self, content: &mut KnownTable) -> Result<Verification, StepError> {
        let reported = self.kernel.drift().map_err(unreadable)?;
        repair(
            &mut *self.kernel,
            &content.table,
            reported.unwrap_or_default(),
        )
    }

    fn has_services(&mut self) -> bool {
        matches!(self.kernel.read(), Ok(FoundTable::Ours(_, elements)) if serves(&elements))
    }
}
