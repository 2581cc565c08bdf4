//! Combinations of behaviours, from Kubernetes objects to packets: source ranges with policies, hints
//! with draining endpoints, affinity with policies, odd ways to write addresses.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::slice;

use anyhow::{Context as _, Result, ensure};
use kplane_dataplane::backend::PodInterface;
use kplane_model::{Family, Protocol};
use serde_json::{Value, json};

use crate::netns::addresses::on_both_nodes;
use kplane_rig::privilege::need_tools;
use kplane_tests::support::cluster::{Cluster, node, node_in, zone_name};
use kplane_tests::support::nft::nft;
use kplane_tests::support::objects::{
    addresses, draining_in, load_balancer, ready_in, service, slices, with_endpoints, with_pods,
};
use kplane_tests::support::{
    ALL, ALL_MASQUERADED, At, Client, DROPPED, HERE, Net, Question, SILENCE, Scenario, Seen, Setup,
    World, ask, cidrs, ep, hit, pairs, refused, silent, svc,
};

/// Connections from which to learn every endpoint: one of 3 stays unseen once in 10^10 times.
const TRIES: usize = 60;

/// A world whose agents get Kubernetes objects.
pub(crate) fn cluster(setup: Setup) -> Result<(World, Cluster)> {
    let world = World::without_agents()?;
    let cluster = Cluster::open(&world, setup)?;
    Ok((world, cluster))
}

/// The pods that answer to many connections by TCP.
pub(crate) fn reached(net: &Net, client: Client, to: SocketAddr) -> Result<BTreeSet<&'static str>> {
    let mut pods = BTreeSet::new();
    let mut other = None;
    let mut tries = 0;
    let question = Question::new(client, Protocol::Tcp, to);
    question.repeat(net, |seen| {
        tries += 1;
        let hit = |pod: &&str| {
            matches!(seen, Seen::Hit { endpoint, .. } if endpoint.ip() == ep(pod).address(Family::of(to.ip())).ip())
        };
        match ["a", "b", "c"].into_iter().find(hit) {
            Some(pod) => drop(pods.insert(pod)),
            None => other = Some(seen),
        }
        other.is_none() && tries < TRIES
    })?;
    match other {
        Some(seen) => Err(anyhow::anyhow!("{question}: {seen}")),
        None => Ok(pods),
    }
}

