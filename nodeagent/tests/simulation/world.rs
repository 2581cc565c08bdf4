//! A cluster in one thread, and its time.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kp_nodeagent::desired::Position;
use kplane_agents::overrides::{Overrides, Scope, Wish};
use kplane_model::Family;
use kplane_proto::convert::ip_bytes;
use kplane_proto::v1::Leaving;
use tokio::time::{Instant, sleep};

use crate::agent::Agent;
use crate::kernel::Kernel;
use crate::ledger::{Claim, I2, Ledger, Shared, lock, names};
use crate::links::{Links, SharedLinks};
use crate::oracle::{Marks, Side, expected};
use crate::plan::{Crash, Fault, Flags, Plan, Step, TableFault};
use crate::reference::{Cluster, Packet};
use crate::replica::Replica;
use crate::source::Lacking;
use crate::truth::{
    Condition, Id, KINDS, Object, Pod, SLICES, Service, Truth, node_name, pod_ip, slice_family,
    slice_of,
};
use crate::wire::{Listener, Weather, Wire};
use crate::written;

/// Longest time between two looks at everything.
const LOOK: Duration = Duration::from_secs(2);

/// The time in which a draining replica ends.
const DRAIN: Duration = Duration::from_secs(5);

/// The time that a list takes without NetworkPolicies.
const LISTING: Duration = Duration::from_millis(5);

/// The time after which an agent starts again that died in the midst of a change.
const DEATH: Duration = Duration::from_millis(500);

/// The time in which all agents reach the newest state, once faults have ended: the longest pause of a client whose
/// replicas sent it away, or of an engine that waits for its next look at the kernel.
pub(crate) const CONVERGED: Duration = Duration::from_secs(400);

pub(crate) struct World {
    truth: Truth,
    replicas: Vec<Option<Replica>>,
    listeners: Arc<Mutex<Vec<Option<Listener>>>>,
    agents: Vec<Agent>,
    links: SharedLinks,
    dark: bool,
    policies: bool,
    ranged: bool,
    listing: Duration,
    flags: Vec<Flags>,
    /// The orders of operators, if they give some, and since when all replicas freeze a node.
    orders: Overrides,
    ordered: bool,
    frozen: Vec<Option<Instant>>,
    pub(crate) ledger: Shared,
    nodes: u8,
    snapshots: u32,
    /// The number of replicas that were started.
    starts: u64,
    /// Pods of Services were deleted.
    ended: BTreeSet<(u8, u8)>,
}

impl World {
    pub(crate) fn new(plan: &Plan, reported: bool) -> Self {
        let ledger = Ledger::new(plan.nodes, Packet::sample(plan.seed), reported);
        let listeners = Arc::new(Mutex::new(vec![None; plan.replicas]));
        let links = Arc::new(Mutex::new(Links::new(plan.nodes)));
        let agents = (0..plan.nodes).map(|node| {
            Agent::new(Wire {
                links: Arc::clone(&links),
                nodes: plan.nodes,
                node,
                listeners: Arc::clone(&listeners),
                weather: Arc::new(Mutex::new(Weather::new())),
                kernel: Kernel::new(node, plan, Arc::clone(&ledger)),
                ledger: Arc::clone(&ledger),
            })
        });
        Self {
            truth: Truth::default(),
            replicas: (0..plan.replicas).map(|_| None).collect(),
            agents: agents.collect(),
            links,
            dark: plan.dark,
            policies: plan.policies,
            ranged: plan.ranged,
            listing: if plan.policies { plan.listing } else { LISTING },
            flags: vec![Flags::usual(plan.policies); plan.replicas],
            orders: Overrides::default(),
            ordered: plan.orders,
            frozen: vec![None; plan.nodes.into()],
            listeners,
            ledger,
            nodes: plan.nodes,
            snapshots: plan.snapshots,
            starts: 0,
            ended: BTreeSet::new(),
        }
    }

