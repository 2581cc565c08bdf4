//! Mode iptables where it differs from nftables (A10, A20, A21), and on the way from one
//! backend to another (I4).

use std::net::{Ipv4Addr, SocketAddr};
use std::slice;
use std::time::Duration;

use anyhow::{Result, ensure};
use kplane_dataplane::backend::Kind;
use kplane_dataplane::backend::iptables::{Layout, PacketCounts};
use kplane_dataplane::leftovers::{self, Serving};
use kplane_model::{Family, Protocol};
use kplane_tests::client::{Outcome, Probe};
use kplane_tests::netns::NetNs;
use kplane_tests::wait::eventually;
use socket2::{Domain, Socket, Type};

use crate::netns::addresses::{cases, cluster_policies, on_both_nodes};
use crate::netns::churn::Loads;
use crate::netns::coming_from_kube_proxy::EVERYBODY;
use kplane_tests::support::kube_proxy::Mode;
use kplane_tests::support::nft::nft;
use kplane_tests::support::programs::list;
use kplane_tests::support::under_test::UnderTest;
use kplane_tests::support::{
    Agent, At, Client, PATIENCE, REFUSED, Scenario, Seen, Setup, Svc, World, answers, ask, cidrs,
    ep, facts, loopback, node_ip, second_ip, silent, svc, tcp_service,
};

/// REJECT wins: nobody is dropped by the firewall of a Service without endpoints.
pub(crate) fn a10_without_endpoints_source_ranges_do_not_count() -> Result<()> {
    let ranges = cidrs(&["172.30.0.3/32", "fd30::3/128"])?;
    let empty = svc(1).everywhere().ranges(ranges);
    Scenario {
        setup: Setup::PodRanges,
        service: empty.clone(),
        rows: vec![(At::LoadBalancer, [REFUSED; 4])],
    }
    .play()?;
    let service = empty.endpoints([ep("a")]);
    let world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    for family in Family::ALL {
        let to = service.address(At::LoadBalancer, family, 1);
        silent(&world.net, Client::PodHere, Protocol::Tcp, to)?;
    }
    Ok(())
}

/// Nobody in the network has these addresses: nothing comes back.
pub(crate) fn a20_unused_ports_and_addresses_are_left_alone() -> Result<()> {
    let service = svc(1).endpoints([ep("a")]);
    let world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    for (family, protocol) in cases() {
        let mut unused = service.address(At::ClusterIp, family, 1);
        unused.set_port(81);
        for to in [unused, svc(2).address(At::ClusterIp, family, 1)] {
            silent(&world.net, Client::Outside, protocol, to)?;
        }
    }
    Ok(())
}

/// A21, C8: IPv4 loopback only, and not for others who send there.
pub(crate) fn a21_node_ports_are_served_on_all_addresses_and_on_loopback() -> Result<()> {
    let service = on_both_nodes();
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let port = service.node_port();
    for everywhere in [true, false] {
        if !everywhere {
            let first = world.first()?;
            first.settings.nodeport_addresses = vec![];
            first.replace(slice::from_ref(&service))?;
        }
        for family in Family::ALL {
            answers(
                &world.net,
                Client::Outside,
                (node_ip(1, family), port).into(),
            )?;
            let second = SocketAddr::new(second_ip(family), port);
            for client in [Client::Outside, Client::PodHere, Client::Node] {
                let seen = ask(&world.net, client, Protocol::Tcp, second)?;
                let hit = matches!(seen, Seen::Hit { .. });
                ensure!(hit == everywhere, "{client:?} to {second}: {seen}");
            }
            let local = SocketAddr::new(loopback(family), port);
            let outcome = Probe::tcp(local).timeout(PATIENCE).once(world.node(1)?)?;
            let served = matches!(outcome, Outcome::Reply(_));
            let wanted = everywhere && family == Family::V4;
            ensure!(
                served == wanted,
                "{local}, everywhere {everywhere}: {outcome}"
            );
        }
    }
    Ok(())
}

