//! One family's driver, the same for all backends.
//!
//! ```text
//! adopt ─> content known ─ stage ─> commit ─┬─ done ────> accept ─> content known
//!   ^                                       ├─ refused ─> isolate: without the ServicePorts at fault
//!   '────── content not known <─────────────┴─ interrupted, or drift that is not repaired
//! ```
//!
//! A backend implements [`DataPath`] and keeps the facts of its machine. The driver owns the content, and
//! decides when it is known.
//!
//! The families share no state but the generation of nf_tables (`Namespace` in `nftables/access.rs`).

#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::slice;
use std::time::{Duration, Instant};

use kplane_model::{Family, ServiceKey, ServiceName};

use super::frontends::FrontendOwners;
use super::{Applied, ApplyError, Change, Failure, Inspection, ServerCounts, Side, Verification};
use crate::plan::FrontendAddr;

/// The error of a program or of the kernel behind a failed step.
pub(super) type Cause = Box<dyn std::error::Error + Send + Sync>;

/// A step that failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum StepError {
    /// This machine cannot program the family.
    #[error("{0}")]
    Unusable(String),
    /// The data path could not be read. Its known content stays valid.
    #[error("{0}")]
    Read(Cause),
    /// The kernel, or its tool, understood the change and refused it. It may accept fewer ServicePorts.
    #[error("{0}")]
    Refused(Cause),
    /// It is not known how much of the change was applied.
    #[error("{0}")]
    Interrupted(Cause),
    /// A partial change came while the content of the data path is not known.
    #[error("the content of the data path is not known, so everything has to be applied again")]
    Unknown,
    /// Another program changed kplane's objects. The next complete change repairs them.
    #[error("another program changed kplane's rules: {0}")]
    Drifted(String),
}

impl StepError {
    /// Returns the error of a read.
    pub(super) fn read(cause: impl Into<Cause>) -> Self {
        Self::Read(cause.into())
    }

    /// Returns the error of a change that may be applied in part.
    pub(super) fn interrupted(cause: impl Into<Cause>) -> Self {
        Self::Interrupted(cause.into())
    }
}

/// One family's data path, as a backend implements it. No method has to care whether the content is known.
pub(super) trait DataPath: Send {
    /// kplane's objects in the data path, and their owners.
    type Content: Send;
    /// A change that has been worked out and is not carried out yet.
    type Staged;

    fn family(&self) -> Family;

    /// Reads the data path. No ServicePort owns anything in the content yet.
    fn adopt(&mut self) -> Result<Self::Content, StepError>;

    /// Returns the frontends of a ServicePort in the content.
    fn frontends<'c>(content: &'c Self::Content, key: &ServiceKey) -> &'c [FrontendAddr];

    /// Works out a change. Adds the number of operations and the failures to `applied`.
    fn stage(
        &mut self,
        content: &mut Self::Content,
        change: Change<'_>,
        applied: &mut Applied,
    ) -> Result<Self::Staged, StepError>;

    /// Carries out a staged change. Adds bytes, times and further failures to `applied`. Nothing of the
    /// change is in effect after [`StepError::Refused`].
    fn commit(
        &mut self,
        content: &mut Self::Content,
        staged: &mut Self::Staged,
        applied: &mut Applied,
    ) -> Result<(), StepError>;

    /// Records in the content that a staged change was carried out.
    fn accept(&mut self, content: &mut Self::Content, staged: Self::Staged, applied: &mut Applied);

    /// Compares the data path with the content. With `Ok`, the content is known afterwards;
    /// [`StepError::Drifted`] says that it has to be adopted again.
    fn check(&mut self, content: &mut Self::Content) -> Result<Verification, StepError>;

    /// Repairs the changes of other programs that the kernel reported. Results as for [`DataPath::check`].
    fn repair(&mut self, content: &mut Self::Content) -> Result<Verification, StepError> {
        self.check(content)
    }

    /// Prepares the search for the ServicePorts because of which a change is refused.
    fn before_isolation(&mut self, _content: &Self::Content) -> Result<(), StepError> {
        Ok(())
    }

    /// Tries a part of a refused change without any effect on packets. `None` for data paths with
    /// transactions, where a part is applied to try it.
    fn rehearse(&mut self, _part: Change<'_>) -> Option<Result<(), StepError>> {
        None
    }

    /// Returns whether the data path has Services. May read all of it.
    fn has_services(&mut self) -> bool;

    /// See [`Side::probe_interval`].
    fn probe_interval(&self) -> Option<Duration> {
        None
    }

    /// See [`Side::servers`].
    fn servers(&self) -> Option<ServerCounts> {
        None
    }

    /// See [`Side::inspect`]; the content is `None` while it is not known.
    fn inspect(
        &self,
        _content: Option<&Self::Content>,
        _service: &ServiceName,
    ) -> Option<Inspection> {
        None
    }
}

