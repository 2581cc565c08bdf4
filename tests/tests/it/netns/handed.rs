//! Single Services handed to the userspace proxy, while the kernel's backend serves all the rest.

use std::net::SocketAddr;
use std::slice;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use kplane_dataplane::backend::Failure;
use kplane_model::{Family, Protocol, Proxied};
use kplane_tests::client::{Outcome, Probe};

use crate::netns::churn::{EVERYBODY, Loads};
use crate::netns::conntrack::Caller;
use crate::netns::proxied::NOTHING;
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{
    At, Client, Ep, Seen, Setup, Svc, World, ask, ep, hit, loopback, node_ip, svc,
};
use kplane_tests::wait::eventually;

/// Connections to a Service half of whose endpoints are dead.
const CONNECTIONS: usize = 30;

/// Rejects of iptables to the node itself may count only with the second packet, after a second.
const PATIENCE: Duration = Duration::from_secs(10);

const PROTOCOLS: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];

/// A Service that asks for the proxy.
fn asking(service: &Svc) -> Svc {
    with(service, Proxied::default())
}

fn with(service: &Svc, proxied: Proxied) -> Svc {
    let mut service = service.clone();
    service.proxied = Some(proxied);
    service
}

/// The number of connections and flows that the first node's proxy has led to an endpoint.
fn led(world: &mut World) -> Result<u64> {
    let proxy = world.first()?.proxy();
    Ok(proxy.map_or(0, |proxy| proxy.totals().0.opened))
}

pub(crate) fn a_service_changes_its_way_without_a_failed_connection() -> Result<()> {
    let kernel = svc(1).everywhere().only(Protocol::Tcp).endpoints(["a", "b"].map(ep));
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&kernel))?;
    ensure!(
        world.first()?.proxy().is_none(),
        "a proxy that no Service asks for"
    );
    let loads = Loads::start(&world, &kernel, &EVERYBODY)?;
    for round in 0..8 {
        world.update(slice::from_ref(&kernel))?;
        loads.progress(5)?;
        let before = led(&mut world)?;
        world.update(&[asking(&kernel)])?;
        // On a busy machine the kernel may serve meanwhile: in a virtual machine that gets little of it, for long.
        eventually(
            6 * PATIENCE,
            &format!("round {round}: the proxy serves"),
            || {
                loads.progress(5)?;
                let state = world.first()?.proxys_state();
                ensure!(led(&mut world)? > before, "nothing; {state}");
                anyhow::Ok(())
            },
        )?;
    }
    loads.none_lost()
}

/// The Service that asks gets another attempt, and its neighbour is the kernel's, where the client's address stays.
pub(crate) fn u37_only_the_service_that_asks_is_the_proxys() -> Result<()> {
    let dead = ep("b").port(NOTHING);
    let half_dead = asking(&svc(1).everywhere().endpoints([ep("a"), dead]));
    let neighbour = svc(2).everywhere().endpoints([ep("a")]);
    let mut world = World::serving(Setup::PodRanges, &[half_dead.clone(), neighbour.clone()])?;
    for family in Family::ALL {
        for protocol in PROTOCOLS {
            let to = half_dead.address(At::ClusterIp, family, 1);
            for client in [Client::Outside, Client::PodThere, Client::Node] {
                for _ in 0..CONNECTIONS {
                    hit(&world.net, client, protocol, to)?;
                }
            }
            let before = led(&mut world)?;
            let to = neighbour.address(At::ClusterIp, family, 1);
            let seen = ask(&world.net, Client::PodHere, protocol, to)?;
            let source = Client::PodHere.source(family);
            let is_kernels = matches!(seen, Seen::Hit { source: from, .. } if from == source);
            ensure!(is_kernels, "{protocol} {to}: {seen}");
            ensure!(led(&mut world)? == before, "the proxy serves the neighbour");
        }
    }
    world.first()?.end();
    let to = half_dead.address(At::ClusterIp, Family::V4, 1);
    let answers = |_| ask(&world.net, Client::Node, Protocol::Tcp, to);
    let seen: Vec<Seen> = (0..CONNECTIONS).map(answers).collect::<Result<_>>()?;
    let hits = seen.iter().filter(|seen| matches!(seen, Seen::Hit { .. })).count();
    ensure!(
        (1..CONNECTIONS).contains(&hits),
        "{hits}: the kernel tries once"
    );
    Ok(())
}

/// The proxy would connect to the node's own address with the node's own rights: the kernel serves such a Service, and the
/// agent says so.
pub(crate) fn a_service_with_the_nodes_address_stays_the_kernels() -> Result<()> {
    let pods = asking(&svc(1).everywhere().only(Protocol::Tcp).endpoints([ep("a")]));
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&pods))?;
    let to = pods.address(At::ClusterIp, Family::V4, 1);
    let source = |world: &World| match ask(&world.net, Client::PodHere, Protocol::Tcp, to)? {
        Seen::Hit { source, .. } => Ok(Some(source)),
        _ => anyhow::Ok(None),
    };
    let client = Client::PodHere.source(Family::V4);
    ensure!(
        source(&world)? != Some(client),
        "the proxy does not serve Pods"
    );
    let own = Ep::new(1, Family::ALL.map(|family| node_ip(1, family))).port(NOTHING);
    let with_node = pods.clone().endpoints([ep("a"), own]);
    let done = world.first()?.update(&[with_node])?;
    let is_reported =
        |failure: &Failure| failure.degraded && failure.reason.contains("--userspace-endpoints");
    ensure!(
        done.failures.len() == 2 && done.failures.iter().all(is_reported),
        "{done:?}"
    );
    let before = led(&mut world)?;
    let seen: Vec<_> = (0..CONNECTIONS).map(|_| source(&world)).collect::<Result<_>>()?;
    ensure!(
        seen.contains(&Some(client)),
        "the kernel does not serve: {seen:?}"
    );
    ensure!(led(&mut world)? == before, "the proxy connects to the node");
    ensure!(world.first()?.update(&[pods])?.failures.is_empty());
    ensure!(
        source(&world)? != Some(client),
        "the proxy does not serve Pods again"
    );
    Ok(())
}

