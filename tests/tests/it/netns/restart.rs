//! A new process takes over what the kernel holds; another layout is replaced; all of it goes away
//! when asked.

use std::slice;

use anyhow::{Result, ensure};
use kplane_model::{Family, Protocol};
use kplane_tests::client::Probe;
use kplane_tests::load::{Load, Pace};
use kplane_tests::privilege::{need_tools, require_tool};

use crate::netns::addresses::cluster_policies;
use kplane_tests::support::nft::{load, need_loading, nft};
use kplane_tests::support::{At, Client, Setup, Svc, World, cidrs, ep, svc};
use kplane_tests::wait::DEADLINE;

/// One Service of every kind; the first is that of [`cluster_policies`].
pub(crate) fn every_kind() -> Result<Vec<Svc>> {
    let all = ["a", "b", "c"].map(ep);
    Ok(vec![
        cluster_policies().service,
        svc(2).endpoints(all.clone()),
        svc(3).everywhere().external_local().endpoints(all.clone()),
        svc(4).everywhere().external_local().endpoints([ep("c")]),
        svc(5).everywhere().internal_local().endpoints([ep("c")]),
        svc(6).everywhere(),
        svc(7)
            .everywhere()
            .ranges(cidrs(&["172.30.0.0/24", "fd30::/112"])?)
            .endpoints(all.clone()),
        svc(8).everywhere().endpoints((9001..9020).map(|port| ep("a").port(port))),
        svc(9).everywhere().endpoints([ep("a").draining()]),
        svc(10).everywhere().sticky(10_800).endpoints(all.clone()),
        svc(11).everywhere().external_local().sticky(60).endpoints(all),
    ])
}

fn start_load(world: &World, at: At) -> Result<Load> {
    let service = cluster_policies().service;
    let to = service.address(at, Family::V4, 1);
    let client = world.net.ns(Client::Outside)?;
    let pace = Pace {
        threads: 1,
        ..Pace::default()
    };
    Load::start(client, Probe::tcp(to), pace)
}

fn few_lost(load: Load, most: u64) -> Result<()> {
    let report = load.stop();
    ensure!(report.lost() <= most && report.ok() > 0, "{report}");
    Ok(())
}

pub(crate) fn a_restart_adopts_everything_without_an_operation() -> Result<()> {
    let services = every_kind()?;
    let mut world = World::serving(Setup::PodRanges, &services)?;
    let load = start_load(&world, At::ClusterIp)?;
    let to = services[0].address(At::LoadBalancer, Family::V6, 1);
    let mut session = Probe::tcp(to).open(world.net.ns(Client::PodHere)?)?;
    for _ in 0..5 {
        let first = world.first()?;
        first.restart()?;
        let done = first.replace(&services)?;
        ensure!(done.operations == 0, "{done:?}");
        first.ensure_equal()?;
        session.echo(DEADLINE)?;
        load.goes_on(5, DEADLINE)?;
    }
    load.unharmed()?;
    // What was adopted can be changed and deleted.
    let first = world.first()?;
    first.update(&[svc(2).endpoints([ep("a")])])?;
    first.exchange(&services[2..], &[])?;
    first.ensure_equal()?;
    cluster_policies().observe(&world.net)
}

/// While nobody looked, Services came, changed and went.
pub(crate) fn a_restart_repairs_what_changed_meanwhile() -> Result<()> {
    let mut services = every_kind()?;
    let mut world = World::serving(Setup::PodRanges, &services)?;
    let load = start_load(&world, At::NodePort)?;
    services.remove(1);
    services[1] = svc(3).everywhere().endpoints([ep("b")]);
    services.push(svc(20).everywhere().endpoints([ep("a")]));
    let first = world.first()?;
    first.restart()?;
    let done = first.replace(&services)?;
    ensure!(done.operations > 0, "{done:?}");
    first.ensure_equal()?;
    first.restart()?;
    let done = first.replace(&services)?;
    ensure!(done.operations == 0, "{done:?}");
    load.unharmed()?;
    cluster_policies().observe(&world.net)
}

/// A packet that is between two look-ups in the very moment in which a table takes the place of
/// another is found by neither: seen about once in 100 replacements with one connection at a time.
const REPLACEMENT_LOSS: u64 = 2;