/// An echo reply that nobody asked for: connection tracking can make nothing of it.
const ICMP_REPLY: [u8; 8] = [0, 0, 0xff, 0xfd, 0, 1, 0, 1];

/// What kube-proxy's metrics of this mode count.
pub(crate) fn c7_c8_dropped_and_local_packets_are_counted() -> Result<()> {
    let service = on_both_nodes();
    let world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let counts = || world.node(1)?.run(|| Ok(PacketCounts::read()));
    let none = PacketCounts {
        invalid_dropped: Some(0),
        localhost_accepted: Some(0),
    };
    ensure!(counts()? == none, "{:?}", counts()?);
    let to = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), service.node_port());
    let outcome = Probe::tcp(to).timeout(PATIENCE).once(world.node(1)?)?;
    ensure!(matches!(outcome, Outcome::Reply(_)), "{to}: {outcome}");
    world.net.pod("a")?.run(|| {
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(socket2::Protocol::ICMPV4))?;
        let outside = SocketAddr::new(Client::Outside.source(Family::V4), 0);
        socket.send_to(&ICMP_REPLY, &outside.into())?;
        Ok(())
    })?;
    eventually(PATIENCE, "both are counted", || {
        let seen = counts()?;
        let both = [seen.invalid_dropped, seen.localhost_accepted];
        ensure!(both == [Some(1); 2], "{seen:?}");
        Ok(())
    })
}

/// C4: and chooses anew then.
pub(crate) fn a11_a_client_is_forgotten_when_its_time_is_over() -> Result<()> {
    let service = svc(1).only(Protocol::Tcp).endpoints(["a", "b", "c"].map(ep)).sticky(1);
    let world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let to = service.address(At::ClusterIp, Family::V4, 1);
    let choice = || ask(&world.net, Client::Outside, Protocol::Tcp, to);
    let first = choice()?;
    for _ in 0..5 {
        let again = choice()?;
        ensure!(first == again, "{first}, then {again}");
    }
    eventually(Duration::from_secs(60), "another choice", || {
        // Longer than its time: the next question would prolong it.
        std::thread::sleep(Duration::from_millis(2_100));
        match choice() {
            Ok(other) if other != first => Ok(()),
            Ok(same) => Err(same.to_string()),
            Err(error) => Err(error.to_string()),
        }
    })
}

/// Removes what other proxies left on a node.
pub(crate) fn remove_leftovers(node: &NetNs, serving: Serving) -> Result<()> {
    let outcome = node.run(|| Ok(leftovers::find(serving).remove()))?;
    ensure!(outcome.problems.is_empty(), "{:?}", outcome.problems);
    let left = node.run(|| Ok(leftovers::find(serving)))?;
    ensure!(left.is_empty(), "left: {left}");
    Ok(())
}

/// Those of both kinds of iptables, and of nftables: the ones of the kind that the node uses are
/// taken over, the others go.
pub(crate) fn i4_nothing_fails_while_kube_proxys_rules_are_adopted() -> Result<()> {
    let service = tcp_service();
    for mode in [Mode::Nft, Mode::Legacy, Mode::Nftables] {
        let mut world = World::new(Setup::PodRanges)?;
        let node = world.node(1)?.clone();
        mode.serve(&node, &service)?;
        let loads = Loads::start(&world, &service, &EVERYBODY)?;
        loads.progress(5)?;
        world.first()?.restart()?;
        world.first()?.replace(slice::from_ref(&service))?;
        world.first()?.ensure_equal()?;
        loads.progress(5)?;
        remove_leftovers(&node, UnderTest::current()?.serving())?;
        loads.progress(20)?;
        world.first()?.ensure_equal()?;
        loads.none_lost()?;
        // The chains of kube-proxy's that are not ours are gone.
        let all = list(&node)?;
        let stale = all.iter().filter(|line| line.contains("ERIFXISQEP7F7OF4"));
        ensure!(stale.count() == 0, "{mode:?}: {all:#?}");
    }
    Ok(())
}

