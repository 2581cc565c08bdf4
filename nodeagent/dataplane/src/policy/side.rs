//! One family's policies: their content, and the table in the kernel.

use std::collections::{HashSet, VecDeque};
use std::net::IpAddr;
use std::time::Instant;

use kplane_model::{Direction, Family};

use super::before::Before;
use super::content::Content;
use super::departed::Departed;
use super::held::ElementChange;
use super::numbers::highest;
use super::phases::phases;
use super::suspects::Suspects;
use super::{PolicyApplied, PolicyChange, PolicyPart};
use crate::backend::nftables::{
    Cost, FoundPolicies, Key, Ops, PolicySet, PolicyTable, PolicyTables,
};
use crate::backend::{ApplyError, Verification};
use crate::conntrack::AnyFlow;

/// What is known of the kernel's table.
#[derive(Debug)]
enum TableState {
    /// Nothing.
    Unknown,
    /// There is none, or at least none that this process made.
    Absent,
    /// It holds the content.
    Held(PolicyTable),
}

/// Most objects with which a table is read before it is changed. The kernel takes long to list large sets.
const READABLE: usize = 200_000;

/// Operations that the kernel gets at once: it takes some 10 ms for them, and Services' changes wait as long.
pub(super) const PART: usize = 4_096;

/// A family.
#[derive(Debug)]
pub(super) struct PolicySide {
    pub(super) content: Content,
    table: TableState,
    /// Whether the kernel may have a table.
    may_be_there: bool,
    departed: Departed,
    /// Operations that the kernel gets at once.
    part: usize,
    /// Transactions of the last change that the kernel does not have yet.
    rest: VecDeque<Vec<Ops>>,
    /// Addresses that may have lost something by it.
    lost: HashSet<IpAddr>,
}

/// Access to the table, and what was found in its place.
type OpenedTable = Result<(PolicyTable, FoundPolicies), ApplyError>;

/// A way to compare a table with its content, and to repair it.
pub(super) type ReadBack = fn(&mut PolicyTable, &Content) -> Result<Verification, ApplyError>;

impl PolicySide {
    pub(super) fn new(family: Family) -> Self {
        Self {
            content: Content::new(family),
            table: TableState::Unknown,
            may_be_there: false,
            departed: Departed::default(),
            part: PART,
            rest: VecDeque::new(),
            lost: HashSet::new(),
        }
    }

    /// Returns whether the kernel holds a table of this process.
    pub(super) fn has_table(&self) -> bool {
        matches!(self.table, TableState::Held(_))
    }

    /// Returns whether the kernel may have a table, of this process or an earlier one.
    pub(super) fn may_have_table(&self) -> bool {
        self.may_be_there
    }

    /// Applies the first part of a change. Whatever fails, the next change has to be complete.
    pub(super) fn begin(
        &mut self,
        tables: &mut PolicyTables,
        suspects: &mut Suspects,
        change: PolicyChange<'_>,
    ) -> Result<PolicyApplied, ApplyError> {
        if change.complete && !self.rest.is_empty() {
            self.table = TableState::Unknown;
            self.rest.clear();
        }
        // What fails there is noted there.
        self.finish()?;
        let begun = self.begin_once(tables, suspects, change);
        self.note(begun)
    }