    /// Plays a plan; returns the time that the agents took to reach the newest state.
    pub(crate) async fn play(&mut self, plan: &Plan) -> Duration {
        for (step, wait) in &plan.steps {
            lock(&self.ledger).note("step", || format!("* {step:?}"));
            self.step(step).await;
            self.pass(*wait).await;
            if self.is_broken() {
                return Duration::ZERO;
            }
        }
        self.heal().await;
        self.settle().await
    }

    /// Waits until all agents have reached the newest state.
    async fn settle(&mut self) -> Duration {
        let nodes = 0..self.nodes;
        let wanted: Vec<_> = nodes
            .map(|node| {
                let side = |family| expected(self.truth.now(), &Marks::default(), node, family);
                Family::ALL.map(side)
            })
            .collect();
        let policies = self.policies.then(|| Cluster::of(self.truth.now()));
        let began = Instant::now();
        loop {
            let mut agents = self.agents.iter();
            let lag = self
                .agents
                .iter()
                .zip(&wanted)
                .find_map(|(agent, wanted)| self.lag(agent, wanted))
                .or_else(|| agents.find_map(|agent| differs(agent, policies.as_ref()?)));
            let took = began.elapsed();
            let Some(lag) = lag else {
                return took;
            };
            if took >= CONVERGED {
                lock(&self.ledger).break_invariant(I2, lag);
            }
            if self.is_broken() {
                return took;
            }
            self.pass(took.clamp(Duration::from_millis(50), LOOK)).await;
            if took >= LOOK {
                self.agents.iter().for_each(Agent::alarm);
            }
        }
    }

    fn is_broken(&self) -> bool {
        lock(&self.ledger).violation.is_some()
    }

    /// Lets time pass.
    async fn pass(&mut self, time: Duration) {
        let until = Instant::now() + time;
        loop {
            for replica in self.replicas.iter_mut().flatten() {
                replica.catch_up(&self.truth, &self.orders).await;
            }
            self.agents.iter_mut().for_each(Agent::start_if_due);
            let starts = self.agents.iter().filter_map(|agent| agent.restart_at);
            let next = starts.min().map_or(until, |start| start.min(until));
            let left = next.saturating_duration_since(Instant::now());
            sleep(left.clamp(Duration::from_micros(1), LOOK)).await;
            self.look();
            for agent in self.agents.iter_mut().filter(|agent| agent.has_died()) {
                agent.crash(Crash::Process, DEATH).await;
            }
            if Instant::now() >= until || self.is_broken() {
                return;
            }
        }
    }

    /// Checks the invariants of which agents themselves do not speak.
    fn look(&mut self) {
        for (number, replica) in self.replicas.iter_mut().enumerate() {
            if replica.as_ref().is_some_and(|replica| replica.hub.shutdown().is_cancelled()) {
                *replica = None;
                lock(&self.listeners)[number] = None;
            }
        }
        let replicas = || self.replicas.iter().flatten();
        for (node, since) in (0..).zip(&mut self.frozen) {
            let orders = |replica: &Replica| replica.hub.overrides().frozen(&node_name(node));
            let frozen = self.ordered && replicas().all(|replica| orders(replica).is_some());
            *since = if frozen { since.or_else(|| Some(Instant::now())) } else { None };
        }
        for agent in &mut self.agents {
            agent.keep_file();
            let Some(report) = agent.report() else {
                continue;
            };
            let of_position = |at: Option<Position>| at.map(|at| (at.epoch, at.revision));
            if self.policies {
                let claim = Claim {
                    applied: of_position(report.applied),
                    keeps: report.keeps.as_ref().is_some_and(|keeps| keeps.policies > 0),
                };
                agent.judge(claim);
            }
            let held = report.held.map(|held| (held.epoch, held.revision));
            let mut ledger = lock(&self.ledger);
            ledger.holds(agent.node, held, self.frozen[usize::from(agent.node)]);
            let reported = report.keeps.is_some() || report.applied != report.held;
            agent.kernel.show(|sides| ledger.admits(agent.node, reported, sides));
        }
    }