/// What makes our table that of another version or of somebody else.
const OTHERS: [&str; 4] = [
    "add rule ip kplane input counter accept\nadd rule ip6 kplane input counter accept",
    "add chain ip kplane newer\nadd chain ip6 kplane newer",
    "add set ip kplane newer { type ipv4_addr; }\nadd set ip6 kplane newer { type ipv6_addr; }",
    "flush chain ip kplane unallocated\nflush chain ip6 kplane unallocated",
];

pub(crate) fn a_table_of_another_layout_is_replaced_under_load() -> Result<()> {
    need_tools(&["nft"])?;
    let services = every_kind()?;
    let mut world = World::serving(Setup::PodRanges, &services)?;
    let node = world.node(1)?.clone();
    let load = start_load(&world, At::ClusterIp)?;
    for change in OTHERS {
        nft(&node, change)?;
        let first = world.first()?;
        first.restart()?;
        let done = first.replace(&services)?;
        ensure!(done.operations > 0, "{change}: {done:?}");
        first.ensure_equal()?;
        load.goes_on(5, DEADLINE)?;
    }
    few_lost(load, REPLACEMENT_LOSS)?;
    cluster_policies().observe(&world.net)
}

/// The same rules under the comment of an older layout: never adopted.
pub(crate) fn a_table_with_another_layouts_number_is_replaced() -> Result<()> {
    need_loading()?;
    let services = every_kind()?;
    let mut world = World::serving(Setup::PodRanges, &services)?;
    let node = world.node(1)?.clone();
    let load_on = start_load(&world, At::ClusterIp)?;
    let text = nft(&node, "list ruleset")?;
    let older = text.replace("nftables layout ", "nftables layout 0");
    ensure!(older != text, "no number to change");
    load(&node, &format!("flush ruleset\n{older}"))?;
    let first = world.first()?;
    first.restart()?;
    let done = first.replace(&services)?;
    ensure!(done.operations > 0, "{done:?}");
    first.ensure_equal()?;
    let now = nft(&node, "list ruleset")?;
    ensure!(!now.contains("nftables layout 0"), "the old number is left");
    few_lost(load_on, REPLACEMENT_LOSS)
}

/// A table as an agent of the release before left it, with one Service of those that [`cluster_policies`] has.
const OLDER: &str = include_str!("layout-4.nft");

/// An older agent replaces our table in one transaction, and we replace the one that it left.
pub(crate) fn an_older_layout_is_replaced_under_load_both_ways() -> Result<()> {
    need_loading()?;
    let services = [cluster_policies().service];
    let mut world = World::serving(Setup::PodRanges, &services)?;
    let node = world.node(1)?.clone();
    let load_on = start_load(&world, At::ClusterIp)?;
    for _ in 0..3 {
        load(&node, &format!("delete table ip kplane\n{OLDER}"))?;
        load_on.goes_on(5, DEADLINE)?;
        let first = world.first()?;
        first.restart()?;
        let done = first.replace(&services)?;
        ensure!(done.operations > 0, "{done:?}");
        first.ensure_equal()?;
        load_on.goes_on(5, DEADLINE)?;
    }
    few_lost(load_on, 3 * REPLACEMENT_LOSS)?;
    cluster_policies().observe(&world.net)
}

pub(crate) fn cleanup_removes_both_tables_and_may_be_repeated() -> Result<()> {
    let services = every_kind()?;
    let mut world = World::serving(Setup::PodRanges, &services)?;
    let node = world.node(1)?.clone();
    let first = world.first()?;
    for _ in 0..2 {
        first.cleanup()?;
        if require_tool("nft")? {
            let left = nft(&node, "list ruleset")?;
            ensure!(left.is_empty(), "{left}");
        }
    }
    first.restart()?;
    first.cleanup()?;
    // Afterwards it can begin again.
    let refused = first.update(slice::from_ref(&services[0]));
    ensure!(
        refused.is_err(),
        "a change that is not complete, on nothing"
    );
    first.replace(&services)?;
    first.ensure_equal()?;
    let mut scenario = cluster_policies();
    scenario.service = scenario.service.only(Protocol::Tcp);
    scenario.observe(&world.net)
}
