//! Tests of the needs of a ServicePort.

use kplane_model::Protocol;

use super::super::IpvsSettings;
use super::super::demand::{Demand, NodeIps};
use super::super::sets::{Entry, SetId};
use super::{NODE_IP, Svc, at, ip, node, server};

const TCP: Protocol = Protocol::Tcp;

fn of(svc: &Svc, settings: &IpvsSettings) -> Demand {
    let ips = NodeIps::new([ip(NODE_IP), ip("127.0.0.1")]);
    Demand::new(&svc.plan(), settings.scheduler, &node(), &ips, settings)
}

fn demand(svc: &Svc) -> Demand {
    of(svc, &IpvsSettings::default())
}

fn svc() -> Svc {
    Svc::new("web", "10.96.0.1").endpoints(&["10.1.0.1:8080", "10.1.0.2:8080"])
}

/// Returns the real servers that packets to a frontend may reach.
fn reals(demand: &Demand, place: &str) -> Vec<String> {
    let key = server(place, TCP);
    let wanted = demand
        .servers
        .iter()
        .find(|wanted| wanted.key == key)
        .expect("there is a virtual server");
    wanted.reals.iter().map(ToString::to_string).collect()
}

/// The sets that an address is in.
fn sets(demand: &Demand, address: &str) -> Vec<SetId> {
    let of = |entry: &Entry| match *entry {
        Entry::Ip(ip)
        | Entry::IpPort(ip, ..)
        | Entry::IpPortIp(ip, ..)
        | Entry::IpPortNet(ip, ..) => ip == self::ip(address),
        Entry::Port(_) => false,
    };
    demand
        .entries
        .iter()
        .filter(|(_, entry)| of(entry))
        .map(|(set, _)| *set)
        .collect()
}

/// D2, D3, A15.
#[test]
fn d2_each_place_is_a_virtual_server() {
    let demand = demand(
        &svc()
            .here(&["10.1.0.1:8080"])
            .external_ip("198.51.100.9")
            .load_balancer("203.0.113.1", &[])
            .node_port(30_080)
            .health(30_000),
    );
    let both = ["10.1.0.1:8080", "10.1.0.2:8080"];
    for place in [
        "10.96.0.1:80",
        "198.51.100.9:80",
        "203.0.113.1:80",
        "192.168.0.1:30080",
    ] {
        assert_eq!(reals(&demand, place), both, "{place}");
    }
    assert_eq!(demand.servers.len(), 4);
    let bound = ["10.96.0.1", "198.51.100.9", "203.0.113.1"].map(ip);
    assert_eq!(demand.addresses, bound);
    assert_eq!(
        sets(&demand, "10.96.0.1"),
        [SetId::ClusterIp, SetId::IpvsIps]
    );
    let external = [SetId::ExternalIp, SetId::IpvsIps];
    assert_eq!(sets(&demand, "198.51.100.9"), external);
    assert_eq!(
        sets(&demand, "203.0.113.1"),
        [SetId::LoadBalancer, SetId::IpvsIps]
    );
    assert_eq!(sets(&demand, "10.1.0.1"), [SetId::LoopBack]);
    for (set, port) in [
        (SetId::NodePortTcp, 30_080),
        (SetId::HealthCheckNodePort, 30_000),
    ] {
        assert!(
            demand.entries.contains(&(set, Entry::Port(port))),
            "{set:?}"
        );
    }
}

/// D2: an address that the node has is not bound a second time.
#[test]
fn d2_the_nodes_own_address_is_not_bound() {
    let demand = demand(&svc().external_ip(NODE_IP));
    assert_eq!(demand.addresses, [ip("10.96.0.1")]);
    assert_eq!(sets(&demand, NODE_IP), [SetId::ExternalIp]);
}

/// A15, D3: SCTP has no set of ports alone.
#[test]
fn d3_node_ports_of_sctp_are_known_with_addresses() {
    let svc = svc().protocol(Protocol::Sctp).node_port(30_080).external_local();
    let demand = demand(&svc);
    let expected = [SetId::NodePortSctp, SetId::NodePortLocalSctp];
    assert_eq!(sets(&demand, NODE_IP), expected);
}

