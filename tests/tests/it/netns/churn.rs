//! Changes under way of traffic: nothing fails that has an endpoint before and after, and what is
//! connected stays connected (A19; invariant: no-gap).

use std::slice;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_model::{Family, Protocol};
use kplane_tests::client::{self, Probe, Session};
use kplane_tests::load::{Load, Pace};
use kplane_tests::vm;

use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{
    At, Client, Ep, Setup, Svc, World, answers, cidrs, ep, hit, refused, svc,
};
use kplane_tests::wait::DEADLINE;

/// Light, because several run at the same time: the clients of one test begin two connections each millisecond, which is
/// shorter than any change takes.
fn pace() -> Pace {
    let think = if vm::is_inside() {
        Duration::from_millis(20)
    } else {
        Duration::from_millis(2)
    };
    Pace { threads: 1, think }
}

/// In a virtual machine a second may pass without anything being done.
fn patience() -> Duration {
    if vm::is_inside() { 30 * client::TIMEOUT } else { client::TIMEOUT }
}

/// Loads on one Service that must not lose anything.
pub(crate) struct Loads(Vec<(String, Load)>);

impl Loads {
    pub(crate) fn start(
        world: &World,
        service: &Svc,
        cases: &[(Client, At, Family)],
    ) -> Result<Self> {
        let start = |(client, at, family): &(Client, At, Family)| {
            let to = service.address(*at, *family, client.node());
            let probe = Probe::tcp(to).timeout(patience());
            let load = Load::start(world.net.ns(*client)?, probe, pace())?;
            Ok((format!("{client:?} to {at:?} {to}"), load))
        };
        cases.iter().map(start).collect::<Result<_>>().map(Self)
    }

    /// Waits until every load has been answered `more` times again.
    pub(crate) fn progress(&self, more: u64) -> Result<()> {
        self.0
            .iter()
            .try_for_each(|(name, load)| load.goes_on(more, DEADLINE).context(name.clone()))
    }

    pub(crate) fn none_lost(self) -> Result<()> {
        self.0.into_iter().try_for_each(|(name, load)| load.unharmed().context(name))
    }
}

pub(crate) const EVERYBODY: [(Client, At, Family); 4] = [
    (Client::PodHere, At::ClusterIp, Family::V4),
    (Client::Outside, At::NodePort, Family::V4),
    (Client::Outside, At::LoadBalancer, Family::V6),
    (Client::Node, At::ClusterIp, Family::V6),
];

/// One after the other goes and comes back, as in a rolling update; the number of endpoints passes
/// through several classes.
pub(crate) fn endpoints_come_and_go_without_a_failed_connection() -> Result<()> {
    let service = svc(1).everywhere().only(Protocol::Tcp);
    let steps: [&[&str]; 8] = [
        &["a"],
        &["a", "b"],
        &["b"],
        &["b", "c"],
        &["a", "b", "c"],
        &["a", "c"],
        &["c"],
        &["a", "c"],
    ];
    let with = |pods: &[&str]| service.clone().endpoints(pods.iter().map(|pod| ep(pod)));
    let mut world = World::serving(Setup::PodRanges, &[with(steps[0])])?;
    let loads = Loads::start(&world, &service, &EVERYBODY)?;
    for _ in 0..12 {
        for step in steps {
            world.update(&[with(step)])?;
            loads.progress(2)?;
        }
    }
    loads.none_lost()
}

/// Everything about a Service changes but its endpoints.
pub(crate) fn other_properties_change_without_a_failed_connection() -> Result<()> {
    let service = svc(1).everywhere().only(Protocol::Tcp).endpoints(["a", "b"].map(ep));
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let internal = |svc: Svc| svc.only(Protocol::Tcp).endpoints(["a", "b"].map(ep));
    let variants = [
        internal(svc(1)),
        internal(svc(1).reached(At::NodePort)),
        service.clone().external_local(),
        service.clone().internal_local(),
        service.clone().ranges(cidrs(&["192.0.2.0/24", "2001:db8::/32"])?),
        service.clone(),
    ];
    let always = [
        (Client::PodHere, At::ClusterIp, Family::V4),
        (Client::Node, At::ClusterIp, Family::V6),
        (Client::Outside, At::ClusterIp, Family::V4),
    ];
    let loads = Loads::start(&world, &service, &always)?;
    let mut session = open(&world, Client::Outside, &service, At::LoadBalancer)?;
    // A19: cut by what takes its address away, and by ranges.
    let cuts = UnderTest::current()? == UnderTest::Ipvs;
    for variant in variants.iter().cycle().take(24) {
        world.update(slice::from_ref(variant))?;
        loads.progress(3)?;
        if !cuts {
            session.echo(DEADLINE).with_context(|| format!("{variant:?}"))?;
        }
    }
    loads.none_lost()
}

/// The client is inside all of the ranges.
pub(crate) fn source_ranges_change_without_a_failed_connection() -> Result<()> {
    let service = svc(1).everywhere().only(Protocol::Tcp).endpoints(["a", "b"].map(ep));
    let ranges: [&[&str]; 4] = [
        &[],
        &["172.30.0.0/16", "fd30::/16"],
        &["172.30.0.0/24", "fd30::/112", "10.244.0.0/16"],
        &["172.30.0.3/32", "172.30.0.0/25", "fd30::3/128"],
    ];
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let cases = Family::ALL.map(|family| (Client::Outside, At::LoadBalancer, family));
    let loads = Loads::start(&world, &service, &cases)?;
    for ranges in ranges.iter().cycle().take(100) {
        world.update(&[service.clone().ranges(cidrs(ranges)?)])?;
        loads.progress(1)?;
    }
    loads.none_lost()
}

