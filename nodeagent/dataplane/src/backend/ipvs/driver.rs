//! The IPVS backend: keeps the state of each family, and changes the kernel to what a change asks for.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use kplane_model::{Family, ServiceKey, ServiceName};

use self::ruleset::Rules;
use self::schedulers::Schedulers;
use self::seen::{Seen, told};
use super::demand::{Demand, NodeIps};
use super::kernel::{Kernel, KernelError, Machine, Reading, Refused};
use super::rules::{self, Lacks, Steps};
use super::sets::SetId;
use super::state::{Op, Ops, State};
use super::{DESCRIPTION, probe, sysctl};
use crate::backend::{
    self, Applied, ApplyError, Backend, Change, Description, Failure, Inspection, OpenError,
    ServerCounts, Serving, Verification,
};
use crate::plan::NodePlan;
use kplane_netlink::ipvs::{Ipvs, ServerKey, Timeouts};

mod ruleset;
mod schedulers;
mod seen;
pub(super) mod stopping;

/// Largest share of the time for reading everything back, as 1/n.
const READ_SHARE: u32 = 20;
/// Time after which a refused operation is tried again.
const REFUSED_FOR: Duration = Duration::from_secs(30);
/// Most virtual servers of other programs in one log line.
const NAMED: usize = 5;

/// The driver of IPVS, with one side per family.
#[derive(Debug)]
struct Driver<K> {
    /// The sides; for a family that this machine cannot program, the reason.
    sides: [Result<Side<K>, String>; 2],
    /// Longest time between two checks of the data path.
    probe_interval: Duration,
}

/// One family's part of the driver.
#[derive(Debug)]
struct Side<K> {
    kernel: K,
    settings: backend::Settings,
    family: Family,
    state: State,
    /// Whether the state is certainly that of the kernel.
    known: bool,
    node: NodePlan,
    ips: NodeIps,
    capacities: HashMap<SetId, u32>,
    rules: Rules,
    /// Features that the rules cannot use on this machine.
    lacks: Lacks,
    /// Schedulers that Services ask for.
    schedulers: Schedulers,
    /// Operations that the kernel refused.
    refused: HashSet<Op>,
    refused_at: Option<Instant>,
    /// Virtual servers of other programs that were logged.
    foreign: Vec<ServerKey>,
    /// Duration of the last complete read.
    reading: Duration,
    /// Data for human-readable views.
    seen: Seen,
}

/// A step that failed while applying a change.
#[derive(Debug, thiserror::Error)]
enum StepError {
    /// This machine cannot program the family.
    #[error("{0}")]
    Unusable(String),
    /// The exchange with the kernel failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A partial change came while the content of the kernel is not known.
    #[error("what the kernel holds is not known any more; everything has to be applied again")]
    Unknown,
}

/// Opens the backend for this thread's network namespace.
///
/// # Errors
/// [`OpenError`] when no family can be programmed.
pub(super) fn open(settings: &backend::Settings) -> Result<Box<dyn Backend>, OpenError> {
    Ok(Box::new(Driver::open(settings)?))
}

impl Driver<Machine> {
    fn open(settings: &backend::Settings) -> Result<Self, OpenError> {
        let failed = |reason| OpenError {
            backend: DESCRIPTION.name,
            reason,
        };
        backend::check_privilege(DESCRIPTION.name)?;
        probe::machine(settings.ipvs.scheduler).map_err(failed)?;
        prepare(&settings.ipvs);
        let side = |family| {
            let (tool, lacks) = probe::tool(family)?;
            tracing::info!(%family, tool = tool.name(), "programming IPVS");
            let machine = Machine::new(family, tool).map_err(|error| error.to_string())?;
            let side = Side::new(machine, family, settings.clone());
            Ok(Side { lacks, ..side })
        };
        let driver = Self {
            sides: Family::ALL.map(side),
            probe_interval: settings.probe_interval,
        };
        backend::check_sides(DESCRIPTION.name, &driver.sides)?;
        Ok(driver)
    }
}

