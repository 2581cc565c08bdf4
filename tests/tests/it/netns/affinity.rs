//! Session affinity (A11).

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::slice;

use anyhow::{Context as _, Result, bail, ensure};
use kplane_dataplane::backend::Kind;
use kplane_model::{Family, Protocol};
use kplane_tests::netns::NetNs;
use kplane_tests::privilege::need_tools;
use kplane_tests::vm;
use kplane_tests::wait::{DEADLINE, eventually};

use crate::netns::churn::Loads;
use kplane_tests::support::nft::{load, need_loading, objects, run};
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{At, Client, Ep, Net, Setup, Svc, World, ep, hit, svc};

/// Connections that would hardly all reach one of three endpoints by chance: 3^-11.
const CONNECTIONS: usize = 12;
const LONG: u32 = 10_800;

fn all() -> [Ep; 3] {
    ["a", "b", "c"].map(ep)
}

/// Where one connection ends.
fn endpoint(net: &Net, client: Client, protocol: Protocol, to: SocketAddr) -> Result<SocketAddr> {
    Ok(hit(net, client, protocol, to)?.0)
}

/// Where a number of connections end.
fn endpoints(
    net: &Net,
    client: Client,
    protocol: Protocol,
    to: SocketAddr,
) -> Result<BTreeSet<SocketAddr>> {
    let once = |_| endpoint(net, client, protocol, to);
    (0..CONNECTIONS).map(once).collect()
}

/// The one endpoint that a client gets at all these addresses.
fn home(
    net: &Net,
    client: Client,
    protocol: Protocol,
    to: impl IntoIterator<Item = SocketAddr>,
) -> Result<SocketAddr> {
    let mut seen = BTreeSet::new();
    for to in to {
        seen.append(&mut endpoints(net, client, protocol, to)?);
    }
    ensure!(seen.len() == 1, "{client:?}, {protocol}: {seen:?}");
    seen.pop_first().context("no address to ask")
}

/// Clients whose packets node-1 handles, from one address whatever they ask. (The node's own SCTP
/// packets are crafted and take the address that fits.)
fn clients(protocol: Protocol) -> &'static [Client] {
    match protocol {
        Protocol::Sctp => &[Client::Outside, Client::PodHere, Client::Endpoint],
        Protocol::Tcp | Protocol::Udp => &[
            Client::Outside,
            Client::PodHere,
            Client::Endpoint,
            Client::Node,
        ],
    }
}

fn addresses(service: &Svc, family: Family) -> [SocketAddr; 4] {
    At::ALL.map(|at| service.address(at, family, 1))
}

pub(crate) fn a11_a_client_stays_at_its_endpoint_at_all_addresses() -> Result<()> {
    let service = svc(1).everywhere().sticky(LONG).endpoints(all());
    let world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    for (family, protocol) in service.variants() {
        for client in clients(protocol) {
            home(&world.net, *client, protocol, addresses(&service, family))?;
        }
    }
    Ok(())
}

/// A choice belongs to one ServicePort and one client.
pub(crate) fn a11_protocols_and_clients_choose_apart() -> Result<()> {
    let services: Vec<Svc> =
        (1..12).map(|number| svc(number).sticky(LONG).endpoints(all())).collect();
    let world = World::serving(Setup::PodRanges, &services)?;
    for family in Family::ALL {
        let mut chosen = BTreeSet::new();
        for service in &services {
            let to = service.address(At::ClusterIp, family, 1);
            let home = |client, protocol| home(&world.net, client, protocol, [to]);
            chosen.insert([
                home(Client::Outside, Protocol::Tcp)?,
                home(Client::Outside, Protocol::Udp)?,
                home(Client::PodHere, Protocol::Tcp)?,
            ]);
        }
        let differ = |a: usize, b: usize| chosen.iter().any(|homes| homes[a] != homes[b]);
        ensure!(differ(0, 1), "TCP and UDP always agree: {chosen:?}");
        ensure!(differ(0, 2), "two clients always agree: {chosen:?}");
    }
    Ok(())
}

/// What a node's table remembers: milliseconds that each client has left, by family.
fn remaining(ns: &NetNs, family: Family) -> Result<Vec<u64>> {
    let objects = objects(ns, family)?;
    objects
        .iter()
        .filter_map(|object| object.get("map"))
        .filter(|map| map["name"].as_str().is_some_and(|n| n.starts_with("affinity-")))
        .filter_map(|map| map["elem"].as_array())
        .flatten()
        .map(|element| {
            let element = element[0]["elem"]["expires"].as_u64();
            element.with_context(|| format!("no time in {objects:?}"))
        })
        .collect()
}

