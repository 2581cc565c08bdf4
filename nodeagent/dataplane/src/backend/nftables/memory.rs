//! The nf_tables of a machine in memory, below the drivers: what the kernel refuses, reports, and does with packets.
//! Simulations and unit tests use it.
//!
//! ```text
//! drivers > MemoryTable > transactions on HeldTable   (held.rs: elements, groups, clients)
//! packets > PacketWalk  > the chains of layout.rs, policy_layout.rs and affinity.rs, over these elements   (walk.rs)
//! ```
//!
//! A machine outlives the processes that program it. One process programs it at a time: [`MemoryKernel::open`] is its
//! beginning, and ends the one before.

mod held;
#[cfg(test)]
mod tests;
mod walk;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::panic::resume_unwind;
use std::sync::Arc;

use kplane_model::{Family, FrontendAddr};
use kplane_netlink::{CommitError, Errno, Generation, NetlinkError, generation_after};
use parking_lot::{Mutex, MutexGuard};

pub(crate) use self::held::HeldTable;
use self::walk::PacketWalk;
pub use self::walk::{PacketFate, PacketFlow, TestPacket};
use super::access::{ABSENT, Cost, FoundTable, Guard, TableAccess};
use super::affinity::Group;
use super::affinity_id::AffinityId;
use super::clients::Client;
use super::data_path::NftDataPath;
use super::element::Element;
use super::frontend::{Ops, place_of};
use super::policies::PolicyTables;
use super::readback::{ListedSet, ReadError};
use super::schema::{Set, TableSettings};
use super::table_kind::TableKind;
use super::tables::TableLayout;
use super::watch::{Changed, Drift, Ledger, OneTable};
use crate::backend::driver::Driver;
use crate::backend::{Backend, Notifications, noop};

/// One machine. Clones are the same machine.
#[derive(Clone, Debug, Default)]
pub struct MemoryKernel(Arc<Mutex<MemoryState>>);

/// The faults of one table's exchanges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableFaults {
    /// Nothing can be read or written.
    pub broken: bool,
    /// The kernel refuses to add elements that name this address as a frontend's or an endpoint's.
    pub refused: Option<IpAddr>,
    /// Number of further reads that fail with `ENOBUFS`.
    pub failing_reads: u32,
    /// Number of further transactions that are refused with `EBUSY`.
    pub failing_commits: u32,
    /// Number of further transactions that are applied, and whose answers are lost.
    pub lost_answers: u32,
    /// Number of further transactions before which another program changes its own table.
    pub contended: u32,
}

/// A change by another program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disturbance {
    /// A change of that program's own table.
    Elsewhere,
    /// Deletes a table.
    DeleteTable(TableKind, Family),
    /// Deletes all elements of a table.
    Flush(TableKind, Family),
    /// Deletes every `n`th element of a table, from the first on.
    Thin(TableKind, Family, usize),
    /// Deletes all elements of a place.
    RemoveFrontend(FrontendAddr, Family),
}

/// The payload of the panic with which a process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessDied;

#[derive(Debug)]
struct MemoryState {
    /// The machine's own addresses, besides loopback.
    own: BTreeSet<IpAddr>,
    tables: BTreeMap<OneTable, HeldTable>,
    faults: BTreeMap<OneTable, TableFaults>,
    /// Most elements in one transaction.
    capacity: usize,
    generation: u32,
    /// Number of transactions that processes committed.
    transactions: u64,
    /// Disturbances, and the number of transactions after which each happens.
    due: Vec<(u64, Disturbance)>,
    /// Number of transactions with which the process dies.
    crash_at: Option<u64>,
    /// Number of the process that may program the machine.
    process: u64,
    has_died: bool,
    /// The record of that process, and the reports that it has not read yet.
    ledger: Ledger,
    reports: Vec<(Generation, Vec<(OneTable, Changed)>)>,
    /// Reports were lost.
    overrun: bool,
    /// Checks the elements after each transaction.
    #[cfg(test)]
    between: Option<fn(&HeldTable)>,
}

impl Default for MemoryState {
    fn default() -> Self {
        Self {
            own: BTreeSet::new(),
            tables: BTreeMap::new(),
            faults: BTreeMap::new(),
            capacity: usize::MAX,
            generation: 1,
            transactions: 0,
            due: Vec::new(),
            crash_at: None,
            process: 0,
            has_died: false,
            ledger: Ledger::default(),
            reports: Vec::new(),
            overrun: false,
            #[cfg(test)]
            between: None,
        }
    }
}

impl MemoryKernel {
    /// Returns a machine with these addresses, and without tables.
    pub fn new(own: impl IntoIterator<Item = IpAddr>) -> Self {
        let own = own.into_iter().collect();
        let state = MemoryState {
            own,
            ..MemoryState::default()
        };
        Self(Arc::new(Mutex::new(state)))
    }