/// Applies the settings of the network namespace as a whole.
pub(super) fn prepare(settings: &super::Settings) {
    probe::load_ipvs();
    for problem in sysctl::apply(settings) {
        tracing::warn!(problem, "a setting of the kernel that IPVS mode needs");
    }
    if settings.timeouts != Timeouts::default() {
        let set = Ipvs::open().and_then(|mut ipvs| ipvs.set_timeouts(settings.timeouts));
        if let Err(error) = set {
            tracing::warn!(%error, "timeouts of IPVS stay as they are");
        }
    }
}

impl<K: Kernel> Driver<K> {
    fn side(&mut self, family: Family) -> Result<&mut Side<K>, StepError> {
        let side = self.sides[family as usize].as_mut();
        side.map_err(|reason| StepError::Unusable(reason.clone()))
    }
}

impl<K: Kernel> Side<K> {
    fn new(kernel: K, family: Family, settings: backend::Settings) -> Self {
        Self {
            kernel,
            settings,
            family,
            state: State::default(),
            known: false,
            node: NodePlan::default(),
            ips: NodeIps::default(),
            capacities: HashMap::new(),
            rules: Rules::default(),
            lacks: Lacks::default(),
            schedulers: Schedulers::default(),
            refused: HashSet::new(),
            refused_at: None,
            foreign: Vec::new(),
            reading: Duration::ZERO,
            seen: Seen::default(),
        }
    }

    fn apply(&mut self, change: Change<'_>) -> Result<Applied, StepError> {
        let started = Instant::now();
        if !self.known {
            if !change.complete {
                return Err(StepError::Unknown);
            }
            self.state = State::default();
            let reading = self.kernel.read()?;
            self.take(reading, true);
            self.read_rules()?;
        }
        self.node = change.node.clone();
        let mut failures = Vec::new();
        let demands = self.demands(&change, &mut failures)?;
        // The state is certain again when all operations are done.
        self.known = false;
        let protected = &self.settings.ipvs.exclude_cidrs;
        let (ops, conflicts) = self.state.stage(demands, change.complete, protected);
        failures.extend(conflicts);
        if change.complete {
            self.refused.clear();
            self.refused_at = None;
        }
        let steps = self.steps(change.complete);
        let planned = started.elapsed();
        let operations = (ops.len() + steps.len()) as u64;
        let bytes = self.carry_out(&ops, &steps, &mut failures)?;
        self.known = true;
        if change.complete {
            self.seen.counts = Some(self.state.counts());
        }
        Ok(Applied {
            operations,
            bytes,
            plan: planned,
            encode: Duration::ZERO,
            kernel: started.elapsed().saturating_sub(planned),
            failures: merged(failures),
            rules: None,
            repaired: None,
        })
    }

    /// Returns the needs of each ServicePort of a change.
    fn demands(
        &mut self,
        change: &Change<'_>,
        failures: &mut Vec<Failure>,
    ) -> Result<Vec<(ServiceKey, Option<Demand>)>, StepError> {
        if change.complete {
            self.schedulers.clear();
        }
        let settings = &self.settings.ipvs;
        let mut demands = Vec::with_capacity(change.services.len());
        for (key, plan) in change.services {
            let Some(plan) = plan else {
                demands.push((key.clone(), None));
                continue;
            };
            let kernel = &mut self.kernel;
            let scheduler = self
                .schedulers
                .choose(plan, settings.scheduler, kernel, failures)?;
            let demand = Demand::new(plan, scheduler, &self.node, &self.ips, settings);
            if self.lacks.ipvs && !demand.denied.is_empty() {
                failures.push(Failure {
                    key: key.clone(),
                    reason:
                        "the node itself is not kept out by its source ranges: load the kernel \
                             module xt_ipvs"
                            .to_owned(),
                    degraded: true,
                });
            }
            demands.push((key.clone(), Some(demand)));
        }
        Ok(demands)
    }