/// A data path, and what is known of it.
#[derive(Debug)]
pub(super) struct Driver<D: DataPath> {
    pub(super) path: D,
    known: Option<Known<D::Content>>,
}

/// The known content of a data path.
#[derive(Debug)]
struct Known<C> {
    content: C,
    frontends: FrontendOwners,
}

impl<D: DataPath> Driver<D> {
    /// Creates a driver that knows nothing yet.
    pub(super) fn new(path: D) -> Self {
        Self { path, known: None }
    }

    /// Takes the content out of the driver, or adopts it. Only a complete change may adopt, because no
    /// ServicePort owns anything then.
    fn load(&mut self, complete: bool) -> Result<Known<D::Content>, StepError> {
        match self.known.take() {
            Some(known) => Ok(known),
            None if complete => Ok(Known {
                content: self.path.adopt()?,
                frontends: FrontendOwners::default(),
            }),
            None => Err(StepError::Unknown),
        }
    }

    fn apply_once(&mut self, change: Change<'_>) -> Result<Applied, StepError> {
        let started = Instant::now();
        let mut known = self.load(change.complete)?;
        let Known { content, frontends } = &mut known;
        let mut claims = frontends.claim(change, |key| D::frontends(content, key));
        let mut applied = Applied {
            failures: std::mem::take(&mut claims.failures),
            ..Applied::default()
        };
        let mut staged = self.path.stage(content, claims.change(change), &mut applied)?;
        applied.plan = started.elapsed();
        match self.path.commit(content, &mut staged, &mut applied) {
            Ok(()) => {}
            Err(refused @ StepError::Refused(_)) if !change.complete => {
                self.known = Some(known);
                return Err(refused);
            }
            Err(error) => return Err(error),
        }
        self.path.accept(content, staged, &mut applied);
        frontends.accept(&claims, change.complete, |key| D::frontends(content, key));
        self.known = Some(known);
        merge_failures(&mut applied.failures);
        Ok(applied)
    }

    /// Applies a refused change without the ServicePorts because of which it is refused (invariant:
    /// isolation). The change is tried in smaller and smaller parts until these are found.
    fn isolate(&mut self, change: Change<'_>) -> Result<Applied, StepError> {
        let known = self.load(change.complete)?;
        self.path.before_isolation(&known.content)?;
        self.known = Some(known);
        let mut total = Applied::default();
        let (mut good, mut guilty) = (Vec::new(), Vec::new());
        let mut parts = vec![change.services];
        while let Some(part) = parts.pop() {
            // A partial change deletes nothing that another part may still claim.
            let partial = Change {
                services: part,
                complete: false,
                ..change
            };
            match (self.try_part(partial, &mut total), part) {
                (Ok(()), _) => good.extend_from_slice(part),
                (Err(refused @ StepError::Refused(_)), [(key, _)]) => {
                    guilty.push(Failure::unserved(key, refused.to_string()));
                }
                (Err(StepError::Refused(_)), _) => {
                    let (first, second) = part.split_at(part.len() / 2);
                    parts.extend([second, first]);
                }
                (Err(error), _) => return Err(error),
            }
        }
        let innocent = Change {
            services: &good,
            ..change
        };
        let last = self.apply_once(innocent).inspect_err(|_| self.known = None)?;
        add(&mut total, last);
        for failure in guilty {
            let again = self.confirm(change, failure)?;
            add(&mut total, again);
        }
        Ok(total)
    }

