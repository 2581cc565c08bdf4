//! One family of the IPVS backend: its virtual servers, sets, addresses and rules, and how they are read,
//! changed and compared.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use kplane_model::{Family, ServiceKey, ServiceName};

use self::ruleset::InstalledRules;
use self::schedulers::Schedulers;
use self::seen::{Seen, described};
use super::demand::{Demand, NodeIps};
use super::machine::{Kernel, KernelError, Machine, Reading, RefusedOp};
use super::rules::{self, Lacks, Steps};
use super::sets::SetId;
use super::state::{IpvsState, Op, ServerOps};
use super::{DESCRIPTION, probe, sysctl};
use crate::backend::driver::{DataPath, StepError};
use crate::backend::{
    self, Applied, Backend, Change, Failure, Inspection, Kind, OpenError, ServerCounts,
    Verification, open_sides,
};
use crate::plan::{FrontendAddr, NodePlan};
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

/// One family's data path.
#[derive(Debug)]
struct IpvsDataPath<K> {
    kernel: K,
    settings: backend::Settings,
    family: Family,
    node: NodePlan,
    ips: NodeIps,
    capacities: HashMap<SetId, u32>,
    rules: InstalledRules,
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

/// A change that is worked out.
#[derive(Debug)]
pub(super) struct StagedOps {
    ops: ServerOps,
    steps: Steps,
    complete: bool,
}

/// An error before anything is changed.
fn unreadable(error: KernelError) -> StepError {
    StepError::read(error)
}

/// An error after which some operations may have been done.
fn interrupted(error: KernelError) -> StepError {
    StepError::interrupted(error)
}

/// Opens the backend for this thread's network namespace.
///
/// # Errors
/// [`OpenError`] when no family can be programmed.
pub(super) fn open(settings: &backend::Settings) -> Result<Backend, OpenError> {
    open_on(settings, |machine| machine)
}

/// Opens the backend with access to the machine through a layer.
fn open_on<K: Kernel + 'static>(
    settings: &backend::Settings,
    layer: impl Fn(Machine) -> K,
) -> Result<Backend, OpenError> {
    let failed = |reason| OpenError::new(DESCRIPTION.name, reason);
    backend::check_privilege(DESCRIPTION.name)?;
    probe::machine(settings.ipvs.scheduler).map_err(failed)?;
    prepare(&settings.ipvs);
    let mut flavours = [None, None];
    let side = |family| {
        let (tool, lacks) = probe::tool(family)?;
        tracing::info!(%family, tool = tool.name(), "programming IPVS");
        flavours[family as usize] = Some(tool.flavour());
        let machine = Machine::new(family, tool).map_err(|error| error.to_string())?;
        let side = IpvsDataPath::new(layer(machine), family, settings.clone());
        Ok(IpvsDataPath { lacks, ..side })
    };
    let sides = open_sides(DESCRIPTION.name, side)?;
    Ok(Backend {
        serving: Some(Kind::Ipvs.serving(flavours)),
        ..Backend::new(&DESCRIPTION, sides)
    })
}

/// Applies the settings of the network namespace as a whole.
pub(super) fn prepare(settings: &super::IpvsSettings) {
    probe::load_ipvs();
    for problem in sysctl::apply(settings) {
        tracing::warn!(
            problem,
            "cannot change a kernel setting that IPVS mode needs"
        );
    }
    if settings.timeouts != Timeouts::default() {
        let set = Ipvs::open().and_then(|mut ipvs| ipvs.set_timeouts(settings.timeouts));
        if let Err(error) = set {
            tracing::warn!(%error, "cannot set the timeouts of IPVS; they stay as they are");
        }
    }
}

