//! The state that a family's data path must have, the state that it has, and the operations between both.
//! This module is pure.
//!
//! * **Needed objects are counted**: an entry of a set, or an address, is removed when no ServicePort needs
//!   it any more. A virtual server has one owner.
//! * **The sets show the owner of a virtual server**: kube-proxy and kplane add the frontend of each virtual
//!   server to a set. A virtual server whose place is in no set belongs to another program and stays.
//! * **An unneeded real server** keeps its connections: its weight becomes 0, and it is removed when they
//!   have ended (D5). The weight itself records this, so nothing else has to be stored.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use kplane_model::{Cidr, EndpointAddr, Protocol, ServiceKey};

use super::demand::{Demand, WantedServer};
use super::sets::{Entry, SetId};
use crate::backend::{Connections, Failure};
use crate::plan::FrontendAddr;
use kplane_netlink::ipvs::{Command, Real, Server, ServerKey, ServerMode};

mod frontends;
mod owners;
mod seen;

pub(super) use self::frontends::FrontendsInSets;

/// Weight of a real server that gets connections.
const SERVES: u32 = 1;
/// Weight of a real server that gets no new connections.
const DRAINS: u32 = 0;

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Op {
    /// A command for IPVS.
    Ipvs(Command),
    /// An entry of a set: added (`true`) or removed.
    Entry(SetId, Entry, bool),
    /// An address of the dummy device: added (`true`) or removed.
    Address(IpAddr, bool),
}

/// Operations in order. The rules are written between [`ServerOps::ready`] and [`ServerOps::bind`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ServerOps {
    /// Operations that must be done before packets arrive: entries, servers.
    pub(super) ready: Vec<Op>,
    /// Operations that let packets arrive: addresses.
    pub(super) bind: Vec<Op>,
    /// Operations that remove unneeded objects: addresses, then servers, then entries.
    pub(super) clear: Vec<Op>,
}

impl ServerOps {
    pub(super) fn len(&self) -> usize {
        self.ready.len() + self.bind.len() + self.clear.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Op> {
        self.ready.iter().chain(&self.bind).chain(&self.clear)
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&Op) -> bool) {
        for ops in [&mut self.ready, &mut self.bind, &mut self.clear] {
            ops.retain(&keep);
        }
    }
}

/// The objects that a change touched.
#[derive(Debug, Default)]
struct Dirty {
    servers: BTreeSet<ServerKey>,
    entries: BTreeSet<(SetId, Entry)>,
    addresses: BTreeSet<IpAddr>,
}

/// A virtual server that exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HeldServer {
    /// The mode; `None` for a mode that kplane never uses.
    pub(super) mode: Option<ServerMode>,
    pub(super) reals: BTreeMap<EndpointAddr, HeldReal>,
}

/// A real server that exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HeldReal {
    /// The weight; `None` if packets are not translated.
    pub(super) weight: Option<u32>,
    /// The connections at the last read.
    pub(super) connections: Connections,
}

/// The kernel's state as it was read.
#[derive(Clone, Debug, Default)]
pub(super) struct Snapshot {
    pub(super) servers: Vec<Server>,
    pub(super) reals: Vec<Real>,
    pub(super) entries: HashMap<SetId, HashSet<Entry>>,
    /// Addresses of the dummy device.
    pub(super) addresses: HashSet<IpAddr>,
}

/// A virtual server that must exist.
#[derive(Clone, Debug)]
struct Claim {
    mode: ServerMode,
    reals: Arc<[EndpointAddr]>,
    owner: ServiceKey,
}

impl Claim {
    /// Returns whether an existing server has exactly the wanted mode and real servers.
    fn is(&self, held: &HeldServer) -> bool {
        let weight = |real| held.reals.get(real).and_then(|held| held.weight);
        let right = |real| weight(real) == Some(SERVES);
        held.mode == Some(self.mode)
            && held.reals.len() == self.reals.len()
            && self.reals.iter().all(right)
    }
}

