//! The tables of NetworkPolicies, beside any backend.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use kplane_model::Family;
use kplane_netlink::{CommitError, Errno, NetlinkError};

use super::access::{ABSENT, Cost, FoundTable, KernelTables, Namespace, TableAccess};
use super::element::{Element, Key};
use super::frontend::Ops;
use super::guarded::{Send, repair, send};
use super::policy_schema::PolicySet;
use super::probe::{can_log, can_own};
use super::readback::refused_element;
use super::repair::{Contents, everything, unreadable};
use super::schema::Set;
use super::slices::{Expected, SlicedRead, check};
use super::table_kind::{POLICY_TABLE, TableKind};
use super::tables::TableLayout;
use super::transactions::Ground;
use crate::backend::driver::StepError;
use crate::backend::{ApplyError, Notifications as _, Verification};

/// The way to the tables of NetworkPolicies of both families.
#[derive(Clone, Debug)]
pub struct PolicyTables {
    way: PolicyAccess,
    /// See [`TableLayout::Policies`].
    output: bool,
    log: Option<bool>,
    owned: Option<bool>,
    /// Most operations at once; `None` = the usual number.
    part: Option<usize>,
    /// Number of times that a namespace was opened for them.
    generation: u64,
}

#[derive(Clone, Debug)]
enum PolicyAccess {
    /// The backend's own way to the kernel, and its notifications.
    Shared(Arc<dyn KernelTables>),
    /// A socket and notifications of their own, once they are needed.
    Own(Option<Namespace>),
    /// The backend's name; it programs nothing that could enforce a policy.
    Refused(&'static str),
}

impl PolicyTables {
    const fn new(way: PolicyAccess, output: bool) -> Self {
        Self {
            way,
            output,
            log: None,
            owned: None,
            part: None,
            generation: 0,
        }
    }

    pub(super) fn shared(tables: Arc<dyn KernelTables>) -> Self {
        Self::new(PolicyAccess::Shared(tables), false)
    }

    /// Returns tables beside those of a kernel in memory, which can all that a new one can.
    pub(super) fn in_memory(tables: Arc<dyn KernelTables>, part: Option<usize>) -> Self {
        Self {
            part,
            log: Some(true),
            owned: Some(true),
            ..Self::shared(tables)
        }
    }

    /// Returns tables beside a backend that does not use nf_tables. `output`: see [`TableLayout::Policies`].
    pub const fn own(output: bool) -> Self {
        Self::new(PolicyAccess::Own(None), output)
    }

    /// Returns the refusal of a backend that programs nothing.
    pub const fn refused(backend: &'static str) -> Self {
        Self::new(PolicyAccess::Refused(backend), false)
    }

    /// Gives the tables no owner, as a kernel before Linux 6.9.
    #[must_use]
    pub fn without_owner(mut self) -> Self {
        self.owned = Some(false);
        self
    }

    /// Returns how many operations the kernel gets at once, at most, if it is not the usual number.
    pub(crate) fn part(&self) -> Option<usize> {
        self.part
    }

    /// Returns whether policies can be enforced.
    pub(crate) fn is_possible(&self) -> bool {
        !matches!(self.way, PolicyAccess::Refused(_))
    }

    /// Returns access to a family's table. Opens the calling thread's network namespace if needed.
    pub(crate) fn table(&mut self, family: Family) -> Result<PolicyTable, ApplyError> {
        let error = |step| ApplyError::new(family, step);
        let tables: &dyn KernelTables = match &mut self.way {
            PolicyAccess::Shared(tables) => &**tables,
            PolicyAccess::Own(Some(namespace)) => namespace,
            PolicyAccess::Own(closed) => {
                let opened = Namespace::open().map_err(|problem| {
                    let lacks = lacks_tables(&problem);
                    error(if lacks {
                        StepError::Unusable(problem.to_string())
                    } else {
                        unreadable(problem)
                    })
                })?;
                self.generation += 1;
                closed.insert(opened)
            }
            PolicyAccess::Refused(backend) => {
                return Err(error(StepError::Unusable(format!(
                    "backend {backend} enforces no NetworkPolicies"
                ))));
            }
        };
        let layout = TableLayout::Policies {
            output: self.output,
            log: *self.log.get_or_insert_with(can_log),
            owned: *self.owned.get_or_insert_with(can_own),
        };
        Ok(PolicyTable {
            family,
            kernel: tables.table(family, layout),
            expected: Expected::default(),
            read: SlicedRead::default(),
        })
    }