    /// Opens the backend for a new process. From now on, calls of an earlier process panic with [`ProcessDied`].
    pub fn open(&self) -> Backend {
        let process = self.start();
        let side = |family| {
            let table = process.table(family, TableSettings::default());
            Box::new(Driver::new(NftDataPath::new(family, table))) as _
        };
        Backend {
            policies: PolicyTables::in_memory(process.clone()),
            notifications: Some(Box::new(process.clone())),
            ..noop::open_with(side)
        }
    }

    /// Begins a new process.
    pub(super) fn start(&self) -> MemoryProcess {
        let mut state = self.0.lock();
        state.process += 1;
        (state.has_died, state.crash_at) = (false, None);
        (state.ledger, state.overrun) = (Ledger::default(), false);
        state.reports.clear();
        MemoryProcess {
            kernel: self.clone(),
            number: state.process,
        }
    }

    /// Starts the machine anew: its tables are gone, and its process is dead.
    pub fn reboot(&self) {
        let mut state = self.0.lock();
        state.tables.clear();
        state.due.clear();
        (state.generation, state.has_died, state.crash_at) = (1, true, None);
    }

    /// Returns the number of transactions that processes have committed.
    pub fn transactions(&self) -> u64 {
        self.0.lock().transactions
    }

    /// Sets the faults of a table's exchanges, in place of those before.
    pub fn set_faults(&self, table: TableKind, family: Family, faults: TableFaults) {
        self.0.lock().faults.insert((table, family), faults);
    }

    /// Sets the number of elements that fit into one transaction.
    pub fn set_capacity(&self, elements: usize) {
        self.0.lock().capacity = elements;
    }

    /// Loses the reports that the process has not read yet.
    pub fn lose_reports(&self) {
        let mut state = self.0.lock();
        state.reports.clear();
        state.overrun = true;
    }

    /// Has the process die with the `n`th transaction from now: the kernel applies it, and the call panics with
    /// [`ProcessDied`], without a message, as does each later one.
    pub fn crash_with(&self, n: u64) {
        let mut state = self.0.lock();
        state.crash_at = Some(state.transactions + n.max(1));
    }

    /// Returns whether the process died, and no other has begun.
    pub fn has_died(&self) -> bool {
        self.0.lock().has_died
    }

    /// Has another program change something after `n` further transactions; 0 = now.
    pub fn disturb(&self, n: u64, disturbance: Disturbance) {
        let mut state = self.0.lock();
        let at = state.transactions + n;
        state.due.push((at, disturbance));
        state.happen();
    }

    /// Returns whether there is a table.
    pub fn has_table(&self, table: TableKind, family: Family) -> bool {
        self.0.lock().tables.contains_key(&(table, family))
    }

    /// Returns all fates that a packet may have: draws among endpoints decide.
    pub fn fates(&self, packet: &TestPacket) -> BTreeSet<PacketFate> {
        self.0.lock().fates(packet, &TableKind::ALL)
    }

    /// Returns a packet's fate with one draw, and remembers the client of a Service with session affinity.
    pub fn connect(&self, packet: &TestPacket, draw: u32) -> PacketFate {
        let mut state = self.0.lock();
        let family = Family::of(packet.source);
        let tables = state.tables_of(family, &TableKind::ALL);
        let mut walk = PacketWalk::new(&tables, &state.own, packet, draw);
        let (fate, remembered) = (walk.fate(), walk.remembered);
        if let Some(held) = state.tables.get_mut(&(TableKind::Services, family)) {
            held.remember(packet.source, remembered);
        }
        fate
    }

    /// Returns the places that the table of Services names, with the fates of new connections to them, whatever
    /// NetworkPolicies say: of a client outside of the cluster, and of the machine itself. Node ports are those of its
    /// first address.
    pub fn frontends(&self, family: Family) -> BTreeMap<FrontendAddr, [BTreeSet<PacketFate>; 2]> {
        let state = self.0.lock();
        let (client, loopback): (IpAddr, IpAddr) = match family {
            Family::V4 => (
                Ipv4Addr::new(192, 0, 2, 1).into(),
                Ipv4Addr::LOCALHOST.into(),
            ),
            Family::V6 => (
                Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
                Ipv6Addr::LOCALHOST.into(),
            ),
        };
        let own = state
            .own
            .iter()
            .copied()
            .find(|ip| Family::of(*ip) == family)
            .unwrap_or(loopback);
        let fates = |at: FrontendAddr| {
            let (ip, protocol, port) = match at {
                FrontendAddr::Address { ip, protocol, port } => (ip, protocol, port),
                FrontendAddr::NodePort { protocol, port } => (own, protocol, port),
            };
            [client, own].map(|source| {
                let packet = TestPacket::new(source, ip, Some((protocol, port)));
                state.fates(&packet, &[TableKind::Services])
            })
        };
        let table = state.tables.get(&(TableKind::Services, family));
        let places: BTreeSet<FrontendAddr> = table
            .into_iter()
            .flat_map(HeldTable::elements)
            .filter_map(|element| place_of(element.key))
            .collect();
        places.into_iter().map(|at| (at, fates(at))).collect()
    }