/// Time runs out, and each new connection gives all of it back. Nothing is timed here: the kernel
/// is asked what it is going to do, and has done.
pub(crate) fn a11_a_client_is_forgotten_when_its_time_is_over_and_use_prolongs_it() -> Result<()> {
    const SECONDS: u32 = 3;
    need_tools(&["nft"])?;
    let service = svc(1).only(Protocol::Udp).sticky(SECONDS).endpoints(all());
    let world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let node = world.node(1)?;
    for family in Family::ALL {
        let to = service.address(At::ClusterIp, family, 1);
        let ask = || endpoint(&world.net, Client::Outside, Protocol::Udp, to);
        let first = ask()?;
        eventually(DEADLINE, "time runs", || {
            match &remaining(node, family)?[..] {
                // nft 1.0.6 prints whole seconds.
                [left, ..] if *left < u64::from(SECONDS) => Ok(()),
                left => bail!("{left:?} left"),
            }
        })?;
        ensure!(ask()? == first, "{family}: another endpoint in time");
        eventually(DEADLINE, "the client is forgotten", || {
            let left = remaining(node, family)?;
            ensure!(left.is_empty(), "{left:?} left");
            Ok(())
        })?;
        ask()?;
    }
    Ok(())
}

pub(crate) fn a11_choices_survive_other_changes_and_a_restart() -> Result<()> {
    let service = svc(1).everywhere().sticky(LONG).endpoints(all());
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let homes = |world: &World| -> Result<Vec<SocketAddr>> {
        let mut homes = Vec::new();
        for (family, protocol) in service.variants() {
            for client in clients(protocol) {
                let to = addresses(&service, family);
                homes.push(home(&world.net, *client, protocol, to)?);
            }
        }
        Ok(homes)
    };
    let before = homes(&world)?;
    let more = (9001..9004).map(|port| ep("a").port(port));
    world.update(&[svc(2).everywhere().sticky(60).endpoints(all())])?;
    world.update(&[service.clone().endpoints(all().into_iter().chain(more))])?;
    ensure!(homes(&world)? == before, "other endpoints came");
    world.update(&[service.clone().sticky(90)])?;
    ensure!(homes(&world)? == before, "the timeout changed");
    world.remove(&[svc(2).everywhere()])?;
    ensure!(homes(&world)? == before, "another Service went");
    let service = service.clone().sticky(90);
    let first = world.first()?;
    first.restart()?;
    let done = first.replace(slice::from_ref(&service))?;
    ensure!(done.operations == 0, "{done:?}");
    first.ensure_equal()?;
    ensure!(homes(&world)? == before, "the agent was restarted");
    Ok(())
}

/// In TCP: a UDP client that happens to use a port again would go on in its old flow (F1).
pub(crate) fn a11_an_endpoint_that_goes_lets_its_clients_go() -> Result<()> {
    let service = svc(1).everywhere().only(Protocol::Tcp).sticky(LONG).endpoints(all());
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let first = |family, protocol| {
        [
            service.address(At::ClusterIp, family, 1),
            service.address(At::NodePort, family, 1),
        ]
        .map(|to| (protocol, to))
    };
    for gone in ["a", "b", "c", "a", "b", "c"] {
        let rest: Vec<Ep> =
            ["a", "b", "c"].into_iter().filter(|name| *name != gone).map(ep).collect();
        world.update(&[service.clone().endpoints(rest)])?;
        for (family, protocol) in service.variants() {
            let gone = ep(gone).address(family);
            for client in [Client::Outside, Client::PodHere] {
                let to = first(family, protocol).map(|(_, to)| to);
                // Each virtual server remembers for itself (D7).
                let together = match UnderTest::current()?.kind() {
                    Kind::Ipvs => 1,
                    _ => to.len(),
                };
                for to in to.chunks(together) {
                    let home = home(&world.net, client, protocol, to.iter().copied())?;
                    ensure!(home != gone, "{client:?} {protocol}: still at {gone}");
                }
            }
        }
    }
    // None is left and one comes back; the agent was away.
    world.update(&[service.clone().endpoints([])])?;
    world.update(&[service.clone().endpoints([ep("b")])])?;
    let agent = world.first()?;
    agent.restart()?;
    agent.replace(&[service.clone().endpoints([ep("a")])])?;
    agent.ensure_equal()?;
    for (family, protocol) in service.variants() {
        let to = addresses(&service, family);
        let home = home(&world.net, Client::Outside, protocol, to)?;
        ensure!(home == ep("a").address(family), "{home}");
    }
    Ok(())
}

