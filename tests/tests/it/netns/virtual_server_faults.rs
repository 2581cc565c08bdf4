//! Mode ipvs when something goes wrong: others flush servers, sets, addresses and rules, or remove
//! the device; the agent is killed in the midst of its work.

use std::slice;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use kplane_dataplane::backend::Verification;
use kplane_dataplane::backend::ipvs::OperationBudget;
use kplane_model::{Family, IpvsScheduler, Protocol};
use kplane_tests::netns::NetNs;
use kplane_tests::vm;
use kplane_tests::wait::{DEADLINE, eventually};

use crate::netns::churn::Loads;
use crate::netns::tampering::{Tampering, only, tamperings};
use kplane_tests::support::cluster::Cluster;
use kplane_tests::support::ipvs::{everything, run, servers};
use kplane_tests::support::objects::{load_balancer, with_pods};
use kplane_tests::support::{At, Client, Seen, Setup, Svc, World, ask, ep, hit, svc, tcp_service};

fn service() -> Svc {
    tcp_service().everywhere()
}

/// Each is found at the next look; then everything is as it was, and is served.
pub(crate) fn what_others_do_is_found_and_repaired() -> Result<()> {
    let services = [service()];
    let mut world = World::serving(Setup::PodRanges, &services)?;
    let node = world.node(1)?.clone();
    world
        .first()?
        .ensure_equal()
        .with_context(|| format!("{:#?}", servers(&node)))?;
    let before = everything(&node)?;
    for Tampering {
        family, commands, ..
    } in tamperings("ipvs")?
    {
        let what = commands.join("; ");
        for command in commands {
            run(&node, command).with_context(|| what.clone())?;
        }
        ensure!(everything(&node)? != before, "{what} changes nothing");
        let first = world.first()?;
        let seen = first.verify(family).with_context(|| what.clone())?;
        let drifted = matches!(seen, Verification::Drifted(_));
        ensure!(drifted, "{what}: {seen:?}");
        // Some of it is of both families, which look for themselves.
        for family in Family::ALL {
            first.verify(family).with_context(|| what.clone())?;
        }
        let done = first.replace(&services).with_context(|| what.clone())?;
        ensure!(done.failures.is_empty(), "{what}: {done:?}");
        first.ensure_equal().with_context(|| what.clone())?;
        let after = everything(&node)?;
        let (lacking, new) = (only(&before, &after), only(&after, &before));
        ensure!(
            lacking.is_empty() && new.is_empty(),
            "{what}: lacks {lacking:#?}, has {new:#?}"
        );
        for at in [At::ClusterIp, At::NodePort] {
            let to = services[0].address(at, family, 1);
            hit(&world.net, Client::Outside, Protocol::Tcp, to)?;
        }
    }
    Ok(())
}

