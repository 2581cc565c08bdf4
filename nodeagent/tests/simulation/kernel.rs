//! A node's kernel, scripted: it keeps what it is given, and may refuse, fail or be changed by another program.
//!
//! Services are kept as plans. NetworkPolicies are elements of nf_tables in memory, below the real driver.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use kplane_dataplane::backend::nftables::TableKind;
use kplane_dataplane::backend::nftables::memory::{
    Disturbance, MemoryKernel, PacketFate, TableFaults, TestPacket,
};
use kplane_dataplane::backend::{
    Applied, ApplyError, Backend, Change, Failure, Notifications, Side, Verification, noop,
};
use kplane_model::{Family, ServiceKey};

use crate::connections::{Connections, Sweeps};
use crate::ledger::{C1, Shared, Sides, lock};
use crate::oracle::{self, Key, key, planned};
use crate::plan::{Damage, Fault, Plan, TableFault};
use crate::reference::{Packet, random};
use crate::truth::node_address;

/// The kernel of one node. It outlives the agent.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    node: u8,
    state: Arc<Mutex<State>>,
    ledger: Shared,
    /// The tables of NetworkPolicies, if nodes enforce some.
    tables: Option<MemoryKernel>,
}

#[derive(Debug, Default)]
struct State {
    /// What agents wrote, and the ServicePorts that are not as planned because they were refused, by family.
    written: Sides,
    /// By family.
    connections: [Connections; 2],
    /// ServicePorts that another program removed since.
    drifted: [BTreeSet<Key>; 2],
    refused: Option<u8>,
    broken: Option<Family>,
    /// Families whose next change is taken, but not answered.
    silent: Option<Family>,
    /// The packets that passed after so many transactions of NetworkPolicies.
    passing: Option<(u64, u64)>,
}

fn family_of(v6: bool) -> Family {
    if v6 { Family::V6 } else { Family::V4 }
}

/// Returns what other programs do to tables of NetworkPolicies.
fn disturbances(v6: bool, damage: Damage) -> Vec<Disturbance> {
    let (kind, family) = (TableKind::Policies, family_of(v6));
    match damage {
        Damage::Table => vec![Disturbance::DeleteTable(kind, family)],
        Damage::Tables => Family::ALL.map(|family| Disturbance::DeleteTable(kind, family)).to_vec(),
        Damage::Old => vec![Disturbance::Restore(kind, family)],
        Damage::Elements => vec![Disturbance::Thin(kind, family, 1)],
        Damage::Some(of) => vec![Disturbance::Thin(kind, family, of)],
    }
}

impl Kernel {
    pub(crate) fn new(node: u8, plan: &Plan, ledger: Shared) -> Self {
        let tables = plan.policies.then(|| MemoryKernel::new([node_address(node)]));
        if let Some(tables) = &tables {
            let [capacity, part] = plan.narrow;
            capacity.into_iter().for_each(|most| tables.set_capacity(most));
            part.into_iter().for_each(|most| tables.set_part(most));
        }
        Self {
            tables,
            node,
            state: Arc::default(),
            ledger,
        }
    }

    /// Opens a backend for a new agent; an older one gives the tables of NetworkPolicies no owner.
    pub(crate) fn open(&self, older: bool) -> Backend {
        let side = |family| {
            let kernel = self.clone();
            Box::new(KernelSide {
                kernel,
                family,
                known: false,
                sweeps: Sweeps::default(),
            }) as Box<dyn Side>
        };
        let noop = noop::open_with(side);
        let tables = self.tables.as_ref().map(MemoryKernel::open);
        Backend {
            notifications: Some(Box::new(self.clone())),
            policies: match tables.map_or(noop.policies, |tables| tables.policies) {
                policies if older => policies.without_owner(),
                policies => policies,
            },
            ..noop
        }
    }

    pub(crate) fn set(&self, fault: Fault) {
        let mut state = lock(&self.state);
        match fault {
            Fault::Refuse(service) => state.refused = Some(service),
            Fault::Family(v6) => state.broken = Some(family_of(v6)),
            Fault::LostAnswer(v6) => state.silent = Some(family_of(v6)),
            Fault::None => (state.refused, state.broken, state.silent) = (None, None, None),
        }
    }

