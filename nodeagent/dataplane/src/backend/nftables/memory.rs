//! The nf_tables of a machine in memory, below the drivers: what the kernel refuses, reports, and does with packets.
//! Simulations and unit tests use it.
//!
//! ```text
//! drivers > MemoryTable > transactions on HeldTable   (process.rs, held.rs: elements, groups, clients)
//! packets > PacketWalk  > the chains of layout.rs, policy_layout.rs and affinity.rs, over these elements   (walk.rs)
//! ```
//!
//! A machine outlives the processes that program it. One process programs it at a time: [`MemoryKernel::open`] is its
//! beginning, and ends the one before.

mod held;
mod process;
mod walk;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use kplane_model::{Family, FrontendAddr};
use kplane_netlink::{Generation, generation_after};
use parking_lot::Mutex;

pub(crate) use self::held::HeldTable;
use self::process::MemoryProcess;
use self::walk::PacketWalk;
pub use self::walk::{PacketFate, PacketFlow, TestPacket};
use super::access::KernelTables as _;
use super::data_path::NftDataPath;
use super::element::Element;
use super::frontend::place_of;
use super::policies::PolicyTables;
use super::schema::TableSettings;
use super::table_kind::TableKind;
use super::watch::{Changed, Ledger, OneTable};
use crate::backend::driver::Driver;
use crate::backend::{Backend, noop};

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
    /// Deletes every `n`th element of a table, from the first on; all if `n` is 1.
    Thin(TableKind, Family, usize),
    /// Deletes all elements of a place.
    RemoveFrontend(FrontendAddr, Family),
    /// Adds the elements that a table had at the time of [`MemoryKernel::copy`] and has no more.
    Restore(TableKind, Family),
}

/// The payload of the panic with which a process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessDied;

#[derive(Debug, Default)]
struct MemoryState {
    /// The machine's own addresses, besides loopback.
    own: BTreeSet<IpAddr>,
    tables: BTreeMap<OneTable, HeldTable>,
    /// The copies of them that another program keeps.
    copies: BTreeMap<OneTable, HeldTable>,
    faults: BTreeMap<OneTable, TableFaults>,
    /// Most elements in one transaction.
    capacity: Option<usize>,
    /// Most operations of NetworkPolicies that a process sends at once, if not the usual number.
    part: Option<usize>,
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
    reports: Vec<(Generation, Option<(OneTable, Changed)>)>,
    /// Reports were lost.
    overrun: bool,
}

impl MemoryKernel {
    /// Returns a machine with these addresses, and without tables.
    pub fn new(own: impl IntoIterator<Item = IpAddr>) -> Self {
        let kernel = Self::default();
        kernel.0.lock().own.extend(own);
        kernel
    }