    /// Closes what was opened for tables that are not needed now, so that nobody listens to the kernel in vain.
    pub(crate) fn close(&mut self) {
        if let PolicyAccess::Own(opened) = &mut self.way {
            *opened = None;
        }
    }

    /// Returns the number of the descriptor, which differs for each; 0 = there is none.
    pub(crate) fn generation(&self) -> u64 {
        match &self.way {
            PolicyAccess::Own(Some(_)) => self.generation,
            PolicyAccess::Own(None) | PolicyAccess::Shared(_) | PolicyAccess::Refused(_) => 0,
        }
    }

    /// Returns a descriptor that is readable when there are reports of the kernel to read; `None` if the backend's
    /// notifications cover the tables, or no table was needed yet.
    pub(crate) fn readiness(&self) -> Option<OwnedFd> {
        match &self.way {
            PolicyAccess::Own(Some(namespace)) => namespace.readiness(),
            PolicyAccess::Own(None) | PolicyAccess::Shared(_) | PolicyAccess::Refused(_) => None,
        }
    }

    /// Reads the reports. Returns, by family, whether another program changed the tables.
    pub(crate) fn drifted(&self) -> [bool; 2] {
        match &self.way {
            PolicyAccess::Shared(tables) => tables.drifted(TableKind::Policies),
            PolicyAccess::Own(Some(namespace)) => namespace.drifted(TableKind::Policies),
            PolicyAccess::Own(None) | PolicyAccess::Refused(_) => [false; 2],
        }
    }
}

/// The kernel's content in place of a table of policies.
#[derive(Debug)]
pub(crate) enum FoundPolicies {
    /// No table.
    Absent,
    /// A table of this layout, with these elements.
    Ours(Vec<Element>),
    /// A table that has to be replaced.
    Other,
}

/// Returns whether the kernel has no nf_tables, or does not let this process use them.
fn lacks_tables(problem: &NetlinkError) -> bool {
    matches!(
        problem.errno(),
        Some(
            Errno::EINVAL
                | Errno::EPERM
                | Errno::EOPNOTSUPP
                | Errno::EAFNOSUPPORT
                | Errno::EPROTONOSUPPORT
        )
    )
}

/// Returns the keys of elements that the kernel refuses whenever they come: those that an error names, unless it is about
/// the moment.
pub(crate) fn refused_keys(error: &ApplyError) -> Vec<Key> {
    let cause = match error.source.downcast_ref() {
        Some(StepError::Refused(cause) | StepError::Interrupted(cause)) => cause.downcast_ref(),
        _ => None,
    };
    let Some(CommitError::Rejected { rejections, .. }) = cause else {
        return Vec::new();
    };
    let passes = [
        Errno::ENOMEM,
        Errno::ENOBUFS,
        Errno::EAGAIN,
        Errno::EINTR,
        Errno::EBUSY,
    ];
    let sets = || PolicySet::ALL.map(Set::Policy);
    rejections
        .iter()
        .filter(|refused| !passes.contains(&refused.errno))
        .filter_map(|refused| Some(refused_element(refused, error.family, sets())?.key))
        .collect()
}

/// One family's table.
#[derive(Debug)]
pub(crate) struct PolicyTable {
    family: Family,
    kernel: Box<dyn TableAccess>,
    expected: Expected,
    read: SlicedRead,
}

impl PolicyTable {
    fn error(&self, step: StepError) -> ApplyError {
        ApplyError::new(self.family, step)
    }

