//! A kernel in memory, of one family.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use kplane_model::{EndpointAddr, IpvsScheduler, Protocol};

use super::super::machine::{Kernel, KernelError, Reading, RefusedOp};
use super::super::rules;
use super::super::sets::{Entry, SetId, capacity_for};
use super::super::state::{Op, Snapshot};
use super::{NODE_IP, ip};
use crate::backend::iptables::{Flavour, FoundRules, TableChange};
use kplane_netlink::ipvs::{Command, Real, Server, ServerKey, ServerMode};
use kplane_netlink::{Errno, NetlinkError};

/// The objects of the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct World {
    pub(in super::super) servers: BTreeMap<ServerKey, ServerMode>,
    /// Weight and connections of each real server.
    pub(in super::super) reals: BTreeMap<(ServerKey, EndpointAddr), (u32, u64)>,
    pub(in super::super) entries: BTreeSet<(SetId, Entry)>,
    pub(in super::super) addresses: BTreeSet<IpAddr>,
    pub(in super::super) node_ips: BTreeSet<IpAddr>,
    pub(in super::super) rules: FoundRules,
    pub(in super::super) capacities: BTreeMap<SetId, u32>,
}

#[derive(Debug, Default)]
pub(in super::super) struct Inside {
    pub(in super::super) world: World,
    /// All operations that were done, in order.
    pub(in super::super) done: Vec<Op>,
    /// Number of steps after which the machine stops.
    pub(in super::super) steps_left: Option<usize>,
    /// Operations that the kernel refuses.
    pub(in super::super) refuse: HashSet<Op>,
    /// Schedulers that the kernel lacks.
    pub(in super::super) lacks: BTreeSet<IpvsScheduler>,
    /// Function that is called after each step.
    pub(in super::super) watch: Option<fn(&World)>,
}

/// A handle to a kernel that lives on when an agent does not.
#[derive(Clone, Debug)]
pub(in super::super) struct Fake(Arc<Mutex<Inside>>);

impl Fake {
    pub(in super::super) fn new() -> Self {
        let mut inside = Inside::default();
        inside.world.node_ips.insert(ip(NODE_IP));
        Self(Arc::new(Mutex::new(inside)))
    }

    pub(in super::super) fn inside(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().unwrap()
    }

    pub(in super::super) fn world(&self) -> World {
        self.inside().world.clone()
    }

    /// Returns the operations since the last call.
    pub(in super::super) fn done(&self) -> Vec<Op> {
        std::mem::take(&mut self.inside().done)
    }
}

fn still() -> KernelError {
    let (what, errno) = ("do something", Errno::EAGAIN);
    NetlinkError::Socket { what, errno }.into()
}

impl Inside {
    fn step(&mut self) -> Result<(), KernelError> {
        match &mut self.steps_left {
            Some(0) => return Err(still()),
            Some(left) => *left -= 1,
            None => {}
        }
        Ok(())
    }

    fn look(&self) {
        if let Some(watch) = self.watch {
            watch(&self.world);
        }
    }
}

impl World {
    fn perform(&mut self, op: Op) -> Result<(), String> {
        let said = match op {
            Op::Entry(set, entry, true) => {
                let held = self.entries.iter().filter(|(s, _)| *s == set).count();
                if held >= self.capacities.get(&set).map_or(0, |c| *c as usize) {
                    return Err("full".to_owned());
                }
                self.entries.insert((set, entry))
            }
            Op::Entry(set, entry, false) => self.entries.remove(&(set, entry)),
            Op::Address(ip, true) => self.addresses.insert(ip),
            Op::Address(ip, false) => self.addresses.remove(&ip),
            Op::Ipvs(command) => return self.ipvs(command),
        };
        said.then_some(()).ok_or(format!("{op:?} changes nothing"))
    }

    fn ipvs(&mut self, command: Command) -> Result<(), String> {
        let said = match command {
            Command::AddServer(key, mode) => self.servers.insert(key, mode).is_none(),
            Command::SetServer(key, mode) => self.servers.insert(key, mode).is_some(),
            Command::DeleteServer(key) => {
                self.reals.retain(|(server, _), _| *server != key);
                self.servers.remove(&key).is_some()
            }
            Command::AddReal(key, real, weight) => {
                let server = self.servers.contains_key(&key);
                server && self.reals.insert((key, real), (weight, 0)).is_none()
            }
            Command::SetReal(key, real, weight) => match self.reals.get_mut(&(key, real)) {
                Some(found) => {
                    found.0 = weight;
                    true
                }
                None => false,
            },
            Command::DeleteReal(key, real) => self.reals.remove(&(key, real)).is_some(),
        };
        said.then_some(()).ok_or(format!("{command:?} changes nothing"))
    }

