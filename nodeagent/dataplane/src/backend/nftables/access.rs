//! The drivers' access to the tables in the kernel, as narrow as possible.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kplane_model::Family;
use parking_lot::{Mutex, MutexGuard};

use super::affinity::Group;
use super::affinity_id::AffinityId;
use super::clients::{self, Client};
use super::element::{Element, ElementOp, push_elements};
use super::frontend::Ops;
use super::readback::{
    KernelList, ListedSet, ReadError, StructureState, read_elements_of, read_structure,
};
use super::schema::Set;
use super::structure::{GroupOp, push_delete, push_groups, push_own, push_structure};
use super::table_kind::TableKind;
use super::tables::TableLayout;
use super::watch::{Drift, Ledger, OneTable};
use crate::backend::Notifications;
use kplane_netlink::{Batch, CommitError, Errno, Monitor, NetlinkError, NfSocket};

/// Most bytes that one element adds to a batch: see `MAX_ELEMENT_BYTES` in `element.rs`. A generous estimate
/// only makes transactions smaller than necessary.
const ELEMENT_BYTES: usize = 128;
/// Size of the table itself in a batch, in bytes: about 500 operations.
const STRUCTURE_BYTES: usize = 256 * 1024;

/// Size of a transaction from which nobody listens to it, in bytes: some 2,000 elements. The kernel takes a page of memory
/// for the notification of each element until all are sent (`nf_tables_setelem_notify`): 800 MB for 200,000 elements, whose
/// transaction took 3.16 s, and takes 0.34 s without.
const UNHEARD_BYTES: usize = 64 * 1024;

/// See [`TableAccess::pause`].
const READ_PAUSE: Duration = Duration::from_millis(20);

/// Most attempts to read a table while its rules change.
const READ_ATTEMPTS: u32 = 10;

/// The kernel's content in place of kplane's table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FoundTable {
    /// kplane's table with these groups of session affinity and these elements.
    Ours(Vec<Group>, Vec<Element>),
    /// No table, or a table that has to be replaced.
    Other(String),
}

/// The reason of [`FoundTable::Other`] when there is no table.
pub(super) const ABSENT: &str = "there is no table";

/// The cost of a commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    pub(crate) bytes: u64,
    pub(crate) encode: Duration,
    pub(crate) kernel: Duration,
}

/// Condition for a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Guard {
    /// Changes by other programs to kplane's table are handled. Since the last transaction that the kernel
    /// reported, no program has committed anything to any table.
    Head,
    /// No condition.
    None,
}

/// Access to one family's table.
pub(super) trait TableAccess: fmt::Debug + Send {
    /// Reads kplane's table. This handles all earlier changes by other programs.
    fn read(&mut self) -> Result<FoundTable, NetlinkError>;

    /// Waits before a table that differs is read again.
    fn pause(&self) {
        std::thread::sleep(READ_PAUSE);
    }

    /// Compares the table's chains, rules and sets. Returns its groups of session affinity if they are kplane's.
    fn structure(&mut self) -> Result<Option<Vec<Group>>, NetlinkError>;

    /// Returns the table's sets.
    fn sets(&self) -> Vec<Set>;

    /// Begins to list a set.
    fn list(&mut self, set: Set) -> Result<ListedSet, ReadError>;

    /// Reads the kernel's reports. Returns the changes by other programs to the table since the last call.
    fn drift(&mut self) -> Result<Option<Drift>, NetlinkError>;

    /// Applies operations in one transaction, on top of a fresh table if `rebuild`.
    fn commit(&mut self, rebuild: bool, guard: Guard, groups: &[Ops]) -> Result<Cost, CommitError>;

    /// Returns the clients that a group of session affinity remembers.
    fn clients(&mut self, group: AffinityId) -> Result<Vec<Client>, NetlinkError>;