    /// Shows one table to a test, which may change it without notice.
    #[cfg(test)]
    pub(super) fn show<T>(&self, table: OneTable, to: impl FnOnce(&mut HeldTable) -> T) -> T {
        to(self.0.lock().tables.get_mut(&table).unwrap())
    }

    /// Checks the table after each transaction.
    #[cfg(test)]
    pub(super) fn check_between(&self, check: fn(&HeldTable)) {
        self.0.lock().between = Some(check);
    }
}

impl MemoryState {
    fn tables_of(&self, family: Family, kinds: &[TableKind]) -> Vec<&HeldTable> {
        kinds.iter().filter_map(|kind| self.tables.get(&(*kind, family))).collect()
    }

    fn fates(&self, packet: &TestPacket, kinds: &[TableKind]) -> BTreeSet<PacketFate> {
        PacketWalk::fates(
            &self.tables_of(Family::of(packet.source), kinds),
            &self.own,
            packet,
        )
    }

    /// Carries out the disturbances that are due.
    fn happen(&mut self) {
        let now = self.transactions;
        let due: Vec<_> = self.due.extract_if(.., |(at, _)| *at <= now).collect();
        for (_, disturbance) in due {
            let changes = self.changes(disturbance);
            self.end(Some((4_711, "another".to_owned())), changes);
        }
    }

    fn changes(&mut self, disturbance: Disturbance) -> Vec<(OneTable, Changed)> {
        let mut remove = |table: OneTable, mut goes: Box<dyn FnMut(&Element) -> bool>| {
            let gone = self.tables.get_mut(&table).map(|held| held.remove(&mut *goes));
            let gone = gone.into_iter().flatten().map(|element| ((element.set, element.key), None));
            let gone: BTreeMap<_, _> = gone.collect();
            // The kernel reports no ranges as the drivers write them.
            let has_ranges = gone.keys().any(|(set, _)| set.is_interval());
            let changed = if has_ranges { Changed::Anything } else { Changed::Elements(gone) };
            vec![(table, changed)]
        };
        match disturbance {
            Disturbance::Elsewhere => Vec::new(),
            Disturbance::DeleteTable(kind, family) => {
                let gone = self.tables.remove(&(kind, family));
                gone.map(|_| ((kind, family), Changed::Anything)).into_iter().collect()
            }
            Disturbance::Flush(kind, family) => remove((kind, family), Box::new(|_| true)),
            Disturbance::Thin(kind, family, n) => {
                let mut number = 0..;
                let nth = move |_: &Element| {
                    number.next().is_some_and(|at: usize| at.is_multiple_of(n.max(1)))
                };
                remove((kind, family), Box::new(nth))
            }
            Disturbance::RemoveFrontend(at, family) => remove(
                (TableKind::Services, family),
                Box::new(move |element| place_of(element.key) == Some(at)),
            ),
        }
    }

    /// Ends a transaction, which the kernel reports.
    fn end(&mut self, by: Option<(u32, String)>, changes: Vec<(OneTable, Changed)>) {
        self.generation = generation_after(self.generation);
        let number = self.generation;
        self.reports.push((Generation { number, by }, changes));
    }

    /// Reads the reports of every transaction up to now.
    fn catch_up(&mut self) {
        if std::mem::take(&mut self.overrun) {
            self.ledger.lose();
        }
        for (generation, changes) in std::mem::take(&mut self.reports) {
            self.ledger.hear(&generation, changes);
        }
        if self.ledger.head().is_none() {
            self.ledger.restart(self.generation);
        }
    }

    /// Takes a fault of the next call, if there is one.
    fn fails(&mut self, table: OneTable, count: fn(&mut TableFaults) -> &mut u32) -> bool {
        let left = self.faults.get_mut(&table).map(count);
        left.is_some_and(|left| match left.checked_sub(1) {
            Some(less) => {
                *left = less;
                true
            }
            None => false,
        })
    }
}

/// A process that programs the machine.
#[derive(Clone, Debug)]
pub(super) struct MemoryProcess {
    kernel: MemoryKernel,
    number: u64,
}

