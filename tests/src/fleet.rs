//! A fleet of simulated agents at real control planes, in one process: what `cargo xtask fleet` and `cargo xtask bench`
//! measure, and a test checks. TLS, protocol and digests are real; there is no kernel under the agents.
//!
//! Everything is on the loopback device of the calling thread's network namespace.

mod agent;
mod catalog;
mod held;
mod input;
mod meter;
mod plane;
mod scenarios;
mod trace;
mod wire;

use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kplane_rig::histogram::Histogram;
use kplane_rig::netns::NetNs;
use kplane_rig::process::Process;
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::sleep;

use agent::{Agent, World};
pub use input::{Input, STAMP_BITS, names, objects, slice, stamp_of};
use meter::Meter;
pub use meter::{Violated, WayCounts, percentiles};
use plane::{Places, make_certs};
pub use plane::{Usage, agent_address, identity, metrics_address};
pub use scenarios::{Back, Churned, Killed, Stalled};
pub use wire::connect;

/// Nothing here takes longer.
pub const DEADLINE: Duration = Duration::from_secs(180);
/// Runs a fleet in a network of its own, on two threads.
///
/// # Errors
/// The network cannot be made, or the fleet fails.
pub fn apart<T>(fleet: impl Future<Output = Result<T>>) -> Result<T> {
    inside(&NetNs::new("fleet")?, fleet)
}

/// Runs a fleet in a network, on two threads.
///
/// # Errors
/// The fleet fails.
pub fn inside<T>(ns: &NetNs, fleet: impl Future<Output = Result<T>>) -> Result<T> {
    let _inside = ns.enter()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(fleet)
}

/// Interval at which conditions are checked.
const LOOK: Duration = Duration::from_millis(5);

/// The size of a fleet.
#[derive(Clone, Debug)]
pub struct Size {
    /// Number of agents.
    pub agents: u32,
    /// Number of Services that each of them holds.
    pub services: u32,
    /// Number of control planes.
    pub replicas: usize,
    /// Whether agents report what they hold.
    pub reports: bool,
}

/// Control planes, and simulated agents.
pub struct Fleet {
    size: Size,
    // Fields drop in order: control planes before their files.
    planes: Vec<Option<Process>>,
    tasks: JoinSet<()>,
    agents: Vec<Arc<Agent>>,
    world: Arc<World>,
    input: Input,
    places: Places,
    _folder: TempDir,
}

impl Fleet {
    /// Starts control planes that know the agents, and nobody else.
    ///
    /// # Errors
    /// A control plane does not start.
    pub async fn start(program: PathBuf, size: Size) -> Result<Self> {
        let folder = TempDir::new()?;
        let manifests = folder.path().join("objects");
        let input = Input::new(&manifests, size.agents, size.services)?;
        Self::with(program, size, ("--manifests", manifests), input, folder).await
    }

    /// Starts control planes that read a cluster, which has the objects of a fleet of this size.
    ///
    /// # Errors
    /// A control plane does not start.
    pub async fn at(
        program: PathBuf,
        size: Size,
        kubeconfig: PathBuf,
        input: Input,
    ) -> Result<Self> {
        let source = ("--kubeconfig", kubeconfig);
        Self::with(program, size, source, input, TempDir::new()?).await
    }