    /// Forgets clients of a group. Fails as a whole if one of them is forgotten already.
    fn forget(&mut self, group: AffinityId, clients: &[Client]) -> Result<(), CommitError>;

    /// Returns the number of element operations that fit into one transaction.
    fn capacity(&self, rebuild: bool) -> usize;

    /// Makes the table this process's own, if tables have owners. Returns whether it is.
    fn own(&mut self) -> Result<bool, CommitError>;

    /// Deletes the table, which need not exist.
    fn delete(&mut self) -> Result<Cost, CommitError>;
}

/// The tables of both families, and the reports about them.
pub(super) trait KernelTables: fmt::Debug + Send + Sync {
    /// Returns access to one of a family's tables.
    fn table(&self, family: Family, layout: TableLayout) -> Box<dyn TableAccess>;

    /// Reads the kernel's reports. Returns, by family, whether another program changed the table.
    fn drifted(&self, kind: TableKind) -> [bool; 2];
}

/// The nf_tables of one network namespace, over netlink. Both families share its generation, which grows with
/// each transaction on any table.
#[derive(Clone, Debug)]
pub(super) struct Namespace(Arc<Mutex<Netlink>>);

#[derive(Debug)]
struct Netlink {
    socket: NfSocket,
    /// The port of `socket`.
    port: u32,
    monitor: Monitor,
    ledger: Ledger,
}

impl Namespace {
    /// Opens the namespace of this thread.
    ///
    /// # Errors
    /// [`NetlinkError::Open`].
    pub(super) fn open() -> Result<Self, NetlinkError> {
        let socket = NfSocket::open()?;
        let port = socket.port()?;
        let netlink = Netlink {
            monitor: Monitor::open(port)?,
            ledger: Ledger::default(),
            socket,
            port,
        };
        Ok(Self(Arc::new(Mutex::new(netlink))))
    }

    /// Only the engine's thread uses the lock, so it is never waited for.
    fn lock(&self) -> MutexGuard<'_, Netlink> {
        self.0.lock()
    }
}

impl Notifications for Namespace {
    fn readiness(&self) -> Option<OwnedFd> {
        let fd = self.lock().monitor.readiness();
        let found_late = |error: &_| {
            tracing::warn!(%error, "cannot wait for the kernel's reports; changes by other programs are found late");
        };
        fd.inspect_err(found_late).ok()
    }

    fn read(&mut self) -> [bool; 2] {
        self.drifted(TableKind::Services)
    }
}

impl KernelTables for Namespace {
    fn table(&self, family: Family, layout: TableLayout) -> Box<dyn TableAccess> {
        Box::new(KernelTable {
            family,
            layout,
            namespace: self.clone(),
        })
    }

    fn drifted(&self, kind: TableKind) -> [bool; 2] {
        let mut netlink = self.lock();
        match netlink.catch_up() {
            Ok(()) => Family::ALL.map(|family| netlink.ledger.has_drifted((kind, family))),
            Err(problem) => {
                tracing::warn!(%problem, "cannot read the kernel's reports of changes; reading both tables back");
                [true, true]
            }
        }
    }
}

impl Netlink {
    /// Reads the reports of every transaction up to now.
    fn catch_up(&mut self) -> Result<(), NetlinkError> {
        if self.monitor.is_paused() {
            self.ledger.lose();
            self.monitor.resume()?;
        }
        self.take_reports()
    }

    fn take_reports(&mut self) -> Result<(), NetlinkError> {
        let (ledger, port) = (&mut self.ledger, self.port);
        if !self.monitor.drain(|message| ledger.take(message, port)) {
            self.ledger.lose();
        }
        if self.ledger.head().is_none() {
            self.ledger.restart(self.socket.generation()?);
        }
        Ok(())
    }