    /// Takes over some objects of a change.
    pub(super) fn take_over(&mut self, objects: &[PolicyPart<'_>], suspects: &mut Suspects) {
        if self.has_table() {
            self.content.held.record();
        }
        self.content.take_over(objects, suspects);
    }

    /// Notes at whose elements a change failed, or that the kernel has all of it.
    fn note<T>(&mut self, sent: Result<T, ApplyError>) -> Result<T, ApplyError> {
        match &sent {
            Ok(_) if self.rest.is_empty() => self.content.refused.was_taken(),
            Ok(_) => {}
            Err(error) => self.content.note_refused(error),
        }
        sent
    }

    fn begin_once(
        &mut self,
        tables: &mut PolicyTables,
        suspects: &mut Suspects,
        change: PolicyChange<'_>,
    ) -> Result<PolicyApplied, ApplyError> {
        self.part = tables.part().unwrap_or(PART);
        let started = Instant::now();
        let mut table = std::mem::replace(&mut self.table, TableState::Unknown);
        let mut found = None;
        match &table {
            TableState::Unknown if !change.complete => {
                return Err(ApplyError::unknown(self.content.family));
            }
            TableState::Unknown => {
                self.content.clear();
                found = tables.is_possible().then(|| self.find(tables, change.objects.len()));
                self.may_be_there |= match &found {
                    None | Some(Ok((_, FoundPolicies::Absent))) => false,
                    Some(Ok(_)) => true,
                    Some(Err(error)) => !error.is_about_the_machine(),
                };
            }
            TableState::Absent => {}
            TableState::Held(_) => self.content.held.record(),
        }
        self.content.apply(change, suspects);
        let mut applied = PolicyApplied::default();
        let is_needed = self.content.has_policies();
        if is_needed {
            applied.failures = self.content.failures().to_vec();
        }
        applied.plan = started.elapsed();
        let mut lost = HashSet::new();
        let cost = match (&mut table, is_needed) {
            (TableState::Absent, false) => Cost::default(),
            (TableState::Unknown, false) => self.remove_left(found)?,
            (TableState::Held(held), false) => {
                // At once, however long the kernel takes: in a table that is emptied step by step, Pods that nobody judges any
                // more would be unknown ones for a while, and cut off.
                applied.operations = 1;
                drop(self.content.held.recorded());
                held.delete()?
            }
            (TableState::Held(held), true) => {
                let changes = self.content.held.changes();
                lost = self.content.lost(&changes);
                lost.extend(self.departed.follow(&changes));
                self.content.change(held, &changes, (&mut self.rest, self.part), &mut applied)?
            }
            (TableState::Unknown | TableState::Absent, true) => {
                lost = self.content.judged();
                self.departed.clear();
                let (new, cost) = match &table {
                    TableState::Absent => self.begin_table(tables, &mut applied)?,
                    _ => self.fill(tables, found, &mut applied)?,
                };
                table = TableState::Held(new);
                cost
            }
        };
        if applied.repaired.is_some() {
            // Any connection may have begun while another program's change was in effect.
            lost.extend(self.content.judged());
        }
        self.table = if is_needed { table } else { TableState::Absent };
        self.may_be_there = is_needed;
        applied.add(cost);
        applied.rest = self.rest.len();
        self.lost.extend(lost);
        Ok(applied)
    }

    /// Makes a table where Pods may do everything until now, and sends the first part of the content.
    fn begin_table(
        &mut self,
        tables: &mut PolicyTables,
        applied: &mut PolicyApplied,
    ) -> Result<(PolicyTable, Cost), ApplyError> {
        let family = self.content.family;
        let mut table = tables.table(family)?;
        applied.add(table.replace(&Content::new(family))?);
        self.may_be_there = true;
        let changes = self.content.held.changes_from(&[]);
        let rest = (&mut self.rest, self.part);
        let cost = self.content.change(&mut table, &changes, rest, applied)?;
        Ok((table, cost))
    }

    /// Turns what was found into a table of the content, or makes one in one transaction, so that no Pod is open that
    /// was closed.
    fn fill(
        &mut self,
        tables: &mut PolicyTables,
        found: Option<OpenedTable>,
        applied: &mut PolicyApplied,
    ) -> Result<(PolicyTable, Cost), ApplyError> {
        let mut new = match found.transpose()? {
            Some((mut left, FoundPolicies::Ours(elements))) => {
                let changes = self.content.held.changes_from(&elements);
                let rest = (&mut self.rest, self.part);
                let cost = self.content.change(&mut left, &changes, rest, applied)?;
                return Ok((left, cost));
            }
            Some((other, _)) => other,
            None => tables.table(self.content.family)?,
        };
        applied.operations = self.content.held.len() as u64;
        let cost = new.replace(&self.content)?;
        Ok((new, cost))
    }

    /// Sends the next part of the change.
    pub(super) fn go_on(&mut self, applied: &mut PolicyApplied) -> Result<(), ApplyError> {
        let phases = part(&mut self.rest, self.part);
        let TableState::Held(table) = &mut self.table else {
            return Err(ApplyError::unknown(self.content.family));
        };
        let sent = table.go_on(&self.content, &phases);
        if sent.is_err() {
            self.table = TableState::Unknown;
        }
        applied.add(self.note(sent)?);
        applied.rest = self.rest.len();
        Ok(())
    }

    fn finish(&mut self) -> Result<(), ApplyError> {
        let mut applied = PolicyApplied::default();
        while !self.rest.is_empty() {
            self.go_on(&mut applied)?;
        }
        Ok(())
    }

    /// Returns the addresses that may have lost something by changes that the kernel has.
    pub(super) fn take_lost(&mut self) -> HashSet<IpAddr> {
        std::mem::take(&mut self.lost)
    }

    /// Reads what an earlier process, or this one before an error, left in the kernel. The table is changed step by step
    /// then, which no packet notices. A new table in its place costs some clients their first packet: the kernel takes
    /// the maps from packets that are between two rules.
    fn find(&mut self, tables: &mut PolicyTables, objects: usize) -> OpenedTable {
        let mut table = tables.table(self.content.family)?;
        if objects > READABLE {
            return Ok((table, FoundPolicies::Other));
        }
        let found = table.read()?;
        if let FoundPolicies::Ours(elements) = &found {
            self.content.numbers.begin_above(highest(elements));
        }
        Ok((table, found))
    }

    /// Deletes the table of an earlier process. A node without policies needs no nf_tables.
    fn remove_left(&self, found: Option<OpenedTable>) -> Result<Cost, ApplyError> {
        let family = self.content.family;
        match found {
            None | Some(Ok((_, FoundPolicies::Absent))) => Ok(Cost::default()),
            Some(Ok((mut table, _))) => table.delete(),
            Some(Err(error)) if error.is_about_the_machine() => {
                tracing::debug!(%family, %error, "this machine can have no table of policies; there is no policy");
                Ok(Cost::default())
            }
            Some(Err(error)) => Err(error),
        }
    }

    /// Compares the table with the content in one of two ways, and repairs it.
    pub(super) fn read_back(&mut self, read_back: ReadBack) -> Result<Verification, ApplyError> {
        self.finish()?;
        let looked = match &mut self.table {
            TableState::Held(table) => read_back(table, &self.content),
            TableState::Absent => Ok(Verification::Equal),
            TableState::Unknown => {
                let what = "it is not known what the table of policies should hold";
                Ok(Verification::Drifted(what.to_owned()))
            }
        };
        // An error loses what the kernel had reported, so the next change compares everything.
        if matches!(looked, Err(_) | Ok(Verification::Drifted(_))) {
            self.table = TableState::Unknown;
        }
        looked
    }

    /// Returns those flows that policies deny. While a change is being worked out, they are judged after it.
    pub(super) fn denied(&mut self, mut flows: Vec<AnyFlow>) -> Vec<AnyFlow> {
        if self.content.begun {
            self.lost
                .extend(flows.drain(..).flat_map(|flow| [flow.source, flow.destination]));
        }
        flows.retain(|flow| self.has_table() && !self.content.allows(&flow.into()));
        flows
    }
}

/// Splits a phase into transactions.
fn transactions(phase: Vec<Ops>, most: usize) -> Vec<Vec<Ops>> {
    let mut transactions: Vec<Vec<Ops>> = Vec::new();
    let mut size = 0;
    for ops in phase {
        size += ops.len();
        if size <= most
            && let Some(last) = transactions.last_mut()
        {
            last.push(ops);
        } else {
            size = ops.len();
            transactions.push(vec![ops]);
        }
    }
    transactions
}

/// Takes the next transactions: at least one, and no more than the kernel takes without holding up others.
fn part(rest: &mut VecDeque<Vec<Ops>>, most: usize) -> Vec<Vec<Ops>> {
    let size = |transaction: &Vec<Ops>| transaction.iter().map(Ops::len).sum::<usize>();
    let (mut part, mut sum) = (Vec::new(), 0);
    while let Some(next) = rest.pop_front_if(|next| {
        sum += size(next);
        part.is_empty() || sum <= most
    }) {
        part.push(next);
    }
    part
}

impl Content {
    /// Sends the first part of changes that the content has taken over. `rest` is what follows, and no more than so many
    /// operations are sent at once.
    fn change(
        &self,
        table: &mut PolicyTable,
        changes: &[ElementChange],
        (rest, most): (&mut VecDeque<Vec<Ops>>, usize),
        applied: &mut PolicyApplied,
    ) -> Result<Cost, ApplyError> {
        let stays = |ip| self.held.has(PolicySet::LocalPods, Key::Ip(ip));
        let phases = phases(changes, stays, self.is_early(changes));
        applied.operations = phases.iter().flatten().map(|ops| ops.len() as u64).sum();
        *rest = phases.into_iter().flat_map(|phase| transactions(phase, most)).collect();
        let (content, phases) = (self, part(rest, most));
        table.change(&Before { content, changes }, &phases, &mut applied.repaired)
    }