    fn carry_out(
        &mut self,
        ops: &Ops,
        steps: &Steps,
        failures: &mut Vec<Failure>,
    ) -> Result<u64, StepError> {
        let mut bytes = 0;
        self.make_room(ops)?;
        bytes += self.perform(&ops.ready, failures)?;
        bytes += self.restore(&steps.first)?;
        bytes += self.perform(&ops.bind, failures)?;
        bytes += self.restore(&steps.last)?;
        bytes += self.perform(&ops.clear, failures)?;
        Ok(bytes)
    }

    /// Enlarges sets that must have more entries than they can hold. Old entries are deleted after new ones
    /// were added, so the set must have room for both.
    fn make_room(&mut self, ops: &Ops) -> Result<(), StepError> {
        let mut added = [0; SetId::ALL.len()];
        for op in &ops.ready {
            if let Op::Entry(set, _, true) = op {
                added[*set as usize] += 1;
            }
        }
        for set in SetId::ALL {
            let capacity = self.capacities.get(&set).copied().unwrap_or(0) as usize;
            let held = self.state.entries(set).1;
            let needed = added[set as usize] + held.map_or(0, HashSet::len);
            if capacity == 0 || needed <= capacity {
                continue;
            }
            let none = HashSet::new();
            let capacity = self.kernel.grow(set, held.unwrap_or(&none), needed)?;
            tracing::info!(set = set.name(self.family), capacity, "an IP set has grown");
            self.capacities.insert(set, capacity);
        }
        Ok(())
    }

    fn perform(&mut self, ops: &[Op], failures: &mut Vec<Failure>) -> Result<u64, StepError> {
        let (refused, bytes) = self.kernel.perform(ops)?;
        let those: HashSet<Op> = refused
            .iter()
            .filter_map(|r| ops.get(r.index))
            .copied()
            .collect();
        let owners = self.state.owners(&those);
        let mut refused = refused.into_iter().peekable();
        for (index, op) in ops.iter().enumerate() {
            match refused.next_if(|refused| refused.index == index) {
                None => {
                    self.refused.remove(op);
                    self.state.done(*op);
                }
                Some(refused) => {
                    self.refuse(*op, &refused, owners.get(op), failures);
                }
            }
        }
        Ok(bytes)
    }

    fn refuse(
        &mut self,
        op: Op,
        refused: &Refused,
        owner: Option<&ServiceKey>,
        failures: &mut Vec<Failure>,
    ) {
        let what = told(&op);
        match owner {
            Some(key) => failures.push(Failure {
                key: key.clone(),
                reason: format!("{what}: {}", refused.reason),
                degraded: true,
            }),
            None => tracing::warn!(
                family = %self.family, what, reason = refused.reason, "nobody's any more, and still there"
            ),
        }
        self.refused.insert(op);
        self.refused_at = Some(Instant::now());
    }

    /// Records what was read from the kernel.
    fn take(&mut self, reading: Reading, first: bool) {
        let (family, servers) = (self.family, reading.snapshot.servers.len());
        if first && servers > 0 {
            tracing::info!(%family, servers, "adopting the virtual servers that are there");
        }
        self.ips = NodeIps::new(reading.node_ips);
        self.capacities = reading.capacities;
        let foreign = self.state.adopt(reading.snapshot, first);
        self.seen.at = Some(Instant::now());
        if !foreign.is_empty() && foreign != self.foreign {
            let names: Vec<String> = foreign
                .iter()
                .take(NAMED)
                .map(ToString::to_string)
                .collect();
            tracing::warn!(
                %family, count = foreign.len(), first = names.join(", "),
                "virtual servers of others on addresses of Services: left alone"
            );
        }
        self.foreign = foreign;
    }

