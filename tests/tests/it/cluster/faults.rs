//! The API server, its storage and our rights fail and come back, under changes.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use kplane_proto::v1::Confidence;
use kplane_tests::cluster::{Api, objects};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::cluster::support::steady::Steady;
use crate::cluster::support::world::{BINDING, DEADLINE, NODES, grant};
use crate::cluster::support::{World, with_world};

/// Crashes of the API server in a row.
const CRASHES: usize = 3;
/// Between two changes while the server comes and goes.
const PAUSE: Duration = Duration::from_millis(20);

pub(crate) fn nothing_is_lost_when_the_api_server_crashes_under_changes() -> Result<()> {
    with_world(|world| {
        let steady = steady(world)?;
        let (stop, api) = (AtomicBool::new(false), world.api());
        let written = thread::scope(|scope| {
            let writer = scope.spawn(|| write_until(api, &stop));
            let crashed = (0..CRASHES).try_for_each(|_| {
                world.cluster.kill_apiserver()?;
                world.cluster.start_apiserver()
            });
            stop.store(true, Ordering::Relaxed);
            let written = writer.join().map_err(|_| anyhow!("the writer panicked"))?;
            crashed.and(written)
        })?;
        ensure!(written > 5, "only {written} changes");
        world.settle()?;
        steady.stop()
    })
}

pub(crate) fn a_compacted_history_is_no_harm() -> Result<()> {
    with_world(|world| {
        let steady = steady(world)?;
        serve(world.api(), "gone", 60, 2)?;
        world.settle()?;
        // They cannot see what happens, and resume from before the server's memory begins.
        for plane in &world.planes {
            plane.signal(Signal::SIGSTOP)?;
        }
        remove(world.api(), "gone")?;
        serve(world.api(), "new", 61, 3)?;
        world.cluster.compact()?;
        world.cluster.kill_apiserver()?;
        world.cluster.start_apiserver()?;
        for plane in &world.planes {
            plane.signal(Signal::SIGCONT)?;
        }
        world.settle()?;
        steady.stop()
    })
}

pub(crate) fn a_list_that_lacks_many_is_looked_at_twice() -> Result<()> {
    with_world(|world| {
        let steady = steady(world)?;
        many_vanish(world)?;
        world.wait_issue(&["are kept", "kpctl approve"], true)?;
        world.leads(
            "node-1",
            (IpAddr::from([10, 96, 77, 120]), 80),
            &addresses(120, 1),
        )?;
        world.wait_issue(&["are kept"], false)?;
        world.settle()?;
        for plane in &world.planes {
            let status = plane.fleet()?.control_plane.context("no control plane")?;
            ensure!(status.confidence() == Confidence::Confirmed, "{status:?}");
        }
        steady.stop()
    })
}

/// Makes Services and removes many of them while no watch can report that by name. The list that follows lacks them: fewer
/// than a list must lack to be doubted by itself, and more than the cliff guard lets pass.
pub(crate) fn many_vanish(world: &World) -> Result<()> {
    let name = |number: u8| format!("many-{number}");
    for number in 120..144 {
        serve(world.api(), &name(number), number, 1)?;
    }
    world.settle()?;
    for plane in &world.planes {
        plane.signal(Signal::SIGSTOP)?;
    }
    // No watch may tell them by name: theirs ends before, and the next begins too late.
    world.cluster.kill_apiserver()?;
    world.cluster.start_apiserver()?;
    for number in 120..130 {
        remove(world.api(), &name(number))?;
    }
    world.cluster.compact()?;
    world.cluster.kill_apiserver()?;
    world.cluster.start_apiserver()?;
    for plane in &world.planes {
        plane.signal(Signal::SIGCONT)?;
    }
    Ok(())
}

