//! One family of the nftables backend: its table, and how it is read, changed and repaired.

#[cfg(test)]
mod tests;

use kplane_model::{Family, ServiceKey};

use super::DESCRIPTION;
use super::access::{Cost, FoundTable, Guard, KernelTable, Namespace, TableAccess};
use super::adopt::{adopt, serves};
use super::affinity_id::AffinityId;
use super::frontend::Ops;
use super::mend::{mend, unreadable};
use super::probe::{ProbeError, probe};
use super::schema::TableSettings;
use super::stale::{self, Turns};
use super::table::{StagedTable, Table};
use super::transactions::each_transaction;
use super::watch::Meddling;
use crate::backend::driver::{DataPath, StepError};
use crate::backend::{Applied, Backend, Change, Kind, OpenError, Verification, open_sides};
use crate::plan::FrontendAddr;
use kplane_netlink::CommitError;

/// Most attempts to write under the guard. Other programs may change their rules while kplane writes. After
/// this many such conflicts in a row, kplane writes without the guard. The kernel reports afterwards whether
/// another program changed kplane's table.
const ATTEMPTS: u32 = 64;

/// One family's table: `table ip kplane` or `table ip6 kplane`.
#[derive(Debug)]
pub(super) struct NftDataPath<K> {
    family: Family,
    kernel: K,
    turns: Turns,
}

/// The content of the kernel's table.
#[derive(Debug)]
pub(super) struct Content {
    table: Table,
    /// Whether the kernel has no such table yet. The next transaction creates it.
    missing: bool,
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
    let error = |reason: String| OpenError {
        backend: DESCRIPTION.name,
        reason,
    };
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
    let table = |family| Ok(NftDataPath::new(family, namespace.table(family, settings)));
    let sides = open_sides::<NftDataPath<KernelTable>>(DESCRIPTION.name, table)?;
    Ok(Backend {
        notifications: Some(Box::new(namespace)),
        serving: Some(Kind::Nftables.serving([None; 2])),
        ..Backend::new(&DESCRIPTION, sides)
    })
}

impl<K: TableAccess> NftDataPath<K> {
    pub(super) fn new(family: Family, kernel: K) -> Self {
        Self {
            family,
            kernel,
            turns: Turns::default(),
        }
    }

    #[cfg(test)]
    pub(super) fn kernel(&mut self) -> &mut K {
        &mut self.kernel
    }

    #[cfg(test)]
    pub(super) fn into_kernel(self) -> K {
        self.kernel
    }

    /// Commits if nothing happened to kplane's table since its content was last known. Changes by other
    /// programs are repaired first.
    fn commit_guarded(
        &mut self,
        table: &Table,
        rebuild: bool,
        groups: &[Ops],
        repaired: &mut Option<String>,
    ) -> Result<Cost, StepError> {
        for _ in 0..ATTEMPTS {
            match self.kernel.commit(rebuild, Guard::Head, groups) {
                Err(CommitError::GenerationMoved) => {}
                result => return Ok(result?),
            }
            // A table that is replaced as a whole may hold anything.
            let meddling = self.kernel.meddling().map_err(unreadable)?;
            if let Some(meddling) = meddling.filter(|_| !rebuild) {
                *repaired = mend(&mut self.kernel, table, meddling)?.or(repaired.take());
            }
        }
        let family = self.family;
        tracing::warn!(
            %family,
            "other programs change their rules all the time; writing without the guard"
        );
        Ok(self.kernel.commit(rebuild, Guard::None, groups)?)
    }

    /// Repairs changes by other programs. A change that cannot be repaired from what kplane knows of the
    /// table is drift. After drift, the engine applies everything again.
    fn repair(&mut self, table: &Table, meddling: Meddling) -> Result<Verification, StepError> {
        match mend(&mut self.kernel, table, meddling) {
            Ok(repaired) => Ok(repaired.map_or(Verification::Equal, Verification::Repaired)),
            Err(known @ (StepError::Read(_) | StepError::Drifted(_))) => Err(known),
            Err(error) => Err(StepError::Drifted(format!("cannot repair it: {error}"))),
        }
    }

    /// Forgets clients of these groups whose endpoint is gone, so that they get a new endpoint.
    fn forget_stale(&mut self, table: &Table, groups: impl IntoIterator<Item = AffinityId>) {
        for id in groups {
            let Some(endpoints) = table.may_remember(id) else {
                continue;
            };
            if let Err(problem) = stale::forget_stale(&mut self.kernel, id, endpoints) {
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

impl<K: TableAccess> DataPath for NftDataPath<K> {
    type Content = Content;
    type Staged = StagedTable;

    fn family(&self) -> Family {
        self.family
    }

    fn adopt(&mut self) -> Result<Content, StepError> {
        let family = self.family;
        match self.kernel.read().map_err(unreadable)? {
            FoundTable::Ours(groups, elements) => {
                let table = adopt(&groups, &elements);
                let (elements, strays) = (elements.len(), table.strays.len());
                tracing::info!(%family, elements, strays, "adopted table kplane of the kernel");
                let missing = false;
                Ok(Content { table, missing })
            }
            FoundTable::Other(reason) => {
                tracing::info!(%family, reason, "creating table kplane");
                Ok(Content {
                    table: Table::default(),
                    missing: true,
                })
            }
        }
    }

    fn places<'c>(content: &'c Content, key: &ServiceKey) -> &'c [FrontendAddr] {
        content.table.places(key)
    }

    fn stage(
        &mut self,
        content: &mut Content,
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
        content: &mut Content,
        staged: &mut StagedTable,
        applied: &mut Applied,
    ) -> Result<(), StepError> {
        let capacity = [false, true].map(|rebuild| self.kernel.capacity(rebuild));
        each_transaction(content.missing, &staged.groups, capacity, |part| {
            let cost = if part.first {
                let repaired = &mut applied.repaired;
                self.commit_guarded(&content.table, part.rebuild, part.groups, repaired)?
            } else {
                let rest = self.kernel.commit(false, Guard::None, part.groups);
                // The kernel has begun to apply the change.
                rest.map_err(StepError::interrupted)?
            };
            applied.bytes += cost.bytes;
            applied.encode += cost.encode;
            applied.kernel += cost.kernel;
            Ok(())
        })
    }

    fn accept(&mut self, content: &mut Content, mut staged: StagedTable, _applied: &mut Applied) {
        let stale = std::mem::take(&mut staged.stale);
        content.table.accept(staged);
        content.missing = false;
        self.forget_stale(&content.table, stale);
    }

    fn check(&mut self, content: &mut Content) -> Result<Verification, StepError> {
        let reported = self.kernel.meddling().map_err(unreadable)?;
        let by = reported.and_then(|reported| reported.by);
        let table = &content.table;
        let outcome = self.repair(table, Meddling::anything_by(by))?;
        if outcome == Verification::Equal {
            // This repeats what an earlier attempt failed to do.
            let groups = table.groups().into_iter().map(|group| group.id);
            let groups = self.turns.next(&groups.collect());
            self.forget_stale(table, groups);
        }
        Ok(outcome)
    }

    fn mend(&mut self, content: &mut Content) -> Result<Verification, StepError> {
        let reported = self.kernel.meddling().map_err(unreadable)?;
        self.repair(&content.table, reported.unwrap_or_default())
    }

    fn has_services(&mut self) -> bool {
        matches!(self.kernel.read(), Ok(FoundTable::Ours(_, elements)) if serves(&elements))
    }
}