    async fn step(&mut self, step: &Step) {
        match step {
            Step::Batch(steps) => steps.iter().for_each(|step| self.write(step)),
            Step::Service(..)
            | Step::NoService(_)
            | Step::Slice(..)
            | Step::NoSlice(..)
            | Step::Node(..)
            | Step::NoNode(_)
            | Step::Policies(_) => {
                self.write(step);
            }
            Step::Leave(service, slice, number) => self.leave(*service, *slice, *number),
            Step::Ending(service, slice, number) => self.end_pod(*service, *slice, *number),
            Step::Start(replica, late, lacking, doubt) => {
                self.start(*replica, *late, *lacking, *doubt).await;
            }
            Step::Lag(..)
            | Step::Watch(..)
            | Step::CutOff(..)
            | Step::List(..)
            | Step::Kill(_)
            | Step::Drain(_)
            | Step::Mark(..)
            | Step::Approve(_) => {
                self.replica_step(step).await;
            }
            Step::Flags(replica, flags) => self.flags[*replica] = *flags,
            Step::Order(node, frozen) => self.order(*node, *frozen),
            _ => self.agent_step(step).await,
        }
    }

    /// An operator freezes a node or all, or thaws them.
    fn order(&mut self, node: Option<u8>, frozen: bool) {
        let scope = node.map_or(Scope::All, |node| Scope::Node(node_name(node).to_string()));
        let wish = Wish {
            scopes: vec![scope],
            frozen,
            by: String::new(),
            at_ms: 0,
            reason: String::new(),
        };
        self.orders = self.orders.with(&wish).unwrap();
    }

    /// A Pod is about to end: its slice says so, and its hook asks.
    fn leave(&mut self, service: u8, slice: u8, number: u64) {
        let id = Id::Slice(service, slice);
        let object = self.truth.now().get(&id).map(|(_, object)| Arc::clone(object));
        let Some(Object::Slice(pods)) = object.as_deref() else {
            return;
        };
        let place = usize::try_from(number).unwrap_or(0).checked_rem(pods.len());
        let Some(pod) = place.map(|place| pods[place]) else {
            return;
        };
        let mut left = pods.clone();
        left[place.unwrap_or(0)].condition = Condition::Draining;
        self.truth.write(id, Some(Object::Slice(left)));
        let ip = pod_ip(service, pod.number, slice_family(slice));
        let token = lock(&self.ledger).ask((service, slice), ip);
        let is_known = |replica: &Replica| {
            let object = replica.view.objects.get(&id).map(|(_, object)| &**object);
            let is_it = |other: &Pod| (other.number, other.node) == (pod.number, pod.node);
            let is_served = replica.view.objects.contains_key(&Id::Service(service));
            is_served && matches!(object, Some(Object::Slice(pods)) if pods.iter().any(is_it))
        };
        if !self.replicas.iter().flatten().all(is_known) {
            // A replica looks two seconds for a Pod that it does not know, and may be further behind than that.
            lock(&self.ledger).rewritten((service, slice), []);
        }
        let leaving = Leaving {
            token,
            addresses: vec![ip_bytes(ip)],
            within_ms: 10_000,
            ..Leaving::default()
        };
        let weather = Arc::clone(&self.agents[usize::from(pod.node)].wire.weather);
        let asks = lock(&weather).ask(leaving);
        lock(&self.ledger).note("leaves", || format!("{ip} of n{} asks: {asks}", pod.node));
    }

    /// A Pod of a slice is being deleted, or is gone; its slice lags behind.
    fn end_pod(&mut self, service: u8, slice: u8, number: u64) {
        let ended = |id: &&Id| matches!(id, Id::Ending(of, _) if *of == service);
        let ended = self.truth.now().keys().find(ended).copied();
        if let (Some(id), true) = (ended, number.is_multiple_of(3)) {
            self.truth.write(id, None);
            return;
        }
        let slice = self.truth.now().get(&Id::Slice(service, slice));
        if let Some(Object::Slice(pods)) = slice.map(|(_, object)| &**object)
            && let Some(place) = (number >> 2).checked_rem(pods.len() as u64)
            && let Some(pod) = pods.get(usize::try_from(place).unwrap_or(0))
        {
            let id = Id::Ending(service, pod.number);
            self.ended.insert((service, pod.number));
            self.truth.write(id, Some(Object::Ending));
        }
    }

