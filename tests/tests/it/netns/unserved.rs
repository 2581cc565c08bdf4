//! Destinations without endpoints, ports and addresses that no Service has (A18, A20, A21), and who
//! may come at all (A8, A9, A10).

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::slice;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kplane_dataplane::backend::nftables::LoopbackCounts;
use kplane_model::{Cidr, Family, Protocol};
use kplane_tests::capture::Capture;
use kplane_tests::client::{self, Outcome, Probe};

use crate::netns::addresses::{cases, on_both_nodes};
use kplane_tests::support::{
    ALL, ALL_MASQUERADED, At, Client, DROPPED, Ep, PATIENCE, PORT, Question, REFUSED, SILENCE,
    Scenario, Seen, Setup, World, answers, ask, cidrs, ep, loopback, node_ip, pairs, refused,
    second_ip, silent, svc, take_address,
};

pub(crate) fn a18_without_endpoints_everybody_is_refused_everywhere() -> Result<()> {
    Scenario {
        setup: Setup::PodRanges,
        service: svc(1).everywhere(),
        rows: At::ALL.map(|at| (at, [REFUSED; 4])).to_vec(),
    }
    .play()
}

/// The first endpoint ends the refusals, the last one's end begins them.
pub(crate) fn a18_refusals_follow_the_endpoints() -> Result<()> {
    let empty = svc(1).everywhere();
    let full = empty.clone().endpoints([ep("a")]);
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&empty))?;
    for _ in 0..3 {
        for (service, served) in [(&full, true), (&empty, false)] {
            world.update(slice::from_ref(service))?;
            for (at, family) in pairs(At::ALL, Family::ALL) {
                let to = service.address(at, family, 1);
                let seen = ask(&world.net, Client::Outside, Protocol::Tcp, to)?;
                let hit = matches!(seen, Seen::Hit { .. });
                ensure!(hit == served && (hit || seen.is_refused()), "{to}: {seen}");
            }
        }
    }
    Ok(())
}

/// No client waits for a timer: even a local IPv6 one, which an ICMP error would not reach before
/// its first retransmission.
pub(crate) fn a18_refusals_come_at_once() -> Result<()> {
    let service = svc(1).everywhere();
    let world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    for client in Client::ALL {
        for (family, protocol) in cases().filter(|(_, p)| *p != Protocol::Sctp) {
            let to = service.address(At::ClusterIp, family, 1);
            refused_at_once(&world, client, protocol, to)?;
        }
    }
    Ok(())
}

fn refused_at_once(
    world: &World,
    client: Client,
    protocol: Protocol,
    to: SocketAddr,
) -> Result<()> {
    let start = Instant::now();
    let seen = ask(&world.net, client, protocol, to)?;
    let took = start.elapsed();
    ensure!(
        seen.is_refused() && took < PATIENCE,
        "{client:?} to {protocol} {to}: {seen}, {took:?}"
    );
    Ok(())
}

/// One Service's endpoint is another one's address, at which there is nobody: who comes by the first
/// is let through.
pub(crate) fn a18_an_endpoint_may_be_where_another_service_refuses() -> Result<()> {
    let endpoint = ep("b").port(PORT);
    let served = svc(1).everywhere().endpoints([endpoint.clone()]);
    let refusing = svc(2).external_ips(endpoint.ips);
    let mut world = World::serving(Setup::PodRanges, &[served.clone(), refusing.clone()])?;
    let pod = world.topology.pod_mut("b")?;
    pod.serve(client::Protocol::Tcp, PORT)?;
    pod.serve(client::Protocol::Udp, PORT)?;
    for (client, family) in pairs([Client::Outside, Client::PodHere], Family::ALL) {
        for at in At::ALL {
            answers(&world.net, client, served.address(at, family, 1))?;
        }
    }
    for family in Family::ALL {
        let to = refusing.address(At::ExternalIp, family, 1);
        refused(&world.net, Client::PodHere, Protocol::Tcp, to)?;
    }
    Ok(())
}

pub(crate) fn a20_an_unused_port_of_a_cluster_ip_is_refused() -> Result<()> {
    let service = svc(1).endpoints([ep("a")]);
    let world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    for (family, protocol) in cases() {
        let mut to = service.address(At::ClusterIp, family, 1);
        to.set_port(81);
        for client in Client::ALL {
            refused(&world.net, client, protocol, to)?;
        }
    }
    Ok(())
}

/// An endpoint that is another Service's ClusterIP: DNAT does not lead on from there, so the packet would leave the node.
pub(crate) fn a20_an_endpoint_that_is_a_cluster_ip_is_refused() -> Result<()> {
    let target = svc(2).endpoints([ep("a")]);
    let ips = Family::ALL.map(|family| target.address(At::ClusterIp, family, 1).ip());
    let chained = svc(1).everywhere().endpoints([Ep::new(1, ips)]);
    let world = World::serving(Setup::PodRanges, &[chained.clone(), target])?;
    for (family, protocol) in cases() {
        for client in [Client::Outside, Client::PodHere, Client::Node] {
            let to = chained.address(At::ClusterIp, family, 1);
            refused_at_once(&world, client, protocol, to)?;
        }
    }
    Ok(())
}