    /// Returns the real servers that a new connection may reach; `None` if it does not arrive at the node.
    pub(in super::super) fn reaches(&self, to: ServerKey) -> Option<Vec<EndpointAddr>> {
        let local = self.addresses.contains(&to.ip) || self.node_ips.contains(&to.ip);
        let reals = self.reals.iter().filter(|((server, _), _)| *server == to);
        let serving = reals.filter(|(_, (weight, _))| *weight > 0);
        local.then(|| serving.map(|((_, real), _)| *real).collect())
    }

    /// Returns the state without draining real servers.
    pub(in super::super) fn settled(mut self) -> Self {
        self.reals
            .retain(|(server, _), (weight, _)| *weight > 0 || server.protocol != Protocol::Tcp);
        self.reals.values_mut().for_each(|real| real.1 = 0);
        self
    }
}

impl Kernel for Fake {
    fn read(&mut self) -> Result<Reading, KernelError> {
        let mut inside = self.inside();
        let world = &mut inside.world;
        for id in SetId::ALL {
            world.capacities.entry(id).or_insert(capacity_for(0));
        }
        let mut entries: HashMap<SetId, HashSet<Entry>> = HashMap::new();
        for (set, entry) in &world.entries {
            entries.entry(*set).or_default().insert(*entry);
        }
        let server = |(key, mode): (&ServerKey, &ServerMode)| Server {
            key: *key,
            mode: Some(*mode),
        };
        let real =
            |((server, at), (weight, active)): (&(ServerKey, EndpointAddr), &(u32, u64))| Real {
                server: *server,
                at: *at,
                translated: true,
                weight: *weight,
                active: *active,
                inactive: 0,
            };
        Ok(Reading {
            snapshot: Snapshot {
                servers: world.servers.iter().map(server).collect(),
                reals: world.reals.iter().map(real).collect(),
                entries,
                addresses: world.addresses.iter().copied().collect(),
            },
            capacities: world.capacities.iter().map(|(id, c)| (*id, *c)).collect(),
            node_ips: world.node_ips.iter().copied().collect(),
        })
    }

    fn rules(&mut self) -> Result<FoundRules, KernelError> {
        Ok(self.inside().world.rules.clone())
    }

    fn generation(&mut self) -> Option<u32> {
        None
    }

    fn perform(&mut self, ops: &[Op]) -> Result<(Vec<RefusedOp>, u64), KernelError> {
        let mut inside = self.inside();
        let mut refused = Vec::new();
        for (index, op) in ops.iter().enumerate() {
            inside.step()?;
            let said = if inside.refuse.contains(op) {
                Err("refused".to_owned())
            } else {
                inside.world.perform(*op)
            };
            match said {
                Ok(()) => inside.done.push(*op),
                Err(reason) => refused.push(RefusedOp { index, reason }),
            }
            inside.look();
        }
        Ok((refused, 1))
    }

    fn grow(&mut self, set: SetId, held: &HashSet<Entry>, to: usize) -> Result<u32, KernelError> {
        let mut inside = self.inside();
        inside.step()?;
        let world = &mut inside.world;
        world.entries.retain(|(s, _)| *s != set);
        world.entries.extend(held.iter().map(|entry| (set, *entry)));
        world.capacities.insert(set, capacity_for(to));
        Ok(capacity_for(to))
    }

    fn restore(&mut self, steps: &[TableChange]) -> Result<u64, KernelError> {
        let mut inside = self.inside();
        for step in steps {
            inside.step()?;
            rules::accept(&mut inside.world.rules, std::slice::from_ref(step));
            inside.look();
        }
        Ok(1)
    }

    fn has_loaded(&self, scheduler: IpvsScheduler) -> bool {
        !self.inside().lacks.contains(&scheduler)
    }

    fn has_scheduler(&mut self, scheduler: IpvsScheduler) -> Result<bool, KernelError> {
        Ok(!self.inside().lacks.contains(&scheduler))
    }

    fn flavour(&self) -> Flavour {
        Flavour::Nft
    }
}