    /// Slices no longer have the Pods that were deleted.
    fn catch_up_slices(&mut self) {
        for (service, pod) in std::mem::take(&mut self.ended) {
            self.truth.write(Id::Ending(service, pod), None);
            let id = slice_of(service, pod);
            let slice = self.truth.now().get(&id).map(|(_, object)| Arc::clone(object));
            if let Some(Object::Slice(pods)) = slice.as_deref() {
                let mut left = pods.clone();
                left.retain(|of| of.number != pod);
                self.truth.write(id, Some(Object::Slice(left)));
            }
        }
    }

    fn write(&mut self, step: &Step) {
        let truth = &mut self.truth;
        match step {
            Step::Service(number, shape) => {
                let service = Object::Service(Service::of(*shape));
                truth.write(Id::Service(*number), Some(service));
            }
            Step::NoService(number) => {
                truth.write(Id::Service(*number), None);
                for slice in 0..SLICES {
                    lock(&self.ledger).rewritten((*number, slice), []);
                    truth.write(Id::Slice(*number, slice), None);
                }
            }
            Step::Slice(service, slice, seed) => {
                let pods = Pod::some(*slice, *seed, self.nodes);
                let ip = |pod: &Pod| pod_ip(*service, pod.number, slice_family(*slice));
                lock(&self.ledger).rewritten((*service, *slice), pods.iter().map(ip));
                truth.write(Id::Slice(*service, *slice), Some(Object::Slice(pods)));
            }
            Step::NoSlice(service, slice) => {
                lock(&self.ledger).rewritten((*service, *slice), []);
                truth.write(Id::Slice(*service, *slice), None);
            }
            Step::Node(node, zone) => {
                let (zone, ranged) = (*zone, self.policies && self.ranged);
                truth.write(Id::Node(*node), Some(Object::Node { zone, ranged }));
            }
            Step::NoNode(node) => truth.write(Id::Node(*node), None),
            Step::Policies(seed) => {
                let (id, object) = written::change(*seed, self.nodes);
                lock(&self.ledger).note("written", || format!("{id:?} is {object:?}"));
                truth.write(id, object);
            }
            _ => {}
        }
    }

    async fn start(&mut self, number: usize, late: u64, lacking: Lacking, doubt: bool) {
        self.kill(number);
        self.starts += 1;
        let watched = self.dark.then(|| (Arc::clone(&self.links), self.nodes));
        let ledger = Arc::clone(&self.ledger);
        let mut replica = Replica::start(
            self.starts,
            self.snapshots,
            self.flags[number],
            self.ordered,
            watched,
            ledger,
        );
        lock(&self.listeners)[number] = Some(replica.listener.clone());
        let lists = replica.begin(&self.truth, late, lacking, doubt);
        replica.lags = true;
        self.replicas[number] = Some(replica);
        for said in lists {
            let Some(replica) = &mut self.replicas[number] else {
                return;
            };
            replica.hear(&self.truth, said).await;
            // A list takes a time, but none where snapshots are rare: agents that wait for the last list would compete for
            // them, and the runtime's order of these is random.
            if self.snapshots > 1 {
                self.pass(self.listing).await;
            }
        }
        if let Some(replica) = &mut self.replicas[number] {
            replica.touch();
            // An older state stays for a while.
            replica.lags = late > 0;
        }
    }

    fn kill(&mut self, number: usize) {
        lock(&self.listeners)[number] = None;
        if let Some(replica) = self.replicas[number].take() {
            replica.hub.shutdown().cancel();
        }
    }