pub(crate) fn rights_taken_away_delete_nothing_and_heal() -> Result<()> {
    with_world(|world| {
        let api = world.api();
        let steady = steady(world)?;
        serve(api, "before", 62, 2)?;
        world.settle()?;
        api.delete("ClusterRoleBinding", BINDING)?;
        // Open watches go on without rights; new ones need them.
        world.cluster.kill_apiserver()?;
        world.cluster.start_apiserver()?;
        world.wait_issue(&["403", "services"], true)?;
        world.wait_issue(&["403", "endpointslices"], true)?;
        remove(api, "before")?;
        serve(api, "meanwhile", 63, 3)?;
        grant(&world.cluster)?;
        world.settle()?;
        world.wait_issue(&["403"], false)?;
        steady.stop()
    })
}

pub(crate) fn an_older_etcd_is_followed_and_resurrects_nothing_else() -> Result<()> {
    with_world(|world| {
        let api = world.api();
        let steady = steady(world)?;
        serve(api, "deleted-later", 64, 2)?;
        serve(api, "changed-later", 65, 2)?;
        world.settle()?;
        let saved = world.cluster.folder().join("saved");
        world.cluster.save(&saved)?;
        remove(api, "deleted-later")?;
        serve(api, "changed-later", 65, 4)?;
        serve(api, "made-later", 66, 2)?;
        world.settle()?;
        world.cluster.restore(&saved)?;
        std::fs::remove_dir_all(&saved).context("the saved state")?;
        ensure!(api.get("Service", "default/made-later")?.is_none());
        // Agents do not go back before their control planes have insisted for a minute, or the versions of the
        // restored server have passed those that the nodes hold.
        world.settle_within(3 * DEADLINE)?;
        for (node, _) in NODES {
            let log = world.logged(node)?;
            ensure!(log.contains("shows an older state of the cluster"), "{log}");
        }
        // Changes after the old state count as well, although their revisions were used before.
        serve(api, "changed-later", 65, 1)?;
        world.settle()?;
        steady.stop()
    })
}

/// A Service that no fault may touch, and who watches that.
fn steady(world: &World) -> Result<Steady> {
    let to = serve(world.api(), "steady", 9, 3)?;
    let endpoints = addresses(9, 3);
    world.leads("node-1", to, &endpoints)?;
    Ok(Steady::watch(world.ns("node-1")?, to, endpoints))
}

/// A Service without a selector and its slice with some endpoints; returns where it is.
pub(crate) fn serve(api: &Api, name: &str, number: u8, endpoints: u8) -> Result<(IpAddr, u16)> {
    let spec = json!({ "clusterIP": format!("10.96.77.{number}") });
    let made = api.apply(&objects::service("default", name, spec))?;
    api.apply(&slice(name, &addresses(number, endpoints)))?;
    let ip = made["spec"]["clusterIP"].as_str().context("no address")?;
    Ok((ip.parse()?, 80))
}

/// The slice of a Service.
pub(crate) fn slice(service: &str, ips: &BTreeSet<IpAddr>) -> Value {
    let endpoints = ips.iter().map(|ip| objects::endpoint(ip, "node-2"));
    let name = format!("{service}-own");
    objects::slice("default", &name, service, endpoints)
}

pub(crate) fn addresses(number: u8, count: u8) -> BTreeSet<IpAddr> {
    (1..=count).map(|n| IpAddr::from([10, 244, number, n])).collect()
}

fn remove(api: &Api, service: &str) -> Result<()> {
    api.delete("Service", &format!("default/{service}"))?;
    api.delete("EndpointSlice", &format!("default/{service}-own"))
}

/// Changes objects all the time; counts the changes that the server took.
fn write_until(api: &Api, stop: &AtomicBool) -> Result<u32> {
    let mut written = 0;
    for round in 0_u32.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let number = u8::try_from(round % 4)? + 1;
        let name = format!("busy-{number}");
        // The server is away now and then.
        let done = match round % 3 {
            0 | 1 => serve(api, &name, 100 + number, u8::try_from(round % 7)?).map(drop),
            _ => remove(api, &name),
        };
        written += u32::from(done.is_ok());
        thread::sleep(PAUSE);
    }
    Ok(written)
}