/// The state of one family.
#[derive(Debug, Default)]
pub(super) struct IpvsState {
    services: HashMap<ServiceKey, Demand>,
    claims: HashMap<ServerKey, Claim>,
    entries: HashMap<(SetId, Entry), u32>,
    addresses: HashMap<IpAddr, u32>,
    denied: HashMap<ServerKey, u32>,
    /// Number of entries that each set must have.
    sizes: [usize; SetId::ALL.len()],
    held: HashMap<ServerKey, HeldServer>,
    held_entries: HashMap<SetId, HashSet<Entry>>,
    held_addresses: HashSet<IpAddr>,
}

impl IpvsState {
    /// Records what a change asks for, and returns the operations. Afterwards, the caller must report each
    /// operation that was done ([`IpvsState::done`]).
    pub(super) fn stage(
        &mut self,
        changes: Vec<(ServiceKey, Option<Demand>)>,
        complete: bool,
        protected: &[Cidr],
    ) -> (ServerOps, Vec<Failure>) {
        let mut dirty = Dirty::default();
        if complete {
            let all = std::mem::take(&mut self.services);
            for (key, demand) in all {
                self.release(&key, &demand, &mut dirty);
            }
        } else {
            for (key, _) in &changes {
                if let Some(demand) = self.services.remove(key) {
                    self.release(key, &demand, &mut dirty);
                }
            }
        }
        let mut failures = Vec::new();
        for (key, demand) in changes {
            if let Some(demand) = demand {
                failures.extend(self.claim(&key, &demand, &mut dirty));
                self.services.insert(key, demand);
            }
        }
        let ops = if complete { self.compare(protected) } else { self.ops(&dirty, protected) };
        (ops, failures)
    }

    fn release(&mut self, key: &ServiceKey, demand: &Demand, dirty: &mut Dirty) {
        for server in &demand.servers {
            if self.claims.get(&server.key).is_some_and(|c| c.owner == *key) {
                self.claims.remove(&server.key);
                dirty.servers.insert(server.key);
            }
        }
        for entry in &demand.entries {
            if forget(&mut self.entries, entry) {
                self.sizes[entry.0 as usize] -= 1;
                dirty.entries.insert(*entry);
            }
        }
        for ip in &demand.addresses {
            if forget(&mut self.addresses, ip) {
                dirty.addresses.insert(*ip);
            }
        }
        for server in &demand.denied {
            forget(&mut self.denied, server);
        }
    }

    fn claim(&mut self, key: &ServiceKey, demand: &Demand, dirty: &mut Dirty) -> Option<Failure> {
        let mut failure = None;
        for WantedServer {
            key: at,
            mode,
            reals,
        } in &demand.servers
        {
            if let Some(other) = self.claims.get(at) {
                if other.owner == *key {
                    // A node port and an address of the node may have the same port number. One server serves
                    // both.
                    continue;
                }
                // A node port of one ServicePort, on an address that another one has with the same port.
                failure = Some(Failure::unserved(
                    key,
                    format!("{at}: is already programmed for {}", other.owner),
                ));
                continue;
            }
            let claim = Claim {
                mode: *mode,
                reals: Arc::clone(reals),
                owner: key.clone(),
            };
            self.claims.insert(*at, claim);
            dirty.servers.insert(*at);
        }
        for entry in &demand.entries {
            if remember(&mut self.entries, *entry) {
                self.sizes[entry.0 as usize] += 1;
                dirty.entries.insert(*entry);
            }
        }
        for ip in &demand.addresses {
            if remember(&mut self.addresses, *ip) {
                dirty.addresses.insert(*ip);
            }
        }
        for server in &demand.denied {
            remember(&mut self.denied, *server);
        }
        failure
    }

    /// Returns the frontends of a ServicePort.
    pub(super) fn frontends(&self, key: &ServiceKey) -> &[FrontendAddr] {
        let demand = self.services.get(key);
        demand.map_or(&[], |demand| &demand.frontends)
    }

