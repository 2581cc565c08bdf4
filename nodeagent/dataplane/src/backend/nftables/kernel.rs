//! The driver's access to the tables in the kernel, as narrow as possible.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use kplane_model::Family;

use super::affinity::{AffinityId, Group};
use super::clients::{self, Client};
use super::element::{Element, ElementOp, push_elements};
use super::frontend::Ops;
use super::readback::{ReadError, StructureState, read_elements, read_structure};
use super::schema::Settings;
use super::structure::{GroupOp, push_delete_table, push_groups, push_structure};
use super::watch::{Ledger, Meddling};
use kplane_netlink::{Batch, CommitError, Monitor, NetlinkError, NfSocket};

/// Most bytes that one element adds to a batch: see `MAX_ELEMENT_BYTES` in `element.rs`. A generous estimate
/// only makes transactions smaller than necessary.
const ELEMENT_BYTES: usize = 128;
/// Size of the table itself in a batch, in bytes: about 500 operations.
const STRUCTURE_BYTES: usize = 256 * 1024;

/// Most attempts to read a table while its rules change.
const READ_ATTEMPTS: u32 = 10;

/// The kernel's content in place of kplane's table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// kplane's table with these groups of session affinity and these elements.
    Ours(Vec<Group>, Vec<Element>),
    /// No table, or a table that has to be replaced.
    Other(String),
}

/// The cost of a commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cost {
    pub(super) bytes: u64,
    pub(super) encode: Duration,
    pub(super) kernel: Duration,
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

/// Access to the tables of one network namespace.
pub(super) trait Kernel: Send {
    /// Reads kplane's table. This handles all earlier changes by other programs.
    fn read(&mut self, family: Family) -> Result<Found, NetlinkError>;

    /// Reads the kernel's reports. Returns the changes by other programs to a family's table since the last
    /// call.
    fn meddling(&mut self, family: Family) -> Result<Option<Meddling>, NetlinkError>;

    /// Reads the kernel's reports. Returns the families whose tables other programs changed. The changes
    /// still have to be handled.
    fn listen(&mut self) -> Result<[bool; 2], NetlinkError>;

    /// Returns a descriptor that is readable when the kernel has reports.
    fn readiness(&self) -> Option<OwnedFd>;

    /// Applies operations in one transaction, on top of a fresh table if `rebuild`.
    fn commit(
        &mut self,
        family: Family,
        rebuild: bool,
        guard: Guard,
        groups: &[Ops],
    ) -> Result<Cost, CommitError>;

    /// Returns the clients that a group of session affinity remembers.
    fn clients(&mut self, family: Family, group: AffinityId) -> Result<Vec<Client>, NetlinkError>;

    /// Forgets clients of a group. Fails as a whole if one of them is forgotten already.
    fn forget(
        &mut self,
        family: Family,
        group: AffinityId,
        clients: &[Client],
    ) -> Result<(), CommitError>;

    /// Returns the number of element operations that fit into one transaction.
    fn capacity(&self, rebuild: bool) -> usize;
}

/// Access to the real kernel, over netlink.
#[derive(Debug)]
pub(super) struct Netlink {
    socket: NfSocket,
    /// The port of `socket`.
    port: u32,
    monitor: Monitor,
    ledger: Ledger,
    settings: Settings,
}

impl Netlink {
    /// # Errors
    /// [`NetlinkError::Open`].
    pub(super) fn open(settings: Settings) -> Result<Self, NetlinkError> {
        let socket = NfSocket::open()?;
        let port = socket.port()?;
        Ok(Self {
            monitor: Monitor::open(port)?,
            ledger: Ledger::default(),
            socket,
            port,
            settings,
        })
    }

    /// Reads the reports of every transaction up to now.
    fn catch_up(&mut self) -> Result<(), NetlinkError> {
        let (ledger, port) = (&mut self.ledger, self.port);
        if !self.monitor.drain(|message| ledger.take(message, port)) {
            self.ledger.lose();
        }
        if self.ledger.head().is_none() {
            self.ledger.restart(self.socket.generation()?);
        }
        Ok(())
    }