    fn send(&mut self, table: OneTable, batch: Batch, guard: Guard) -> Result<(), CommitError> {
        let head = match guard {
            // Reading the reports moves the head, so the head alone would not reveal these changes.
            Guard::Head if self.ledger.has_drifted(table) => {
                return Err(CommitError::GenerationMoved);
            }
            Guard::Head => Some(self.ledger.head().ok_or(CommitError::GenerationMoved)?),
            Guard::None => None,
        };
        let is_unheard = batch.byte_len() >= UNHEARD_BYTES;
        let before = if is_unheard { self.pause() } else { head };
        let result = self.socket.commit(batch.seal(head));
        match (&result, before) {
            (Ok(()), Some(before)) => self.ledger.committed(before),
            (Err(CommitError::OutcomeUnknown(_)), _) => self.ledger.lose(),
            // The transaction's end will be reported, like those of other programs.
            _ => {}
        }
        if is_unheard {
            self.resume();
        }
        result
    }

    /// Stops to listen; returns the generation up to which everything is known.
    fn pause(&mut self) -> Option<u32> {
        let paused = self.monitor.pause().and_then(|()| self.take_reports());
        if let Err(problem) = paused {
            tracing::debug!(%problem, "cannot read the kernel's reports before a large transaction");
        }
        self.ledger.head()
    }

    /// Listens again. If another program may have changed something meanwhile, everything is read.
    fn resume(&mut self) {
        let listens = self.monitor.resume().and_then(|()| self.socket.generation());
        if !listens.is_ok_and(|generation| self.ledger.head() == Some(generation)) {
            self.ledger.lose();
        }
    }

    fn read_once(
        &mut self,
        family: Family,
        layout: TableLayout,
    ) -> Result<FoundTable, NetlinkError> {
        let groups = match read_structure(&mut self.socket, family, layout)? {
            StructureState::Absent => return Ok(FoundTable::Other(ABSENT.to_owned())),
            StructureState::Different(reason) => return Ok(FoundTable::Other(reason)),
            StructureState::Ours(groups) => groups,
        };
        match read_elements_of(&mut self.socket, family, layout.table()) {
            Ok(elements) => Ok(FoundTable::Ours(groups, elements)),
            Err(ReadError::Different(reason)) => Ok(FoundTable::Other(reason)),
            Err(ReadError::Netlink(error)) => Err(error),
        }
    }
}

/// Access to one of a family's tables in the real kernel.
#[derive(Debug)]
struct KernelTable {
    family: Family,
    layout: TableLayout,
    namespace: Namespace,
}

impl KernelTable {
    fn id(&self) -> OneTable {
        (self.layout.table(), self.family)
    }
}

impl TableAccess for KernelTable {
    fn read(&mut self) -> Result<FoundTable, NetlinkError> {
        let mut netlink = self.namespace.lock();
        // A read may be torn if other programs changed kplane's table meanwhile. Changes to other tables do
        // no harm.
        for _ in 0..READ_ATTEMPTS {
            netlink.catch_up()?;
            netlink.ledger.take_drift(self.id());
            let found = netlink.read_once(self.family, self.layout)?;
            netlink.catch_up()?;
            if !netlink.ledger.has_drifted(self.id()) {
                return Ok(found);
            }
        }
        Err(NetlinkError::KeepsChanging {
            what: "read table kplane",
            attempts: READ_ATTEMPTS,
        })
    }

    fn structure(&mut self) -> Result<Option<Vec<Group>>, NetlinkError> {
        let socket = &mut self.namespace.lock().socket;
        Ok(match read_structure(socket, self.family, self.layout)? {
            StructureState::Ours(groups) => Some(groups),
            StructureState::Absent | StructureState::Different(_) => None,
        })
    }

    fn sets(&self) -> Vec<Set> {
        Set::all_of(self.layout.table())
    }

    fn list(&mut self, set: Set) -> Result<ListedSet, ReadError> {
        KernelList::begin(self.family, set).map(ListedSet::Kernel)
    }

