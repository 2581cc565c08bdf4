//! Much, and too much: small socket buffers, too many endpoints, a ServicePort that the kernel
//! refuses, two that want the same place.

use std::net::IpAddr;
use std::process::Command;
use std::slice;

use anyhow::{Context as _, Result, ensure};
use kplane_dataplane::backend::Verification;
use kplane_dataplane::backend::nftables::Class;
use kplane_model::{EndpointAddr, Family, Protocol};
use kplane_netlink::NfSocket;
use kplane_tests::userns;

use kplane_tests::support::{
    Agent, At, Client, Ep, Seen, Setup, World, answers, ask, ep, facts, hit, pod_ips, refused, svc,
};

/// Services in the test of small buffers.
const MANY: u16 = 2000;

/// Runs itself once more in a user namespace, where the kernel does not let a socket's buffers grow
/// beyond what is set for everybody.
pub(crate) fn many_services_are_loaded_through_a_small_socket_buffer() -> Result<()> {
    if std::env::var_os(userns::FORCE_VAR).is_none() {
        let mut command = Command::new(std::env::current_exe()?);
        let this = "limits::many_services_are_loaded_through_a_small_socket_buffer";
        command.args(["netns", "--exact", this]).env(userns::FORCE_VAR, "1");
        let printed = kplane_tests::process::output(command)?;
        ensure!(printed.contains("1 passed"), "{printed}");
        return Ok(());
    }
    let mut world = World::new(Setup::PodRanges)?;
    let mut services: Vec<_> = (1..=MANY)
        .map(|number| svc(number).everywhere().endpoints([ep("a"), ep("b")]))
        .collect();
    // Some 80,000 elements in each family.
    for service in &mut services {
        service.protocols = vec![Protocol::Tcp, Protocol::Udp];
    }
    let node = world.node(1)?.clone();
    let generation = || node.run(|| Ok(NfSocket::open()?.generation()?));
    let before = generation()?;
    let first = world.first()?;
    let done = first.replace(&services)?;
    ensure!(done.failures.is_empty(), "{:?}", done.failures);
    let transactions = generation()? - before;
    ensure!(transactions > 2, "{transactions} for two families");
    first.ensure_equal()?;
    first.restart()?;
    let done = first.replace(&services)?;
    ensure!(done.operations == 0, "{done:?}");
    for service in services.iter().step_by(500) {
        for family in Family::ALL {
            let to = service.address(At::ClusterIp, family, 1);
            hit(&world.net, Client::PodHere, Protocol::Tcp, to)?;
        }
    }
    let first = world.first()?;
    first.replace(&services[..1])?;
    first.ensure_equal()
}

pub(crate) fn too_many_endpoints_are_refused_by_name_and_the_rest_works() -> Result<()> {
    let many = |count: usize| {
        let endpoints = (0..count).map(|n| {
            let [high, low] = u16::try_from(n % 65536).unwrap_or(0).to_be_bytes();
            let mut ips = pod_ips(1, 250);
            ips[0] = IpAddr::from([10, 245, high, low]);
            Ep::new(2, ips).port(1 + u16::try_from(n % 65535).unwrap_or(0))
        });
        svc(1).only(Protocol::Tcp).endpoints(endpoints)
    };
    let good = svc(2).everywhere().endpoints([ep("a")]);
    let mut world = World::new(Setup::PodRanges)?;
    let first = world.first()?;
    let done = first.replace(&[many(Class::MAX_ENDPOINTS + 1), good.clone()])?;
    let names: Vec<String> = done.failures.iter().map(|f| f.key.to_string()).collect();
    let wanted = ["test/svc-1:tcp/TCP (IPv4)", "test/svc-1:tcp/TCP (IPv6)"];
    ensure!(names == wanted, "{:?}", done.failures);
    first.ensure_equal()?;
    answers(
        &world.net,
        Client::Outside,
        good.address(At::NodePort, Family::V6, 1),
    )?;

    // As many as there may be, and back to a few.
    let first = world.first()?;
    let done = first.update(&[many(Class::MAX_ENDPOINTS)])?;
    ensure!(done.failures.is_empty(), "{:?}", done.failures);
    first.ensure_equal()?;
    let few = svc(1).only(Protocol::Tcp).endpoints([ep("a")]);
    first.update(slice::from_ref(&few))?;
    let to = few.address(At::ClusterIp, Family::V4, 1);
    hit(&world.net, Client::PodHere, Protocol::Tcp, to)?;
    Ok(())
}