/// Other Services come, change and go by the hundred.
pub(crate) fn other_services_change_without_a_failed_connection() -> Result<()> {
    let service = svc(1).everywhere().only(Protocol::Tcp).endpoints(["a", "b", "c"].map(ep));
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let loads = Loads::start(&world, &service, &EVERYBODY)?;
    for number in 2..=120 {
        let other = svc(number).everywhere();
        world.update(&[other.clone().endpoints([ep("a")])])?;
        world.update(&[other.clone().external_local().endpoints([ep("b"), ep("c")])])?;
        if number % 2 == 0 {
            world.remove(&[other])?;
        }
    }
    loads.progress(50)?;
    loads.none_lost()
}

/// A complete change that changes nothing, again and again.
pub(crate) fn complete_changes_do_not_disturb_anybody() -> Result<()> {
    let service = svc(1).everywhere().only(Protocol::Tcp).endpoints(["a", "b", "c"].map(ep));
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let loads = Loads::start(&world, &service, &EVERYBODY)?;
    for _ in 0..50 {
        let done = world.first()?.replace(slice::from_ref(&service))?;
        ensure!(done.operations == 0, "{done:?}");
        loads.progress(1)?;
    }
    loads.none_lost()
}

/// A19: a connection outlives its endpoint's part in the Service, and the Service; new ones are
/// refused.
///
/// With IPVS, ours and kube-proxy's, source ranges are looked at for each packet, and connections end
/// with their Service.
pub(crate) fn a19_what_is_connected_stays_connected() -> Result<()> {
    let service = svc(1).everywhere().only(Protocol::Tcp);
    let full = service.clone().endpoints([ep("a")]);
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&full))?;
    let mut sessions = Vec::new();
    for client in [
        Client::Outside,
        Client::PodHere,
        Client::Node,
        Client::Endpoint,
    ] {
        for at in At::ALL {
            sessions.push(open(&world, client, &service, at)?);
        }
    }
    let mut all_echo = |when: &str| {
        sessions
            .iter_mut()
            .try_for_each(|session| session.echo(DEADLINE).context(when.to_owned()))
    };
    all_echo("at first")?;
    world.update(&[full.clone().endpoints([ep("b"), ep("c")])])?;
    all_echo("other endpoints")?;
    world.update(&[full.clone().external_local().endpoints([ep("c")])])?;
    all_echo("no endpoint on the node")?;
    let cuts = UnderTest::current()? == UnderTest::Ipvs;
    if !cuts {
        world.update(&[full.ranges(cidrs(&["192.0.2.0/24", "2001:db8::/32"])?)])?;
        all_echo("other clients only")?;
    }
    world.update(slice::from_ref(&service))?;
    let to = service.address(At::ClusterIp, Family::V4, 1);
    refused(&world.net, Client::PodHere, Protocol::Tcp, to)?;
    all_echo("no endpoint")?;
    world.remove(slice::from_ref(&service))?;
    if cuts { Ok(()) } else { all_echo("no Service") }
}

/// An endpoint that stops after it was taken out is never asked again; one that starts before it is
/// put in never refuses.
pub(crate) fn servers_stop_after_and_start_before_their_endpoints() -> Result<()> {
    let service = svc(1).everywhere().only(Protocol::Tcp);
    let on = |pods: &[&str], port| -> Svc {
        let endpoints: Vec<Ep> = pods.iter().map(|pod| ep(pod).port(port)).collect();
        service.clone().endpoints(endpoints)
    };
    let mut world = World::new(Setup::PodRanges)?;
    let (mut old, mut new) = (9001, 9002);
    for pod in ["a", "b"] {
        world.topology.pod_mut(pod)?.serve(client::Protocol::Tcp, old)?;
    }
    world.replace(&[on(&["a", "b"], old)])?;
    let loads = Loads::start(&world, &service, &EVERYBODY)?;
    for _ in 0..10 {
        for pod in ["a", "b"] {
            world.topology.pod_mut(pod)?.serve(client::Protocol::Tcp, new)?;
        }
        world.update(&[on(&["a", "b"], new)])?;
        // Whoever was on its way when the endpoints changed has arrived after this.
        loads.progress(2)?;
        for pod in ["a", "b"] {
            let pod = world.topology.pod_mut(pod)?;
            pod.stop(client::Protocol::Tcp, old, DEADLINE)?;
        }
        std::mem::swap(&mut old, &mut new);
    }
    loads.none_lost()?;
    let to = service.address(At::ClusterIp, Family::V4, 1);
    answers_tcp(&world, to)
}

fn answers_tcp(world: &World, to: std::net::SocketAddr) -> Result<()> {
    hit(&world.net, Client::PodHere, Protocol::Tcp, to)?;
    Ok(())
}

/// Services take over each other's addresses in one change.
pub(crate) fn an_address_passes_to_another_service_in_one_change() -> Result<()> {
    let one = svc(1).everywhere().named("one").endpoints([ep("a")]);
    let two = svc(1).everywhere().named("two").endpoints([ep("b")]);
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&one))?;
    let loads = Loads::start(&world, &one, &EVERYBODY)?;
    for (old, new) in [(&one, &two), (&two, &one)].into_iter().cycle().take(20) {
        for agent in &mut world.agents {
            let done = agent.exchange(slice::from_ref(old), slice::from_ref(new))?;
            ensure!(done.failures.is_empty(), "{done:?}");
        }
        loads.progress(2)?;
    }
    loads.none_lost()?;
    answers(
        &world.net,
        Client::Outside,
        one.address(At::LoadBalancer, Family::V6, 1),
    )
}

fn open(world: &World, client: Client, service: &Svc, at: At) -> Result<Session> {
    let to = service.address(at, Family::V4, client.node());
    Probe::tcp(to).open(world.net.ns(client)?)
}
