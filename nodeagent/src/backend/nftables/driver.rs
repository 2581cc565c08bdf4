//! The backend: keeps a table per family and brings the kernel to what a change asks for.

#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use kplane_model::{Family, ServiceKey};

use super::adopt::{adopt, serves};
use super::affinity::AffinityId;
use super::clients;
use super::frontend::Ops;
use super::kernel::{Cost, Found, Kernel, Netlink};
use super::probe::{ProbeError, probe};
use super::schema::Settings;
use super::table::{Staged, Table};
use crate::backend::{
    Applied, ApplyError, Backend, Change, Failure, OpenError, Serving, Verification,
};
use crate::netlink::{CommitError, NetlinkError, NfSocket};
use crate::plan::ServicePlan;

/// The backend's name.
const NAME: &str = "nftables";
/// Somebody else may change rules of theirs while we write; after so many times in a row we write
/// all the same. Verification finds out if it mattered.
const ATTEMPTS: u32 = 5;

/// How often, and after which pause, a table is read again that is not as it should be.
const READ_AGAIN: u32 = 2;
const READ_PAUSE: Duration = Duration::from_millis(20);

/// Programs nf_tables: `table ip kplane` and `table ip6 kplane`.
#[derive(Debug)]
pub(super) struct Driver<K> {
    kernel: K,
    /// What the kernel holds, by family; `None` = not known.
    tables: [Option<Table>; 2],
}

/// A step of applying that failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum StepError {
    /// The table could not be read.
    #[error("reading our table back: {0}")]
    Read(#[from] NetlinkError),
    /// A transaction was not committed.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// A change that is not complete came while it is not known what the kernel holds.
    #[error("our table is not known any more; everything has to be applied again")]
    Unknown,
    /// Somebody changed our table; it will be repaired with the next complete change.
    #[error("somebody else changed our table: {0}")]
    Drifted(String),
}

impl StepError {
    /// The kernel understood and refused: with fewer ServicePorts it may accept.
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
    /// For sure: the kernel holds what it held.
    nothing_applied: bool,
}

impl Driver<Netlink> {
    /// Opens the backend for this thread's network namespace, having tried out that the kernel can
    /// run our table.
    ///
    /// # Errors
    /// [`OpenError`] says what is missing.
    pub(super) fn open(settings: Settings) -> Result<Self, OpenError> {
        let error = |reason: String| OpenError {
            backend: NAME,
            reason,
        };
        match probe(&Family::ALL) {
            Ok(()) => {}
            // A kernel without IPv6 still serves IPv4; the family's changes fail by themselves.
            Err(ProbeError::Missing {
                family: Family::V6,
                missing,
            }) => {
                tracing::warn!(
                    missing,
                    "this kernel cannot run the IPv6 table; serving IPv4 only"
                );
            }
            Err(problem) => return Err(error(problem.to_string())),
        }
        let socket = NfSocket::open().map_err(|problem| error(problem.to_string()))?;
        Ok(Self::with(Netlink::new(socket, settings)))
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
        let cost = match self.commit(family, &table, rebuild, &staged) {
            Ok(cost) => cost,
            Err(failed) => {
                // Otherwise it is not known any more what the kernel holds.
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
        })
    }

