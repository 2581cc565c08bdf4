//! Mode ipvs where it differs from the others (D2-D9, A29), and on the way to another backend (I4).

use std::collections::BTreeMap;
use std::slice;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_dataplane::backend::ipvs::Timeouts;
use kplane_dataplane::backend::{Connections, Kind, RealServer};
use kplane_dataplane::leftovers;
use kplane_model::{Family, IpvsScheduler, Protocol, ServiceName};
use kplane_proto::v1::ServerStats;
use kplane_tests::client::{Probe, Session};
use kplane_tests::link::Route;
use kplane_tests::topology::LINK;
use kplane_tests::wait::eventually;

use crate::netns::churn::Loads;
use crate::netns::combined::cluster;
use crate::netns::iptables::remove_leftovers;
use kplane_tests::support::cluster::Cluster;
use kplane_tests::support::ipvs::{addresses, ensure_nothing, run, servers, sets, weights};
use kplane_tests::support::objects::{service, with_pods};
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{
    Agent, At, Client, REFUSED, Scenario, Seen, Setup, Svc, World, ask, cidrs, ep, facts, hit,
    refused, svc,
};

/// For things that happen in a virtual machine, on a busy one.
const PATIENCE: Duration = Duration::from_secs(30);
/// IPVS forgets a connection that was reset after 10 s; somebody must look then.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// Those of kube-proxy (D7), and whether one client's connections are spread evenly by it
/// (`Some(true)`), all go one way (`Some(false)`), or whatever suits.
const SCHEDULERS: [(&str, Option<bool>); 11] = [
    ("rr", Some(true)),
    ("wrr", Some(true)),
    ("lc", None),
    ("wlc", None),
    ("lblc", None),
    ("lblcr", None),
    ("sh", Some(false)),
    ("dh", Some(false)),
    ("sed", None),
    ("nq", None),
    // Told to hash the port too.
    ("mh", None),
];

fn tcp(pods: &[&str]) -> Svc {
    let service = svc(1).only(Protocol::Tcp);
    service.endpoints(pods.iter().map(|pod| ep(pod)))
}

fn open(world: &World, client: Client, service: &Svc, family: Family) -> Result<Session> {
    let to = service.address(At::ClusterIp, family, client.node());
    Probe::tcp(to).timeout(PATIENCE).open(world.net.ns(client)?)
}

/// Each scheduler takes the place of the one before. Connections stay; new ones may be refused for a
/// moment, since the kernel takes the old one away before it sets the other.
pub(crate) fn d7_every_scheduler_serves_and_takes_anothers_place() -> Result<()> {
    let service = tcp(&["a", "b", "c"]);
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let node = world.node(1)?.clone();
    let mut session = open(&world, Client::PodHere, &service, Family::V6)?;
    for (name, even) in SCHEDULERS {
        let first = world.first()?;
        first.backend_settings.ipvs.scheduler = IpvsScheduler::parse(name).context(name)?;
        first.restart().context(name)?;
        first.replace(slice::from_ref(&service)).context(name)?;
        first.ensure_equal().context(name)?;
        for ip in ["10.96.0.1", "[fd96::1]"] {
            let wanted = format!("-A -t {ip}:80 -s {name}");
            let lines = servers(&node)?;
            // Behind the name stand flags.
            let found = lines.iter().any(|line| line.starts_with(&wanted));
            ensure!(found, "no {wanted} in {lines:#?}");
        }
        let to = service.address(At::ClusterIp, Family::V4, 1);
        let probe = Probe::tcp(to).timeout(PATIENCE);
        let spread = probe.spread(world.net.ns(Client::PodHere)?, 9)?;
        let answered = spread.keys().all(|name| ["a", "b", "c"].contains(&name.as_str()));
        ensure!(answered, "{name}: {spread:?}");
        match even {
            Some(true) => ensure!(spread.values().all(|n| *n == 3), "{name}: {spread:?}"),
            Some(false) => ensure!(spread.len() == 1, "{name}: {spread:?}"),
            None => {}
        }
        session.echo(PATIENCE).context(name)?;
    }
    Ok(())
}