/// Wants exactly these pods to answer, in both families.
pub(crate) fn reaches(
    net: &Net,
    client: Client,
    number: u16,
    at: At,
    pods: &[&'static str],
) -> Result<()> {
    for family in Family::ALL {
        let to = svc(number).address(at, family, client.node());
        let seen = reached(net, client, to)?;
        let wanted: BTreeSet<&str> = pods.iter().copied().collect();
        ensure!(
            seen == wanted,
            "{client:?} to {at:?} {to}: {seen:?}, not {wanted:?}"
        );
    }
    Ok(())
}

/// Source ranges decide first, for pods as well; whoever is admitted has the ways of A16.
pub(crate) fn a8_a16_source_ranges_together_with_external_policy_local() -> Result<()> {
    let ranges = cidrs(&[
        "172.30.0.3/32",
        "10.244.2.0/24",
        "fd30::3/128",
        "fd44:0:0:2::/64",
    ])?;
    let service = on_both_nodes().external_local().ranges(ranges);
    let local = [HERE, ALL, ALL, ALL_MASQUERADED];
    Scenario {
        setup: Setup::PodRanges,
        service,
        rows: vec![
            (At::LoadBalancer, [HERE, DROPPED, ALL, DROPPED]),
            (At::ExternalIp, local),
            (At::NodePort, local),
            (At::ClusterIp, [ALL_MASQUERADED, ALL, ALL, ALL_MASQUERADED]),
        ],
    }
    .play()
}

/// An admitted client is dropped all the same where the policy has no endpoint; others are dropped
/// even where everything is refused.
pub(crate) fn a8_a18_source_ranges_where_a_local_policy_has_no_endpoint() -> Result<()> {
    let ranges = cidrs(&["172.30.0.3/32", "fd30::3/128"])?;
    let there = svc(1).everywhere().external_local().ranges(ranges);
    let service = there.endpoints([ep("c")]);
    let wants = [DROPPED, DROPPED, DROPPED, DROPPED];
    Scenario {
        setup: Setup::NoPodRanges,
        service,
        rows: vec![(At::LoadBalancer, wants)],
    }
    .play()
}

/// Where another program translates first, our chain for the choice of an endpoint never sees the packet.
pub(crate) fn a8_source_ranges_hold_where_another_program_translates() -> Result<()> {
    need_tools(&["nft"])?;
    let ranges = cidrs(&["172.30.0.3/32", "fd30::3/128"])?;
    let service = svc(1).everywhere().ranges(ranges).endpoints([ep("a")]);
    let world = World::serving(Setup::PodRanges, slice::from_ref(&service))?;
    for (table, family) in [("ip", Family::V4), ("ip6", Family::V6)] {
        let at = service.address(At::LoadBalancer, family, 1);
        let pod = ep("a").address(family);
        let chain = |point: &str| {
            format!(
                "add table {table} other\n\
                 add chain {table} other {point} {{ type nat hook {point} priority -105; }}\n\
                 add rule {table} other {point} {table} daddr {} meta l4proto {{ tcp, udp, sctp }} th dport {} dnat to {pod}\n",
                at.ip(),
                at.port(),
            )
        };
        nft(world.node(1)?, &(chain("prerouting") + &chain("output")))?;
        for protocol in Protocol::ALL {
            let seen = ask(&world.net, Client::Outside, protocol, at)?;
            ensure!(matches!(seen, Seen::Hit { .. }), "{protocol} {at}: {seen}");
            silent(&world.net, Client::PodHere, protocol, at)?;
        }
        silent(&world.net, Client::Node, Protocol::Tcp, at)?;
    }
    Ok(())
}

/// Pods told by the one interface that has this name (`BridgeInterface`): others are no pods.
pub(crate) fn a15_a16_pods_are_told_by_one_interface() -> Result<()> {
    let service = on_both_nodes().external_local();
    let mut world = World::new(Setup::NoPodRanges)?;
    // Of the pod `here`: links are numbered in the order of the pods.
    let link = PodInterface::new("pod3", false);
    let first = world.first()?;
    first.backend_settings.pod_interface = link;
    first.restart()?;
    first.replace(slice::from_ref(&service))?;
    for (at, family) in pairs([At::LoadBalancer, At::NodePort, At::ClusterIp], Family::ALL) {
        let to = service.address(at, family, 1);
        for (client, known) in [(Client::PodHere, true), (Client::Endpoint, false)] {
            let seen = reached(&world.net, client, to)?;
            let all = known || at == At::ClusterIp;
            ensure!(
                seen.contains("c") == all,
                "{client:?} to {at:?} {to}: {seen:?}"
            );
            let (_, source) = hit(&world.net, client, Protocol::Udp, to)?;
            let masqueraded = client.is_masqueraded(source);
            let may = !known && (at == At::ClusterIp || client == Client::Endpoint);
            ensure!(!masqueraded || may, "{client:?} to {at:?} {to}: {source}");
            ensure!(
                masqueraded || known || at != At::ClusterIp,
                "{client:?} to {to}: {source}"
            );
        }
    }
    Ok(())
}

/// Nothing is ready: hints do not count, draining endpoints of all zones serve (B3). One is ready
/// elsewhere: it serves policy Cluster whatever its hint (B2), the draining one policy Local (B5).
pub(crate) fn b2_b3_b5_hints_together_with_draining_endpoints() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let net = &world.net;
    let [one, two] = [zone_name(1), zone_name(2)];
    let mut local = load_balancer(1);
    local["spec"]["externalTrafficPolicy"] = json!("Local");

    cluster.apply(&with_endpoints(
        local.clone(),
        &[("a", draining_in(&one)), ("c", draining_in(&two))],
    ))?;
    for client in [Client::PodHere, Client::PodThere] {
        reaches(net, client, 1, At::ClusterIp, &["a", "c"])?;
        reaches(net, client, 1, At::LoadBalancer, &["a", "c"])?;
    }
    reaches(net, Client::Outside, 1, At::LoadBalancer, &["a"])?;

    cluster.apply(&slices(
        &local,
        &[("a", draining_in(&one)), ("c", ready_in(&two))],
    ))?;
    for client in [Client::PodHere, Client::PodThere] {
        reaches(net, client, 1, At::ClusterIp, &["c"])?;
        reaches(net, client, 1, At::LoadBalancer, &["c"])?;
    }
    reaches(net, Client::Outside, 1, At::LoadBalancer, &["a"])?;
    reaches(net, Client::Outside, 1, At::NodePort, &["a"])?;

    // With one ready endpoint in each zone everybody stays at home, but policy Local knows no zones.
    cluster.apply(&slices(
        &local,
        &[
            ("a", draining_in(&two)),
            ("b", ready_in(&two)),
            ("c", ready_in(&one)),
        ],
    ))?;
    reaches(net, Client::PodHere, 1, At::ClusterIp, &["c"])?;
    reaches(net, Client::PodThere, 1, At::ClusterIp, &["b"])?;
    reaches(net, Client::Outside, 1, At::LoadBalancer, &["b"])
}