impl<K: Kernel> IpvsDataPath<K> {
    fn new(kernel: K, family: Family, settings: backend::Settings) -> Self {
        Self {
            kernel,
            settings,
            family,
            node: NodePlan::default(),
            ips: NodeIps::default(),
            capacities: HashMap::new(),
            rules: InstalledRules::default(),
            lacks: Lacks::default(),
            schedulers: Schedulers::default(),
            refused: HashSet::new(),
            refused_at: None,
            foreign: Vec::new(),
            reading: Duration::ZERO,
            seen: Seen::default(),
        }
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
                .choose(plan, settings.scheduler, kernel, failures)
                .map_err(unreadable)?;
            let demand = Demand::new(plan, scheduler, &self.node, &self.ips, settings);
            if self.lacks.ipvs && !demand.denied.is_empty() {
                failures.push(Failure {
                    key: key.clone(),
                    reason:
                        "source ranges do not keep the node itself out: load the kernel module \
                             xt_ipvs"
                            .to_owned(),
                    degraded: true,
                });
            }
            demands.push((key.clone(), Some(demand)));
        }
        Ok(demands)
    }

    /// Enlarges sets that must have more entries than they can hold. Old entries are deleted after new ones
    /// were added, so the set must have room for both.
    fn make_room(&mut self, state: &IpvsState, ops: &ServerOps) -> Result<(), StepError> {
        let mut added = [0; SetId::ALL.len()];
        for op in &ops.ready {
            if let Op::Entry(set, _, true) = op {
                added[*set as usize] += 1;
            }
        }
        for set in SetId::ALL {
            let capacity = self.capacities.get(&set).copied().unwrap_or(0) as usize;
            let held = state.entries(set).1;
            let needed = added[set as usize] + held.map_or(0, HashSet::len);
            if capacity == 0 || needed <= capacity {
                continue;
            }
            let none = HashSet::new();
            let capacity =
                self.kernel.grow(set, held.unwrap_or(&none), needed).map_err(interrupted)?;
            tracing::info!(set = set.name(self.family), capacity, "an IP set has grown");
            self.capacities.insert(set, capacity);
        }
        Ok(())
    }

    fn perform(
        &mut self,
        state: &mut IpvsState,
        ops: &[Op],
        failures: &mut Vec<Failure>,
    ) -> Result<u64, StepError> {
        let (refused, bytes) = self.kernel.perform(ops).map_err(interrupted)?;
        let those: HashSet<Op> = refused.iter().filter_map(|r| ops.get(r.index)).copied().collect();
        let owners = state.owners(&those);
        let mut refused = refused.into_iter().peekable();
        for (index, op) in ops.iter().enumerate() {
            match refused.next_if(|refused| refused.index == index) {
                None => {
                    self.refused.remove(op);
                    state.done(*op);
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
        refused: &RefusedOp,
        owner: Option<&ServiceKey>,
        failures: &mut Vec<Failure>,
    ) {
        let what = described(&op);
        match owner {
            Some(key) => failures.push(Failure::degraded(
                key,
                format!("{what}: {}", refused.reason),
            )),
            None => tracing::warn!(
                family = %self.family, what, reason = refused.reason, "cannot remove a stale IPVS object; the next check tries again"
            ),
        }
        self.refused.insert(op);
        self.refused_at = Some(Instant::now());
    }

    /// Records what was read from the kernel.
    fn take(&mut self, state: &mut IpvsState, reading: Reading, first: bool) {
        let (family, servers) = (self.family, reading.snapshot.servers.len());
        if first && servers > 0 {
            tracing::info!(%family, servers, "adopted the virtual servers of the kernel");
        }
        self.ips = NodeIps::new(reading.node_ips);
        self.capacities = reading.capacities;
        let foreign = state.adopt(reading.snapshot, first);
        self.seen.at = Some(Instant::now());
        if !foreign.is_empty() && foreign != self.foreign {
            let names: Vec<String> = foreign.iter().take(NAMED).map(ToString::to_string).collect();
            tracing::warn!(
                %family, count = foreign.len(), first = names.join(", "),
                "leaving virtual servers of other programs on addresses of Services alone"
            );
        }
        self.foreign = foreign;
    }

    /// Removes real servers that have drained. A failed operation is not reported, because the next check
    /// repeats it.
    fn remove_drained(&mut self, state: &mut IpvsState, idle: Vec<Op>) -> Result<(), StepError> {
        let (refused, _) = self.kernel.perform(&idle).map_err(unreadable)?;
        for (index, op) in idle.into_iter().enumerate() {
            if refused.iter().all(|refused| refused.index != index) {
                state.done(op);
            }
        }
        Ok(())
    }

    /// Returns the differences between the kernel and the state, and whether there are differences that the
    /// kernel refused to change.
    fn differences(&mut self, state: &IpvsState) -> (Option<String>, bool) {
        let mut ops = state.compare(&self.settings.ipvs.exclude_cidrs);
        let all = ops.len();
        ops.retain(|op| !self.refused.contains(op));
        let refused = all > ops.len();
        let steps = rules::compare(&self.shape(state), &self.rules.found);
        let first = ops
            .iter()
            .next()
            .map(|op| format!("{} differs", described(op)))
            .or_else(|| steps.describe());
        let what = first.map(|first| match ops.len() + steps.len() {
            1 => first,
            count => format!("{first}, and {} more", count - 1),
        });
        (what, refused)
    }
}

impl<K: Kernel> DataPath for IpvsDataPath<K> {
    type Content = IpvsState;
    type Staged = StagedOps;

    fn family(&self) -> Family {
        self.family
    }

    fn adopt(&mut self) -> Result<IpvsState, StepError> {
        let mut state = IpvsState::default();
        let reading = self.kernel.read().map_err(unreadable)?;
        self.take(&mut state, reading, true);
        self.rules.forget();
        self.read_rules()?;
        Ok(state)
    }

    fn frontends<'c>(state: &'c IpvsState, key: &ServiceKey) -> &'c [FrontendAddr] {
        state.frontends(key)
    }

    fn stage(
        &mut self,
        state: &mut IpvsState,
        change: Change<'_>,
        applied: &mut Applied,
    ) -> Result<StagedOps, StepError> {
        self.node = change.node.clone();
        let demands = self.demands(&change, &mut applied.failures)?;
        let protected = &self.settings.ipvs.exclude_cidrs;
        let (ops, conflicts) = state.stage(demands, change.complete, protected);
        applied.failures.extend(conflicts);
        if change.complete {
            self.refused.clear();
            self.refused_at = None;
        }
        let steps = self.steps(state, change.complete);
        applied.operations = (ops.len() + steps.len()) as u64;
        let complete = change.complete;
        Ok(StagedOps {
            ops,
            steps,
            complete,
        })
    }

    fn commit(
        &mut self,
        state: &mut IpvsState,
        staged: &mut StagedOps,
        applied: &mut Applied,
    ) -> Result<(), StepError> {
        let started = Instant::now();
        let StagedOps { ops, steps, .. } = staged;
        let failures = &mut applied.failures;
        self.make_room(state, ops)?;
        applied.bytes += self.perform(state, &ops.ready, failures)?;
        applied.bytes += self.restore(&steps.first)?;
        applied.bytes += self.perform(state, &ops.bind, failures)?;
        applied.bytes += self.restore(&steps.last)?;
        applied.bytes += self.perform(state, &ops.clear, failures)?;
        applied.kernel = started.elapsed();
        Ok(())
    }

    fn accept(&mut self, state: &mut IpvsState, staged: StagedOps, _applied: &mut Applied) {
        if staged.complete {
            self.seen.counts = Some(state.counts());
        }
    }

    /// Compares the kernel with the state that it must have, and removes real servers that have drained.
    fn check(&mut self, state: &mut IpvsState) -> Result<Verification, StepError> {
        if let Some(scheduler) = self.schedulers.came(&self.kernel) {
            let what = format!("the kernel has the scheduler {scheduler} now");
            return Ok(Verification::Outdated(what));
        }
        let started = Instant::now();
        let reading = self.kernel.read().map_err(unreadable)?;
        let idle = state.drained(&reading.snapshot.reals);
        let before = std::mem::take(&mut self.ips);
        self.take(state, reading, false);
        if self.ips != before {
            let what = "the node's addresses have changed";
            return Ok(Verification::Outdated(what.to_owned()));
        }
        self.remove_drained(state, idle)?;
        self.seen.counts = Some(state.counts());
        self.reading = started.elapsed();
        self.read_rules()?;
        if !self.rules.are_sure() {
            // The rules are read every time, so the duration includes them.
            self.reading = started.elapsed();
        }
        let (what, refused) = self.differences(state);
        // The content says what was found, so nothing has to be read again.
        if let Some(what) = what {
            return Ok(Verification::Drifted(what));
        }
        let again = |at: Instant| at.elapsed() >= REFUSED_FOR;
        if refused && self.refused_at.is_some_and(again) {
            let what = "what the kernel refused is tried again";
            return Ok(Verification::Outdated(what.to_owned()));
        }
        Ok(Verification::Equal)
    }

    /// The IP sets decide, because virtual servers may belong to any program.
    fn has_services(&mut self) -> bool {
        let found = self.kernel.read();
        found.is_ok_and(|found| found.snapshot.entries.values().any(|set| !set.is_empty()))
    }

    fn probe_interval(&self) -> Option<Duration> {
        let interval = self.settings.probe_interval;
        Some(interval.max(self.reading * READ_SHARE))
    }

    fn servers(&self) -> Option<ServerCounts> {
        self.seen.counts.clone()
    }

    fn inspect(&self, state: Option<&IpvsState>, service: &ServiceName) -> Option<Inspection> {
        Some(self.inspection(state, service))
    }
}

#[cfg(test)]
mod tests;
