//! Mode iptables when something goes wrong: others flush, the lock is held, a restore is refused or
//! killed (C9-C11).

use std::slice;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kplane_dataplane::backend::{Settings, Verification};
use kplane_model::{Family, Protocol};
use kplane_tests::wait::{DEADLINE, eventually};

use crate::netns::addresses::on_both_nodes;
use crate::netns::churn::Loads;
use crate::netns::tampering::{Tampering, only, tamperings};
use kplane_tests::support::cluster::Cluster;
use kplane_tests::support::nft::nft;
use kplane_tests::support::objects::{load_balancer, with_pods};
use kplane_tests::support::programs::{Apart, list, run};
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{At, Client, Seen, Setup, World, answers, ask, ep, hit, pairs, svc};

/// A chain of a Service's, if there is one.
fn chain(world: &World, family: Family) -> Result<String> {
    let listing = run(world.node(1)?, family, "-save", "-t nat")?;
    let mut names = listing.lines().filter_map(|line| line.strip_prefix(':'));
    let name = names.find(|name| name.starts_with("KUBE-SVC-"));
    let name = name.and_then(|name| name.split(' ').next());
    Ok(name.context("no chain of a Service")?.to_owned())
}

pub(crate) fn what_others_do_to_our_rules_is_found_and_repaired() -> Result<()> {
    let services = [on_both_nodes()];
    let mut world = World::serving(Setup::PodRanges, &services)?;
    let node = world.node(1)?.clone();
    let before = list(&node)?;
    for Tampering {
        what,
        family,
        commands,
    } in tamperings("iptables")?
    {
        let arguments = commands[0].replace("@SVC", &chain(&world, family)?);
        world.first()?.ensure_equal().context(what)?;
        run(&node, family, "", &arguments).context(what)?;
        let first = world.first()?;
        let seen = first.verify(family)?;
        let drifted = matches!(seen, Verification::Drifted(_));
        ensure!(drifted, "{what}: {seen:?}");
        first.replace(&services).context(what)?;
        first.ensure_equal().context(what)?;
        repaired(&world).context(what)?;
        let lacking = only(&before, &list(&node)?);
        ensure!(lacking.is_empty(), "{what}: {lacking:#?}");
    }
    Ok(())
}

fn repaired(world: &World) -> Result<()> {
    let here = Client::ALL.into_iter().filter(|client| client.node() == 1);
    for client in here {
        for (family, at) in pairs(Family::ALL, [At::ClusterIp, At::NodePort]) {
            answers(&world.net, client, on_both_nodes().address(at, family, 1))?;
        }
    }
    Ok(())
}

/// By the engine, without anything else happening.
pub(crate) fn c11_what_others_flush_is_back_within_the_probe_interval() -> Result<()> {
    let world = World::without_agents()?;
    let settings = Setup::PodRanges.backend_settings();
    ensure!(settings.probe_interval == Settings::PROBE_INTERVAL);
    let mut cluster = Cluster::open(&world, Setup::PodRanges)?;
    cluster.apply(&with_pods(load_balancer(1), &["a"]))?;
    let node = world.node(1)?.clone();
    let to = "10.96.0.1:80".parse()?;
    let served = || match ask(&world.net, Client::Outside, Protocol::Tcp, to) {
        Ok(Seen::Hit { .. }) => Ok(()),
        Ok(other) => Err(other.to_string()),
        Err(error) => Err(error.to_string()),
    };
    eventually(DEADLINE, "is served", served)?;
    for arguments in [
        "-F",
        "-t nat -F KUBE-SERVICES",
        "-t nat -F",
        "-t nat -D PREROUTING 1",
    ] {
        let sorted = || -> Result<Vec<String>> {
            let mut lines = list(&node)?;
            lines.sort();
            Ok(lines)
        };
        let intact = sorted()?;
        run(&node, Family::V4, "", arguments)?;
        ensure!(sorted()? != intact, "{arguments} changes nothing");
        let start = Instant::now();
        eventually(DEADLINE, arguments, || match sorted() {
            Ok(now) if now == intact => Ok(()),
            Ok(now) => Err(format!("{} lines, not {}", now.len(), intact.len())),
            Err(error) => Err(error.to_string()),
        })?;
        let took = start.elapsed();
        println!("{arguments}: repaired after {took:?}");
        ensure!(took < Duration::from_secs(5), "{arguments}: {took:?}");
        served().map_err(anyhow::Error::msg).context(arguments)?;
    }
    Ok(())
}

pub(crate) fn c9_a_held_lock_is_waited_for_and_named() -> Result<()> {
    let legacy = UnderTest::current()? == UnderTest::IptablesLegacy;
    Apart::run(|apart| {
        let services = [on_both_nodes()];
        let mut world = World::serving(Setup::PodRanges, &services)?;
        let more = svc(2).everywhere().endpoints([ep("a")]);
        // Not for long: the change waits.
        let lock = apart.lock()?;
        thread::scope(|scope| {
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(1_500));
                drop(lock);
            });
            world.first()?.update(slice::from_ref(&more)).map(drop)
        })?;
        world.first()?.ensure_equal()?;
        // Too long: what the kernel has stays, and the reason is named.
        let lock = apart.lock()?;
        let first = world.first()?;
        let outcome = first.update(&[more.clone().endpoints([ep("b")])]);
        if legacy {
            let error = outcome.err().context("wrote without the lock")?;
            ensure!(format!("{error:#}").contains("xtables.lock"), "{error:#}");
        } else {
            outcome.context("nf_tables has no lock")?;
        }
        repaired(&world)?;
        drop(lock);
        let first = world.first()?;
        first.replace(&[on_both_nodes(), more])?;
        first.ensure_equal()
    })
}