/// Hints decide; `trafficDistribution` and the annotations that lead to hints are not read.
pub(crate) fn b8_only_hints_decide_about_topology() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let mut close = service(1);
    close["spec"]["trafficDistribution"] = json!("PreferClose");
    close["metadata"]["annotations"] = json!({
        "service.kubernetes.io/topology-mode": "Auto",
        "service.kubernetes.io/topology-aware-hints": "auto",
    });
    cluster.apply(&with_pods(close, &["a", "b", "c"]))?;
    reaches(
        &world.net,
        Client::PodHere,
        1,
        At::ClusterIp,
        &["a", "b", "c"],
    )
}

/// A node's zone decides, and a change of its label counts at once; without one zones do not count.
pub(crate) fn b2_b9_traffic_follows_the_zone_label_of_the_node() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let hinted = [
        ("a", ready_in(&zone_name(1))),
        ("c", ready_in(&zone_name(2))),
    ];
    cluster.apply(&with_endpoints(load_balancer(1), &hinted))?;
    let mut unlabelled = node(1);
    unlabelled["metadata"]["labels"] = json!({});
    let steps: [(Value, &[&'static str]); 5] = [
        (node(1), &["a"]),
        (node_in(1, &zone_name(2)), &["c"]),
        (unlabelled, &["a", "c"]),
        (node_in(1, "elsewhere"), &["a", "c"]),
        (node(1), &["a"]),
    ];
    for (node, pods) in steps {
        cluster.apply(slice::from_ref(&node))?;
        for at in [At::ClusterIp, At::LoadBalancer, At::NodePort] {
            let moved = reaches(&world.net, Client::PodHere, 1, at, pods);
            moved.with_context(|| node["metadata"]["labels"].to_string())?;
        }
        reaches(&world.net, Client::PodThere, 1, At::ClusterIp, &["c"])?;
    }
    Ok(())
}

/// Addresses with leading zeros are decimal everywhere: in a Service, its ranges, its endpoints.
pub(crate) fn a4_leading_zeros_are_decimal_up_to_the_packet() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let mut service = load_balancer(41);
    let ips = ["010.096.000.041", "fd96::0029"];
    service["spec"]["clusterIP"] = json!(ips[0]);
    service["spec"]["clusterIPs"] = json!(ips);
    service["spec"]["externalIPs"] = json!(["198.018.000.041", "fd96:0:0:1::0029"]);
    service["spec"]["loadBalancerSourceRanges"] = json!([" 172.030.000.003/32", "fd30::0003/128"]);
    let ingress = ["198.019.000.041", "fd96:0:0:2::0029"].map(|ip| json!({"ip": ip}));
    service["status"]["loadBalancer"]["ingress"] = json!(ingress);
    let mut objects = with_pods(service, &["a"]);
    objects[1]["endpoints"][0]["addresses"] = json!(["010.244.001.001"]);
    cluster.apply(&objects)?;
    for at in At::ALL {
        reaches(&world.net, Client::Outside, 41, at, &["a"])?;
    }
    // The ranges count.
    for family in Family::ALL {
        let to = svc(41).address(At::LoadBalancer, family, 1);
        silent(&world.net, Client::PodHere, Protocol::Tcp, to)?;
    }
    Ok(())
}

/// Affinity leads a client to the endpoint it had, but never past a policy: where only local
/// endpoints may answer it does not lead elsewhere.
pub(crate) fn a11_a16_affinity_never_leads_past_a_local_policy() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let net = &world.net;
    // Several, so that at ClusterIPs some clients have an endpoint on the other node.
    let numbers = 1..=12;
    for number in numbers.clone() {
        let mut local = load_balancer(number);
        local["spec"]["externalTrafficPolicy"] = json!("Local");
        local["spec"]["sessionAffinity"] = json!("ClientIP");
        cluster.apply(&with_pods(local, &["a", "b", "c"]))?;
    }
    for (number, family) in numbers.flat_map(|n| Family::ALL.map(|family| (n, family))) {
        let at = |at| svc(number).address(at, family, 1);
        let internal = reached(net, Client::Outside, at(At::ClusterIp))?;
        ensure!(internal.len() == 1, "{internal:?}");
        let external = reached(net, Client::Outside, at(At::LoadBalancer))?;
        ensure!(
            external.len() == 1 && !external.contains("c"),
            "{external:?}"
        );
        let node_port = reached(net, Client::Outside, at(At::NodePort))?;
        ensure!(node_port == external, "{node_port:?}, not {external:?}");
        // A pod has the short way to all endpoints, at every address the same (A11).
        let pod = reached(net, Client::PodHere, at(At::LoadBalancer))?;
        ensure!(pod.len() == 1, "{pod:?}");
        ensure!(reached(net, Client::PodHere, at(At::ClusterIp))? == pod);
    }
    Ok(())
}

