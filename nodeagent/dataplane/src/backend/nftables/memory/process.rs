//! A process's way to the machine.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::panic::resume_unwind;

use kplane_model::Family;
use kplane_netlink::{AttributeWriter, CommitError, Errno, NetlinkError, Rejection};
use parking_lot::MutexGuard;

use super::super::access::{ABSENT, Cost, FoundTable, Guard, KernelTables, TableAccess};
use super::super::affinity::Group;
use super::super::affinity_id::AffinityId;
use super::super::clients::Client;
use super::super::element::{Element, ElementOp, added_to, encode};
use super::super::frontend::Ops;
use super::super::readback::{ListedSet, ReadError};
use super::super::schema::Set;
use super::super::table_kind::TableKind;
use super::super::tables::TableLayout;
use super::super::watch::{Drift, OneTable};
use super::held::names;
use super::{HeldTable, MemoryKernel, MemoryState, ProcessDied, TableFaults};
use crate::backend::Notifications;

/// A process that programs the machine.
#[derive(Clone, Debug)]
pub(in crate::backend::nftables) struct MemoryProcess {
    kernel: MemoryKernel,
    number: u64,
}

impl MemoryProcess {
    pub(super) fn new(kernel: &MemoryKernel, number: u64) -> Self {
        let kernel = kernel.clone();
        Self { kernel, number }
    }

    fn state(&self) -> MutexGuard<'_, MemoryState> {
        let state = self.kernel.0.lock();
        if state.has_died || state.process != self.number {
            drop(state);
            resume_unwind(Box::new(ProcessDied));
        }
        state
    }
}

impl Notifications for MemoryProcess {
    fn readiness(&self) -> Option<OwnedFd> {
        None
    }

    fn read(&mut self) -> [bool; 2] {
        self.drifted(TableKind::Services)
    }
}

impl KernelTables for MemoryProcess {
    fn table(&self, family: Family, layout: TableLayout) -> Box<dyn TableAccess> {
        let process = self.clone();
        Box::new(MemoryTable {
            family,
            layout,
            process,
        })
    }

    fn drifted(&self, kind: TableKind) -> [bool; 2] {
        let mut state = self.state();
        state.catch_up();
        Family::ALL.map(|family| state.ledger.has_drifted((kind, family)))
    }
}

/// A process's access to one of a family's tables.
#[derive(Debug)]
struct MemoryTable {
    family: Family,
    layout: TableLayout,
    process: MemoryProcess,
}

impl MemoryTable {
    fn id(&self) -> OneTable {
        (self.layout.table(), self.family)
    }

    fn is_broken(&self, state: &MemoryState) -> bool {
        state.faults.get(&self.id()).is_some_and(|faults| faults.broken)
    }

    /// Returns the machine if the table can be read.
    fn readable(&self) -> Result<MutexGuard<'_, MemoryState>, NetlinkError> {
        let mut state = self.process.state();
        let fails = state.fails(self.id(), |faults| &mut faults.failing_reads);
        if fails || self.is_broken(&state) {
            return Err(unreadable(Errno::ENOBUFS));
        }
        Ok(state)
    }

    /// Commits a transaction.
    fn transact(
        &self,
        guard: Guard,
        change: impl FnOnce(&mut MemoryState) -> Result<(), CommitError>,
    ) -> Result<Cost, CommitError> {
        let (mut state, table) = (self.process.state(), self.id());
        if self.is_broken(&state) {
            state.ledger.lose();
            return Err(CommitError::OutcomeUnknown(Errno::EIO));
        }
        if state.fails(table, |faults| &mut faults.failing_commits) {
            return Err(CommitError::Refused(Errno::EBUSY));
        }
        if state.fails(table, |faults| &mut faults.contended) {
            state.end(None, None);
        }
        let head = state.ledger.head();
        let is_seen = head == Some(state.generation) && !state.ledger.has_drifted(table);
        if guard == Guard::Head && !is_seen {
            return Err(CommitError::GenerationMoved);
        }
        change(&mut state)?;
        state.end(None, None);
        if let (Guard::Head, Some(head)) = (guard, head) {
            state.ledger.committed(head);
        }
        state.transactions += 1;
        state.happen();
        if state.crash_at == Some(state.transactions) {
            state.has_died = true;
            drop(state);
            resume_unwind(Box::new(ProcessDied));
        }
        if state.fails(table, |faults| &mut faults.lost_answers) {
            state.ledger.lose();
            return Err(CommitError::OutcomeUnknown(Errno::ENOBUFS));
        }
        Ok(Cost {
            bytes: 1,
            ..Cost::default()
        })
    }
}

