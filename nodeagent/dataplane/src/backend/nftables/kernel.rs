//! The kernel's side of a table, as little as the driver needs to know of it.

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

/// Most that one element adds to a batch, in bytes: see `MAX_ELEMENT_BYTES` in `element.rs`. A
/// generous guess only makes transactions smaller than they might be.
const ELEMENT_BYTES: usize = 128;
/// What the table itself takes, about 500 operations.
const STRUCTURE_BYTES: usize = 256 * 1024;

/// How often a table is read again when the rules changed meanwhile.
const READ_ATTEMPTS: u32 = 10;

/// What the kernel holds in place of our table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Our table with these groups of session affinity and these elements.
    Ours(Vec<Group>, Vec<Element>),
    /// No table, or one that has to be replaced.
    Other(String),
}

/// What a commit cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cost {
    pub(super) bytes: u64,
    pub(super) encode: Duration,
    pub(super) kernel: Duration,
}

/// On what a transaction depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Guard {
    /// What others did to our table is dealt with, and nobody committed anything, to any table, since the
    /// last transaction that was heard of.
    Head,
    /// Nothing: it is applied whatever there is.
    None,
}

/// Reads and writes the tables of one network namespace.
pub(super) trait Kernel: Send {
    /// Reads our table. What others did to it before is dealt with by that.
    fn read(&mut self, family: Family) -> Result<Found, NetlinkError>;

    /// Listens to the kernel, and says what others did to a family's table since it was last asked.
    fn meddling(&mut self, family: Family) -> Result<Option<Meddling>, NetlinkError>;

    /// Listens to the kernel, and says whose tables others changed. Nothing of it is dealt with.
    fn listen(&mut self) -> Result<[bool; 2], NetlinkError>;

    /// A descriptor that is readable when there is something to hear.
    fn readiness(&self) -> Option<OwnedFd>;

    /// Applies operations in one transaction, on top of a fresh table if `rebuild`.
    fn commit(
        &mut self,
        family: Family,
        rebuild: bool,
        guard: Guard,
        groups: &[Ops],
    ) -> Result<Cost, CommitError>;

    /// Who is remembered by a group of session affinity.
    fn clients(&mut self, family: Family, group: AffinityId) -> Result<Vec<Client>, NetlinkError>;

    /// Forgets clients of a group. Fails as a whole if one of them is not remembered any more.
    fn forget(
        &mut self,
        family: Family,
        group: AffinityId,
        clients: &[Client],
    ) -> Result<(), CommitError>;

    /// Element operations that fit into one transaction.
    fn capacity(&self, rebuild: bool) -> usize;
}

/// The real one.
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

    /// Hears of every transaction up to now.
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
            // Listening makes a head of its own.
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
            // Its end is heard of like those of others.
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
        // What was read while others changed our table may be torn. Changes of other tables do no harm.
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
        // The kernel does the operations in order: a key is deleted before it is added again.
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
