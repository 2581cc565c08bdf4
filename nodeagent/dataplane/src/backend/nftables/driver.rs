//! The nftables backend: keeps one table per family, and changes the kernel's tables to what a change asks
//! for.

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::os::fd::OwnedFd;
use std::time::Instant;

use kplane_model::{Family, ServiceKey};

use super::DESCRIPTION;
use super::adopt::{adopt, serves};
use super::affinity::AffinityId;
use super::clients;
use super::frontend::Ops;
use super::kernel::{Cost, Found, Guard, Kernel, Netlink};
use super::mend::mend;
use super::phases::phases;
use super::probe::{ProbeError, probe};
use super::schema::Settings;
use super::table::{Staged, Table};
use super::watch::Meddling;
use crate::backend::{
    Applied, ApplyError, Backend, Change, Description, Failure, OpenError, Serving, Verification,
};
use crate::plan::ServicePlan;
use kplane_netlink::{CommitError, NetlinkError};

/// Most attempts to write under the guard. Other programs may change their rules while kplane writes. After
/// this many such conflicts in a row, kplane writes without the guard. The kernel reports afterwards whether
/// another program changed kplane's table.
const ATTEMPTS: u32 = 64;

/// The driver of nf_tables: programs `table ip kplane` and `table ip6 kplane`.
#[derive(Debug)]
pub(super) struct Driver<K> {
    kernel: K,
    /// The content of the kernel's tables, by family; `None` = not known.
    tables: [Option<Table>; 2],
}

/// A step that failed while applying a change.
#[derive(Debug, thiserror::Error)]
pub(super) enum StepError {
    /// The table could not be read.
    #[error("reading our table back: {0}")]
    Read(#[from] NetlinkError),
    /// A transaction was not committed.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// A partial change came while the content of the kernel's table is not known.
    #[error("our table is not known any more; everything has to be applied again")]
    Unknown,
    /// Another program changed kplane's table. The next complete change repairs the table.
    #[error("somebody else changed our table: {0}")]
    Drifted(String),
}

impl StepError {
    /// Returns whether the kernel understood the operations and refused them. It may accept fewer
    /// ServicePorts.
    fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Commit(CommitError::Rejected { .. } | CommitError::Refused(_))
        )
    }
}

/// A change that was not committed.
struct Failed {
    error: StepError,
    /// Whether the kernel certainly holds what it held before.
    nothing_applied: bool,
}

impl Driver<Netlink> {
    /// Opens the backend for this thread's network namespace, after a check that the kernel accepts kplane's
    /// table.
    ///
    /// # Errors
    /// [`OpenError`] names the missing part.
    pub(super) fn open(settings: Settings) -> Result<Self, OpenError> {
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
        let kernel = Netlink::open(settings).map_err(|problem| error(problem.to_string()))?;
        Ok(Self::with(kernel))
    }
}

