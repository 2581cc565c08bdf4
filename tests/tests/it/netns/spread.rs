//! How connections are spread over endpoints: uniformly, whatever their number (B10).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::slice;

use anyhow::{Result, ensure};
use kplane_model::{Family, Protocol};
use kplane_tests::client;

use kplane_tests::support::{At, Client, Ep, Question, Seen, Setup, Svc, World, ep, svc};

/// The first of the ports on which pods serve as many endpoints.
const FIRST_PORT: u16 = 9000;
/// Connections for each endpoint: enough to tell a double share from a single one.
const EACH: usize = 40;
/// Fewest connections.
const LEAST: usize = 120;

pub(crate) fn b10_connections_to_cluster_ips_are_spread_evenly() -> Result<()> {
    check(&plain, Client::PodHere, At::ClusterIp)
}

pub(crate) fn b10_connections_to_node_ports_are_spread_evenly() -> Result<()> {
    check(&plain, Client::Outside, At::NodePort)
}

pub(crate) fn b10_connections_of_pods_to_local_load_balancers_are_spread_evenly() -> Result<()> {
    check(&external_local, Client::PodHere, At::LoadBalancer)
}

pub(crate) fn b10_connections_of_pods_to_local_node_ports_are_spread_evenly() -> Result<()> {
    check(&external_local, Client::PodHere, At::NodePort)
}

pub(crate) fn b10_connections_from_outside_to_local_load_balancers_are_spread_evenly() -> Result<()>
{
    // All endpoints are pod `a`'s.
    check(&external_local, Client::Outside, At::LoadBalancer)
}

fn plain(endpoints: usize) -> Svc {
    svc(1).everywhere().endpoints(first_endpoints(endpoints))
}

fn external_local(endpoints: usize) -> Svc {
    plain(endpoints).external_local()
}

fn first_endpoints(count: usize) -> impl Iterator<Item = Ep> {
    (FIRST_PORT..).take(count).map(|port| ep("a").port(port))
}

/// Grows and shrinks one Service, so that every number of endpoints comes about by a change. By TCP:
/// a datagram from a port that was used before would go where that one went.
fn check(service: &dyn Fn(usize) -> Svc, client: Client, at: At) -> Result<()> {
    let mut world = World::new(Setup::PodRanges)?;
    let pod = world.topology.pod_mut("a")?;
    for port in (FIRST_PORT..).take(40) {
        pod.serve(client::Protocol::Tcp, port)?;
    }
    world.replace(&[])?;
    for (family, count) in [
        (Family::V4, 1),
        (Family::V4, 2),
        (Family::V4, 3),
        (Family::V6, 5),
        (Family::V4, 11),
        (Family::V6, 40),
        (Family::V6, 11),
        (Family::V4, 5),
        (Family::V6, 2),
    ] {
        let svc = service(count).only(Protocol::Tcp);
        world.update(slice::from_ref(&svc))?;
        let to = svc.address(at, family, client.node());
        let question = Question::new(client, Protocol::Tcp, to);
        let counts = count_hits(&world, &question, (count * EACH).max(LEAST))?;
        let wanted = svc.targets(family, None);
        ensure!(
            counts.keys().all(|endpoint| wanted.contains(endpoint)),
            "{question}: {counts:?}"
        );
        let (chi2, limit) = (chi_square(&counts, count), chi_square_limit(count));
        ensure!(
            chi2 <= limit,
            "{question}: chi-square {chi2:.1} of {count} endpoints, at most {limit:.1}: {counts:?}"
        );
    }
    Ok(())
}

fn count_hits(world: &World, question: &Question, n: usize) -> Result<BTreeMap<SocketAddr, usize>> {
    let mut counts = BTreeMap::new();
    let mut asked = 0;
    let mut other = None;
    question.repeat(&world.net, |seen| {
        asked += 1;
        match seen {
            Seen::Hit { endpoint, .. } => *counts.entry(endpoint).or_default() += 1,
            seen => other = Some(seen),
        }
        other.is_none() && asked < n
    })?;
    match other {
        Some(seen) => Err(anyhow::anyhow!("{question}: {seen}")),
        None => Ok(counts),
    }
}

/// Against the same share for each of `endpoints`.
fn chi_square(counts: &BTreeMap<SocketAddr, usize>, endpoints: usize) -> f64 {
    let share = counts.values().sum::<usize>() as f64 / endpoints as f64;
    let never = (endpoints - counts.len()) as f64 * share;
    counts.values().map(|n| (*n as f64 - share).powi(2) / share).sum::<f64>() + never
}

/// What chance exceeds once in 3 million times (5 standard deviations), after Wilson and Hilferty.
fn chi_square_limit(endpoints: usize) -> f64 {
    let freedom = (endpoints - 1) as f64;
    if freedom == 0.0 {
        return 0.0;
    }
    let spread = 2.0 / (9.0 * freedom);
    freedom * (1.0 - spread + 5.0 * spread.sqrt()).powi(3)
}