    /// Returns whether policies of any kind judge a Pod's connections in a direction.
    pub(super) fn is_judged(&self, direction: Direction, ip: IpAddr) -> bool {
        let sets = [PolicySet::Isolated(direction), PolicySet::Tiered(direction)];
        sets.into_iter().any(|set| self.held.has(set, Key::Ip(ip)))
    }

    /// Returns the addresses of Pods that policies judge.
    pub(super) fn judged(&self) -> HashSet<IpAddr> {
        self.held
            .all()
            .filter_map(|(place, _)| match place {
                (PolicySet::Isolated(_) | PolicySet::Tiered(_), Key::Ip(ip)) => Some(ip),
                _ => None,
            })
            .collect()
    }

    /// Returns the addresses with connections that a change may deny: Pods that are isolated now or may do less, and
    /// peers that are in another class.
    pub(super) fn lost(&self, changes: &[ElementChange]) -> HashSet<IpAddr> {
        let lost = changes.iter().filter_map(|change| {
            let (came, went) = (change.before.is_none(), change.after.is_none());
            match change.place {
                (PolicySet::Isolated(_) | PolicySet::Tiered(_), Key::Ip(ip)) if came => Some(ip),
                (PolicySet::TierPeers, Key::Ip(ip))
                | (PolicySet::Decisions(..), Key::Grant(ip, _)) => Some(ip),
                (PolicySet::Peers, Key::Ip(ip)) if !came && !went => Some(ip),
                // One that is unknown from now on is cut off.
                (PolicySet::LocalPods, Key::Ip(ip)) if went => Some(ip),
                (_, Key::Grant(pod, _) | Key::GrantPort(pod, ..) | Key::GrantPorts(pod, ..))
                    if went =>
                {
                    Some(pod)
                }
                _ => None,
            }
        });
        let is_isolated = |ip: &IpAddr| {
            Direction::ALL.into_iter().any(|direction| self.is_judged(direction, *ip))
        };
        // Ranges outside of Pods may be with any Pod.
        let recut = changes.iter().any(|change| change.place.0 == PolicySet::TierBlocks);
        let all = recut.then(|| self.held.all()).into_iter().flatten();
        let tiered = all.filter_map(|(place, _)| match place {
            (PolicySet::Tiered(_), Key::Ip(ip)) => Some(ip),
            _ => None,
        });
        lost.chain(tiered)
            .filter(|ip| is_isolated(ip) || self.objects.peers.contains_key(ip))
            .collect()
    }
}