/// An extension of D7: by annotation; other Services have the node's.
pub(crate) fn d7_a_service_has_the_scheduler_that_it_asks_for() -> Result<()> {
    let scheduler = |name: &str| IpvsScheduler::parse(name).context("unknown");
    let mut own = tcp(&["a", "b", "c"]);
    own.ipvs_scheduler = Some(scheduler("sh")?);
    let other = svc(2).only(Protocol::Tcp).endpoints([ep("a")]);
    let mut world = World::serving(Setup::PodRanges, &[own.clone(), other])?;
    let node = world.node(1)?.clone();
    let lines = servers(&node)?;
    for wanted in ["-A -t 10.96.0.1:80 -s sh", "-A -t 10.96.0.2:80 -s rr"] {
        let found = lines.iter().any(|line| line.starts_with(wanted));
        ensure!(found, "no {wanted} in {lines:#?}");
    }
    let probe = Probe::tcp(own.address(At::ClusterIp, Family::V4, 1)).timeout(PATIENCE);
    let client = world.net.ns(Client::PodHere)?.clone();
    let spread = probe.spread(&client, 6)?;
    ensure!(spread.len() == 1, "by the client's address: {spread:?}");
    world.first()?.update(&[tcp(&["a", "b", "c"])])?;
    let spread = probe.spread(&client, 6)?;
    ensure!(spread.values().all(|n| *n == 2), "in turn: {spread:?}");
    world.first()?.ensure_equal()
}

/// The endpoint gets no new connections, the one that it has goes on, over a restart of the agent
/// too; it may come back; it goes for good when its last connection has.
pub(crate) fn d5_connections_outlive_their_endpoint_and_an_agent() -> Result<()> {
    let timeouts = Timeouts {
        tcp_fin_s: 2,
        ..Timeouts::default()
    };
    let mut world = World::new(Setup::PodRanges)?;
    let node = world.node(1)?.clone();
    let reals = Family::ALL.map(|family| ep("a").address(family).to_string());
    let has = |weight: u32| {
        for real in &reals {
            ensure!(weights(&node, real)? == [weight], "{:#?}", servers(&node)?);
        }
        Ok(())
    };
    {
        let first = world.first()?;
        first.backend_settings.ipvs.timeouts = timeouts;
        first.restart()?;
        first.replace(&[tcp(&["a"])])?;
    }
    let mut sessions = Vec::new();
    for family in Family::ALL {
        sessions.push(open(&world, Client::PodHere, &tcp(&["a"]), family)?);
    }
    let mut go_on = |what: &str| {
        sessions
            .iter_mut()
            .try_for_each(|session| session.echo(PATIENCE).context(what.to_owned()))
    };

    world.first()?.update(&[tcp(&["b"])])?;
    has(0)?;
    go_on("an endpoint is leaving")?;
    only(&world, "b")?;
    world.first()?.ensure_equal()?;

    world.first()?.restart()?;
    let again = world.first()?.replace(&[tcp(&["b"])])?;
    ensure!(again.operations == 0, "a restart: {again:?}");
    has(0)?;
    go_on("an agent has restarted")?;
    only(&world, "b")?;

    world.first()?.update(&[tcp(&["a"])])?;
    has(1)?;
    go_on("an endpoint is back")?;
    only(&world, "a")?;

    world.first()?.update(&[tcp(&["b"])])?;
    world.first()?.ensure_equal()?;
    go_on("an endpoint is leaving again")?;
    has(0)?;
    drop(sessions);
    eventually(FORGOTTEN, "an idle endpoint goes", || {
        world.first()?.ensure_equal()?;
        for real in &reals {
            let weights = weights(&node, real)?;
            ensure!(weights.is_empty(), "{weights:?}");
        }
        Ok::<_, anyhow::Error>(())
    })
}

/// What the first node's agent tells the control plane of both families.
fn stats(cluster: &Cluster) -> Result<Vec<ServerStats>> {
    let report = cluster.reports()[0].to_wire();
    let stats: Vec<_> = report.families.into_iter().filter_map(|f| f.servers).collect();
    ensure!(stats.len() == 2, "not of both families: {stats:?}");
    Ok(stats)
}

