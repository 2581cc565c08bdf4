//! Replicas of the control plane are replaced one after the other while endpoints change all the time: no connection
//! fails, and nothing is sent twice.

use std::net::IpAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use kp_nodeagent::report::Report;
use kplane_tests::client::Probe;
use kplane_tests::load::{Load, Pace};
use kplane_tests::netns::NetNs;
use kplane_tests::wait::{DEADLINE, eventually};

use crate::netns::whole::{
    CONTROL, CONTROL_PORT, ControlPlane, NodeAgent, connected, numbered, place, write,
};
use kplane_tests::support::{Client, World, node_name, pod_ips};

const REPLICAS: u16 = 3;
/// How often each replica is replaced.
const ROUNDS: usize = 2;
const SERVICES: u64 = 12;
/// Time between two changes.
const BETWEEN: Duration = Duration::from_millis(25);
/// Longest time that a replica takes for its farewell.
const DRAIN: Duration = Duration::from_secs(5);

/// Starts a replica.
fn start(control: &NetNs, folder: &Path, replica: u16) -> Result<ControlPlane> {
    // A program that another test is starting may hold the port of the one before until its exec.
    eventually(DEADLINE, "a replica starts", || {
        ControlPlane::start_with(control, folder, |config| {
            config.agent_listen = Some(([0, 0, 0, 0], CONTROL_PORT + replica).into());
        })
    })
}

/// Gives a Service other endpoints, in one step.
fn change(folder: &Path, round: u64) -> Result<()> {
    let [one, other] = [1, 2].map(|number| pod_ips(1, number)[0]);
    let pods: &[IpAddr] = match (round / SERVICES + round) % 3 {
        0 => &[one],
        1 => &[one, other],
        _ => &[other],
    };
    let number = round % SERVICES;
    write(folder, &format!("s{number}"), &numbered(number, pods))
}

/// Changes Services until it is told to stop; returns the number of changes.
fn churn(folder: &Path, stop: &AtomicBool) -> Result<u64> {
    for round in SERVICES.. {
        if stop.load(Ordering::Relaxed) {
            return Ok(round - SERVICES);
        }
        change(folder, round)?;
        thread::sleep(BETWEEN);
    }
    Ok(0)
}

/// Wants the agent to hold what a replica has now, in its kernel.
fn follows(agent: &NodeAgent, planes: &[ControlPlane]) -> Result<()> {
    let node = node_name(1);
    eventually(DEADLINE, "the agent follows", || {
        let report = agent.report();
        let digest = report.resume.map(|resume| resume.digest);
        let newest = planes.iter().map(|plane| plane.hub.store().digest(&node));
        let same = newest.into_iter().all(|newest| digest == Some(newest));
        if same && report.applied == report.held {
            Ok(())
        } else {
            Err(format!("{report:?}"))
        }
    })
}

pub(crate) fn replicas_are_replaced_under_changes_and_no_connection_fails() -> Result<()> {
    let (folder, cache) = (tempfile::tempdir()?, tempfile::tempdir()?);
    (0..SERVICES).try_for_each(|round| change(folder.path(), round))?;
    let world = World::without_agents()?;
    let control = world.topology.host("control")?.ns().clone();
    let client = world.net.ns(Client::Outside)?;
    let places = (0..REPLICAS).map(|replica| format!("{}:{}", CONTROL[0], CONTROL_PORT + replica));
    let config = connected(1, cache.path(), places)?;
    let start = |replica| start(&control, folder.path(), replica);
    let mut planes = (0..REPLICAS).map(start).collect::<Result<Vec<_>>>()?;
    let agent = NodeAgent::start(world.node(1)?, &config)?;
    follows(&agent, &planes)?;
    let load = Load::start(client, Probe::tcp(place(3)), Pace::default())?;
    let stop = AtomicBool::new(false);
    let changes = thread::scope(|scope| {
        let churn = scope.spawn(|| churn(folder.path(), &stop));
        let rolled = (0..ROUNDS).try_for_each(|_| roll(&mut planes, &agent, &start));
        stop.store(true, Ordering::Relaxed);
        let changes = churn.join().map_err(|_| anyhow!("it panicked"))??;
        rolled.map(|()| changes)
    })?;
    follows(&agent, &planes)?;
    load.unharmed()?;
    let report = agent.report();
    ensure!(
        changes > 20 && report.snapshots == 1,
        "{changes}: {report:?}"
    );
    agent.stop()
}

/// Replaces all replicas, one after the other; each begins again before the next one ends.
fn roll(
    planes: &mut Vec<ControlPlane>,
    agent: &NodeAgent,
    start: &dyn Fn(u16) -> Result<ControlPlane>,
) -> Result<()> {
    for replica in 0..REPLICAS {
        let before = agent.report().held;
        planes.remove(0).end(DRAIN);
        planes.push(start(replica)?);
        let newest = planes.iter().map(|plane| plane.hub.store().epoch());
        let epochs: Vec<_> = newest.collect();
        // Changes arrive again, from a replica that is there.
        eventually(DEADLINE, "the agent has a stream", || {
            let Report { held, applied, .. } = agent.report();
            let there = held.is_some_and(|held| epochs.contains(&held.epoch));
            if there && held != before && applied.is_some() {
                Ok(())
            } else {
                Err(format!("{held:?}"))
            }
        })?;
    }
    Ok(())
}