    async fn with(
        program: PathBuf,
        size: Size,
        source: (&'static str, PathBuf),
        input: Input,
        folder: TempDir,
    ) -> Result<Self> {
        let places = Places {
            program,
            certs: folder.path().join("certs"),
            source,
            replicas: size.replicas,
        };
        make_certs(&places.certs, names(size.agents).collect())?;
        let planes = places.start().await?;
        let world = World {
            certs: places.certs.clone(),
            catalog: catalog::Catalog::default(),
            meter: Meter::new(size.replicas),
            replicas: size.replicas,
            changing: input.changing(),
            reports: size.reports,
            stalled: watch::Sender::new(0),
            home: watch::Sender::new(0),
            pids: Mutex::default(),
        };
        for _ in 0..input.last() {
            world.meter.publishes();
        }
        let fleet = Self {
            size,
            planes,
            tasks: JoinSet::new(),
            agents: Vec::new(),
            world: Arc::new(world),
            input,
            places,
            _folder: folder,
        };
        fleet.world.note_pids(fleet.pids());
        Ok(fleet)
    }

    /// Returns the folder with certificates.
    pub fn certs(&self) -> &std::path::Path {
        &self.places.certs
    }

    /// Connects all agents at once, and waits until they have everything; returns how long that took.
    ///
    /// # Errors
    /// Some do not within [`DEADLINE`].
    pub async fn connect(&mut self) -> Result<Duration> {
        for (number, name) in (0..).zip(names(self.size.agents)) {
            let agent = Agent::new(number, name, &self.world)?;
            self.agents.push(Arc::new(agent));
        }
        let begun = Instant::now();
        for agent in &self.agents {
            self.tasks.spawn(Arc::clone(agent).run());
        }
        self.all_attend().await?;
        let took = begun.elapsed();
        self.all_complete().await?;
        self.world.meter.take_ways();
        Ok(took)
    }

    /// Changes an endpoint again and again, each time when all agents have the change before; returns the times until
    /// each agent had each change, and the CPU time of the control planes.
    ///
    /// # Errors
    /// Some agents do not get a change.
    pub async fn change(&mut self, changes: usize) -> Result<(Histogram, Duration)> {
        let reading = self.agents.len() - usize::try_from(*self.world.stalled.borrow())?;
        let mut spent = Duration::ZERO;
        self.world.meter.latencies();
        for _ in 0..changes {
            sleep(Duration::from_millis(200)).await;
            let cpu = self.usage()?.cpu;
            self.publish()?;
            let arrived = || self.world.meter.arrived.load(Relaxed) >= reading;
            until(arrived, "all agents have a change").await?;
            spent += self.usage()?.cpu - cpu;
        }
        Ok((self.world.meter.latencies(), spent))
    }

    /// Returns what the running control planes use.
    ///
    /// # Errors
    /// One of them has ended.
    pub fn usage(&self) -> Result<Usage> {
        plane::usage(&self.pids())
    }

    /// Returns the violations so far: none, unless there is a bug.
    pub fn violated(&self) -> Violated {
        self.world.meter.violated()
    }

    /// Returns the number of objects that the first agent holds.
    pub fn objects(&self) -> usize {
        self.agents.first().map_or(0, |agent| agent.held().len())
    }

    fn pids(&self) -> Vec<u32> {
        self.planes.iter().flatten().map(|plane| plane.id()).collect()
    }

    fn publish(&mut self) -> Result<()> {
        self.world.meter.publishes();
        block_in_place(|| self.input.change())
    }

    /// Waits until all agents that read are up to date at some replica.
    async fn all_attend(&self) -> Result<()> {
        let reading = self.agents.len() - usize::try_from(*self.world.stalled.borrow())?;
        let attend = || self.world.meter.attending() >= reading;
        until(attend, "all agents are up to date").await
    }

    /// Waits until every agent that reads holds the last change of every Service.
    async fn all_complete(&self) -> Result<()> {
        let begun = Instant::now();
        let stalled = usize::try_from(*self.world.stalled.borrow())?;
        for agent in self.agents.iter().skip(stalled) {
            while !self.is_complete(agent) {
                ensure!(begun.elapsed() < DEADLINE, "an agent lacks a change");
                sleep(20 * LOOK).await;
            }
        }
        Ok(())
    }

    /// Returns whether an agent holds the last change of every Service.
    fn is_complete(&self, agent: &Agent) -> bool {
        let tables = self.world.catalog.tables();
        let held = agent.held();
        let stamps = (0..held.keys()).map(|key| held.stamp(&tables, key));
        let oldest = self.input.last() - self.input.changing();
        let current = stamps.filter(|stamp| *stamp > oldest).count();
        u64::try_from(current).is_ok_and(|current| current == self.input.changing())
    }
}

/// Waits for a condition.
async fn until(mut holds: impl FnMut() -> bool, what: &str) -> Result<()> {
    let wait = async {
        while !holds() {
            sleep(LOOK).await;
        }
    };
    let waited = tokio::time::timeout(DEADLINE, wait).await;
    waited.with_context(|| format!("not so within {} s: {what}", DEADLINE.as_secs()))
}