    /// Sets how exchanges with a table of NetworkPolicies fail.
    pub(crate) fn set_tables(&self, v6: bool, fault: TableFault) {
        let mut faults = TableFaults::default();
        match fault {
            TableFault::Busy(times) => faults.failing_commits = times,
            TableFault::Lost(times) => faults.lost_answers = times,
            TableFault::Unread(times) => faults.failing_reads = times,
            TableFault::Contended(times) => faults.contended = times,
            TableFault::Refused(place) => {
                lock(&self.ledger).refused(self.node, family_of(v6));
                let all = random::addresses().into_iter();
                faults.refused =
                    all.filter(|ip| Family::of(*ip) == family_of(v6)).cycle().nth(place);
            }
            TableFault::Broken => faults.broken = true,
            TableFault::None => {}
        }
        if let Some(tables) = &self.tables {
            tables.set_faults(TableKind::Policies, family_of(v6), faults);
        }
    }

    /// Returns whether the agent may have cut an end of a packet off.
    pub(crate) fn is_cut_off(&self, packet: &Packet) -> bool {
        lock(&self.ledger).is_cut_off(self.node, packet)
    }

    /// Another program changes a table of NetworkPolicies after so many changes of the agent.
    pub(crate) fn disturb(&self, v6: bool, damage: Damage, after: u64) {
        if let Some(tables) = &self.tables {
            self.damaged(v6, damage, tables.transactions() + after);
            disturbances(v6, damage).into_iter().for_each(|one| tables.disturb(after, one));
            lock(&self.state).passing = None;
        }
    }

    /// Another program does that now, and nobody reports it.
    pub(crate) fn disturb_unseen(&self, v6: bool, damage: Damage) {
        if let Some(tables) = &self.tables {
            // The sample may show it after a change that has nothing to do with it, until the agent reads everything back.
            self.damaged(v6, damage, u64::MAX);
            disturbances(v6, damage).into_iter().for_each(|one| tables.disturb_unseen(one));
            lock(&self.state).passing = None;
        }
    }

    fn damaged(&self, v6: bool, damage: Damage, after: u64) {
        let is_hit = |family| family == family_of(v6) || damage == Damage::Tables;
        for family in Family::ALL.into_iter().filter(|family| is_hit(*family)) {
            lock(&self.ledger).disturbed(self.node, family, after);
        }
    }

    /// Another program copies the tables.
    pub(crate) fn copy(&self) {
        self.tables.iter().for_each(MemoryKernel::copy);
    }

    pub(crate) fn lose_reports(&self) {
        self.tables.iter().for_each(MemoryKernel::lose_reports);
    }

    /// The agent dies with one of its next changes of NetworkPolicies.
    pub(crate) fn die(&self, after: u64) {
        self.tables.iter().for_each(|tables| tables.crash_with(after));
    }

    /// Returns whether the agent died so.
    pub(crate) fn has_died(&self) -> bool {
        self.tables.as_ref().is_some_and(MemoryKernel::has_died)
    }

    /// Another program removes a Service.
    pub(crate) fn drift(&self, service: u8) {
        let mut state = lock(&self.state);
        for family in Family::ALL {
            let keys: Vec<Key> = state.written[family as usize]
                .0
                .keys()
                .filter(|key| key.0 == service)
                .copied()
                .collect();
            state.drifted[family as usize].extend(keys);
        }
    }

    /// Returns which packets of the sample pass, as bits.
    pub(crate) fn passing_now(&self, sample: &[Packet]) -> u64 {
        let at = self.transactions();
        let known = lock(&self.state).passing.filter(|(known, _)| *known == at);
        if let Some((_, passing)) = known {
            return passing;
        }
        let passing = self.passing(sample);
        lock(&self.state).passing = Some((at, passing));
        passing
    }

    /// Returns the number of changes of NetworkPolicies so far.
    pub(crate) fn transactions(&self) -> u64 {
        self.tables.as_ref().map_or(0, MemoryKernel::transactions)
    }

    /// Returns which of some packets pass, as bits.
    pub(crate) fn passing(&self, packets: &[Packet]) -> u64 {
        let Some(tables) = &self.tables else {
            return u64::MAX;
        };
        let passes = |packet: &Packet| {
            let port = Some((packet.protocol, packet.port));
            let fates = tables.fates(&TestPacket::new(packet.from, packet.to, port));
            !fates.contains(&PacketFate::Dropped(TableKind::Policies))
        };
        packets
            .iter()
            .enumerate()
            .filter(|(_, packet)| passes(packet))
            .fold(0, |bits, (bit, _)| bits | 1 << bit)
    }

    /// The machine starts anew.
    pub(crate) fn reboot(&self) {
        self.tables.iter().for_each(MemoryKernel::reboot);
        lock(&self.ledger).rebooted(self.node);
        let mut state = lock(&self.state);
        let State {
            refused, broken, ..
        } = *state;
        *state = State {
            refused,
            broken,
            ..State::default()
        };
        lock(&self.ledger).serves(self.node, &state.written);
    }