/// What the kernel refuses: an endpoint of the other family.
pub(crate) fn a_poisoned_service_port_does_not_stop_others() -> Result<()> {
    for complete in [true, false] {
        let old = [svc(1), svc(2)].map(|svc| svc.everywhere().endpoints([ep("a")]));
        let new = [3, 4, 5].map(|number| svc(number).everywhere().endpoints([ep("b")]));
        let mut world = World::serving(Setup::PodRanges, &old)?;
        let first = world.first()?;
        poison_applies(first, if complete { &old } else { &[] }, &new, complete)?;
        first.ensure_equal()?;
        for service in [&old[0], &new[0], &new[2]] {
            for at in At::ALL {
                let to = service.address(at, Family::V4, 1);
                answers(&world.net, Client::PodHere, to).with_context(|| format!("{complete}"))?;
            }
        }
        // What was there before is still known: it can be deleted.
        let first = world.first()?;
        first.exchange(&old[..1], &[])?;
        first.ensure_equal()?;
        let to = old[0].address(At::NodePort, Family::V4, 1);
        refused(&world.net, Client::PodHere, Protocol::Tcp, to)?;
    }
    Ok(())
}

/// Applies Services to the IPv4 table, one port of the second new one with an endpoint that has no
/// place there.
fn poison_applies(
    agent: &mut Agent,
    old: &[kplane_tests::support::Svc],
    new: &[kplane_tests::support::Svc],
    complete: bool,
) -> Result<()> {
    let mut plans = agent.plans(Family::V4, old);
    plans.extend(agent.plans(Family::V4, new));
    let bad = plans.iter_mut().filter_map(|(key, plan)| {
        let bad = &*key.service.name == "svc-4" && key.protocol == Protocol::Udp;
        if bad { plan.as_mut() } else { None }
    });
    for frontend in bad.flat_map(|plan| &mut plan.frontends) {
        frontend.endpoints = vec![EndpointAddr::new(pod_ips(1, 1)[1], 53)];
    }
    let applied = agent.apply(Family::V4, &plans, complete)?;
    let names: Vec<String> = applied.failures.iter().map(|f| f.key.to_string()).collect();
    ensure!(
        names == ["test/svc-4:udp/UDP (IPv4)"],
        "{:?}",
        applied.failures
    );
    Ok(())
}

pub(crate) fn of_two_services_with_one_address_the_second_is_refused_by_name() -> Result<()> {
    let one = svc(1).everywhere().named("one").endpoints([ep("a")]);
    let two = svc(1).everywhere().named("two").endpoints([ep("b")]);
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&one))?;
    let first = world.first()?;
    let done = first.update(slice::from_ref(&two))?;
    let all_of_two = |f: &kplane_dataplane::backend::Failure| {
        f.key.service.name.as_ref() == "two" && f.reason.contains("test/one")
    };
    ensure!(
        !done.failures.is_empty() && done.failures.iter().all(all_of_two),
        "{:?}",
        done.failures
    );
    first.ensure_equal()?;
    let to = one.address(At::ClusterIp, Family::V4, 1);
    let seen = ask(&world.net, Client::PodHere, Protocol::Tcp, to)?;
    let endpoints = one.targets(Family::V4, None);
    let is_ones = matches!(seen, Seen::Hit { endpoint, .. } if endpoints.contains(&endpoint));
    ensure!(is_ones, "{seen}, not {endpoints:?}");

    // The first goes: said again, the second gets the place.
    let first = world.first()?;
    first.exchange(slice::from_ref(&one), &[])?;
    let done = first.update(slice::from_ref(&two))?;
    ensure!(done.failures.is_empty(), "{:?}", done.failures);
    first.ensure_equal()?;
    answers(
        &world.net,
        Client::Outside,
        two.address(At::LoadBalancer, Family::V6, 1),
    )
}

/// A backend that has not read the kernel yet takes complete changes only.
pub(crate) fn nothing_is_deleted_before_everything_is_known() -> Result<()> {
    let services = [svc(1), svc(2)].map(|svc| svc.everywhere().endpoints([ep("a")]));
    let mut world = World::serving(Setup::PodRanges, &services)?;
    let node = world.node(1)?.clone();
    let mut other = Agent::open(&node, facts(1)?, Setup::PodRanges.settings()?)?;
    ensure!(other.update(&[]).is_err(), "an incremental change first");
    ensure!(other.exchange(&services, &[]).is_err(), "a deletion first");
    let first = world.first()?;
    ensure!(first.verify(Family::V4)? == Verification::Equal);
    answers(
        &world.net,
        Client::Outside,
        services[1].address(At::NodePort, Family::V4, 1),
    )
}