/// Layout `compat` is kube-proxy's own, letter by letter: what a kube-proxy of this version leaves.
pub(crate) fn i4_nothing_fails_between_kube_proxys_layout_and_ours() -> Result<()> {
    let services: Vec<Svc> = (2..=60)
        .map(|number| svc(number).everywhere().endpoints([ep("a"), ep("c")]))
        .chain([tcp_service()])
        .collect();
    let mut world = World::new(Setup::PodRanges)?;
    let node = world.node(1)?.clone();
    let mut loads = None;
    for layout in [Layout::Compat, Layout::Tree, Layout::Compat, Layout::Tree] {
        let first = world.first()?;
        first.backend_settings.iptables_layout = layout;
        first.restart()?;
        let done = first.replace(&services)?;
        first.ensure_equal()?;
        if loads.is_some() {
            // Chains of ServicePorts and endpoints stay as they are: nothing is written but lists.
            ensure!(done.operations < 800, "{layout:?}: {done:?}");
        } else {
            loads = Some(Loads::start(&world, &tcp_service(), &EVERYBODY)?);
        }
        loads.iter().try_for_each(|loads| loads.progress(10))?;
        let dispatch = list(&node)?.iter().any(|line| line.contains("KUBE-SVC-D-"));
        ensure!(dispatch == (layout == Layout::Tree), "{layout:?}");
        let again = world.first()?.replace(&services)?;
        ensure!(again.operations == 0, "{layout:?}: {again:?}");
    }
    loads.map_or(Ok(()), Loads::none_lost)
}

pub(crate) fn i4_nothing_fails_on_the_way_to_nftables_and_back() -> Result<()> {
    let service = tcp_service();
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let node = world.node(1)?.clone();
    let loads = Loads::start(&world, &service, &EVERYBODY)?;
    loads.progress(5)?;
    let settings = Setup::PodRanges.settings()?;
    for _ in 0..2 {
        let mut other = Agent::open_kind(Kind::Nftables, &node, facts(1)?, settings.clone())?;
        other.replace(slice::from_ref(&service))?;
        loads.progress(5)?;
        remove_leftovers(&node, Kind::Nftables.serving([None; 2]))?;
        other.ensure_equal()?;
        loads.progress(20)?;
        let left: Vec<String> = list(&node)?;
        let ours = |line: &&String| line.contains("KUBE-") && !line.contains("KUBE-FIREWALL");
        let hint = |line: &&String| !line.contains("KUBE-IPTABLES-HINT");
        let left: Vec<&String> = left.iter().filter(ours).filter(hint).collect();
        ensure!(left.is_empty(), "{left:#?}");

        world.first()?.restart()?;
        world.first()?.replace(slice::from_ref(&service))?;
        loads.progress(5)?;
        remove_leftovers(&node, UnderTest::current()?.serving())?;
        world.first()?.ensure_equal()?;
        loads.progress(20)?;
        let left = nft(&node, "list tables")?;
        ensure!(!left.contains("kplane"), "{left}");
    }
    loads.none_lost()
}

pub(crate) fn cleanup_removes_everything_and_may_be_repeated() -> Result<()> {
    let services = [on_both_nodes(), svc(2).everywhere()];
    let mut world = World::new(Setup::PodRanges)?;
    let node = world.node(1)?.clone();
    let before = list(&node)?;
    world.replace(&services)?;
    ensure!(
        list(&node)?.len() > before.len() + 50,
        "nothing was written"
    );
    for _ in 0..2 {
        world.first()?.cleanup()?;
        let after = list(&node)?;
        // The last of it protects the node while route_localnet is set, and is kubelet's as well.
        let ours = |line: &&String| line.contains("KUBE-") && !line.contains("KUBE-FIREWALL");
        let new: Vec<&String> = after.iter().filter(ours).collect();
        let hint = if UnderTest::current()?.is_iptables() { 2 } else { 0 };
        ensure!(new.len() == hint, "{new:#?}");
    }
    world.first()?.restart()?;
    world.first()?.replace(&services)?;
    world.first()?.ensure_equal()?;
    cluster_policies().observe(&world.net)
}