    /// Returns the operations for all differences between both states.
    pub(super) fn compare(&self, protected: &[Cidr]) -> ServerOps {
        let has = |set: &SetId, entry: &Entry| {
            let held = self.held_entries.get(set);
            held.is_some_and(|entries| entries.contains(entry))
        };
        let held = self
            .held_entries
            .iter()
            .flat_map(|(set, entries)| entries.iter().map(|entry| (*set, *entry)));
        let entries = self.entries.keys().copied();
        let wrong = self
            .claims
            .iter()
            .filter(|(key, claim)| self.held.get(key).is_none_or(|h| !claim.is(h)));
        let gone = self.held.keys().filter(|key| !self.claims.contains_key(key));
        let unbound = self.addresses.keys().filter(|ip| !self.held_addresses.contains(ip));
        let left = self.held_addresses.iter().filter(|ip| !self.addresses.contains_key(ip));
        let dirty = Dirty {
            servers: wrong.map(|(key, _)| key).chain(gone).copied().collect(),
            entries: entries
                .filter(|(set, entry)| !has(set, entry))
                .chain(held.filter(|id| !self.entries.contains_key(id)))
                .collect(),
            addresses: unbound.chain(left).copied().collect(),
        };
        self.ops(&dirty, protected)
    }

    fn ops(&self, dirty: &Dirty, protected: &[Cidr]) -> ServerOps {
        let mut ops = ServerOps::default();
        let (mut early, mut late) = (Vec::new(), Vec::new());
        let mut gone = Vec::new();
        for id @ (set, entry) in &dirty.entries {
            let held = self.held_entries.get(set).is_some_and(|entries| entries.contains(entry));
            match (self.entries.contains_key(id), held) {
                (true, false) if set.is_exemption() => late.push(Op::Entry(*set, *entry, true)),
                (true, false) => early.push(Op::Entry(*set, *entry, true)),
                (false, true) if set.is_exemption() => {
                    ops.ready.push(Op::Entry(*set, *entry, false));
                }
                (false, true) => gone.push(Op::Entry(*set, *entry, false)),
                _ => {}
            }
        }
        ops.ready.append(&mut early);
        // Addresses are removed first, so that no packet reaches the node's own ports instead.
        for ip in &dirty.addresses {
            let held = self.held_addresses.contains(ip);
            match (self.addresses.contains_key(ip), held) {
                (true, false) => ops.bind.push(Op::Address(*ip, true)),
                (false, true) => ops.clear.push(Op::Address(*ip, false)),
                _ => {}
            }
        }
        for key in &dirty.servers {
            self.server_ops(*key, &mut ops, protected);
        }
        ops.ready.append(&mut late);
        // Entries that make rules test other sets are removed before the entries of these sets.
        ops.clear.extend(gone.into_iter().rev());
        ops
    }

    fn server_ops(&self, key: ServerKey, ops: &mut ServerOps, protected: &[Cidr]) {
        let ipvs = Op::Ipvs;
        let (claim, held) = match (self.claims.get(&key), self.held.get(&key)) {
            (None, None) => return,
            (None, Some(_)) => {
                if !protected.iter().any(|range| range.contains(key.ip)) {
                    ops.clear.push(ipvs(Command::DeleteServer(key)));
                }
                return;
            }
            (Some(claim), None) => {
                ops.ready.push(ipvs(Command::AddServer(key, claim.mode)));
                let reals =
                    claim.reals.iter().map(|real| ipvs(Command::AddReal(key, *real, SERVES)));
                ops.ready.extend(reals);
                return;
            }
            (Some(claim), Some(held)) => (claim, held),
        };
        if held.mode != Some(claim.mode) {
            ops.ready.push(ipvs(Command::SetServer(key, claim.mode)));
        }
        for real in &*claim.reals {
            ops.ready.extend(match held.reals.get(real).map(|r| r.weight) {
                None => Some(ipvs(Command::AddReal(key, *real, SERVES))),
                Some(Some(SERVES)) => None,
                Some(_) => Some(ipvs(Command::SetReal(key, *real, SERVES))),
            });
        }
        for (real, HeldReal { weight, .. }) in &held.reals {
            if claim.reals.binary_search(real).is_ok() {
                continue;
            }
            ops.ready.extend(match key.protocol {
                Protocol::Tcp if *weight == Some(DRAINS) => None,
                Protocol::Tcp => Some(ipvs(Command::SetReal(key, *real, DRAINS))),
                Protocol::Udp | Protocol::Sctp => Some(ipvs(Command::DeleteReal(key, *real))),
            });
        }
    }