    /// Opens the backend for a new process. From now on, calls of an earlier process panic with [`ProcessDied`].
    pub fn open(&self) -> Backend {
        let process = self.start();
        let side = |family| {
            let table = process.table(family, TableSettings::default().into());
            Box::new(Driver::new(NftDataPath::new(family, table))) as _
        };
        Backend {
            policies: PolicyTables::in_memory(Arc::new(process.clone()), self.0.lock().part),
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
        MemoryProcess::new(self, state.process)
    }

    /// Starts the machine anew: its tables are gone, and its process is dead. Faults stay.
    pub fn reboot(&self) {
        let mut state = self.0.lock();
        state.tables.clear();
        state.due.clear();
        (state.generation, state.has_died) = (0, true);
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
        self.0.lock().capacity = Some(elements);
    }

    /// Sets the number of operations of NetworkPolicies that later processes send at once.
    pub fn set_part(&self, operations: usize) {
        self.0.lock().part = Some(operations);
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

    /// Has another program change something now, and loses the kernel's report of that.
    pub fn disturb_unseen(&self, disturbance: Disturbance) {
        self.0.lock().disturb(disturbance);
    }

    /// Has another program remember all tables as they are, for [`Disturbance::Restore`].
    pub fn copy(&self) {
        let mut state = self.0.lock();
        state.copies = state.tables.clone();
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
        let tables = state.tables_of(packet, &TableKind::ALL);
        let mut walk = PacketWalk::new(&tables, &state.own, packet, draw);
        let (fate, remembered) = (walk.fate(), walk.remembered);
        let table = (TableKind::Services, Family::of(packet.source));
        if let Some(held) = state.tables.get_mut(&table) {
            held.remember(packet.source, remembered);
        }
        fate
    }

    /// Returns the places that the table of Services names, with the fates of new connections to them, whatever
    /// NetworkPolicies say: of a client outside of the cluster, and of the machine itself. Node ports are those of its
    /// first address.
    pub fn frontends(&self, family: Family) -> BTreeMap<FrontendAddr, [BTreeSet<PacketFate>; 2]> {
        let state = self.0.lock();
        let client: IpAddr = match family {
            Family::V4 => Ipv4Addr::new(192, 0, 2, 1).into(),
            Family::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
        };
        let own = state.own.iter().copied().find(|ip| Family::of(*ip) == family).unwrap_or(client);
        let fates = |at: FrontendAddr| {
            let (ip, protocol, port) = match at {
                FrontendAddr::Address { ip, protocol, port } => (ip, protocol, port),
                FrontendAddr::NodePort { protocol, port } => (own, protocol, port),
            };
            let packet = |source| TestPacket::new(source, ip, Some((protocol, port)));
            [client, own].map(|source| state.fates(&packet(source), &[TableKind::Services]))
        };
        let table = state.tables.get(&(TableKind::Services, family));
        let elements = table.into_iter().flat_map(HeldTable::elements);
        let places: BTreeSet<_> = elements.filter_map(|element| place_of(element.key)).collect();
        places.into_iter().map(|at| (at, fates(at))).collect()
    }

    /// Returns the number of keys that rules look up for a packet whose first draw hits an endpoint.
    #[cfg(test)]
    pub(super) fn look_ups(&self, packet: &TestPacket) -> usize {
        let state = self.0.lock();
        let tables = state.tables_of(packet, &[TableKind::Services]);
        let mut walk = PacketWalk::new(&tables, &state.own, packet, 0);
        walk.fate();
        walk.look_ups
    }

    /// Returns the fates of a packet that one table alone judges.
    #[cfg(test)]
    pub(crate) fn fates_in(table: &HeldTable, packet: &TestPacket) -> BTreeSet<PacketFate> {
        PacketWalk::fates(&[table], &BTreeSet::new(), packet)
    }

    /// Shows one table to a test, which may change it without notice.
    #[cfg(test)]
    pub(super) fn show<T>(&self, table: OneTable, to: impl FnOnce(&mut HeldTable) -> T) -> T {
        to(self.0.lock().tables.get_mut(&table).unwrap())
    }
}

impl MemoryState {
    fn tables_of(&self, packet: &TestPacket, kinds: &[TableKind]) -> Vec<&HeldTable> {
        let family = Family::of(packet.source);
        kinds.iter().filter_map(|kind| self.tables.get(&(*kind, family))).collect()
    }

    fn fates(&self, packet: &TestPacket, kinds: &[TableKind]) -> BTreeSet<PacketFate> {
        PacketWalk::fates(&self.tables_of(packet, kinds), &self.own, packet)
    }

    /// Carries out the disturbances that are due.
    fn happen(&mut self) {
        let now = self.transactions;
        let due: Vec<_> = self.due.extract_if(.., |(at, _)| *at <= now).collect();
        for (_, disturbance) in due {
            let change = self.disturb(disturbance);
            self.end(Some((4_711, "another".to_owned())), change);
        }
    }

    /// Carries out a disturbance, and returns its change of a table of kplane.
    fn disturb(&mut self, disturbance: Disturbance) -> Option<(OneTable, Changed)> {
        let table = match disturbance {
            Disturbance::Elsewhere => return None,
            Disturbance::DeleteTable(kind, family)
            | Disturbance::Thin(kind, family, _)
            | Disturbance::Restore(kind, family) => (kind, family),
            Disturbance::RemoveFrontend(_, family) => (TableKind::Services, family),
        };
        let held = self.tables.get_mut(&table)?;
        let mut is = None;
        let changed = match disturbance {
            Disturbance::Thin(_, _, n) => held.remove(|at, _| at.is_multiple_of(n)),
            Disturbance::RemoveFrontend(place, _) => {
                held.remove(|_, element| place_of(element.key) == Some(place))
            }
            Disturbance::Restore(..) => {
                let copy = self.copies.get(&table)?;
                let added = held.restore(copy);
                is = Some(());
                added
            }
            Disturbance::Elsewhere | Disturbance::DeleteTable(..) => {
                self.tables.remove(&table);
                return Some((table, Changed::Anything));
            }
        };
        // Drivers read a table of whose ranges the kernel reports a change.
        let has_ranges = changed.iter().any(|element| element.set.is_interval());
        let changed = if has_ranges {
            Changed::Anything
        } else {
            let now = |element: &Element| ((element.set, element.key), is.map(|()| *element));
            Changed::Elements(changed.iter().map(now).collect())
        };
        Some((table, changed))
    }

    /// Ends a transaction, which the kernel reports.
    fn end(&mut self, by: Option<(u32, String)>, change: Option<(OneTable, Changed)>) {
        self.generation = generation_after(self.generation);
        let number = self.generation;
        self.reports.push((Generation { number, by }, change));
    }

    /// Reads the reports of every transaction up to now.
    fn catch_up(&mut self) {
        if std::mem::take(&mut self.overrun) {
            self.ledger.lose();
        }
        for (generation, change) in std::mem::take(&mut self.reports) {
            self.ledger.hear(&generation, change);
        }
        if self.ledger.head().is_none() {
            self.ledger.restart(self.generation);
        }
    }

    /// Takes one of a number of faults, if any is left.
    fn fails(&mut self, table: OneTable, count: fn(&mut TableFaults) -> &mut u32) -> bool {
        let Some(left) = self.faults.get_mut(&table).map(count) else {
            return false;
        };
        let fails = *left > 0;
        *left = left.saturating_sub(1);
        fails
    }
}