    async fn replica_step(&mut self, step: &Step) {
        let truth = &self.truth;
        let number = match step {
            Step::Lag(n, _)
            | Step::Watch(n, ..)
            | Step::CutOff(n, _)
            | Step::List(n, _)
            | Step::Kill(n)
            | Step::Drain(n)
            | Step::Mark(n, ..)
            | Step::Approve(n) => *n,
            _ => return,
        };
        let Some(replica) = &mut self.replicas[number] else {
            return;
        };
        match step {
            Step::Lag(_, lags) => replica.lags = *lags,
            Step::CutOff(_, cut_off) => replica.cut_off = *cut_off,
            Step::Watch(_, kind, most) if !replica.cut_off => {
                replica.watch(truth, KINDS[*kind], *most).await;
            }
            Step::List(_, lacking) => replica.list(truth, *lacking).await,
            Step::Approve(_) => replica.approve(truth).await,
            Step::Mark(_, suspected, dead) => replica.mark(truth, *suspected, *dead).await,
            Step::Drain(_) if !replica.is_draining() => {
                let hub = Arc::clone(&replica.hub);
                tokio::spawn(async move {
                    hub.streams().draining.begin(DRAIN).await;
                    hub.shutdown().cancel();
                });
            }
            Step::Kill(_) => self.kill(number),
            _ => {}
        }
    }

    async fn agent_step(&mut self, step: &Step) {
        let node = match step {
            Step::Reset(n)
            | Step::BlackHole(n)
            | Step::Delay(n, _)
            | Step::Stall(n, _)
            | Step::Freeze(n, _)
            | Step::Dark(n, _)
            | Step::Restart(n) => *n,
            Step::Apart(mask, time) => return lock(&self.links).set_apart(*mask, *time),
            Step::Split(mask, time) => return lock(&self.links).set_split(*mask, *time),
            Step::Crash(n, ..)
            | Step::Kernel(n, _)
            | Step::Drift(n, _)
            | Step::Tables(n, ..)
            | Step::Disturb(n, ..)
            | Step::Unseen(n, ..)
            | Step::Copy(n)
            | Step::Deaf(n)
            | Step::Version(n, _)
            | Step::Die(n, _) => *n,
            _ => return,
        };
        let agent = &mut self.agents[usize::from(node)];
        let weather = Arc::clone(&agent.wire.weather);
        match step {
            Step::Reset(_) => lock(&weather).cut(),
            Step::BlackHole(_) => lock(&weather).silence(),
            Step::Delay(_, latency) => lock(&weather).latency = *latency,
            Step::Stall(_, time) => lock(&weather).stalled_until = Instant::now() + *time,
            Step::Freeze(_, time) => agent.freeze(*time),
            Step::Restart(_) => agent.stop().await,
            Step::Version(_, lacks) => agent.replace(*lacks).await,
            Step::Crash(n, crash, time) => {
                if *crash == Crash::Machine {
                    lock(&self.links).darken(*n, *time);
                }
                agent.crash(*crash, *time).await;
            }
            Step::Dark(n, time) => lock(&self.links).darken(*n, *time),
            Step::Kernel(_, fault) => agent.kernel.set(*fault),
            Step::Tables(_, v6, fault) => agent.kernel.set_tables(*v6, *fault),
            Step::Disturb(_, v6, damage, after) => {
                agent.kernel.disturb(*v6, *damage, *after);
                agent.alarm();
            }
            Step::Unseen(_, v6, damage) => agent.kernel.disturb_unseen(*v6, *damage),
            Step::Copy(_) => agent.kernel.copy(),
            Step::Deaf(_) => agent.kernel.lose_reports(),
            Step::Die(_, after) => agent.kernel.die(*after),
            Step::Drift(_, service) => {
                agent.kernel.drift(*service);
                agent.alarm();
            }
            _ => {}
        }
    }