/// What drains is in the agent's report with its connections, and told to whoever asks; then it is
/// gone from there too.
pub(crate) fn d5_what_drains_is_in_the_report() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    cluster.apply(&with_pods(service(1), &["a"]))?;
    let name = tcp(&[]).name;
    let name = ServiceName::new("test", &name);
    let mut sessions = Vec::new();
    for family in Family::ALL {
        sessions.push(open(&world, Client::PodHere, &tcp(&["a"]), family)?);
    }
    eventually(PATIENCE, "connections are counted", || {
        let of = |s: &ServerStats| (s.virtual_servers, s.draining, s.active_connections);
        let stats = stats(&cluster)?;
        ensure!(stats.iter().all(|s| of(s) == (1, 0, 1)), "{stats:?}");
        Ok::<_, anyhow::Error>(())
    })?;

    cluster.apply(&with_pods(service(1), &["b"]))?;
    let announced = cluster.inspect(1, &name)?;
    ensure!(
        announced.error.is_empty() && announced.servers.len() == 2,
        "{announced:?}"
    );
    for (family, server) in Family::ALL.into_iter().zip(&announced.servers) {
        let real = |pod: &str, weight, active| RealServer {
            at: ep(pod).address(family).into(),
            weight,
            connections: Connections {
                active,
                inactive: 0,
            },
            draining: weight == 0,
        };
        ensure!(server.scheduler == "rr", "{server:?}");
        ensure!(
            server.reals == [real("a", 0, 1), real("b", 1, 0)],
            "{server:?}"
        );
    }
    let drains = |family: Family, stats: &ServerStats| {
        let [drain] = &stats.drains[..] else {
            return false;
        };
        let key = drain.key.clone().unwrap_or_default();
        let place = tcp(&[]).address(At::ClusterIp, family, 1).to_string();
        (stats.real_servers, stats.draining) == (2, 1)
            && (&*key.name, key.family()) == (&*name.name, family.into())
            && (&drain.virtual_server, drain.active_connections) == (&place, 1)
            && drain.address == ep("a").address(family).to_string()
    };
    eventually(PATIENCE, "what drains is reported", || {
        let stats = stats(&cluster)?;
        let mut both = Family::ALL.into_iter().zip(&stats);
        ensure!(
            both.all(|(family, stats)| drains(family, stats)),
            "{stats:#?}"
        );
        Ok::<_, anyhow::Error>(())
    })?;
    for session in &mut sessions {
        session.echo(PATIENCE).context("an endpoint is leaving")?;
    }
    drop(sessions);
    eventually(FORGOTTEN, "what has drained is gone", || {
        let stats = stats(&cluster)?;
        let of = |s: &ServerStats| (s.real_servers, s.draining, s.drains.len());
        ensure!(stats.iter().all(|s| of(s) == (1, 0, 0)), "{stats:?}");
        Ok::<_, anyhow::Error>(())
    })
}

fn only(world: &World, pod: &str) -> Result<()> {
    for family in Family::ALL {
        let to = tcp(&[]).address(At::ClusterIp, family, 1);
        let probe = Probe::tcp(to).timeout(PATIENCE);
        let spread = probe.spread(world.net.ns(Client::PodHere)?, 4)?;
        let wanted = BTreeMap::from([(pod.to_owned(), 4)]);
        ensure!(spread == wanted, "{family}: {spread:?}");
    }
    Ok(())
}

/// UDP and SCTP have no end that IPVS would see.
pub(crate) fn d5_endpoints_of_udp_and_sctp_go_at_once() -> Result<()> {
    let with = |pod| svc(1).endpoints([ep(pod)]);
    let mut world = World::serving(Setup::PodRanges, &[with("a")])?;
    let node = world.node(1)?.clone();
    world.update(&[with("b")])?;
    let lines = servers(&node)?;
    for family in Family::ALL {
        let a = format!(" -r {} ", ep("a").address(family));
        let left: Vec<&String> = lines.iter().filter(|line| line.contains(&a)).collect();
        let tcp = |line: &&String| line.starts_with("-a -t ") && line.ends_with(" -w 0");
        ensure!(left.iter().all(tcp), "{left:#?}");
    }
    Ok(())
}

/// A session's virtual server is persistent, as long as its affinity says.
pub(crate) fn d7_affinity_is_persistence_with_its_timeout() -> Result<()> {
    let sticky = tcp(&["a", "b", "c"]).sticky(1234);
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&sticky))?;
    let node = world.node(1)?.clone();
    let is = |wanted: &str| {
        let lines = servers(&node)?;
        let found = lines.iter().any(|line| line == wanted);
        ensure!(found, "no {wanted} in {lines:#?}");
        Ok(())
    };
    is("-A -t 10.96.0.1:80 -s rr -p 1234")?;
    world.update(&[sticky.clone().sticky(99)])?;
    is("-A -t 10.96.0.1:80 -s rr -p 99")?;
    world.update(&[tcp(&["a", "b", "c"])])?;
    is("-A -t 10.96.0.1:80 -s rr")
}