/// An endpoint that goes away releases its clients, and they stay where they are then.
pub(crate) fn a11_b5_affinity_is_released_with_the_endpoint_under_policy_local() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let mut local = load_balancer(1);
    local["spec"]["externalTrafficPolicy"] = json!("Local");
    local["spec"]["sessionAffinity"] = json!("ClientIP");
    cluster.apply(&with_pods(local.clone(), &["a", "b", "c"]))?;
    let to = svc(1).address(At::LoadBalancer, Family::V4, 1);
    let first = reached(&world.net, Client::Outside, to)?;
    let stays = if first.contains("a") { "b" } else { "a" };
    let ready = |pods: &[&'static str]| {
        let pods: Vec<_> = pods.iter().map(|pod| (*pod, json!({}))).collect();
        slices(&local, &pods)
    };
    cluster.apply(&ready(&[stays, "c"]))?;
    ensure!(reached(&world.net, Client::Outside, to)? == BTreeSet::from([stays]));
    cluster.apply(&ready(&["a", "b", "c"]))?;
    ensure!(reached(&world.net, Client::Outside, to)? == BTreeSet::from([stays]));
    cluster.apply(&ready(&["c"]))?;
    let question = Question::new(Client::Outside, Protocol::Tcp, to).timeout(SILENCE);
    ensure!(question.ask(&world.net)? == Seen::Silent, "{question}");
    Ok(())
}

/// What others do and kube-proxy does not: answer pings at ClusterIPs, look at
/// `publishNotReadyAddresses`.
pub(crate) fn a30_nothing_but_ready_endpoints_of_ports() -> Result<()> {
    let (world, mut cluster) = cluster(Setup::PodRanges)?;
    let mut service = service(1);
    service["spec"]["publishNotReadyAddresses"] = json!(true);
    let not_ready = json!({"conditions": {"ready": false, "serving": false}});
    cluster.apply(&with_endpoints(service.clone(), &[("a", not_ready)]))?;
    for family in Family::ALL {
        let to = svc(1).address(At::ClusterIp, family, 1);
        refused(&world.net, Client::PodHere, Protocol::Tcp, to)?;
    }
    cluster.apply(&slices(&service, &[("a", json!({}))]))?;
    for ip in addresses(1, At::ClusterIp) {
        ensure!(
            !pings(&world.net, Client::PodHere, ip.parse()?)?,
            "{ip} answers a ping"
        );
    }
    let pod = ep("b").address(Family::V4).ip();
    ensure!(
        pings(&world.net, Client::PodHere, pod)?,
        "the test's ping works"
    );
    Ok(())
}

/// Whether somebody answers an ICMP echo request.
fn pings(net: &Net, client: Client, ip: std::net::IpAddr) -> Result<bool> {
    use socket2::{Domain, Protocol, Socket, Type};
    /// Types of echo requests and replies.
    const V4: [u8; 2] = [8, 0];
    const V6: [u8; 2] = [128, 129];
    net.ns(client)?.run(|| {
        let to = SocketAddr::new(ip, 0);
        let (protocol, [request, reply]) =
            if ip.is_ipv4() { (Protocol::ICMPV4, V4) } else { (Protocol::ICMPV6, V6) };
        let socket = Socket::new(Domain::for_address(to), Type::RAW, Some(protocol))?;
        socket.connect(&to.into())?;
        socket.set_read_timeout(Some(SILENCE))?;
        // Checksum of an IPv4 one: its other bytes are 8 (the type) and zeros. The kernel makes
        // that of an IPv6 one.
        socket.send(&[request, 0, !request, 0xff, 0, 0, 0, 0])?;
        let mut buffer = [0; 128];
        loop {
            match std::io::Read::read(&mut &socket, &mut buffer) {
                // An IPv4 packet comes with its header.
                Ok(len) if buffer[..len].get(if ip.is_ipv4() { 20 } else { 0 }) == Some(&reply) => {
                    return Ok(true);
                }
                Ok(_) => {}
                Err(_) => return Ok(false),
            }
        }
    })
}