    /// Compares the kernel with the state that it must have, and removes real servers that have drained.
    fn verify(&mut self) -> Result<Verification, StepError> {
        if !self.known {
            let what = "it is not known what the kernel holds";
            return Ok(Verification::Drifted(what.to_owned()));
        }
        if let Some(scheduler) = self.schedulers.came(&self.kernel) {
            let what = format!("the kernel has the scheduler {scheduler} now");
            return Ok(Verification::Outdated(what));
        }
        let started = Instant::now();
        let reading = self.kernel.read()?;
        let idle = self.state.drained(&reading.snapshot.reals);
        let before = std::mem::take(&mut self.ips);
        self.take(reading, false);
        if self.ips != before {
            let what = "the node's addresses are others";
            return Ok(Verification::Outdated(what.to_owned()));
        }
        // A failed operation is not reported, because the next check repeats it.
        let (refused, _) = self.kernel.perform(&idle)?;
        for (index, op) in idle.into_iter().enumerate() {
            if refused.iter().all(|refused| refused.index != index) {
                self.state.done(op);
            }
        }
        self.seen.counts = Some(self.state.counts());
        let mut ops = self.state.compare(&self.settings.ipvs.exclude_cidrs);
        let refused = ops.len();
        ops.retain(|op| !self.refused.contains(op));
        let refused = refused > ops.len();
        self.reading = started.elapsed();
        self.read_rules()?;
        if !self.rules.are_sure() {
            // The rules are read every time, so the duration includes them.
            self.reading = started.elapsed();
        }
        let steps = rules::compare(&self.shape(), &self.rules.found);
        let count = ops.len() + steps.len();
        let first = ops
            .iter()
            .next()
            .map(|op| format!("{} is not as it must be", told(op)));
        let Some(first) = first.or_else(|| steps.describe()) else {
            let again = self
                .refused_at
                .is_some_and(|at| at.elapsed() >= REFUSED_FOR);
            if refused && again {
                let what = "what the kernel refused is tried again";
                return Ok(Verification::Outdated(what.to_owned()));
            }
            return Ok(Verification::Equal);
        };
        Ok(Verification::Drifted(match count {
            1 => first,
            _ => format!("{first}, and {} more", count - 1),
        }))
    }
}

/// Returns one failure for each ServicePort.
fn merged(failures: Vec<Failure>) -> Vec<Failure> {
    let mut seen = HashSet::new();
    let first = failures.into_iter().filter(|f| seen.insert(f.key.clone()));
    first.collect()
}

impl<K: Kernel> Backend for Driver<K> {
    fn describe(&self) -> &'static Description {
        &DESCRIPTION
    }

    fn apply(&mut self, change: Change<'_>) -> Result<Applied, ApplyError> {
        let side = self.side(change.family);
        side.and_then(|side| side.apply(change))
            .map_err(|error| ApplyError::new(change.family, error))
    }

    fn verify(&mut self, family: Family) -> Result<Verification, ApplyError> {
        let outcome = self.side(family).and_then(Side::verify);
        outcome.map_err(|error| ApplyError::new(family, error))
    }

    /// The IP sets decide, because virtual servers may belong to any program.
    fn has_services(&mut self, family: Family) -> bool {
        let side = self.side(family).ok();
        let reading = side.and_then(|side| side.kernel.read().ok());
        reading.is_some_and(|found| found.snapshot.entries.values().any(|set| !set.is_empty()))
    }

    fn serving(&self) -> Option<Serving> {
        let sides = self.sides.each_ref();
        let flavours = sides.map(|side| Some(side.as_ref().ok()?.kernel.flavour()));
        Some(Serving::Ipvs(flavours))
    }

    fn probe_interval(&self) -> Option<Duration> {
        let sides = self.sides.iter().flatten();
        let reading = sides.map(|side| side.reading).max().unwrap_or_default();
        Some(self.probe_interval.max(reading * READ_SHARE))
    }

    fn servers(&self, family: Family) -> Option<ServerCounts> {
        self.counts(family)
    }

    fn inspect(&self, service: &ServiceName) -> Option<Inspection> {
        Some(self.inspection(service))
    }
}

#[cfg(test)]
mod tests;