/// A29: kube-proxy's IPVS mode lets the cluster's endpoints serve where a Local policy has none here.
#[test]
fn a29_local_policies_fall_back_to_the_clusters_endpoints() {
    let both = ["10.1.0.1:8080", "10.1.0.2:8080"];
    let local = || svc().external_local().internal_local().node_port(30_080);
    let (cluster_ip, node_port) = ("10.96.0.1:80", "192.168.0.1:30080");
    let without = demand(&local());
    assert_eq!(reals(&without, node_port), both);
    assert_eq!(reals(&without, cluster_ip), both);
    let with = demand(&local().here(&["10.1.0.2:8080"]));
    assert_eq!(reals(&with, node_port), ["10.1.0.2:8080"]);
    assert_eq!(reals(&with, cluster_ip), ["10.1.0.2:8080"]);
    // Nothing can be reached from outside, so the cluster's endpoints do not matter (A14).
    let inside = demand(&svc().internal_local());
    assert_eq!(reals(&inside, cluster_ip), [""; 0]);
    let strict = IpvsSettings {
        strict_local: true,
        ..IpvsSettings::default()
    };
    let demand = of(&local(), &strict);
    assert_eq!(reals(&demand, node_port), [""; 0]);
    assert_eq!(reals(&demand, cluster_ip), [""; 0]);
    // The node's own packets do not pass the chain that refuses packets to frontends that no set opens.
    let vip = "203.0.113.1";
    let balanced = || local().load_balancer(vip, &[]);
    let demand = of(&balanced(), &strict);
    assert_eq!(reals(&demand, "203.0.113.1:80"), both);
    assert_eq!(sets(&demand, vip), [SetId::IpvsIps]);
    assert!(demand.addresses.contains(&vip.parse().unwrap()));
    // With an endpoint on this node, all clients may use the place.
    let here = of(&balanced().here(&["10.1.0.2:8080"]), &strict);
    assert_eq!(reals(&here, "203.0.113.1:80"), ["10.1.0.2:8080"]);
    assert!(sets(&here, vip).contains(&SetId::LoadBalancerLocal));
    // Nothing closes an address that the node has anyway.
    let own = of(&local().load_balancer(NODE_IP, &[]), &strict);
    assert_eq!(reals(&own, &format!("{NODE_IP}:80")), [""; 0]);
    assert!(sets(&own, NODE_IP).contains(&SetId::LoadBalancer));
}

/// A8, A9: the sources that may use a load balancer, and whether the node itself may.
#[test]
fn a8_load_balancers_with_source_ranges() {
    let vip = "203.0.113.1";
    let demand = |ranges: &[&str]| demand(&svc().load_balancer(vip, ranges));
    let place = server("203.0.113.1:80", TCP);
    let closed = demand(&["10.9.0.0/16"]);
    assert_eq!(closed.denied, [place]);
    assert_eq!(
        sets(&closed, vip),
        [
            SetId::LoadBalancer,
            SetId::LoadBalancerFw,
            SetId::LoadBalancerSourceCidr,
            SetId::IpvsIps
        ]
    );
    // The plan adds the address itself where the node is let through.
    let open = demand(&["192.168.0.0/16", "203.0.113.1/32"]);
    assert_eq!(open.denied, []);
    assert!(sets(&open, vip).contains(&SetId::LoadBalancerSourceIp));
    // The kernel has no entry for the range of everything.
    let nets = |demand: &Demand| {
        demand
            .entries
            .iter()
            .filter_map(|(_, entry)| match entry {
                Entry::IpPortNet(.., range) => Some(range.to_string()),
                _ => None,
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(nets(&demand(&["0.0.0.0/0"])), ["0.0.0.0/1", "128.0.0.0/1"]);
    assert_eq!(nets(&closed), ["10.9.0.0/16"]);
}

/// A11, D7.
#[test]
fn d7_affinity_is_persistence() {
    let mut sticky = svc();
    sticky.affinity = Some(77);
    let demand = demand(&sticky);
    assert_eq!(demand.servers[0].mode.persistent_s, Some(77));
    assert_eq!(demand.servers[0].reals[0], at("10.1.0.1:8080"));
}