/// By the engine, without anything else happening.
pub(crate) fn what_others_do_is_repaired_by_itself() -> Result<()> {
    let world = World::without_agents()?;
    let mut cluster = Cluster::open(&world, Setup::PodRanges)?;
    cluster.apply(&with_pods(load_balancer(1), &["a"]))?;
    let node = world.node(1)?.clone();
    let intact = everything(&node)?;
    for command in [
        "ipvsadm -C",
        "ipset flush KUBE-CLUSTER-IP",
        "busybox ip addr del 10.96.0.1/32 dev kube-ipvs0",
        "iptables-nft -t nat -F",
    ] {
        run(&node, command)?;
        let start = Instant::now();
        eventually(DEADLINE, command, || match everything(&node) {
            Ok(now) if now == intact => Ok(()),
            Ok(now) => Err(format!("{} lines, not {}", now.len(), intact.len())),
            Err(error) => Err(error.to_string()),
        })?;
        println!(
            "{command}: repaired after {:.1} s",
            start.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

/// A new agent adopts all of it; what changed meanwhile is changed, and nothing else.
pub(crate) fn a_restart_adopts_everything_and_writes_only_what_changed() -> Result<()> {
    let others: Vec<Svc> =
        (2..12).map(|n| svc(n).everywhere().endpoints([ep("a"), ep("c")])).collect();
    let all = [others.as_slice(), &[service()]].concat();
    let mut world = World::serving(Setup::PodRanges, &all)?;
    let node = world.node(1)?.clone();
    let before = everything(&node)?;
    let loads = Loads::start(
        &world,
        &service(),
        &[(Client::PodHere, At::ClusterIp, Family::V4)],
    )?;
    let first = world.first()?;
    first.restart()?;
    let done = first.replace(&all)?;
    let after = everything(&node)?;
    let lacking: Vec<_> = before.iter().filter(|line| !after.contains(line)).collect();
    let new: Vec<_> = after.iter().filter(|line| !before.contains(line)).collect();
    ensure!(
        lacking.is_empty() && new.is_empty(),
        "lacks {lacking:#?}, has {new:#?}"
    );
    ensure!(done.operations == 0, "{done:?}");

    first.restart()?;
    let fewer = [
        &others[1..],
        slice::from_ref(&service().endpoints([ep("b")])),
    ]
    .concat();
    let done = first.replace(&fewer)?;
    ensure!(done.failures.is_empty(), "{done:?}");
    first.ensure_equal()?;
    let gone = servers(&node)?.iter().any(|line| line.contains("10.96.0.2:"));
    ensure!(!gone, "a Service deleted meanwhile is served");
    loads.progress(3)?;
    loads.none_lost()
}

/// Points of a change at which the agent stops; `KPLANE_VM_ALL=1` takes each.
const POINTS: usize = 3;

/// The agent stops for good in the midst of a change, between any two of its operations: who was and
/// will be served is at that moment, and a new agent brings everything to what it would have been.
pub(crate) fn every_crash_point_serves_and_is_recovered_from() -> Result<()> {
    let web = || service().only(Protocol::Tcp);
    let other = svc(2).everywhere().only(Protocol::Tcp).endpoints([ep("b")]);
    let changes = [
        ("added", vec![web()], vec![web(), other.clone()]),
        (
            "endpoints replaced",
            vec![web().endpoints([ep("a")])],
            vec![web().endpoints([ep("c")])],
        ),
        (
            "policy changed",
            vec![web()],
            vec![web().external_local().sticky(60)],
        ),
        ("removed", vec![web(), other], vec![web()]),
    ];
    let mut world = World::serving(Setup::PodRanges, &changes[0].1)?;
    for (what, before, after) in changes {
        crash_points(&mut world, &before, &after).context(what)?;
    }
    Ok(())
}

/// Plays a change to its end, and then up to some of its points.
fn crash_points(world: &mut World, before: &[Svc], after: &[Svc]) -> Result<()> {
    let budget = OperationBudget::new(usize::MAX);
    world.first()?.restart_stopping(&budget)?;
    world.first()?.replace(before)?;
    let enough = budget.left();
    world.first()?.exchange(before, after)?;
    let operations = enough - budget.left();
    world.first()?.ensure_equal()?;
    let wanted = settled(world.node(1)?)?;
    ensure!(operations > 2, "{operations} operations");
    let all = operations - 1;
    let points = if vm::runs_all() { all } else { POINTS };
    for point in 1..=points {
        let done = point * operations / (points + 1);
        let at = || format!("after {done} of {operations} operations");
        world.first()?.replace(before)?;
        budget.set(done);
        let stopped = world.first()?.exchange(before, after);
        ensure!(stopped.is_err() && budget.left() == 0, "{}", at());
        for (client, address, family) in EVERYWHERE {
            let to = after[0].address(address, family, client.node());
            let seen = ask(&world.net, client, Protocol::Tcp, to)?;
            let hit = matches!(seen, Seen::Hit { .. });
            ensure!(hit, "{}: {client:?} to {address:?} {to}: {seen}", at());
        }
        budget.set(usize::MAX);
        world.first()?.restart_stopping(&budget)?;
        world.first()?.replace(after).with_context(at)?;
        world.first()?.ensure_equal().with_context(at)?;
        let found = settled(world.node(1)?)?;
        let lacks: Vec<_> = wanted.iter().filter(|line| !found.contains(line)).collect();
        let has: Vec<_> = found.iter().filter(|line| !wanted.contains(line)).collect();
        ensure!(
            lacks.is_empty() && has.is_empty(),
            "{}: lacks {lacks:#?}, has {has:#?}",
            at()
        );
    }
    Ok(())
}

/// Who asks in the midst of a change.
const EVERYWHERE: [(Client, At, Family); 6] = [
    (Client::PodHere, At::ClusterIp, Family::V4),
    (Client::PodHere, At::ClusterIp, Family::V6),
    (Client::Outside, At::NodePort, Family::V4),
    (Client::Outside, At::LoadBalancer, Family::V4),
    (Client::Outside, At::LoadBalancer, Family::V6),
    (Client::Node, At::ClusterIp, Family::V4),
];

/// Everything but endpoints that wait for the end of their connections.
fn settled(node: &NetNs) -> Result<Vec<String>> {
    let mut all = everything(node)?;
    all.retain(|line| !line.ends_with(" -w 0"));
    Ok(all)
}

/// A scheduler that no other test asks for, and what keeps the kernel from loading it.
const RARE: &str = "fo";
const FORBIDDEN: &str = "/etc/modprobe.d/kplane-test.conf";

/// It is named with its module: at the start when the node asks for it, at the Service that does, which
/// has the node's until it is there.
pub(crate) fn a_scheduler_that_is_missing_is_named_with_its_module() -> Result<()> {
    std::fs::write(FORBIDDEN, format!("install ip_vs_{RARE} /bin/false\n"))?;
    let mut world = World::serving(Setup::PodRanges, &[service()])?;
    let node = world.node(1)?.clone();
    let scheduler = || -> Result<String> {
        let lines = servers(&node)?;
        let line = lines
            .iter()
            .find(|line| line.starts_with("-A -t 10.96.0.1:80 "))
            .context("no virtual server")?;
        Ok(line.split(' ').nth(4).unwrap_or_default().to_owned())
    };
    let first = world.first()?;
    first.backend_settings.ipvs.scheduler = IpvsScheduler::parse(RARE).context(RARE)?;
    let error = first.restart().err().context("an agent that cannot work")?;
    let error = format!("{error:#}");
    ensure!(error.contains("load the kernel module ip_vs_fo"), "{error}");

    first.backend_settings.ipvs.scheduler = IpvsScheduler::ROUND_ROBIN;
    first.restart()?;
    first.replace(&[service()])?;
    let mut asks = service();
    asks.ipvs_scheduler = IpvsScheduler::parse(RARE);
    let done = first.update(slice::from_ref(&asks))?;
    let failures = format!("{:?}", done.failures);
    ensure!(
        failures.contains("ip_vs_fo, or choose another; rr is used"),
        "{failures}"
    );
    ensure!(scheduler()? == "rr", "{}", scheduler()?);
    first.ensure_equal()?;

    std::fs::remove_file(FORBIDDEN)?;
    first.ensure_equal().context("nothing is loaded for it")?;
    run(&node, "modprobe ip_vs_fo")?;
    let seen = first.verify(Family::V4)?;
    ensure!(matches!(seen, Verification::Outdated(_)), "{seen:?}");
    let done = first.replace(&[asks])?;
    ensure!(done.failures.is_empty(), "{done:?}");
    ensure!(scheduler()? == RARE, "{}", scheduler()?);
    first.ensure_equal()
}