/// Inside the ServiceCIDR; outside of it packets go on to whoever is there.
pub(crate) fn a20_an_address_that_no_service_has_is_dropped() -> Result<()> {
    let mut world = World::serving(Setup::PodRanges, &[svc(1).endpoints([ep("a")])])?;
    let nobody = svc(2);
    let clients = [Client::Outside, Client::PodHere, Client::Node];
    let dropped = |world: &World| -> Result<()> {
        for (client, family) in pairs(clients, Family::ALL) {
            let to = nobody.address(At::ClusterIp, family, 1);
            silent(&world.net, client, Protocol::Tcp, to)?;
        }
        Ok(())
    };
    dropped(&world)?;

    ensure!(!leaves_node_1(&world)?, "a packet to nobody was forwarded");
    let first = world.first()?;
    let ranges = std::mem::take(&mut first.facts.service_cidrs);
    first.update(&[])?;
    ensure!(leaves_node_1(&world)?, "a packet to elsewhere was dropped");
    let first = world.first()?;
    first.facts.service_cidrs = ranges;
    first.update(&[])?;
    dropped(&world)?;
    ensure!(!leaves_node_1(&world)?, "a packet to nobody was forwarded");
    Ok(())
}

/// Whether a packet of pod `here` to a ClusterIP that no Service has gets to the fabric.
fn leaves_node_1(world: &World) -> Result<bool> {
    let capture = Capture::open(world.topology.fabric())?;
    let mut left = false;
    for family in Family::ALL {
        let to = svc(3).address(At::ClusterIp, family, 1);
        let question = Question::new(Client::PodHere, Protocol::Udp, to).timeout(SILENCE);
        ensure!(question.ask(&world.net)? == Seen::Silent, "{question}");
        left = capture.drain()?.iter().any(|packet| packet.dst == to);
    }
    Ok(left)
}

pub(crate) fn a21_node_ports_are_served_on_the_primary_address_and_never_on_loopback() -> Result<()>
{
    let service = on_both_nodes();
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let port = service.node_port();
    for everywhere in [false, true] {
        if everywhere {
            let first = world.first()?;
            first.settings.nodeport_addresses = Family::ALL.map(Cidr::everything).to_vec();
            first.replace(slice::from_ref(&service))?;
        }
        for family in Family::ALL {
            let primary = SocketAddr::new(node_ip(1, family), port);
            let second = SocketAddr::new(second_ip(family), port);
            for client in [Client::Outside, Client::PodHere, Client::Node] {
                answers(&world.net, client, primary)?;
                let seen = ask(&world.net, client, Protocol::Tcp, second)?;
                let hit = matches!(seen, Seen::Hit { .. });
                ensure!(hit == everywhere, "{client:?} to {second}: {seen}");
                ensure!(hit || seen == Seen::Refused, "nobody listens: {seen}");
            }
            let local = SocketAddr::new(loopback(family), port);
            let probe = Probe::tcp(local).timeout(PATIENCE);
            let outcome = probe.once(world.node(1)?)?;
            let refused = matches!(outcome, Outcome::Refused);
            ensure!(refused, "{local}: {outcome}");
        }
    }
    Ok(())
}

/// K6: also a program that listens at the node port of a Service gets nothing from a loopback address, and what is refused
/// is counted.
pub(crate) fn k6_node_ports_on_loopback_are_refused_and_counted() -> Result<()> {
    let service = on_both_nodes();
    let (port, free) = (service.node_port(), service.node_port() + 1);
    let world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let node = world.node(1)?;
    for family in Family::ALL {
        let ip = loopback(family);
        let listens = |port| node.run(|| Ok(TcpListener::bind((ip, port))?));
        let (_taken, _free) = (listens(port)?, listens(free)?);
        let datagrams = node.run(|| Ok(UdpSocket::bind((ip, port))?))?;
        datagrams.set_nonblocking(true)?;
        let refused = |protocol| {
            let counts = node.run(|| Ok(LoopbackCounts::read()))?;
            let of = counts.refused.into_iter().find(|(f, p, _)| (*f, *p) == (family, protocol));
            of.map(|(_, _, packets)| packets).context("no counter")
        };
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            let before = refused(protocol)?;
            let to = SocketAddr::new(ip, port);
            let probe = match protocol {
                Protocol::Udp => Probe::udp(to),
                Protocol::Tcp | Protocol::Sctp => Probe::tcp(to),
            };
            let outcome = probe.timeout(PATIENCE).once(node)?;
            ensure!(matches!(outcome, Outcome::Refused), "{to}: {outcome}");
            ensure!(refused(protocol)? > before, "{to}: not counted");
        }
        ensure!(datagrams.recv(&mut [0; 9]).is_err(), "a datagram arrived");
        // No Service has this one.
        let connected = node.run(|| Ok(TcpStream::connect((ip, free)).is_ok()))?;
        ensure!(connected, "a program's own port is refused");
    }
    Ok(())
}