impl TableAccess for MemoryTable {
    fn read(&mut self) -> Result<FoundTable, NetlinkError> {
        let mut state = self.readable()?;
        state.catch_up();
        state.ledger.take_drift(self.id());
        Ok(match state.tables.get(&self.id()) {
            None => FoundTable::Other(ABSENT.to_owned()),
            Some(held) if held.layout != self.layout => {
                FoundTable::Other("its rules differ".to_owned())
            }
            Some(held) => FoundTable::Ours(held.groups().collect(), held.elements().collect()),
        })
    }

    fn pause(&self) {}

    fn structure(&mut self) -> Result<Option<Vec<Group>>, NetlinkError> {
        let state = self.readable()?;
        let held = state.tables.get(&self.id());
        let ours =
            held.and_then(|held| (held.layout == self.layout).then(|| held.groups().collect()));
        Ok(ours)
    }

    fn sets(&self) -> Vec<Set> {
        Set::all_of(self.layout.table())
    }

    fn list(&mut self, set: Set) -> Result<ListedSet, ReadError> {
        let state = self.readable()?;
        let tables = state.tables.get(&self.id()).into_iter();
        Ok(ListedSet::Whole(
            tables
                .flat_map(HeldTable::elements)
                .filter(|element| element.set == set)
                .collect(),
        ))
    }

    fn drift(&mut self) -> Result<Option<Drift>, NetlinkError> {
        let mut state = self.process.state();
        state.catch_up();
        Ok(state.ledger.take_drift(self.id()))
    }

    fn commit(&mut self, rebuild: bool, guard: Guard, groups: &[Ops]) -> Result<Cost, CommitError> {
        let (bytes, limit) = (groups.iter().map(Ops::weight).sum(), self.capacity(rebuild));
        // One group is never split.
        if bytes > limit && groups.len() > 1 {
            return Err(CommitError::TooBig { bytes, limit });
        }
        self.transact(guard, |state| {
            let table = self.id();
            let mut held = if rebuild {
                HeldTable::new(self.family, self.layout)
            } else {
                state.tables.get(&table).ok_or(INVALID)?.clone()
            };
            let faults = state.faults.get(&table);
            if let Some(ip) = faults.and_then(|faults: &TableFaults| faults.refused) {
                refuse(groups, ip)?;
            }
            held.apply(groups).ok_or(INVALID)?;
            state.tables.insert(table, held);
            Ok(())
        })
    }

    fn clients(&mut self, group: AffinityId) -> Result<Vec<Client>, NetlinkError> {
        let state = self.process.state();
        let clients = state.tables.get(&self.id()).and_then(|held| held.clients(group));
        clients.ok_or_else(|| unreadable(Errno::ENOENT))
    }

    fn forget(&mut self, group: AffinityId, gone: &[Client]) -> Result<(), CommitError> {
        let forget =
            |state: &mut MemoryState| state.tables.get_mut(&self.id())?.forget(group, gone);
        let forget = |state: &mut MemoryState| forget(state).ok_or(INVALID);
        self.transact(Guard::None, forget).map(drop)
    }

    fn capacity(&self, _: bool) -> usize {
        self.process.state().capacity.unwrap_or(usize::MAX)
    }

    fn own(&mut self) -> Result<bool, CommitError> {
        Ok(true)
    }

    fn delete(&mut self) -> Result<Cost, CommitError> {
        self.transact(Guard::None, |state| {
            state.tables.remove(&self.id());
            Ok(())
        })
    }
}

const INVALID: CommitError = CommitError::Refused(Errno::EINVAL);

/// Refuses each element that names an address, as the kernel does: all are tried.
fn refuse(groups: &[Ops], ip: IpAddr) -> Result<(), CommitError> {
    let added = groups.iter().flat_map(|ops| &ops.add).enumerate();
    let rejection = |(index, element): (usize, &Element)| {
        let mut attribute = Vec::new();
        encode(
            &mut AttributeWriter::new(&mut attribute),
            ElementOp::Add,
            element,
        );
        Rejection {
            index,
            what: added_to(element.set),
            errno: Errno::EINVAL,
            reason: None,
            attribute: Some(attribute),
        }
    };
    let rejections: Vec<Rejection> =
        added.filter(|(_, element)| names(element, ip)).map(rejection).collect();
    if rejections.is_empty() {
        return Ok(());
    }
    let operations = groups.iter().map(Ops::len).sum();
    Err(CommitError::Rejected {
        operations,
        rejections,
    })
}

fn unreadable(errno: Errno) -> NetlinkError {
    let what = "read from memory";
    NetlinkError::Socket { what, errno }
}