    fn send(&mut self, family: Family, batch: Batch, guard: Guard) -> Result<(), CommitError> {
        let head = match guard {
            // Reading the reports moves the head, so the head alone would not reveal these changes.
            Guard::Head if self.ledger.is_meddled(family) => {
                return Err(CommitError::GenerationMoved);
            }
            Guard::Head => Some(self.ledger.head().ok_or(CommitError::GenerationMoved)?),
            Guard::None => None,
        };
        let result = self.socket.commit(batch.seal(head));
        match (&result, head) {
            (Ok(()), Some(head)) => self.ledger.committed(head),
            (Err(CommitError::OutcomeUnknown(_)), _) => self.ledger.lose(),
            // The transaction's end will be reported, like those of other programs.
            _ => {}
        }
        result
    }

    fn read_once(&mut self, family: Family) -> Result<Found, NetlinkError> {
        let groups = match read_structure(&mut self.socket, family, self.settings)? {
            StructureState::Absent => return Ok(Found::Other("there is no table".to_owned())),
            StructureState::Different(reason) => return Ok(Found::Other(reason)),
            StructureState::Ours(groups) => groups,
        };
        match read_elements(&mut self.socket, family) {
            Ok(elements) => Ok(Found::Ours(groups, elements)),
            Err(ReadError::Different(reason)) => Ok(Found::Other(reason)),
            Err(ReadError::Netlink(error)) => Err(error),
        }
    }
}

impl Kernel for Netlink {
    fn read(&mut self, family: Family) -> Result<Found, NetlinkError> {
        // A read may be torn if other programs changed kplane's table meanwhile. Changes to other tables do
        // no harm.
        for _ in 0..READ_ATTEMPTS {
            self.meddling(family)?;
            let found = self.read_once(family)?;
            self.catch_up()?;
            if !self.ledger.is_meddled(family) {
                return Ok(found);
            }
        }
        Err(NetlinkError::KeepsChanging {
            what: "read our table",
            attempts: READ_ATTEMPTS,
        })
    }

    fn meddling(&mut self, family: Family) -> Result<Option<Meddling>, NetlinkError> {
        self.catch_up()?;
        Ok(self.ledger.take_meddling(family))
    }

    fn listen(&mut self) -> Result<[bool; 2], NetlinkError> {
        self.catch_up()?;
        Ok(Family::ALL.map(|family| self.ledger.is_meddled(family)))
    }

    fn readiness(&self) -> Option<OwnedFd> {
        let fd = self.monitor.readiness();
        fd.inspect_err(
            |error| tracing::warn!(%error, "others' changes of our rules are found late"),
        )
        .ok()
    }

    fn commit(
        &mut self,
        family: Family,
        rebuild: bool,
        guard: Guard,
        groups: &[Ops],
    ) -> Result<Cost, CommitError> {
        let started = Instant::now();
        let mut batch = Batch::new();
        if rebuild {
            push_delete_table(&mut batch, family);
            push_structure(&mut batch, family, self.settings);
        }
        // The kernel executes the operations in order: a key is deleted before it is added again.
        let deleted = groups.iter().flat_map(|ops| &ops.delete);
        push_elements(&mut batch, family, ElementOp::Delete, deleted);
        let objects = groups.iter().flat_map(|ops| &ops.groups).copied();
        let objects: Vec<GroupOp> = objects.collect();
        push_groups(&mut batch, family, self.settings, &objects);
        let added = groups.iter().flat_map(|ops| &ops.add);
        push_elements(&mut batch, family, ElementOp::Add, added);
        let bytes = batch.byte_len() as u64;
        let encoded = Instant::now();
        self.send(family, batch, guard)?;
        Ok(Cost {
            bytes,
            encode: encoded - started,
            kernel: encoded.elapsed(),
        })
    }

    fn clients(&mut self, family: Family, group: AffinityId) -> Result<Vec<Client>, NetlinkError> {
        clients::read(&mut self.socket, family, group)
    }

    fn forget(
        &mut self,
        family: Family,
        group: AffinityId,
        clients: &[Client],
    ) -> Result<(), CommitError> {
        let mut batch = Batch::new();
        clients::push_forget(&mut batch, family, group, clients);
        self.send(family, batch, Guard::None)
    }

    fn capacity(&self, rebuild: bool) -> usize {
        let structure = if rebuild { STRUCTURE_BYTES } else { 0 };
        let room = self.socket.max_batch_bytes().saturating_sub(structure);
        (room / ELEMENT_BYTES).max(1)
    }
}
