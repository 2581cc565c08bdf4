//! A node that starts while no control plane answers, and what happens when one does.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use kp_nodeagent::report::Report;
use kplane_dataplane::backend::Kind;
use kplane_dataplane::leftovers;
use kplane_desired_state::admission::Enforce;
use kplane_tests::client::Probe;
use kplane_tests::cluster::objects;
use kplane_tests::wait::{DEADLINE, eventually};
use serde_json::json;

use crate::netns::whole::{ControlPlane, NodeAgent, applied, numbered, place, usual, write};
use kplane_tests::support::{Client, SILENCE, TARGET, World, pod_ips};

/// Services at the start.
const SERVICES: u8 = 3;

/// The packets of a reboot without a control plane, its way back, and changes before and after that.
pub(crate) fn a_reboot_without_a_control_plane_is_served_from_the_cache() -> Result<()> {
    let (folder, cache) = (tempfile::tempdir()?, tempfile::tempdir()?);
    (0..SERVICES).try_for_each(|number| add(folder.path(), number))?;
    let world = World::without_agents()?;
    let control = world.topology.host("control")?.ns().clone();
    let client = world.net.ns(Client::Outside)?;
    let plane = || ControlPlane::start(&control, folder.path());
    let config = usual(1, cache.path())?;
    let node = world.node(1)?;
    let start = || NodeAgent::start(node, &config);
    let to = |number| Probe::tcp(place(number)).timeout(Duration::from_millis(500));
    let served = |number| eventually(DEADLINE, "a packet is served", || to(number).reply(client));
    let first = plane()?;
    let agent = start()?;
    agent.reports(current(SERVICES, 1))?;
    drop(first);
    agent.stop()?;

    for number in 0..SERVICES {
        served(number)?;
    }
    node.run(|| reboot(config.backend))?;
    let gone = to(0).reply(client);
    ensure!(gone.is_err(), "an empty kernel serves {gone:?}");
    let agent = start()?;
    for number in 0..SERVICES {
        served(number)?;
    }
    agent.reports(stale)?;

    // Nothing has changed, so the agent needs no snapshot, neither now nor for later changes.
    let second = plane()?;
    agent.reports(current(SERVICES, 0))?;
    add(folder.path(), SERVICES)?;
    agent.reports(current(SERVICES + 1, 0))?;
    served(SERVICES)?;
    drop(second);
    agent.stop()?;

    // The kernel holds what the file says, so the agent writes nothing.
    let agent = start()?;
    agent.reports(|report| {
        let operations = report.last_sync.as_ref().map(|sync| sync.operations);
        stale(report) && operations == Some(0)
    })?;
    // What has changed meanwhile arrives, and nothing else.
    fs::remove_file(folder.path().join("s0.yaml"))?;
    add(folder.path(), SERVICES + 1)?;
    let _third = plane()?;
    agent.reports(current(SERVICES + 1, 0))?;
    served(SERVICES + 1)?;
    agent.stop()
}

/// NetworkPolicies hold after a reboot without a control plane, too, and are gone after a clean-up.
pub(crate) fn policies_hold_after_a_reboot_without_a_control_plane() -> Result<()> {
    let (folder, cache) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let mut pod = objects::pod("shop", "a", "a", "node-1");
    pod["status"] = json!({"podIP": "10.244.1.1"});
    let deny = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "deny", "namespace": "shop"}, "spec": {"podSelector": {}},
    });
    write(folder.path(), "policies", &[pod, deny])?;
    add(folder.path(), 0)?;
    let world = World::without_agents()?;
    let control = world.topology.host("control")?.ns().clone();
    let (here, to) = (
        world.net.pod("here")?,
        SocketAddr::from(([10, 244, 1, 1], TARGET)),
    );
    let gets_through = || Probe::tcp(to).timeout(SILENCE).reply(here).is_ok();
    let (node, config) = (world.node(1)?, usual(1, cache.path())?);
    let start = || NodeAgent::start(node, &config);
    ensure!(gets_through(), "nothing is programmed yet");
    let plane = ControlPlane::start_with(&control, folder.path(), |config| {
        config.admission.network_policies = Some(Enforce::On);
    })?;
    let agent = start()?;
    agent.reports(current(1, 1))?;
    ensure!(!gets_through(), "with a control plane");
    drop(plane);
    agent.stop()?;
    ensure!(!gets_through(), "without an agent");

    node.run(|| reboot(config.backend))?;
    ensure!(gets_through(), "after a clean-up");
    let agent = start()?;
    agent.reports(stale)?;
    ensure!(!gets_through(), "from the cache file");
    agent.stop()
}

/// Wants a report of an agent that no control plane has answered.
fn stale(report: &Report) -> bool {
    let reported = |report: &Report| {
        report
            .failures
            .iter()
            .map(|failure| &failure.reason)
            .any(|reason| reason.contains("stale since 20"))
    };
    applied(report) && report.stale_since_ms.is_some() && reported(report)
}

/// Wants a report of an agent that is up to date, after so many snapshots.
fn current(services: u8, snapshots: u64) -> impl Fn(&Report) -> bool {
    move |report| {
        let fresh = report.stale_since_ms.is_none() && report.snapshots == snapshots;
        applied(report) && fresh && report.counts.services == u64::from(services)
    }
}

/// The machine restarts: nothing is left in its kernel.
fn reboot(kind: Kind) -> Result<()> {
    let problems = leftovers::ours(kind, &Default::default()).remove().problems;
    ensure!(problems.is_empty(), "{problems:?}");
    Ok(())
}

/// Adds a Service with a file of its own.
fn add(folder: &Path, number: u8) -> Result<()> {
    write(
        folder,
        &format!("s{number}"),
        &numbered(number, &pod_ips(1, 1)[..1]),
    )
}