impl<K: Kernel> Driver<K> {
    pub(super) fn with(kernel: K) -> Self {
        Self {
            kernel,
            tables: [None, None],
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

    fn try_apply(&mut self, change: Change<'_>) -> Result<Applied, StepError> {
        let started = Instant::now();
        let family = change.family;
        let (table, rebuild) = self.load(family, change.complete)?;
        let mut staged = table.stage(change);
        let operations = staged.len() as u64;
        let planned = started.elapsed();
        let failures = std::mem::take(&mut staged.failures);
        let mut repaired = None;
        let cost = match self.commit(family, &table, rebuild, &staged, &mut repaired) {
            Ok(cost) => cost,
            Err(failed) => {
                // In all other cases, the content of the kernel's table is not known.
                if failed.nothing_applied && !rebuild {
                    self.tables[family as usize] = Some(table);
                }
                return Err(failed.error);
            }
        };
        let mut table = table;
        let stale = std::mem::take(&mut staged.stale);
        table.accept(staged);
        forget_stale(&mut self.kernel, &table, family, stale);
        self.tables[family as usize] = Some(table);
        Ok(Applied {
            operations,
            bytes: cost.bytes,
            plan: planned,
            encode: cost.encode,
            kernel: cost.kernel,
            failures,
            rules: None,
            repaired,
        })
    }

    /// Takes the family's table out of `tables`, or adopts the kernel's. Returns the table, and whether it
    /// has to be created first.
    fn load(&mut self, family: Family, complete: bool) -> Result<(Table, bool), StepError> {
        if let Some(table) = self.tables[family as usize].take() {
            return Ok((table, false));
        }
        if !complete {
            return Err(StepError::Unknown);
        }
        match self.kernel.read(family)? {
            Found::Ours(groups, elements) => {
                let table = adopt(&groups, &elements);
                let (elements, strays) = (elements.len(), table.strays.len());
                tracing::info!(%family, elements, strays, "adopted what the kernel already holds");
                Ok((table, false))
            }
            Found::Other(reason) => {
                tracing::info!(%family, reason, "making our table");
                Ok((Table::default(), true))
            }
        }
    }

    fn commit(
        &mut self,
        family: Family,
        table: &Table,
        rebuild: bool,
        staged: &Staged,
        repaired: &mut Option<String>,
    ) -> Result<Cost, Failed> {
        let mut cost = Cost::default();
        let mut rebuild = rebuild;
        let mut first = true;
        let phases = match rebuild {
            // A table that does not exist yet guards no destination.
            true => vec![Cow::Borrowed(&staged.groups[..])],
            false => phases(&staged.groups),
        };
        for phase in &phases {
            let mut groups = &phase[..];
            while rebuild || !groups.is_empty() {
                let (now, later) = groups.split_at(fitting(groups, self.kernel.capacity(rebuild)));
                let part = if first {
                    self.commit_guarded(family, table, rebuild, now, repaired)
                } else {
                    // This is the rest of a change that the kernel has begun to apply.
                    let part = self.kernel.commit(family, false, Guard::None, now);
                    part.map_err(StepError::from)
                };
                let part = part.map_err(|error| Failed {
                    nothing_applied: first && error.is_refusal(),
                    error,
                })?;
                cost.bytes += part.bytes;
                cost.encode += part.encode;
                cost.kernel += part.kernel;
                (groups, rebuild, first) = (later, false, false);
            }
        }
        Ok(cost)
    }

    /// Commits if nothing happened to kplane's table since its content was last known. Changes by other
    /// programs are repaired first.
    fn commit_guarded(
        &mut self,
        family: Family,
        table: &Table,
        rebuild: bool,
        groups: &[Ops],
        repaired: &mut Option<String>,
    ) -> Result<Cost, StepError> {
        for _ in 0..ATTEMPTS {
            match self.kernel.commit(family, rebuild, Guard::Head, groups) {
                Err(CommitError::GenerationMoved) => {}
                result => return Ok(result?),
            }
            // A table that is replaced as a whole may hold anything.
            if let Some(meddling) = self.kernel.meddling(family)?.filter(|_| !rebuild) {
                *repaired = mend(&mut self.kernel, family, table, meddling)?.or(repaired.take());
            }
        }
        tracing::warn!(%family, "rules of others change all the time; writing without the guard");
        Ok(self.kernel.commit(family, rebuild, Guard::None, groups)?)
    }

    /// Applies a refused change in smaller and smaller parts, so that only the ServicePorts that the kernel
    /// does not accept are left out (invariant: isolation).
    fn isolate(&mut self, change: Change<'_>) -> Result<Applied, StepError> {
        let mut total = Applied::default();
        let mut good: Vec<(ServiceKey, Option<ServicePlan>)> = Vec::new();
        let mut parts = vec![change.services];
        while let Some(part) = parts.pop() {
            self.prepare(change.family, change.complete)?;
            // A partial change deletes nothing that another part may still claim.
            let partial = Change {
                services: part,
                complete: false,
                ..change
            };
            match (self.try_apply(partial), part) {
                (Ok(applied), _) => {
                    add(&mut total, applied);
                    good.extend_from_slice(part);
                }
                (Err(error), [(key, _)]) if error.is_refusal() => {
                    let (key, reason) = (key.clone(), error.to_string());
                    total.failures.push(Failure {
                        key,
                        reason,
                        degraded: false,
                    });
                }
                (Err(error), _) if error.is_refusal() => {
                    let (first, second) = part.split_at(part.len() / 2);
                    parts.extend([second, first]);
                }
                (Err(error), _) => return Err(error),
            }
        }
        if change.complete {
            let last = self.try_apply(Change {
                services: &good,
                ..change
            })?;
            // The last change reports the failures of these ServicePorts again.
            total
                .failures
                .retain(|failure| good.iter().all(|(key, _)| *key != failure.key));
            add(&mut total, last);
        }
        Ok(total)
    }

    /// Makes sure that the content of the family's table is known. Only a complete change may create or adopt
    /// the table, because no ServicePort owns anything in it then.
    fn prepare(&mut self, family: Family, complete: bool) -> Result<(), StepError> {
        let (table, rebuild) = self.load(family, complete)?;
        if rebuild {
            self.kernel.commit(family, true, Guard::None, &[])?;
        }
        self.tables[family as usize] = Some(table);
        Ok(())
    }
}

impl<K: Kernel> Driver<K> {
    /// Repairs changes by other programs to a family's table. A change that cannot be repaired from what
    /// kplane knows of the table is drift. After drift, the engine applies everything again.
    fn look(&mut self, family: Family, meddling: Meddling) -> Result<Verification, ApplyError> {
        let Some(table) = self.tables[family as usize].take() else {
            let reason = "it is not known what our table should hold".to_owned();
            return Ok(Verification::Drifted(reason));
        };
        match mend(&mut self.kernel, family, &table, meddling) {
            Ok(repaired) => {
                self.tables[family as usize] = Some(table);
                Ok(repaired.map_or(Verification::Equal, Verification::Repaired))
            }
            Err(StepError::Read(error)) => {
                self.tables[family as usize] = Some(table);
                Err(ApplyError::new(family, StepError::Read(error)))
            }
            Err(StepError::Drifted(what)) => Ok(Verification::Drifted(what)),
            Err(error) => Ok(Verification::Drifted(format!(
                "cannot be put right: {error}"
            ))),
        }
    }
}

impl<K: Kernel> Backend for Driver<K> {
    fn describe(&self) -> &'static Description {
        &DESCRIPTION
    }

    fn apply(&mut self, change: Change<'_>) -> Result<Applied, ApplyError> {
        let family = change.family;
        let result = match self.try_apply(change) {
            Err(error) if error.is_refusal() && !change.services.is_empty() => {
                tracing::warn!(%family, %error, "looking for the ServicePort that the kernel refuses");
                self.isolate(change)
            }
            result => result,
        };
        result.map_err(|error| ApplyError::new(family, error))
    }

    fn verify(&mut self, family: Family) -> Result<Verification, ApplyError> {
        let heard = self.kernel.meddling(family);
        let heard = heard.map_err(|error| ApplyError::new(family, StepError::from(error)))?;
        let outcome = self.look(
            family,
            Meddling::anything_by(heard.and_then(|heard| heard.by)),
        )?;
        if let (Some(table), Verification::Equal) = (&self.tables[family as usize], &outcome) {
            // No endpoint is stale now. This repeats what an earlier attempt failed to do.
            let groups = table.groups().into_iter().map(|group| group.id);
            forget_stale(&mut self.kernel, table, family, groups.collect());
        }
        Ok(outcome)
    }

    fn listen(&mut self) -> [bool; 2] {
        self.kernel.listen().unwrap_or_else(|problem| {
            tracing::warn!(%problem, "cannot hear what others change; everything is read back");
            [true, true]
        })
    }

    fn has_services(&mut self, family: Family) -> bool {
        matches!(self.kernel.read(family), Ok(Found::Ours(_, elements)) if serves(&elements))
    }

    fn mend(&mut self, family: Family) -> Result<Verification, ApplyError> {
        let meddling = self.kernel.meddling(family);
        let meddling = meddling.map_err(|error| ApplyError::new(family, StepError::from(error)))?;
        self.look(family, meddling.unwrap_or_default())
    }

    fn readiness(&self) -> Option<OwnedFd> {
        self.kernel.readiness()
    }

    fn serving(&self) -> Option<Serving> {
        Some(Serving::Nftables)
    }
}

/// Forgets clients of these groups whose endpoint is gone, so that they get a new endpoint.
fn forget_stale<K: Kernel>(kernel: &mut K, table: &Table, family: Family, groups: Vec<AffinityId>) {
    for id in groups {
        let Some(endpoints) = table.may_remember(id) else {
            continue;
        };
        if let Err(problem) = clients::forget_stale(kernel, family, id, endpoints) {
            tracing::warn!(
                %family, group = ?id, %problem,
                "some clients with session affinity keep an endpoint that is gone; they are \
                 looked for again when the table is verified"
            );
        }
    }
}

/// Returns how many of the first groups fit into a transaction of `capacity` elements; at least one.
pub(super) fn fitting(groups: &[Ops], capacity: usize) -> usize {
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

fn add(total: &mut Applied, part: Applied) {
    total.operations += part.operations;
    total.bytes += part.bytes;
    total.plan += part.plan;
    total.encode += part.encode;
    total.kernel += part.kernel;
    total.failures.extend(part.failures);
    total.repaired = part.repaired.or(total.repaired.take());
}