    /// Shows what agents wrote, and the ServicePorts that the kernel refused.
    pub(crate) fn show<T>(&self, to: impl FnOnce(&Sides) -> T) -> T {
        to(&lock(&self.state).written)
    }

    /// Returns whether packets meet exactly this state.
    pub(crate) fn is(&self, family: Family, side: &oracle::Side) -> bool {
        let state = lock(&self.state);
        state.drifted[family as usize].is_empty() && state.written[family as usize].0 == *side
    }
}

impl Notifications for Kernel {
    fn readiness(&self) -> Option<OwnedFd> {
        None
    }

    fn read(&mut self) -> [bool; 2] {
        let state = lock(&self.state);
        state.drifted.each_ref().map(|drifted| !drifted.is_empty())
    }
}

struct KernelSide {
    kernel: Kernel,
    family: Family,
    /// A complete change was taken: the content is known.
    known: bool,
    sweeps: Sweeps,
}

impl KernelSide {
    fn error(&self, reason: &str) -> ApplyError {
        ApplyError {
            family: self.family,
            source: reason.to_owned().into(),
        }
    }
}

impl Side for KernelSide {
    fn apply(&mut self, change: Change<'_>) -> Result<Applied, ApplyError> {
        let mut state = lock(&self.kernel.state);
        let place = self.family as usize;
        if !self.known && !change.complete {
            return Err(self.error("the content is not known"));
        }
        if state.broken == Some(self.family) {
            self.known = false;
            return Err(self.error("cannot be programmed"));
        }
        let (before, failed) = std::mem::take(&mut state.written[place]);
        let mut known = before.clone();
        known.retain(|key, _| !failed.contains(key));
        let mut after = if change.complete { oracle::Side::new() } else { before.clone() };
        let mut applied = Applied::default();
        let mut failed = if change.complete { BTreeSet::new() } else { failed };
        for (name, plan) in change.services {
            let key = key(name);
            failed.remove(&key);
            match plan {
                Some(_) if state.refused == Some(key.0) => {
                    failed.insert(key);
                    applied.failures.push(refusal(name));
                    match before.get(&key) {
                        Some(entry) => after.insert(key, entry.clone()),
                        None => after.remove(&key),
                    };
                }
                Some(plan) => drop(after.insert(key, planned(plan))),
                None => drop(after.remove(&key)),
            }
        }
        if change.complete {
            state.drifted[place].clear();
        }
        state.written[place] = (after.clone(), failed.clone());
        let silent = state.silent.take_if(|family| *family == self.family).is_some();
        let connections = &mut state.connections[place];
        let sides = (&known, &after);
        let wrong = if silent {
            None
        } else {
            self.sweeps.committed(&change, &applied.failures, sides, connections)
        };
        connections.begin(&after);
        let mut ledger = lock(&self.kernel.ledger);
        ledger.serves(self.kernel.node, &state.written);
        drop(state);
        if let Some(wrong) = wrong {
            ledger.break_invariant(C1, format!("on n{}, {wrong}", self.kernel.node));
        }
        ledger.applied(self.kernel.node, self.family, (&before, &after), &failed);
        self.known = !silent;
        if silent { Err(self.error("no answer")) } else { Ok(applied) }
    }

    fn verify(&mut self) -> Result<Verification, ApplyError> {
        let state = lock(&self.kernel.state);
        let place = self.family as usize;
        if !state.drifted[place].is_empty() {
            return Ok(Verification::Drifted("a Service is gone".to_owned()));
        }
        if state.written[place].1.iter().any(|key| state.refused != Some(key.0)) {
            return Ok(Verification::Outdated("a Service fits now".to_owned()));
        }
        Ok(Verification::Equal)
    }

    fn repair(&mut self) -> Result<Verification, ApplyError> {
        let mut state = lock(&self.kernel.state);
        let drifted = std::mem::take(&mut state.drifted[self.family as usize]);
        Ok(if drifted.is_empty() {
            Verification::Equal
        } else {
            Verification::Repaired("a Service was gone".to_owned())
        })
    }

    fn has_services(&mut self) -> bool {
        !lock(&self.kernel.state).written[self.family as usize].0.is_empty()
    }
}

fn refusal(key: &ServiceKey) -> Failure {
    Failure {
        key: key.clone(),
        reason: "refused".to_owned(),
        degraded: false,
    }
}
