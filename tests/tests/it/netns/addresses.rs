//! Every kind of address, client, protocol and family: who is reached, and as whom (A3, A5, A6,
//! A15, A17, A21).

use anyhow::{Context as _, Result, ensure};
use kplane_model::{Family, Protocol};
use kplane_tests::client::{self, Probe};

use kplane_tests::support::{
    ALL, ALL_MASQUERADED, At, Client, HERE, Question, Scenario, Seen, Setup, Svc, TARGET, World,
    ask, ep, hit, node_ip, pairs, svc,
};

/// Reached at all kinds of addresses, with endpoints on both nodes.
pub(crate) fn on_both_nodes() -> Svc {
    svc(1).everywhere().endpoints(["a", "b", "c"].map(ep))
}

pub(crate) fn a15_external_addresses_masquerade_and_pods_keep_their_source_to_cluster_ips()
-> Result<()> {
    cluster_policies().play()
}

/// Traffic policies Cluster, pods known by their ranges.
pub(crate) fn cluster_policies() -> Scenario {
    Scenario {
        setup: Setup::PodRanges,
        service: on_both_nodes(),
        rows: vec![
            (At::ClusterIp, [ALL_MASQUERADED, ALL, ALL, ALL_MASQUERADED]),
            (At::ExternalIp, [ALL_MASQUERADED; 4]),
            (At::LoadBalancer, [ALL_MASQUERADED; 4]),
            (At::NodePort, [ALL_MASQUERADED; 4]),
        ],
    }
}

/// Endpoints on node-1 only: answers to a client outside would not come back by node-1 from others.
pub(crate) fn a15_without_pod_ranges_nobody_is_masqueraded_to_cluster_ips() -> Result<()> {
    Scenario {
        setup: Setup::NoPodRanges,
        service: svc(1).everywhere().endpoints(["a", "b"].map(ep)),
        rows: vec![
            (At::ClusterIp, [ALL; 4]),
            (At::ExternalIp, [ALL_MASQUERADED; 4]),
            (At::LoadBalancer, [ALL_MASQUERADED; 4]),
            (At::NodePort, [ALL_MASQUERADED; 4]),
        ],
    }
    .play()
}

pub(crate) fn a17_masquerade_all_masquerades_cluster_ips_for_everybody() -> Result<()> {
    Scenario {
        setup: Setup::MasqueradeAll,
        service: on_both_nodes(),
        rows: vec![
            (At::ClusterIp, [ALL_MASQUERADED; 4]),
            (At::LoadBalancer, [ALL_MASQUERADED; 4]),
        ],
    }
    .play()
}

pub(crate) fn a17_masquerade_all_leaves_external_policy_local_alone() -> Result<()> {
    Scenario {
        setup: Setup::MasqueradeAll,
        service: on_both_nodes().external_local(),
        rows: vec![
            (At::ClusterIp, [ALL_MASQUERADED; 4]),
            (At::LoadBalancer, [HERE, ALL, ALL, ALL_MASQUERADED]),
            (At::NodePort, [HERE, ALL, ALL, ALL_MASQUERADED]),
        ],
    }
    .play()
}

/// The only endpoint asks for itself, at every address and with every policy.
pub(crate) fn a15_an_endpoint_reaches_itself_through_its_service() -> Result<()> {
    let plain = svc(1).everywhere().endpoints([ep("a")]);
    let local = svc(2).everywhere().external_local().internal_local().endpoints([ep("a")]);
    for setup in [Setup::PodRanges, Setup::NoPodRanges, Setup::MasqueradeAll] {
        let services = [plain.clone(), local.clone()];
        let world = World::serving(setup, &services)?;
        for (svc, at) in services.iter().flat_map(|s| At::ALL.map(|at| (s, at))) {
            for (family, protocol) in cases() {
                let to = svc.address(at, family, 1);
                let question = Question::new(Client::Endpoint, protocol, to);
                let seen = question.ask(&world.net)?;
                let Seen::Hit { endpoint, source } = seen else {
                    anyhow::bail!("{setup:?}: {question}: {seen}");
                };
                ensure!(endpoint == ep("a").address(family), "{question}: {seen}");
                let masqueraded = Client::Endpoint.is_masqueraded(source);
                ensure!(masqueraded, "{setup:?}: {question}: {seen}");
            }
        }
    }
    Ok(())
}