    /// Records an operation that the kernel has done.
    pub(super) fn done(&mut self, op: Op) {
        match op {
            Op::Ipvs(command) => self.done_ipvs(command),
            Op::Entry(set, entry, true) => {
                self.held_entries.entry(set).or_default().insert(entry);
            }
            Op::Entry(set, entry, false) => {
                self.held_entries.entry(set).or_default().remove(&entry);
            }
            Op::Address(ip, true) => {
                self.held_addresses.insert(ip);
            }
            Op::Address(ip, false) => {
                self.held_addresses.remove(&ip);
            }
        }
    }

    fn done_ipvs(&mut self, command: Command) {
        match command {
            Command::AddServer(key, mode) | Command::SetServer(key, mode) => {
                let held = self.held.entry(key).or_insert_with(|| HeldServer {
                    mode: None,
                    reals: BTreeMap::new(),
                });
                held.mode = Some(mode);
            }
            Command::DeleteServer(key) => {
                self.held.remove(&key);
            }
            Command::AddReal(key, real, weight) | Command::SetReal(key, real, weight) => {
                if let Some(held) = self.held.get_mut(&key) {
                    held.reals.entry(real).or_default().weight = Some(weight);
                }
            }
            Command::DeleteReal(key, real) => {
                if let Some(held) = self.held.get_mut(&key) {
                    held.reals.remove(&real);
                }
            }
        }
    }

    /// Records the kernel's state as it was read. Returns the virtual servers of other programs on addresses
    /// of kplane's device.
    ///
    /// kplane's are the virtual servers that are wanted, those that it had before, and, if nothing is known
    /// yet (`first`), those whose frontends are in the sets. If the sets have no entries, the address decides.
    pub(super) fn adopt(&mut self, snapshot: Snapshot, first: bool) -> Vec<ServerKey> {
        let frontends = FrontendsInSets::new(&snapshot);
        let mut foreign = Vec::new();
        let before = std::mem::take(&mut self.held);
        let mut reals: HashMap<ServerKey, BTreeMap<EndpointAddr, HeldReal>> = HashMap::new();
        for real in snapshot.reals {
            let of = reals.entry(real.server).or_default();
            of.insert(real.at, HeldReal::new(&real));
        }
        for Server { key, mode } in snapshot.servers {
            let ours = before.contains_key(&key)
                || self.claims.contains_key(&key)
                || (first && frontends.has(key, &snapshot.addresses));
            if ours {
                let reals = reals.remove(&key).unwrap_or_default();
                self.held.insert(key, HeldServer { mode, reals });
            } else if snapshot.addresses.contains(&key.ip) {
                foreign.push(key);
            }
        }
        self.held_entries = snapshot.entries;
        self.held_addresses = snapshot.addresses;
        foreign
    }

    /// Returns the operations that remove draining real servers without connections.
    pub(super) fn drained(&self, reals: &[Real]) -> Vec<Op> {
        let idle = |real: &&Real| {
            let claim = self.claims.get(&real.server);
            let drains = claim.is_some_and(|claim| claim.drains(real.at, Some(real.weight)));
            drains && real.active + real.inactive == 0
        };
        reals
            .iter()
            .filter(idle)
            .map(|real| Op::Ipvs(Command::DeleteReal(real.server, real.at)))
            .collect()
    }

    /// Returns the number of entries that a set must have, and the entries that it has.
    pub(super) fn entries(&self, set: SetId) -> (usize, Option<&HashSet<Entry>>) {
        (self.sizes[set as usize], self.held_entries.get(&set))
    }

    /// Returns the load balancers that the node itself may not use, sorted.
    pub(super) fn denied(&self) -> Vec<ServerKey> {
        let mut denied: Vec<ServerKey> = self.denied.keys().copied().collect();
        denied.sort_unstable();
        denied
    }
}

/// Counts one more need for an object. Returns whether it is the first.
fn remember<T: std::hash::Hash + Eq>(counts: &mut HashMap<T, u32>, what: T) -> bool {
    let count = counts.entry(what).or_default();
    *count += 1;
    *count == 1
}

/// Counts one need less for an object. Returns whether it was the last.
fn forget<T: std::hash::Hash + Eq>(counts: &mut HashMap<T, u32>, what: &T) -> bool {
    let Some(count) = counts.get_mut(what) else {
        return false;
    };
    *count -= 1;
    let last = *count == 0;
    if last {
        counts.remove(what);
    }
    last
}