    /// Tries a ServicePort again that the search found guilty. The kernel may have refused everything for a moment, for
    /// example while another program owned the table, and now it takes changes.
    fn confirm(&mut self, change: Change<'_>, guilty: Failure) -> Result<Applied, StepError> {
        let alone = change.services.iter().find(|(key, _)| *key == guilty.key);
        let partial = Change {
            services: alone.map(slice::from_ref).unwrap_or_default(),
            complete: false,
            ..change
        };
        match self.apply_once(partial) {
            Err(StepError::Refused(_)) => Ok(Applied {
                failures: vec![guilty],
                ..Applied::default()
            }),
            result => result,
        }
    }

    /// Tries a part of a change, with or without effect on packets.
    fn try_part(&mut self, part: Change<'_>, total: &mut Applied) -> Result<(), StepError> {
        if let Some(result) = self.path.rehearse(part) {
            return result;
        }
        let mut applied = self.apply_once(part)?;
        // The last change of the search reports them again.
        applied.failures.clear();
        add(total, applied);
        Ok(())
    }

    /// Reads the data path back in one of two ways, and decides whether the content is still known.
    fn read_back(
        &mut self,
        read_back: impl FnOnce(&mut D, &mut D::Content) -> Result<Verification, StepError>,
    ) -> Result<Verification, ApplyError> {
        let Some(mut known) = self.known.take() else {
            let what = "it is not known what the data path should hold";
            return Ok(Verification::Drifted(what.to_owned()));
        };
        match read_back(&mut self.path, &mut known.content) {
            Err(StepError::Drifted(what)) => Ok(Verification::Drifted(what)),
            result => {
                self.known = Some(known);
                result.map_err(|error| ApplyError::new(self.path.family(), error))
            }
        }
    }
}

impl<D: DataPath> Side for Driver<D> {
    fn apply(&mut self, change: Change<'_>) -> Result<Applied, ApplyError> {
        let family = self.path.family();
        let result = match self.apply_once(change) {
            Err(error @ StepError::Refused(_)) if !change.services.is_empty() => {
                tracing::warn!(%family, %error, "searching for the ServicePort that is refused");
                self.isolate(change)
            }
            result => result,
        };
        result.map_err(|error| ApplyError::new(family, error))
    }

    fn verify(&mut self) -> Result<Verification, ApplyError> {
        self.read_back(D::check)
    }

    fn repair(&mut self) -> Result<Verification, ApplyError> {
        self.read_back(D::repair)
    }

    fn has_services(&mut self) -> bool {
        self.path.has_services()
    }

    fn probe_interval(&self) -> Option<Duration> {
        self.path.probe_interval()
    }

    fn servers(&self) -> Option<ServerCounts> {
        self.path.servers()
    }

    fn inspect(&self, service: &ServiceName) -> Option<Inspection> {
        let content = self.known.as_ref().map(|known| &known.content);
        self.path.inspect(content, service)
    }
}

/// A family that this machine cannot program.
#[derive(Debug)]
pub(super) struct Unusable {
    pub(super) family: Family,
    /// The missing part.
    pub(super) reason: String,
}

impl Unusable {
    fn error(&self) -> ApplyError {
        ApplyError::new(self.family, StepError::Unusable(self.reason.clone()))
    }
}

impl Side for Unusable {
    fn apply(&mut self, _: Change<'_>) -> Result<Applied, ApplyError> {
        Err(self.error())
    }

    fn verify(&mut self) -> Result<Verification, ApplyError> {
        Err(self.error())
    }
}

/// Leaves one failure for each ServicePort: the first one that is not only degraded, or else the first one.
fn merge_failures(failures: &mut Vec<Failure>) {
    failures.sort_by_key(|failure| failure.degraded);
    let mut seen = HashSet::new();
    failures.retain(|failure| seen.insert(failure.key.clone()));
}

fn add(total: &mut Applied, part: Applied) {
    total.operations += part.operations;
    total.bytes += part.bytes;
    total.plan += part.plan;
    total.encode += part.encode;
    total.kernel += part.kernel;
    total.failures.extend(part.failures);
    total.rules = part.rules.or(total.rules);
    total.repaired = part.repaired.or(total.repaired.take());
}