    /// Reads the table.
    pub(crate) fn read(&mut self) -> Result<FoundPolicies, ApplyError> {
        Ok(match self.kernel.read() {
            Ok(FoundTable::Ours(_, elements)) if self.own()? => {
                self.expected = Expected::of(&elements);
                FoundPolicies::Ours(elements)
            }
            Ok(FoundTable::Other(reason)) if reason == ABSENT => FoundPolicies::Absent,
            Ok(FoundTable::Ours(..) | FoundTable::Other(_)) => FoundPolicies::Other,
            Err(problem) if lacks_tables(&problem) => FoundPolicies::Absent,
            Err(problem) => return Err(self.error(unreadable(problem))),
        })
    }

    fn own(&mut self) -> Result<bool, ApplyError> {
        let owned = self.kernel.own();
        owned.map_err(|problem| {
            self.error(match problem.errno() {
                Some(Errno::EPERM) => StepError::Unusable(format!(
                    "another process owns table {} {POLICY_TABLE}; does a second agent run on this node? End one of them",
                    self.family.pick("ip", "ip6")
                )),
                _ => problem.into(),
            })
        })
    }

    /// Puts a new table in place of whatever there is, in one transaction. If the kernel does not take it at once,
    /// the isolated Pods come first, and then what they may do: so nothing is open meanwhile that should be closed.
    pub(crate) fn replace(&mut self, contents: &impl Contents) -> Result<Cost, ApplyError> {
        let phases = everything(contents, self.kernel.capacity(true));
        self.expected = Expected::default();
        self.send(contents, Ground::Other, &phases, false, &mut None)
    }

    /// Changes the table from what it holds, `before`. Each of the phases waits for the one before.
    pub(crate) fn change(
        &mut self,
        before: &impl Contents,
        phases: &[Vec<Ops>],
        repaired: &mut Option<String>,
    ) -> Result<Cost, ApplyError> {
        self.send(before, Ground::Table, phases, false, repaired)
    }

    /// Goes on with a change that the kernel has begun to apply. `contents` is what it leads to.
    pub(crate) fn go_on(
        &mut self,
        contents: &impl Contents,
        phases: &[Vec<Ops>],
    ) -> Result<Cost, ApplyError> {
        self.send(contents, Ground::Table, phases, true, &mut None)
    }

    fn send(
        &mut self,
        before: &impl Contents,
        ground: Ground,
        phases: &[Vec<Ops>],
        begun: bool,
        repaired: &mut Option<String>,
    ) -> Result<Cost, ApplyError> {
        let phases: Vec<&[Ops]> = phases.iter().map(Vec::as_slice).collect();
        let change = Send {
            family: self.family,
            ground,
            phases: &phases,
            begun,
        };
        let sent = send(&mut *self.kernel, before, change, repaired);
        let cost = sent.map_err(|step| self.error(step))?;
        self.expected.record(phases.iter().copied().flatten());
        Ok(cost)
    }

    /// Deletes the table, which need not exist.
    pub(crate) fn delete(&mut self) -> Result<Cost, ApplyError> {
        let deleted = self.kernel.delete();
        deleted.map_err(|problem| self.error(problem.into()))
    }

    /// Reads the next slice of the table, and repairs what differs.
    pub(crate) fn verify(&mut self, contents: &impl Contents) -> Result<Verification, ApplyError> {
        let checked = check(&mut *self.kernel, contents, &self.expected, &mut self.read);
        self.outcome(checked)
    }

    /// Repairs what other programs changed, as the kernel reported it.
    pub(crate) fn repair(&mut self, contents: &impl Contents) -> Result<Verification, ApplyError> {
        let drift = self.kernel.drift().map_err(|problem| self.error(unreadable(problem)))?;
        let repaired = repair(&mut *self.kernel, contents, drift.unwrap_or_default());
        self.outcome(repaired)
    }

    fn outcome(
        &self,
        checked: Result<Verification, StepError>,
    ) -> Result<Verification, ApplyError> {
        match checked {
            Err(StepError::Drifted(what)) => Ok(Verification::Drifted(what)),
            result => result.map_err(|step| self.error(step)),
        }
    }
}
