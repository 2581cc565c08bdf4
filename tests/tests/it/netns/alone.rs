//! A node that starts while no control plane answers, and what happens when one does.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::Parser as _;
use kp_nodeagent::app;
use kp_nodeagent::config::{Config, Flags, Task};
use kp_nodeagent::report::Report;
use kplane_dataplane::backend::Kind;
use kplane_dataplane::leftovers;
use kplane_desired_state::admission::{Admission, Enforce};
use kplane_tests::client::Probe;
use kplane_tests::wait::eventually;
use tokio::runtime::Runtime;

use crate::netns::emptied;
use crate::netns::own_way::{CONTROL, CONTROL_PORT, plane};
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{Client, SILENCE, TARGET, World, node_name};

const DEADLINE: Duration = Duration::from_secs(30);

/// Services at the start.
const SERVICES: u64 = 3;

/// The packets of a reboot without a control plane, its way back, and changes before and after that.
pub(crate) fn a_reboot_without_a_control_plane_is_served_from_the_cache() -> Result<()> {
    let (folder, cache) = (tempfile::tempdir()?, tempfile::tempdir()?);
    (0..SERVICES).try_for_each(|number| add(folder.path(), number))?;
    let world = World::without_agents()?;
    let control = world.topology.host("control")?.ns().clone();
    let client = world.net.ns(Client::Outside)?;
    let plane = || plane(&control, folder.path(), &Admission::default());
    let config = config(cache.path())?;
    let node = world.node(1)?;
    let served = |number| eventually(DEADLINE, "a packet is served", || to(number)?.reply(client));
    node.run(|| {
        let first = plane()?;
        let agent = Agent::start(&config)?;
        agent.reports(&current(SERVICES, 1))?;
        drop(first);
        agent.stop()?;

        for number in 0..SERVICES {
            served(number)?;
        }
        reboot(config.backend)?;
        let gone = to(0)?.reply(client);
        ensure!(gone.is_err(), "an empty kernel serves {gone:?}");
        let agent = Agent::start(&config)?;
        for number in 0..SERVICES {
            served(number)?;
        }
        agent.reports(&stale)?;

        // Nothing has changed, so the agent needs no snapshot, neither now nor for later changes.
        let second = plane()?;
        agent.reports(&current(SERVICES, 0))?;
        add(folder.path(), SERVICES)?;
        agent.reports(&current(SERVICES + 1, 0))?;
        served(SERVICES)?;
        drop(second);
        agent.stop()?;

        // The kernel holds what the file says, so the agent writes nothing.
        let agent = Agent::start(&config)?;
        agent.reports(&|report: &Report| {
            let operations = report.last_sync.as_ref().map(|sync| sync.operations);
            stale(report) && operations == Some(0)
        })?;
        // What has changed meanwhile arrives, and nothing else.
        fs::remove_file(file(folder.path(), 0))?;
        add(folder.path(), SERVICES + 1)?;
        let _third = plane()?;
        agent.reports(&current(SERVICES + 1, 0))?;
        served(SERVICES + 1)?;
        agent.stop()
    })
}

/// NetworkPolicies hold after a reboot without a control plane, too, and are gone after a clean-up.
pub(crate) fn policies_hold_after_a_reboot_without_a_control_plane() -> Result<()> {
    let (folder, cache) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let node = node_name(1);
    fs::write(
        folder.path().join("policies.yaml"),
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: a, namespace: shop}}, spec: {{nodeName: {node}}}, \
              status: {{podIP: 10.244.1.1}}}}\n---\n\
             {{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: deny, namespace: shop}}, \
              spec: {{podSelector: {{}}}}}}\n"
        ),
    )?;
    add(folder.path(), 0)?;
    let world = World::without_agents()?;
    let control = world.topology.host("control")?.ns().clone();
    let (here, to) = (
        world.net.pod("here")?,
        SocketAddr::from(([10, 244, 1, 1], TARGET)),
    );
    let gets_through = || Probe::tcp(to).timeout(SILENCE).reply(here).is_ok();
    let admission = Admission {
        network_policies: Some(Enforce::On),
        ..Admission::default()
    };
    let config = config(cache.path())?;
    world.node(1)?.run(|| {
        ensure!(gets_through(), "nothing is programmed yet");
        let plane = plane(&control, folder.path(), &admission)?;
        let agent = Agent::start(&config)?;
        agent.reports(&current(1, 1))?;
        ensure!(!gets_through(), "with a control plane");
        drop(plane);
        agent.stop()?;
        ensure!(!gets_through(), "without an agent");

        reboot(config.backend)?;
        ensure!(gets_through(), "after a clean-up");
        let agent = Agent::start(&config)?;
        agent.reports(&stale)?;
        ensure!(!gets_through(), "from the cache file");
        agent.stop()
    })
}