    /// The family's table, out of its place, and whether it has to be made first.
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
    ) -> Result<Cost, Failed> {
        let mut cost = Cost::default();
        let mut rebuild = rebuild;
        let mut groups = &staged.groups[..];
        let mut first = true;
        while rebuild || !groups.is_empty() {
            let (now, later) = groups.split_at(fitting(groups, self.kernel.capacity(rebuild)));
            let part = if first {
                self.commit_guarded(family, table, rebuild, now)
            } else {
                // The rest of a change whose beginning is in force.
                let part = self.kernel.commit(family, false, true, now);
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
        Ok(cost)
    }

    /// Commits if nothing happened to our table since we last knew it.
    fn commit_guarded(
        &mut self,
        family: Family,
        table: &Table,
        rebuild: bool,
        groups: &[Ops],
    ) -> Result<Cost, StepError> {
        for _ in 0..ATTEMPTS {
            match self.kernel.commit(family, rebuild, false, groups) {
                Err(CommitError::GenerationMoved) => {}
                result => return Ok(result?),
            }
            // A table that is replaced as a whole may hold anything.
            if rebuild {
                self.kernel.read(family)?;
            } else if let Some(difference) = read_difference(&mut self.kernel, family, table)? {
                return Err(StepError::Drifted(difference));
            }
        }
        tracing::warn!(%family, "rules of others change all the time; writing without the guard");
        Ok(self.kernel.commit(family, rebuild, true, groups)?)
    }

    /// Applies a refused change in smaller and smaller parts, so that only the ServicePorts that
    /// the kernel does not accept are left out (design invariant 4).
    fn isolate(&mut self, change: Change<'_>) -> Result<Applied, StepError> {
        let mut total = Applied::default();
        let mut good: Vec<(ServiceKey, Option<ServicePlan>)> = Vec::new();
        let mut parts = vec![change.services];
        while let Some(part) = parts.pop() {
            self.prepare(change.family, change.complete)?;
            // Deletes nothing that another part may still claim.
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
            // The last change names once more what the parts named.
            total
                .failures
                .retain(|failure| good.iter().all(|(key, _)| *key != failure.key));
            add(&mut total, last);
        }
        Ok(total)
    }

    /// Makes sure that the family's table is known. Only a complete change may make or adopt it:
    /// nobody owns anything in it then.
    fn prepare(&mut self, family: Family, complete: bool) -> Result<(), StepError> {
        let (table, rebuild) = self.load(family, complete)?;
        if rebuild {
            self.kernel.commit(family, true, true, &[])?;
        }
        self.tables[family as usize] = Some(table);
        Ok(())
    }
}

impl<K: Kernel> Backend for Driver<K> {
    fn name(&self) -> &'static str {
        NAME
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
        let slot = &mut self.tables[family as usize];
        let difference = match slot {
            Some(table) => read_difference(&mut self.kernel, family, table)
                .map_err(|error| ApplyError::new(family, StepError::from(error)))?,
            None => Some("it is not known what our table should hold".to_owned()),
        };
        if let (Some(table), None) = (slot.as_ref(), &difference) {
            // Nothing is stale now; what a former attempt could not do is made up for here.
            let groups = table.groups().into_iter().map(|group| group.id);
            forget_stale(&mut self.kernel, table, family, groups.collect());
        }
        Ok(match difference {
            None => Verification::Equal,
            Some(difference) => {
                *slot = None;
                Verification::Drifted(difference)
            }
        })
    }

    fn has_services(&mut self, family: Family) -> bool {
        matches!(self.kernel.read(family), Ok(Found::Ours(_, elements)) if serves(&elements))
    }

    fn serving(&self) -> Option<Serving> {
        Some(Serving::Nftables)
    }

    /// The kernel looks up the rules for the first packet of a flow only.
    fn leaves_conntrack_entries(&self) -> bool {
        true
    }

    fn cleanup(&mut self) -> Result<(), Vec<ApplyError>> {
        let mut errors = Vec::new();
        for family in Family::ALL {
            self.tables[family as usize] = None;
            if let Err(error) = self.kernel.delete(family) {
                errors.push(ApplyError::new(family, StepError::from(error)));
            }
        }
        if errors.is_empty() {
            Ok(())
        } else {
            Err(errors)
        }
    }
}

/// Lets clients of these groups choose anew if the endpoint that they had is gone.
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

/// How many of the first groups fit into a transaction of `capacity` elements; one at least.
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

fn add(total: &mut Applied, part: Applied) {
    total.operations += part.operations;
    total.bytes += part.bytes;
    total.plan += part.plan;
    total.encode += part.encode;
    total.kernel += part.kernel;
    total.failures.extend(part.failures);
}

/// Reads a table and says how it differs from what it should hold. A list of elements may lack some
/// while the kernel is about to enlarge a set, which it does by the way some time after many were
/// added: a difference counts if it stays.
fn read_difference<K: Kernel>(
    kernel: &mut K,
    family: Family,
    table: &Table,
) -> Result<Option<String>, NetlinkError> {
    let mut found = difference(table, &kernel.read(family)?);
    for _ in 0..READ_AGAIN {
        if found.is_none() {
            break;
        }
        std::thread::sleep(READ_PAUSE);
        found = difference(table, &kernel.read(family)?);
    }
    Ok(found)
}

/// How what was found differs from what a table should hold, for people.
fn difference(table: &Table, found: &Found) -> Option<String> {
    let (groups, found) = match found {
        Found::Ours(groups, elements) => (groups, elements),
        Found::Other(reason) => return Some(reason.clone()),
    };
    if !groups.iter().copied().eq(table.groups()) {
        return Some("the chains of session affinity are not ours".to_owned());
    }
    let expected = table.elements();
    let found: std::collections::BTreeSet<_> = found.iter().copied().collect();
    let missing = expected.difference(&found).count();
    let foreign = found.difference(&expected).count();
    if missing == 0 && foreign == 0 {
        return None;
    }
    let example = expected.symmetric_difference(&found).next()?;
    Some(format!(
        "{missing} elements are missing and {foreign} are not ours, one of them in set {}",
        example.set.name()
    ))
}