/// Outside is kept among the endpoints of the node, pods and the node among all.
pub(crate) fn a11_a16_a_local_policy_remembers_among_local_endpoints() -> Result<()> {
    let services: Vec<Svc> = (1..21)
        .map(|number| {
            let service = svc(number).everywhere().external_local().sticky(LONG);
            service.only(Protocol::Udp).endpoints(all())
        })
        .collect();
    let world = World::serving(Setup::PodRanges, &services)?;
    for family in Family::ALL {
        let mut homes = [BTreeSet::new(), BTreeSet::new(), BTreeSet::new()];
        for service in &services {
            let external = [At::ExternalIp, At::LoadBalancer, At::NodePort]
                .map(|at| service.address(at, family, 1));
            let cluster_ip = service.address(At::ClusterIp, family, 1);
            let home = |client, to: &[SocketAddr]| {
                home(&world.net, client, Protocol::Udp, to.iter().copied())
            };
            homes[0].insert(home(Client::Outside, &external)?);
            homes[1].insert(home(
                Client::PodHere,
                &[&external[..], &[cluster_ip]].concat(),
            )?);
            homes[2].insert(home(
                Client::Node,
                &[&external[..], &[cluster_ip]].concat(),
            )?);
        }
        let remote = ep("c").address(family);
        let [outside, pod, node] = &homes;
        let local = outside.len() == 2 && !outside.contains(&remote);
        ensure!(local, "outside: {outside:?}");
        let all = pod.contains(&remote) || node.contains(&remote);
        ensure!(all, "pod: {pod:?}, node: {node:?}");
    }
    Ok(())
}

/// The destination that a packet had decides what is remembered, not its port alone.
pub(crate) fn a11_a_node_port_and_another_services_port_of_the_same_number_are_kept_apart()
-> Result<()> {
    let sticky = svc(1).everywhere().sticky(LONG).endpoints([ep("a"), ep("b")]);
    let other = svc(2).everywhere().on_port(sticky.node_port()).endpoints([ep("c")]);
    let world = World::serving(Setup::PodRanges, &[sticky.clone(), other.clone()])?;
    for (family, protocol) in sticky.variants() {
        let ask = |to| endpoint(&world.net, Client::Outside, protocol, to);
        for at in [At::ClusterIp, At::ExternalIp, At::LoadBalancer] {
            let there = ask(other.address(at, family, 1))?;
            ensure!(there == ep("c").address(family), "{there}");
        }
        let to = addresses(&sticky, family);
        let home = home(&world.net, Client::Outside, protocol, to)?;
        ensure!(home != ep("c").address(family), "{protocol}: {home}");
    }
    Ok(())
}

pub(crate) fn a11_affinity_comes_and_goes_without_a_failed_connection() -> Result<()> {
    let plain = svc(1).everywhere().endpoints(all());
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&plain))?;
    let cases = [
        (Client::Outside, At::ClusterIp, Family::V4),
        (Client::Outside, At::NodePort, Family::V6),
    ];
    let loads = Loads::start(&world, &plain, &cases)?;
    let rounds = if vm::is_inside() { 4 } else { 20 };
    for round in 0..rounds {
        let sticky = plain.clone().sticky(60 + round);
        for service in [
            sticky.clone(),
            sticky.clone().endpoints([ep("b")]),
            sticky.clone().external_local(),
            sticky.internal_local(),
            plain.clone(),
        ] {
            world.update(&[service])?;
        }
    }
    world.first()?.ensure_equal()?;
    loads.progress(2)?;
    loads.none_lost()
}

/// A machine may save our table while clients are remembered, and boot with it.
pub(crate) fn a11_what_is_remembered_is_printed_and_loads_again() -> Result<()> {
    need_loading()?;
    let service = svc(1).everywhere().external_local().sticky(LONG).endpoints(all());
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let homes = |world: &World| -> Result<Vec<SocketAddr>> {
        service
            .variants()
            .map(|(family, protocol)| {
                let to = service.address(At::NodePort, family, 1);
                home(&world.net, Client::Outside, protocol, [to])
            })
            .collect()
    };
    let before = homes(&world)?;
    let node = world.node(1)?.clone();
    let text = run(&node, &["list", "ruleset"])?;
    ensure!(text.contains("expires"), "nobody is remembered:\n{text}");
    run(&node, &["flush", "ruleset"])?;
    load(&node, &text)?;
    ensure!(homes(&world)? == before, "as loaded");
    let first = world.first()?;
    first.restart()?;
    first.replace(slice::from_ref(&service))?;
    first.ensure_equal()
}