/// A neighbour that asks for a Service's address by ARP gets an answer unless `strictARP`.
pub(crate) fn d6_strict_arp_keeps_service_addresses_to_the_node() -> Result<()> {
    let service = tcp(&["a"]).reached(At::LoadBalancer);
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let to = service.address(At::LoadBalancer, Family::V4, 1);
    // The client takes the address for a neighbour's.
    let client = world.topology.host("client")?;
    let itself = kplane_model::Cidr::single(to.ip());
    client.netlink().add_route(&Route::to(itself).dev(LINK))?;
    let answered = |world: &World| {
        let probe = Probe::tcp(to).timeout(Duration::from_secs(5));
        let outcome = probe.once(world.net.ns(Client::Outside)?)?;
        Ok::<_, anyhow::Error>(matches!(outcome, kplane_tests::client::Outcome::Reply(_)))
    };
    ensure!(answered(&world)?, "nobody answers ARP");
    run(
        world.net.ns(Client::Outside)?,
        &format!("busybox ip neigh flush dev {LINK}"),
    )?;
    for number in 0..world.agents.len() {
        let agent = &mut world.agents[number];
        agent.backend_settings.ipvs.strict_arp = true;
        agent.restart()?;
        agent.replace(slice::from_ref(&service))?;
    }
    ensure!(!answered(&world)?, "ARP is answered in spite of strictARP");
    Ok(())
}

/// Virtual servers on excluded addresses stay, those of strangers on other addresses as well.
pub(crate) fn d8_excluded_and_foreign_virtual_servers_are_left_alone() -> Result<()> {
    let services = [tcp(&["a"]), svc(2).only(Protocol::Tcp).endpoints([ep("b")])];
    let mut world = World::serving(Setup::PodRanges, &services)?;
    let node = world.node(1)?.clone();
    // One on an address of nobody's, one on an address of ours.
    for server in ["192.0.2.7:99", "10.96.0.1:99"] {
        run(&node, &format!("ipvsadm -A -t {server} -s wrr"))?;
        run(
            &node,
            &format!("ipvsadm -a -t {server} -r 10.244.1.1:8080 -m -w 7"),
        )?;
    }
    let has = |text: &str| Ok::<_, anyhow::Error>(servers(&node)?.iter().any(|l| l.contains(text)));
    let foreign = || {
        for server in ["192.0.2.7:99", "10.96.0.1:99"] {
            ensure!(has(&format!("-A -t {server} -s wrr"))?, "{server} is gone");
            ensure!(
                has(&format!("-a -t {server} -r 10.244.1.1:8080 -m -w 7"))?,
                "{server}"
            );
        }
        Ok(())
    };
    let first = world.first()?;
    first.ensure_equal()?;
    first.backend_settings.ipvs.exclude_cidrs = cidrs(&["10.96.0.2/32"])?;
    first.restart()?;
    first.replace(&services[..1])?;
    ensure!(
        has("-a -t 10.96.0.2:80 -r 10.244.1.2:8080")?,
        "excluded, but gone"
    );
    ensure!(!has("-A -t [fd96::2]:80")?, "not excluded, but there");
    foreign()?;
    first.backend_settings.ipvs.exclude_cidrs.clear();
    first.restart()?;
    first.replace(&services[..1])?;
    foreign()?;
    first.cleanup()?;
    ensure!(!has("10.96.0.1:80")?, "not cleaned up");
    Ok(())
}