/// Masquerading is for a connection to itself only: its neighbour sees the pod.
pub(crate) fn a15_a_pod_keeps_its_source_to_endpoints_that_are_not_itself() -> Result<()> {
    let service = svc(1).endpoints([ep("b")]);
    let other = svc(2).endpoints([ep("a")]);
    let world = World::serving(Setup::PodRanges, &[service.clone(), other])?;
    for (family, protocol) in cases() {
        let to = service.address(At::ClusterIp, family, 1);
        let seen = ask(&world.net, Client::Endpoint, protocol, to)?;
        let wanted = Seen::Hit {
            endpoint: ep("b").address(family),
            source: Client::Endpoint.source(family),
        };
        ensure!(seen == wanted, "{protocol} {to}: {seen}");
    }
    Ok(())
}

/// A pod asks for a NodePort at a node that is not its own: that node masquerades.
pub(crate) fn a15_a_pod_reaches_the_node_port_of_another_node() -> Result<()> {
    let service = on_both_nodes();
    let world = World::serving(Setup::PodRanges, std::slice::from_ref(&service))?;
    for (family, protocol) in cases() {
        let question = Question::new(
            Client::PodThere,
            protocol,
            service.address(At::NodePort, family, 1),
        );
        let seen = question.ask(&world.net)?;
        let by_node_1 = |ip| Client::PodHere.is_masqueraded(ip);
        let good = matches!(seen, Seen::Hit { source, .. } if by_node_1(source));
        ensure!(good, "{question}: {seen}");
    }
    Ok(())
}

/// An endpoint with the node's own address (`hostNetwork`). On its own node the packets never leave
/// again, so their source stays, as with kube-proxy.
pub(crate) fn a15_endpoints_with_the_nodes_address_are_reached_by_everybody() -> Result<()> {
    let mut world = World::new(Setup::PodRanges)?;
    let pod = world.topology.add_host_pod("node-1", "host")?;
    pod.serve(client::Protocol::Tcp, TARGET)?;
    pod.serve(client::Protocol::Udp, TARGET)?;
    let mut endpoint = ep("a");
    endpoint.ips = Family::ALL.map(|family| node_ip(1, family));
    let service = svc(1).everywhere().endpoints([endpoint.clone()]);
    let local = svc(2)
        .everywhere()
        .internal_local()
        .external_local()
        .endpoints([endpoint.clone()]);
    world.replace(&[service.clone(), local.clone()])?;
    for (svc, at) in [&service, &local].into_iter().flat_map(|s| At::ALL.map(|at| (s, at))) {
        for client in Client::ALL {
            // Where no endpoint is, policy Local is tested elsewhere.
            if client == Client::PodThere && *svc == local {
                continue;
            }
            for (family, protocol) in cases().filter(|(_, p)| *p != Protocol::Sctp) {
                let to = svc.address(at, family, client.node());
                let (reached, _) = hit(&world.net, client, protocol, to)?;
                ensure!(reached == endpoint.address(family), "{to}: {reached}");
            }
        }
    }
    Ok(())
}

/// A connection whose source the node changed gets its answers, and one port of an address does not
/// answer for another.
pub(crate) fn a3_the_same_port_of_other_protocols_is_independent() -> Result<()> {
    let tcp = svc(1).everywhere().only(Protocol::Tcp).endpoints([ep("a")]);
    let udp = svc(1).everywhere().only(Protocol::Udp).endpoints([ep("b")]);
    let world = World::serving(Setup::PodRanges, &[tcp.clone(), udp])?;
    for (at, family) in pairs(At::ALL, Family::ALL) {
        let to = tcp.address(at, family, 1);
        for (protocol, pod) in [(client::Protocol::Tcp, "a"), (client::Protocol::Udp, "b")] {
            let reply = Probe::new(protocol, to)
                .reply(world.net.ns(Client::PodHere)?)
                .with_context(|| format!("{at:?}"))?;
            ensure!(reply.name == pod, "{protocol} {to}: {reply:?}");
        }
    }
    Ok(())
}

pub(crate) fn cases() -> impl Iterator<Item = (Family, Protocol)> {
    Family::ALL
        .into_iter()
        .flat_map(|family| Protocol::ALL.map(|protocol| (family, protocol)))
}
