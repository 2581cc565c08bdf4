//! The kernel's side of a table, as little as the driver needs to know of it.

use std::time::{Duration, Instant};

use kplane_model::Family;

use super::affinity::{AffinityId, Group};
use super::clients::{self, Client};
use super::element::{Element, ElementOp, push_elements};
use super::frontend::Ops;
use super::readback::{ReadError, StructureState, read_elements, read_structure};
use super::schema::Settings;
use super::structure::{GroupOp, push_delete_table, push_groups, push_structure};
use crate::netlink::{Batch, CommitError, NetlinkError, NfSocket, generation_after};

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

/// Reads and writes the tables of one network namespace.
pub(super) trait Kernel: Send {
    /// Reads our table.
    fn read(&mut self, family: Family) -> Result<Found, NetlinkError>;

    /// Applies operations in one transaction, on top of a fresh table if `rebuild`. Unless `force`,
    /// nothing is applied if the table may have changed since it was last read or written.
    fn commit(
        &mut self,
        family: Family,
        rebuild: bool,
        force: bool,
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

    /// Deletes our table, whether it exists or not.
    fn delete(&mut self, family: Family) -> Result<(), CommitError>;

    /// Element operations that fit into one transaction.
    fn capacity(&self, rebuild: bool) -> usize;
}

/// The real one.
#[derive(Debug)]
pub(super) struct Netlink {
    socket: NfSocket,
    settings: Settings,
    /// By family: the generation of all rules in which its table was last known to be as we think
    /// it is; `None` = it has to be read first.
    generations: [Option<u32>; 2],
}

impl Netlink {
    pub(super) fn new(socket: NfSocket, settings: Settings) -> Self {
        Self {
            socket,
            settings,
            generations: [None, None],
        }
    }

    /// Sends a batch that touches one family's table, based on what is known of it unless `force`.
    fn send(&mut self, family: Family, batch: Batch, force: bool) -> Result<(), CommitError> {
        let known = self.generations[family as usize].take();
        if force {
            return self.socket.commit(batch.seal(None));
        }
        let generation = known.ok_or(CommitError::GenerationMoved)?;
        self.socket.commit(batch.seal(Some(generation)))?;
        // Nothing else changed since, so what was known of the other table still holds. If that
        // was known of an older generation only, it stays so, and its next batch is refused.
        let next = Some(generation_after(generation));
        self.generations[family as usize] = next;
        for other in &mut self.generations {
            if *other == Some(generation) {
                *other = next;
            }
        }
        Ok(())
    }
}

impl Netlink {
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
        // The kernel notices a change during a dump only between chunks of it, so that a single
        // answer may be torn: only what was read from one generation counts.
        for _ in 0..READ_ATTEMPTS {
            let before = self.socket.generation()?;
            let found = self.read_once(family)?;
            if self.socket.generation()? == before {
                self.generations[family as usize] = Some(before);
                return Ok(found);
            }
        }
        Err(NetlinkError::KeepsChanging {
            what: "read our table",
            attempts: READ_ATTEMPTS,
        })
    }

    fn commit(
        &mut self,
        family: Family,
        rebuild: bool,
        force: bool,
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
        self.send(family, batch, force)?;
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
        self.send(family, batch, true)
    }

    fn delete(&mut self, family: Family) -> Result<(), CommitError> {
        let mut batch = Batch::new();
        push_delete_table(&mut batch, family);
        self.send(family, batch, true)
    }

    fn capacity(&self, rebuild: bool) -> usize {
        let structure = if rebuild { STRUCTURE_BYTES } else { 0 };
        let room = self.socket.max_batch_bytes().saturating_sub(structure);
        (room / ELEMENT_BYTES).max(1)
    }
}
