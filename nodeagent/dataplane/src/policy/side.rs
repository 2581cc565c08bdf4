//! One family's policies: their content, and the table in the kernel.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::Instant;

use kplane_model::{Direction, Family};

use super::content::{Before, Content};
use super::cutter::Flow;
use super::held::Change;
use super::phases::phases;
use super::{PolicyApplied, PolicyChange};
use crate::backend::nftables::{Cost, Key, PolicySet, PolicyTable, PolicyTables};
use crate::backend::{ApplyError, Verification};

/// What is known of the kernel's table.
#[derive(Debug)]
enum Table {
    /// Nothing.
    Unknown,
    /// There is none, or at least none that this process made.
    Absent,
    /// It holds the content.
    Held(PolicyTable),
}

/// A family.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) content: Content,
    table: Table,
}

/// The outcome of a change, and the addresses that may have lost something by it.
pub(super) type Outcome = (PolicyApplied, HashSet<IpAddr>);

impl Side {
    pub(super) fn new(family: Family) -> Self {
        Self {
            content: Content::new(family),
            table: Table::Unknown,
        }
    }

    /// Returns whether the kernel holds a table of this process.
    pub(super) fn has_table(&self) -> bool {
        matches!(self.table, Table::Held(_))
    }

    /// Applies a change. Whatever fails, the next change has to be complete.
    pub(super) fn apply(
        &mut self,
        tables: &mut PolicyTables,
        change: PolicyChange<'_>,
    ) -> Result<Outcome, ApplyError> {
        let started = Instant::now();
        let mut table = std::mem::replace(&mut self.table, Table::Unknown);
        match &table {
            Table::Unknown if !change.complete => {
                return Err(ApplyError::unknown(self.content.family));
            }
            Table::Unknown => self.content.clear(),
            Table::Absent => {}
            Table::Held(_) => self.content.held.record(),
        }
        self.content.apply(change);
        let changes = self.content.held.changes();
        let mut applied = PolicyApplied::default();
        let is_needed = self.content.has_policies();
        if is_needed {
            applied.failures = self.content.failures();
        }
        applied.plan = started.elapsed();
        let mut lost = HashSet::new();
        let cost = match (&mut table, is_needed) {
            (Table::Absent, false) => Cost::default(),
            (Table::Unknown, false) => self.remove_left(tables)?,
            (Table::Held(held), false) => {
                applied.operations = 1;
                held.delete()?
            }
            (Table::Held(held), true) => {
                lost = self.content.lost(&changes);
                let stays = |ip| self.content.held.has(PolicySet::LocalPods, Key::Ip(ip));
                let phases = phases(&changes, stays);
                applied.operations = phases.iter().flatten().map(|ops| ops.len() as u64).sum();
                let before = Before {
                    content: &self.content,
                    changes: &changes,
                };
                held.change(&before, &phases, &mut applied.repaired)?
            }
            (Table::Unknown | Table::Absent, true) => {
                lost = self.content.isolated();
                applied.operations = self.content.held.len() as u64;
                let mut new = tables.table(self.content.family)?;
                let cost = new.replace(&self.content)?;
                table = Table::Held(new);
                cost
            }
        };
        self.table = match is_needed {
            true => table,
            false => Table::Absent,
        };
        applied.bytes = cost.bytes;
        applied.encode = cost.encode;
        applied.kernel = cost.kernel;
        Ok((applied, lost))
    }

    /// Deletes the table of an earlier process. A node without policies needs no nf_tables.
    fn remove_left(&self, tables: &mut PolicyTables) -> Result<Cost, ApplyError> {
        if !tables.is_possible() {
            return Ok(Cost::default());
        }
        let family = self.content.family;
        let found = tables.table(family).and_then(|mut table| {
            let there = table.exists()?;
            Ok((table, there))
        });
        match found {
            Ok((mut table, true)) => table.delete(),
            Ok((_, false)) => Ok(Cost::default()),
            Err(error) => {
                tracing::debug!(%family, %error, "cannot look for a table of policies; there is no policy");
                Ok(Cost::default())
            }
        }
    }

    /// Compares the table with the content in one of two ways, and repairs it.
    pub(super) fn look(
        &mut self,
        look: impl FnOnce(&mut PolicyTable, &Content) -> Result<Verification, ApplyError>,
    ) -> Result<Verification, ApplyError> {
        let looked = match &mut self.table {
            Table::Held(table) => look(table, &self.content)?,
            Table::Absent => Verification::Equal,
            Table::Unknown => {
                let what = "it is not known what the table of policies should hold";
                Verification::Drifted(what.to_owned())
            }
        };
        if matches!(looked, Verification::Drifted(_)) {
            self.table = Table::Unknown;
        }
        Ok(looked)
    }

    /// Returns those flows that policies deny. From and to the node itself everything is allowed (NP11).
    pub(super) fn denied(&self, flows: Vec<Flow>, own: &HashSet<IpAddr>) -> Vec<Flow> {
        if !self.has_table() {
            return Vec::new();
        }
        let is_denied = |flow: &Flow| {
            let packet = flow.packet();
            let is_own = own.contains(&packet.source) || own.contains(&packet.destination);
            !is_own && !self.content.allows(&packet)
        };
        flows.into_iter().filter(is_denied).collect()
    }
}

impl Content {
    /// Returns the isolated Pods' addresses.
    fn isolated(&self) -> HashSet<IpAddr> {
        let isolated = self.held.all().filter_map(|(place, _)| match place {
            (PolicySet::Isolated(_), Key::Ip(ip)) => Some(ip),
            _ => None,
        });
        isolated.collect()
    }

    /// Returns the addresses with connections that a change may deny: Pods that are isolated now or may do less, and
    /// peers that are in another class.
    fn lost(&self, changes: &[Change]) -> HashSet<IpAddr> {
        let lost = changes.iter().filter_map(|change| {
            let (came, went) = (change.before.is_none(), change.after.is_none());
            match change.place {
                (PolicySet::Isolated(_), Key::Ip(ip)) if came => Some(ip),
                (PolicySet::Peers, Key::Ip(ip)) if !came && !went => Some(ip),
                (_, Key::Grant(pod, _) | Key::GrantPort(pod, ..) | Key::GrantPorts(pod, ..))
                    if went =>
                {
                    Some(pod)
                }
                _ => None,
            }
        });
        let is_isolated = |ip: &IpAddr| {
            let mut directions = Direction::ALL.into_iter();
            directions.any(|direction| self.held.has(PolicySet::Isolated(direction), Key::Ip(*ip)))
        };
        let lost = lost.filter(|ip| is_isolated(ip) || self.objects.peers.contains_key(ip));
        lost.collect()
    }
}