/// Wants a report of an agent that no control plane has answered.
fn stale(report: &Report) -> bool {
    let reported = |report: &Report| {
        let mut reasons = report.failures.iter().map(|failure| &failure.reason);
        reasons.any(|reason| reason.contains("stale since 20"))
    };
    applied(report) && report.stale_since_ms.is_some() && reported(report)
}

/// Wants a report of an agent that is up to date, after so many snapshots.
fn current(services: u64, snapshots: u64) -> impl Fn(&Report) -> bool {
    move |report| {
        let fresh = report.stale_since_ms.is_none() && report.snapshots == snapshots;
        applied(report) && fresh && report.counts.services == services
    }
}

fn applied(report: &Report) -> bool {
    report.held.is_some() && report.applied == report.held
}

/// The machine restarts: nothing is left in its kernel.
fn reboot(kind: Kind) -> Result<()> {
    let problems = leftovers::ours(kind, &Default::default()).remove().problems;
    ensure!(problems.is_empty(), "{problems:?}");
    Ok(())
}

fn to(number: u64) -> Result<Probe> {
    let to: SocketAddr = format!("10.96.7.{number}:80").parse()?;
    Ok(Probe::tcp(to).timeout(Duration::from_millis(500)))
}

fn file(folder: &Path, number: u64) -> std::path::PathBuf {
    folder.join(format!("s{number}.yaml"))
}

/// Adds a Service with a file of its own.
fn add(folder: &Path, number: u64) -> Result<()> {
    Ok(fs::write(file(folder, number), emptied::yaml(number))?)
}

/// An agent in the calling thread's namespace.
pub(crate) struct Agent {
    runtime: Runtime,
    bound: app::Bound,
}

impl Agent {
    pub(crate) fn start(config: &Config) -> Result<Self> {
        let runtime = Runtime::new()?;
        let bound = runtime.block_on(app::build(config.clone()))?;
        Ok(Self { runtime, bound })
    }

    pub(crate) fn report(&self) -> Report {
        self.bound.reports().borrow().clone()
    }

    fn reports(&self, wanted: &dyn Fn(&Report) -> bool) -> Result<()> {
        let reports = self.bound.reports();
        eventually(DEADLINE, "the report", || {
            let report = reports.borrow().clone();
            match wanted(&report) {
                true => Ok(()),
                false => Err(format!("{report:?}")),
            }
        })
    }

    pub(crate) fn stop(self) -> Result<()> {
        self.bound.shutdown_token().cancel();
        self.runtime.block_on(self.bound.wait())?;
        Ok(())
    }
}

fn config(cache: &Path) -> Result<Config> {
    config_with(&format!("http://{}:{CONTROL_PORT}", CONTROL[0]), cache)
}

/// Returns the configuration of an agent that knows these control planes.
pub(crate) fn config_with(planes: &str, cache: &Path) -> Result<Config> {
    let plane = format!("--control-plane={planes}");
    let cache = format!("--cache-dir={}", cache.display());
    let name = format!("--node-name={}", node_name(1));
    agent_config(&["--insecure", &plane, &cache, &name])
}

/// Returns the configuration of an agent with these flags, the backend under test, and neither metrics nor health checks.
pub(crate) fn agent_config(flags: &[&str]) -> Result<Config> {
    let name = "kp-nodeagent";
    let line = [name, "--healthz-bind-address=", "--metrics-bind-address="];
    let flags = Flags::try_parse_from(line.iter().chain(flags))?;
    match flags.check()?.task {
        Task::Run(config) => Ok(Config {
            backend: UnderTest::current()?.kind(),
            ..*config
        }),
        _ => bail!("not an agent"),
    }
}