impl MemoryProcess {
    /// Returns access to one of a family's tables.
    pub(super) fn table(&self, family: Family, layout: impl Into<TableLayout>) -> MemoryTable {
        MemoryTable {
            family,
            layout: layout.into(),
            process: self.clone(),
        }
    }

    /// Reads the reports. Returns, by family, whether another program changed the table.
    pub(super) fn drifted(&self, kind: TableKind) -> [bool; 2] {
        let mut state = self.state();
        state.catch_up();
        Family::ALL.map(|family| state.ledger.has_drifted((kind, family)))
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

/// A process's access to one of a family's tables.
#[derive(Debug)]
pub(super) struct MemoryTable {
    family: Family,
    layout: TableLayout,
    process: MemoryProcess,
}

impl MemoryTable {
    fn id(&self) -> OneTable {
        (self.layout.table(), self.family)
    }

    /// Returns the machine if the table can be read.
    fn readable(&self) -> Result<MutexGuard<'_, MemoryState>, NetlinkError> {
        let mut state = self.process.state();
        let is_broken = state.faults.get(&self.id()).is_some_and(|faults| faults.broken);
        let errno = if is_broken { Errno::EIO } else { Errno::ENOBUFS };
        if is_broken || state.fails(self.id(), |faults| &mut faults.failing_reads) {
            let what = "read from memory";
            return Err(NetlinkError::Socket { what, errno });
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
        if state.faults.get(&table).is_some_and(|faults| faults.broken) {
            state.ledger.lose();
            return Err(CommitError::OutcomeUnknown(Errno::EIO));
        }
        if state.fails(table, |faults| &mut faults.failing_commits) {
            return Err(CommitError::Refused(Errno::EBUSY));
        }
        if state.fails(table, |faults| &mut faults.contended) {
            state.end(None, Vec::new());
        }
        let head = state.ledger.head();
        if guard == Guard::Head
            && (state.ledger.has_drifted(table) || head != Some(state.generation))
        {
            return Err(CommitError::GenerationMoved);
        }
        change(&mut state)?;
        state.end(None, Vec::new());
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

fn refused() -> CommitError {
    CommitError::Refused(Errno::EINVAL)
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

    fn structure(&mut self) -> Result<Option<Vec<Group>>, NetlinkError> {
        let state = self.readable()?;
        let held = state.tables.get(&self.id()).filter(|held| held.layout == self.layout);
        Ok(held.map(|held| held.groups().collect()))
    }

    fn sets(&self) -> Vec<Set> {
        Set::all_of(self.layout.table())
    }

    fn list(&mut self, set: Set) -> Result<ListedSet, ReadError> {
        let state = self.readable()?;
        let elements = state.tables.get(&self.id()).into_iter().flat_map(HeldTable::elements);
        let elements = elements.filter(|element| element.set == set).collect();
        Ok(ListedSet::Whole(elements))
    }

    fn drift(&mut self) -> Result<Option<Drift>, NetlinkError> {
        let mut state = self.process.state();
        state.catch_up();
        Ok(state.ledger.take_drift(self.id()))
    }

    fn commit(&mut self, rebuild: bool, guard: Guard, groups: &[Ops]) -> Result<Cost, CommitError> {
        let table = self.id();
        self.transact(guard, |state| {
            let (bytes, limit) = (groups.iter().map(Ops::weight).sum(), state.capacity);
            // One group is never split.
            if bytes > limit && groups.len() > 1 {
                return Err(CommitError::TooBig { bytes, limit });
            }
            let before =
                if rebuild { None } else { Some(state.tables.get(&table).ok_or_else(refused)?) };
            let mut held = before.map_or_else(
                || HeldTable::new(self.family, self.layout),
                HeldTable::clone,
            );
            let faults = state.faults.get(&table).copied().unwrap_or_default();
            held.apply(groups, faults.refused).ok_or_else(refused)?;
            #[cfg(test)]
            state.between.inspect(|check| check(&held));
            state.tables.insert(table, held);
            Ok(())
        })
    }

    fn clients(&mut self, group: AffinityId) -> Result<Vec<Client>, NetlinkError> {
        let state = self.readable()?;
        let clients = state.tables.get(&self.id()).and_then(|held| held.clients(group));
        clients.ok_or(NetlinkError::Socket {
            what: "read clients from memory",
            errno: Errno::ENOENT,
        })
    }

    fn forget(&mut self, group: AffinityId, gone: &[Client]) -> Result<(), CommitError> {
        let forgotten = self.transact(Guard::None, |state| {
            let held = state.tables.get_mut(&self.id());
            held.and_then(|held| held.forget(group, gone)).ok_or_else(refused)
        });
        forgotten.map(drop)
    }

    fn capacity(&self, _: bool) -> usize {
        self.process.state().capacity
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