/// A29 by option: connections are refused rather than sent to another node. The node's own go on where that
/// can be, to external addresses, as in all modes (A16).
pub(crate) fn a29_strict_local_policies_refuse_where_no_endpoint_is() -> Result<()> {
    let service = svc(1).everywhere().external_local().internal_local().endpoints([ep("c")]);
    let mut world = World::new(Setup::PodRanges)?;
    for agent in &mut world.agents {
        agent.backend_settings.ipvs.strict_local = true;
        agent.restart()?;
        agent.replace(slice::from_ref(&service))?;
    }
    let mut wrong = Vec::new();
    for at in At::ALL {
        for client in [Client::Outside, Client::PodHere, Client::Node] {
            for family in Family::ALL {
                let to = service.address(at, family, 1);
                let seen = ask(&world.net, client, Protocol::Tcp, to)?;
                let external = matches!(at, At::LoadBalancer | At::ExternalIp);
                let as_it_must = if client == Client::Node && external {
                    matches!(seen, Seen::Hit { .. })
                } else {
                    seen.is_refused()
                };
                if !as_it_must {
                    wrong.push(format!("{client:?} to {at:?} {to}: {seen}"));
                }
            }
            let to = service.address(at, Family::V4, 2);
            if client == Client::PodHere && at == At::NodePort {
                hit(&world.net, Client::PodThere, Protocol::Tcp, to)?;
            }
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// D2: an address of a Service stands on the device once, however many Services have it, and goes
/// with the last one; one that the node has anyway does not.
pub(crate) fn d2_addresses_are_on_the_device_while_a_service_has_them() -> Result<()> {
    let (one, two) = (tcp(&["a"]), svc(2).only(Protocol::Tcp));
    let mut world = World::serving(Setup::PodRanges, &[one.clone(), two.clone()])?;
    let node = world.node(1)?.clone();
    let all = ["10.96.0.1/32", "10.96.0.2/32", "fd96::1/128", "fd96::2/128"];
    ensure!(addresses(&node)? == all, "{:?}", addresses(&node)?);
    world.remove(slice::from_ref(&two))?;
    let one_left = ["10.96.0.1/32", "fd96::1/128"];
    ensure!(addresses(&node)? == one_left, "{:?}", addresses(&node)?);
    let ports: Vec<u16> = vec![81, 82];
    let more: Vec<Svc> = ports
        .iter()
        .map(|port| one.clone().named(&format!("more-{port}")).on_port(*port))
        .collect();
    world.update(&more)?;
    world.remove(slice::from_ref(&one))?;
    ensure!(addresses(&node)? == one_left, "{:?}", addresses(&node)?);
    world.remove(&more)?;
    ensure!(addresses(&node)?.is_empty(), "{:?}", addresses(&node)?);
    let entries = sets(&node)?;
    let entries: Vec<_> = entries.iter().filter(|line| line.starts_with("add ")).collect();
    ensure!(entries.is_empty(), "{entries:#?}");
    ensure!(servers(&node)?.is_empty(), "{:#?}", servers(&node)?);
    world.first()?.ensure_equal()
}

/// D4: other ports of a Service's address are closed, though the node has the address.
pub(crate) fn d4_other_ports_of_service_addresses_are_closed() -> Result<()> {
    let service = tcp(&["a"]).reached(At::LoadBalancer);
    let world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    for at in [At::ClusterIp, At::LoadBalancer] {
        other_ports_are_closed(&world, &service, at, &[Client::Outside, Client::PodHere])?;
    }
    Ok(())
}

/// The node listens on all its addresses, and nobody gets there by those of Services.
fn other_ports_are_closed(world: &World, service: &Svc, at: At, clients: &[Client]) -> Result<()> {
    let node = world.node(1)?;
    let _server = node.run(|| Ok(std::net::TcpListener::bind("[::]:8888")?))?;
    for family in Family::ALL {
        let mut to = service.address(at, family, 1);
        to.set_port(8888);
        for client in clients {
            refused(&world.net, *client, Protocol::Tcp, to)?;
        }
    }
    Ok(())
}

/// Everybody who reaches a Service with a node port. A node's own connections to a ClusterIP have that
/// address as their source too, and lose it with the device: they are not among these.
const EVERYBODY: [(Client, At, Family); 4] = [
    (Client::PodHere, At::ClusterIp, Family::V4),
    (Client::Outside, At::NodePort, Family::V4),
    (Client::Outside, At::ClusterIp, Family::V6),
    (Client::PodHere, At::NodePort, Family::V6),
];

/// Loads what the rules of nftables need.
const MODULES_OF_NFTABLES: &str = "modprobe -a nft_ct nft_numgen nft_chain_nat nft_nat nft_masq \
    nft_fib_ipv4 nft_fib_ipv6 nft_reject_ipv4 nft_reject_ipv6";

/// To nftables and back: no new connection fails. Connections of nftables go on under IPVS.
pub(crate) fn i4_nothing_fails_on_the_way_to_nftables_and_back() -> Result<()> {
    let service = tcp(&["a", "b", "c"]).reached(At::NodePort);
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let node = world.node(1)?.clone();
    // Else the kernel begins anew with each module that it finds missing, which takes half a minute.
    run(&node, MODULES_OF_NFTABLES)?;
    let loads = Loads::start(&world, &service, &EVERYBODY)?;
    loads.progress(2)?;
    let settings = Setup::PodRanges.settings()?;
    let mut other = Agent::open_kind(Kind::Nftables, &node, facts(1)?, settings.clone())?;
    other.replace(slice::from_ref(&service))?;
    loads.progress(2)?;
    remove_leftovers(&node, Kind::Nftables.serving([None; 2]))?;
    other.ensure_equal()?;
    loads.progress(4)?;
    ensure_nothing(&node)?;

    let mut of_nftables = open(&world, Client::PodHere, &service, Family::V4)?;
    world.first()?.restart()?;
    world.first()?.replace(slice::from_ref(&service))?;
    loads.progress(2)?;
    of_nftables.echo(PATIENCE).context("both are there")?;
    remove_leftovers(&node, UnderTest::current()?.serving())?;
    world.first()?.ensure_equal()?;
    loads.progress(4)?;
    of_nftables.echo(PATIENCE).context("nftables is gone")?;
    let left = kplane_tests::support::nft::nft(&node, "list tables")?;
    ensure!(!left.contains("kplane"), "{left}");
    loads.none_lost()
}

/// Connections that IPVS carries go on when nftables has taken over, those of the node itself too; what
/// they need of IPVS goes after them, and nothing else has to wait.
pub(crate) fn i4_connections_of_ipvs_outlive_it() -> Result<()> {
    let used = tcp(&["a", "b", "c"]).reached(At::NodePort);
    let unused = svc(2).only(Protocol::Tcp).endpoints([ep("a")]);
    let services = [used.clone(), unused];
    let world = World::serving(Setup::PodRanges, &services)?;
    let node = world.node(1)?.clone();
    let mut sessions = Vec::new();
    for (client, at, family) in [
        (Client::PodHere, At::ClusterIp, Family::V4),
        (Client::Node, At::ClusterIp, Family::V6),
        (Client::Outside, At::NodePort, Family::V4),
    ] {
        let to = used.address(at, family, client.node());
        let session = Probe::tcp(to).timeout(PATIENCE).open(world.net.ns(client)?)?;
        sessions.push((client, session));
    }
    let mut other = Agent::open_kind(
        Kind::Nftables,
        &node,
        facts(1)?,
        Setup::PodRanges.settings()?,
    )?;
    other.replace(&services)?;
    let look = || {
        node.run(|| {
            let serving = Kind::Nftables.serving([None; 2]);
            let waits = leftovers::spare_connections(serving, [true; 2])?;
            let found = match waits {
                Some(_) => leftovers::find_sparing(serving),
                None => leftovers::find(serving),
            };
            let problems = found.remove().problems;
            ensure!(problems.is_empty(), "{problems:?}");
            Ok(waits)
        })
    };
    let waits = look()?.context("connections are waited for")?;
    ensure!(
        waits == "3 connections through IPVS, 2 addresses",
        "{waits}"
    );
    let kept = servers(&node)?;
    let virtual_servers = kept.iter().filter(|line| line.starts_with("-A"));
    ensure!(virtual_servers.count() == 3, "{kept:#?}");
    ensure!(kept.iter().all(|line| !line.contains("-w 1")), "{kept:#?}");
    let rules = run(&node, "iptables-save")?;
    ensure!(!rules.contains("KUBE-SERVICES"), "{rules}");
    for (client, session) in &mut sessions {
        session.echo(PATIENCE).with_context(|| format!("{client:?}"))?;
    }
    other_ports_are_closed(&world, &used, At::ClusterIp, &[Client::PodHere])?;
    // Whoever comes now is sent by nftables, though IPVS refuses.
    for client in [Client::PodHere, Client::Node, Client::Outside] {
        let to = used.address(At::NodePort, Family::V4, client.node());
        hit(&world.net, client, Protocol::Tcp, to)?;
    }
    drop(sessions);
    eventually(FORGOTTEN, "nothing is waited for", || match look()? {
        None => anyhow::Ok(()),
        Some(waits) => anyhow::bail!(waits),
    })?;
    let rules = run(&node, "iptables-save")?;
    ensure!(!rules.contains("KUBE-IPVS"), "{rules}");
    ensure_nothing(&node)
}

/// What is cleaned up leaves nothing, and comes again.
pub(crate) fn cleanup_removes_everything_and_may_be_repeated() -> Result<()> {
    let service = svc(1).everywhere().endpoints(["a", "c"].map(ep));
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let node = world.node(1)?.clone();
    for _ in 0..2 {
        world.first()?.cleanup()?;
        ensure_nothing(&node)?;
    }
    world.first()?.restart()?;
    world.first()?.replace(slice::from_ref(&service))?;
    world.first()?.ensure_equal()?;
    let nobody = svc(2).everywhere();
    world.update(slice::from_ref(&nobody))?;
    Scenario {
        setup: Setup::PodRanges,
        service: nobody,
        rows: vec![(At::ClusterIp, [REFUSED; 4])],
    }
    .observe(&world.net)
}