    /// Ends all faults.
    async fn heal(&mut self) {
        lock(&self.ledger).note("heal", || "* all faults end".to_owned());
        self.order(None, false);
        self.flags.fill(Flags::usual(self.policies));
        self.catch_up_slices();
        for number in 0..self.replicas.len() {
            let replica = self.replicas[number].as_ref();
            let is_usual = |replica: &Replica| replica.flags == self.flags[number];
            if replica.is_none_or(|replica| replica.is_draining() || !is_usual(replica)) {
                self.start(number, 0, Lacking::default(), false).await;
            }
        }
        for replica in self.replicas.iter_mut().flatten() {
            (replica.lags, replica.cut_off) = (false, false);
            if !self.dark {
                replica.mark(&self.truth, 0, 0).await;
            }
            replica.believe(&self.truth).await;
            replica.catch_up(&self.truth, &self.orders).await;
            // The second list confirms what the first one lacks.
            replica.list(&self.truth, Lacking::default()).await;
            replica.list(&self.truth, Lacking::default()).await;
        }
        lock(&self.links).heal();
        for agent in &mut self.agents {
            agent.kernel.set(Fault::None);
            for v6 in [false, true] {
                agent.kernel.set_tables(v6, TableFault::None);
            }
            agent.freeze(Duration::ZERO);
            if agent.is_older() {
                agent.replace(0).await;
            }
            let mut weather = lock(&agent.wire.weather);
            weather.latency = Duration::ZERO;
            weather.stalled_until = Instant::now();
        }
    }

    /// Returns what an agent lacks of the newest state, if it lacks anything.
    fn lag(&self, agent: &Agent, wanted: &[Side; 2]) -> Option<String> {
        let node = node_name(agent.node);
        let Some(report) = agent.report() else {
            return Some(format!("the agent of {node} does not run"));
        };
        for (family, wanted) in Family::ALL.into_iter().zip(wanted) {
            if !agent.kernel.is(family, wanted) {
                let has = agent.kernel.show(|sides| names(&sides[family as usize].0));
                return Some(format!(
                    "the kernel of {node} has {family} {has} and must have {}",
                    names(wanted)
                ));
            }
        }
        let Some(applied) = report.applied else {
            return Some(format!("{node} has applied nothing"));
        };
        let mut replicas = self.replicas.iter().flatten();
        let Some(replica) = replicas.find(|replica| replica.hub.store().epoch() == applied.epoch)
        else {
            return Some(format!(
                "{node} has a state of epoch {}, which has ended",
                applied.epoch
            ));
        };
        let store = replica.hub.store();
        let head = store.head().borrow().revision;
        let record = replica.hub.agents().record(&node);
        let known = record
            .filter(|record| record.connected)
            .and_then(|record| record.report.clone())
            .map(|report| report.applied_revision);
        if applied.revision != head || known != Some(head) {
            return Some(format!(
                "{node} has applied revision {} of {head}, and its replica knows of {known:?}",
                applied.revision
            ));
        }
        let digest = report.resume.map(|resume| resume.digest);
        if digest != Some(store.digest(&node)) {
            return Some(format!("the digest of {node} is not that of its replica"));
        }
        // A policy that cannot be enforced as it is written stays so.
        let clean = report.failures.iter().all(|f| f.degraded) && report.keeps.is_none();
        (!clean || replica.view.holds()).then(|| {
            format!(
                "{node} still reports {:?}, {:?}",
                report.failures, report.keeps
            )
        })
    }
}

/// Returns a packet that a node treats otherwise than NetworkPolicies say, if there is one.
fn differs(agent: &Agent, policies: &Cluster) -> Option<String> {
    Packet::all().chunks(64).find_map(|packets| {
        let answers = policies
            .answers(agent.node, packets)
            .or_dropped(packets, |packet| agent.kernel.is_cut_off(packet));
        let (packet, passes) = answers.wrong(agent.kernel.passing(packets), packets)?;
        let does = if passes { "passes" } else { "drops" };
        Some(format!("n{} {does} {packet}", agent.node))
    })
}