/// A client that keeps its source port would reach the proxy for as long as it goes on, if only the kernel decided.
pub(crate) fn f1_udp_flows_follow_their_service_to_the_kernel_and_back() -> Result<()> {
    let kernel = svc(1).everywhere().only(Protocol::Udp).endpoints([ep("a")]);
    let mut world = World::serving(Setup::PodRanges, &[asking(&kernel)])?;
    world.first()?.clean_conntrack()?;
    let clients = [Client::PodHere, Client::Outside];
    let callers = Caller::all(&world, &kernel, &clients, &[At::ClusterIp, At::NodePort])?;
    let all_reach = |pod: &str| callers.iter().try_for_each(|caller| caller.reaches(pod));
    all_reach("a").context("through the proxy")?;
    ensure!(led(&mut world)? >= 8, "the proxy serves nothing");
    world.update(slice::from_ref(&kernel))?;
    all_reach("a").context("by the kernel")?;
    let before = led(&mut world)?;
    all_reach("a").context("by the kernel, again")?;
    ensure!(led(&mut world)? == before, "the proxy still serves flows");
    world.update(&[asking(&kernel).endpoints([ep("b")])])?;
    all_reach("b").context("through the proxy again")
}

/// U22, KEP-6032: this node's processes reach node ports at 127.0.0.1 and ::1, other clients as ever, and
/// `route_localnet`, which would let packets from outside in, stays off. In mode iptables, IPv4 is the kernel's.
pub(crate) fn u17_u22_node_ports_on_loopback_addresses() -> Result<()> {
    let service = svc(1).everywhere().endpoints([ep("a"), ep("c")]);
    // Policy Local counts for the node's own processes as well (K7); in mode iptables the kernel leads them to all.
    let elsewhere = svc(2).everywhere().external_local().endpoints([ep("c")]);
    let empty = svc(3).everywhere();
    let both = svc(4).everywhere().external_local().endpoints([ep("a"), ep("c")]);
    let services = [&service, &elsewhere, &empty, &both].map(Svc::clone);
    let mut world = World::new(Setup::PodRanges)?;
    let first = world.first()?;
    first.settings.nodeport_localhost = [true; 2];
    first.replace(&services)?;
    for family in Family::ALL {
        for protocol in PROTOCOLS {
            for served in [&service, &both] {
                let before = led(&mut world)?;
                let seen = at_home(&world, family, protocol, served)?;
                ensure!(matches!(seen, Outcome::Reply(_)), "{protocol}: {seen}");
                let is_led = led(&mut world)? > before;
                ensure!(is_led != is_kernels(family)?, "{family} {protocol}");
            }
        }
        for protocol in PROTOCOLS {
            let seen = at_home(&world, family, protocol, &elsewhere)?;
            let is_served = matches!(seen, Outcome::Reply(_));
            let is_right = is_served == is_kernels(family)?;
            ensure!(is_right, "{family} {protocol}, no endpoint here: {seen}");
        }
        let here = both.targets(family, Some(1)).into_iter().next().context("no endpoint")?;
        for _ in 0..if is_kernels(family)? { 0 } else { 12 } {
            let seen = at_home(&world, family, Protocol::Tcp, &both)?;
            let Outcome::Reply(reply) = &seen else {
                bail!("{family}: {seen}");
            };
            ensure!(reply.local == here, "{family}: {seen}, and not {here}");
        }
        let seen = at_home(&world, family, Protocol::Tcp, &empty)?;
        ensure!(matches!(seen, Outcome::Refused), "no endpoint: {seen}");
        let before = led(&mut world)?;
        let to = service.address(At::NodePort, family, 1);
        hit(&world.net, Client::Outside, Protocol::Tcp, to)?;
        let others = led(&mut world)? - before;
        let is_all = UnderTest::current()? == UnderTest::Userspace;
        ensure!(is_all || others == 0, "the proxy serves other clients");
    }
    let off = |world: &World| {
        let setting = "/proc/sys/net/ipv4/conf/all/route_localnet";
        world.node(1)?.run(|| Ok(std::fs::read_to_string(setting)?.trim() == "0"))
    };
    ensure!(off(&world)? || is_kernels(Family::V4)?, "route_localnet");
    let first = world.first()?;
    first.settings.nodeport_localhost = [false; 2];
    first.replace(&services)?;
    let seen = at_home(&world, Family::V6, Protocol::Tcp, &service)?;
    ensure!(matches!(seen, Outcome::Refused), "no longer served: {seen}");
    Ok(())
}

/// Whether the kernel serves node ports on loopback addresses.
fn is_kernels(family: Family) -> Result<bool> {
    Ok(UnderTest::current()?.is_iptables() && family == Family::V4)
}

/// Asks for a node port on the loopback address of the first node.
fn at_home(world: &World, family: Family, protocol: Protocol, service: &Svc) -> Result<Outcome> {
    let to = SocketAddr::new(loopback(family), service.node_port());
    let probe = match protocol {
        Protocol::Udp => Probe::udp(to),
        Protocol::Tcp | Protocol::Sctp => Probe::tcp(to),
    };
    probe.timeout(PATIENCE).once(world.node(1)?)
}