/// A NodePort is not for packets that only pass this node.
pub(crate) fn a21_node_ports_are_not_served_on_addresses_of_others() -> Result<()> {
    let service = on_both_nodes();
    let mut world = World::new(Setup::PodRanges)?;
    let first = world.first()?;
    first.settings.nodeport_addresses = Family::ALL.map(Cidr::everything).to_vec();
    first.replace(slice::from_ref(&service))?;
    let client = world.topology.host("client")?;
    for (family, protocol) in cases().filter(|(_, p)| *p != Protocol::Sctp) {
        let pod = ep("c").port(service.node_port()).address(family);
        client.route(Cidr::single(pod.ip()), world.topology.node("node-1")?)?;
        refused(&world.net, Client::Outside, protocol, pod)?;
    }
    Ok(())
}

/// The client's addresses and those of pods of node-2.
const RANGES: [&str; 4] = [
    "172.30.0.3/32",
    "10.244.2.0/24",
    "fd30::3/128",
    "fd44:0:0:2::/64",
];

pub(crate) fn a8_source_ranges_drop_others_at_load_balancer_addresses_only() -> Result<()> {
    let everybody = [ALL_MASQUERADED; 4];
    Scenario {
        setup: Setup::PodRanges,
        service: on_both_nodes().ranges(cidrs(&RANGES)?),
        rows: vec![
            (At::ClusterIp, [ALL_MASQUERADED, ALL, ALL, ALL_MASQUERADED]),
            (At::ExternalIp, everybody),
            (At::NodePort, everybody),
            (
                At::LoadBalancer,
                [ALL_MASQUERADED, DROPPED, ALL_MASQUERADED, DROPPED],
            ),
        ],
    }
    .play()
}

pub(crate) fn a10_source_ranges_count_without_endpoints_too() -> Result<()> {
    Scenario {
        setup: Setup::PodRanges,
        service: svc(1).everywhere().ranges(cidrs(&RANGES)?),
        rows: vec![
            (At::NodePort, [REFUSED; 4]),
            (At::LoadBalancer, [REFUSED, DROPPED, REFUSED, DROPPED]),
        ],
    }
    .play()
}

/// Ranges inside each other, and one that holds everybody.
pub(crate) fn a8_ranges_may_overlap_and_hold_everybody() -> Result<()> {
    let mut ranges = cidrs(&["172.30.0.0/16", "fd30::/16"])?;
    ranges.extend(cidrs(&RANGES)?);
    let service = on_both_nodes().ranges(ranges.clone());
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let allowed = |world: &World, client| -> Result<()> {
        for family in Family::ALL {
            answers(
                &world.net,
                client,
                service.address(At::LoadBalancer, family, 1),
            )?;
        }
        Ok(())
    };
    for client in [Client::Outside, Client::PodThere, Client::Node] {
        allowed(&world, client)?;
    }
    ranges.extend(Family::ALL.map(Cidr::everything));
    world.update(&[service.clone().ranges(ranges)])?;
    Client::ALL.into_iter().try_for_each(|c| allowed(&world, c))
}

/// A node with the load-balancer address on a link of its own sends from that address.
pub(crate) fn a9_a_node_inside_the_ranges_reaches_an_address_that_it_has_itself() -> Result<()> {
    let inside = cidrs(&["172.30.1.0/24", "fd30::1:0/112"])?;
    // Masquerading may choose the load-balancer address, to which no other node has a way back.
    let service = on_both_nodes().endpoints(["a", "b"].map(ep)).ranges(inside);
    let mut world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let node = world.topology.node("node-1")?;
    let vips = Family::ALL.map(|family| service.address(At::LoadBalancer, family, 1));
    for vip in vips {
        take_address(node, vip.ip())?;
    }
    let probe = |vip: SocketAddr| Probe::tcp(vip).source(vip.ip());
    for vip in vips {
        // The first packet may get lost while the pod learns the address.
        let patient = probe(vip).timeout(Duration::from_millis(2_500));
        patient.reply(world.node(1)?)?;
    }
    world.update(&[service.ranges(cidrs(&RANGES)?)])?;
    for vip in vips {
        let outcome = probe(vip).timeout(SILENCE).once(world.node(1)?)?;
        let timed_out = matches!(outcome, Outcome::TimedOut);
        ensure!(timed_out, "{vip}: {outcome}");
    }
    Ok(())
}

/// An external address that the node has on a link of its own is refused on its way in.
pub(crate) fn a18_addresses_that_the_node_has_itself_are_refused_too() -> Result<()> {
    let service = svc(1).everywhere();
    let world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    let node = world.topology.node("node-1")?;
    for (at, family) in pairs([At::ExternalIp, At::LoadBalancer], Family::ALL) {
        let vip = service.address(at, family, 1);
        take_address(node, vip.ip())?;
        // Somebody listens there, who must not be reached by mistake.
        let echo = world.topology.echo();
        let protocol = client::Protocol::Tcp;
        let _server = echo.serve(node.ns(), "node", protocol, vip)?;
        for client in [Client::Outside, Client::PodHere] {
            refused(&world.net, client, Protocol::Tcp, vip)?;
        }
    }
    Ok(())
}