/// Programs that refuse whatever has one Service's address.
pub(crate) fn c10_a_refused_service_port_is_named_and_the_others_are_served() -> Result<()> {
    Apart::run(|apart| {
        let old = [svc(1), svc(2)].map(|svc| svc.everywhere().endpoints([ep("a")]));
        let new = [3, 4, 5].map(|n| svc(n).everywhere().endpoints([ep("b")]));
        let bad = new[1].address(At::ClusterIp, Family::V4, 1).ip();
        for complete in [false, true] {
            let mut world = World::new(Setup::PodRanges)?;
            let first = world.first()?;
            first.replace(&old)?;
            apart.fault(&format!(
                "grep -qF -e '-d {bad}/32 ' $text && {{ echo line 1: RULE_APPEND failed >&2; exit 4; }}\n"
            ))?;
            let done = if complete {
                first.replace(&[&old[..], &new[..]].concat())?
            } else {
                first.update(&new)?
            };
            let names: Vec<&str> = done.failures.iter().map(|f| &*f.key.service.name).collect();
            ensure!(!names.is_empty(), "nothing failed");
            ensure!(names.iter().all(|n| *n == "svc-4"), "{:?}", done.failures);
            let reason = &done.failures[0].reason;
            ensure!(reason.contains("RULE_APPEND failed"), "{reason}");
            first.ensure_equal()?;
            for service in [&old[0], &old[1], &new[0], &new[2]] {
                for at in At::ALL {
                    answers(
                        &world.net,
                        Client::PodHere,
                        service.address(at, Family::V4, 1),
                    )?;
                }
            }
            apart.heal()?;
            let first = world.first()?;
            let done = first.update(&new)?;
            ensure!(done.failures.is_empty(), "{:?}", done.failures);
            answers(
                &world.net,
                Client::PodHere,
                new[1].address(At::NodePort, Family::V4, 1),
            )?;
        }
        Ok(())
    })
}

/// Another's rule jumps to a chain of a Service that goes: the chain stays, empty.
pub(crate) fn chains_that_others_hold_on_to_do_not_stop_anything() -> Result<()> {
    let services = [svc(1), svc(2)].map(|svc| svc.everywhere().endpoints([ep("a")]));
    let mut world = World::serving(Setup::PodRanges, &services[..1])?;
    let node = world.node(1)?.clone();
    let held = chain(&world, Family::V4)?;
    run(&node, Family::V4, "", "-t nat -N MINE")?;
    run(&node, Family::V4, "", &format!("-t nat -A MINE -j {held}"))?;
    let first = world.first()?;
    first.exchange(&services[..1], &services[1..])?;
    first.ensure_equal()?;
    answers(
        &world.net,
        Client::Outside,
        services[1].address(At::NodePort, Family::V4, 1),
    )?;
    let lines = list(&node)?;
    ensure!(
        lines.contains(&format!(":{held} -")),
        "the chain is gone: {lines:#?}"
    );
    ensure!(
        !lines.iter().any(|l| l.starts_with(&format!("-A {held} "))),
        "has rules"
    );
    // It is used again, and goes when nobody needs it any more.
    let first = world.first()?;
    first.update(&services[..1])?;
    first.ensure_equal()?;
    answers(
        &world.net,
        Client::Outside,
        services[0].address(At::NodePort, Family::V4, 1),
    )?;
    run(&node, Family::V4, "", "-t nat -F MINE")?;
    let first = world.first()?;
    first.exchange(&services[..1], &[])?;
    first.ensure_equal()?;
    let lines = list(&node)?;
    ensure!(!lines.contains(&format!(":{held} -")), "the chain is there");
    Ok(())
}

/// SIGKILL: of the program, before, in the middle of and after its work; and of the agent, which
/// ends its text anywhere.
pub(crate) fn a_restore_that_is_killed_anywhere_is_made_up_for() -> Result<()> {
    let service = svc(1).everywhere().only(Protocol::Tcp);
    let with = |pods: &[&str]| service.clone().endpoints(pods.iter().map(|pod| ep(pod)));
    let cut = |percent: u32| {
        format!(
            "head -c $(($(wc -c < $text) * {percent} / 100)) $text | $real \"$@\"; kill -9 $$\n"
        )
    };
    let mut faults = vec![
        "kill -9 $$\n".to_owned(),
        "$real \"$@\" < $text; kill -9 $$\n".to_owned(),
    ];
    faults.extend([10, 30, 50, 70, 90, 97].map(cut));
    Apart::run(|apart| {
        let mut world = World::serving(Setup::PodRanges, &[with(&["a"])])?;
        let loads = Loads::start(
            &world,
            &service,
            &[
                (Client::PodHere, At::ClusterIp, Family::V4),
                (Client::Outside, At::NodePort, Family::V6),
            ],
        )?;
        for (round, fault) in faults.iter().enumerate() {
            let pods: &[&str] = [&["a", "b"][..], &["b", "c"], &["c"], &["a"]][round % 4];
            apart.fault(fault)?;
            let killed = world.first()?.update(&[with(pods), svc(2).everywhere()]);
            ensure!(killed.is_err(), "{fault}: {killed:?}");
            apart.heal()?;
            // A new process knows nothing of it.
            world.first()?.restart()?;
            world.first()?.replace(&[with(pods)])?;
            world.first()?.ensure_equal()?;
            loads.progress(3)?;
        }
        loads.none_lost()?;
        if UnderTest::current()? == UnderTest::IptablesNft {
            nft(world.node(1)?, "flush ruleset")?;
            world.first()?.restart()?;
            world.first()?.replace(&[with(&["a"])])?;
            let to = service.address(At::NodePort, Family::V4, 1);
            hit(&world.net, Client::Outside, Protocol::Tcp, to)?;
        }
        Ok(())
    })
}