    fn drift(&mut self) -> Result<Option<Drift>, NetlinkError> {
        let mut netlink = self.namespace.lock();
        netlink.catch_up()?;
        Ok(netlink.ledger.take_drift(self.id()))
    }

    fn commit(&mut self, rebuild: bool, guard: Guard, groups: &[Ops]) -> Result<Cost, CommitError> {
        let started = Instant::now();
        let (family, layout) = (self.family, self.layout);
        let mut batch = Batch::new();
        if rebuild {
            push_delete(&mut batch, family, layout);
            push_structure(&mut batch, family, layout);
        }
        // The kernel executes the operations in order: a key is deleted before it is added again.
        let deleted = groups.iter().flat_map(|ops| &ops.delete);
        push_elements(&mut batch, family, ElementOp::Delete, deleted);
        let objects: Vec<GroupOp> = groups.iter().flat_map(|ops| &ops.groups).copied().collect();
        push_groups(&mut batch, family, layout.settings(), &objects);
        let added = groups.iter().flat_map(|ops| &ops.add);
        push_elements(&mut batch, family, ElementOp::Add, added);
        let bytes = batch.byte_len() as u64;
        let encoded = Instant::now();
        self.namespace.lock().send(self.id(), batch, guard)?;
        Ok(Cost {
            bytes,
            encode: encoded - started,
            kernel: encoded.elapsed(),
        })
    }

    fn clients(&mut self, group: AffinityId) -> Result<Vec<Client>, NetlinkError> {
        clients::read(&mut self.namespace.lock().socket, self.family, group)
    }

    fn forget(&mut self, group: AffinityId, clients: &[Client]) -> Result<(), CommitError> {
        let mut batch = Batch::new();
        clients::push_forget(&mut batch, self.family, group, clients);
        self.namespace.lock().send(self.id(), batch, Guard::None)
    }

    fn capacity(&self, rebuild: bool) -> usize {
        let structure = if rebuild { STRUCTURE_BYTES } else { 0 };
        let room = self.namespace.lock().socket.max_batch_bytes();
        (room.saturating_sub(structure) / ELEMENT_BYTES).max(1)
    }

    fn own(&mut self) -> Result<bool, CommitError> {
        if self.layout.flags() == 0 {
            return Ok(true);
        }
        let mut batch = Batch::new();
        push_own(&mut batch, self.family, self.layout);
        let sent = self.namespace.lock().send(self.id(), batch, Guard::None);
        match sent {
            Err(error) if error.errno() == Some(Errno::EOPNOTSUPP) => Ok(false),
            sent => sent.map(|()| true),
        }
    }

    fn delete(&mut self) -> Result<Cost, CommitError> {
        let mut batch = Batch::new();
        push_delete(&mut batch, self.family, self.layout);
        let (bytes, started) = (batch.byte_len() as u64, Instant::now());
        self.namespace.lock().send(self.id(), batch, Guard::None)?;
        Ok(Cost {
            bytes,
            encode: Duration::ZERO,
            kernel: started.elapsed(),
        })
    }
}

#[cfg(test)]
mod tests {
    use kplane_rig::kernel::{in_netns, nft};

    use super::*;
    use crate::backend::nftables::POLICY_TABLE;

    /// What another program changes while nobody listens leaves doubt about all tables.
    #[test]
    fn a_change_during_a_pause_is_not_missed() {
        in_netns(|| {
            let namespace = Namespace::open().unwrap();
            let script = format!("add table ip {POLICY_TABLE}");
            let is_in_doubt =
                || TableKind::ALL.into_iter().flat_map(|kind| namespace.drifted(kind)).all(|m| m);
            for changes in [false, true] {
                let mut netlink = namespace.lock();
                assert!(netlink.pause().is_some());
                if changes {
                    nft(&["-f", "-"], &script);
                }
                netlink.resume();
                drop(netlink);
                assert_eq!(is_in_doubt(), changes);
            }
        });
    }
}
