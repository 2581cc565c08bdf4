//! Tests of planning, named by the behaviour they stand for.

use std::collections::BTreeSet;
use std::net::IpAddr;

use kplane_model::{
    Cidr, EndpointAddr, Family, Holder, LocalEndpoint, LocalEndpoints, NodeFacts, Protocol,
    ReservedPorts, ServiceKey, ServicePort, ServiceProgram, TrafficPolicy,
};

use super::*;

const CLUSTER_IP: [u8; 4] = [10, 96, 0, 1];
const LB_IP: [u8; 4] = [198, 51, 100, 1];
const EXTERNAL_IP: [u8; 4] = [203, 0, 113, 1];

impl ServicePlan {
    /// Returns a plan without frontends, for tests of backends: they name only what they are about.
    pub(crate) fn sample(key: ServiceKey, cluster_ip: IpAddr) -> Self {
        Self {
            key,
            cluster_ip,
            frontends: Vec::new(),
            local: Vec::new(),
            affinity_timeout_s: None,
            ipvs_scheduler: None,
            proxied: None,
            health_check_node_port: None,
            serving: Vec::new(),
            dead: Vec::new(),
        }
    }
}

fn endpoint(octet: u8) -> EndpointAddr {
    EndpointAddr::new([10, 0, 0, octet], 8080)
}

fn program() -> ServiceProgram {
    let port = ServicePort {
        cluster_ip: CLUSTER_IP.into(),
        external_ips: vec![EXTERNAL_IP.into()],
        load_balancer_ips: vec![LB_IP.into()],
        node_port: Some(30080),
        ..ServicePort::sample(ServiceKey::sample("shop", "web"))
    };
    ServiceProgram::sample(port, vec![endpoint(1), endpoint(2)])
}

fn local(program: &ServiceProgram, endpoints: &[(u8, bool)]) -> LocalEndpoints {
    let local = endpoints.iter().map(|(octet, ready)| LocalEndpoint {
        addr: endpoint(*octet),
        ready: *ready,
    });
    LocalEndpoints {
        key: program.port.key.clone(),
        endpoints: local.collect(),
    }
}

fn node() -> NodeFacts {
    NodeFacts {
        name: "n".into(),
        addresses: vec![IpAddr::from([172, 18, 0, 2])],
        ..NodeFacts::default()
    }
}

fn at(plan: &ServicePlan, ip: [u8; 4]) -> &Frontend {
    let is_it = |f: &&Frontend| matches!(f.at, FrontendAddr::Address { ip: x, .. } if x == IpAddr::from(ip));
    plan.frontends.iter().find(is_it).unwrap()
}

fn node_port(plan: &ServicePlan) -> &Frontend {
    let is_it = |f: &&Frontend| matches!(f.at, FrontendAddr::NodePort { port: 30080, .. });
    plan.frontends.iter().find(is_it).unwrap()
}

#[test]
fn a15_external_destinations_are_masqueraded_with_policy_cluster() {
    let program = program();
    let plan = plan_service(&program, None, &node());
    assert_eq!(plan.frontends.len(), 4);
    for external in [at(&plan, LB_IP), at(&plan, EXTERNAL_IP), node_port(&plan)] {
        assert!(external.masquerade && external.inside.is_none());
        assert_eq!(external.endpoints, program.endpoints);
    }
    let internal = at(&plan, CLUSTER_IP);
    assert!(!internal.masquerade);
    assert_eq!(
        (&internal.endpoints, internal.unserved),
        (&program.endpoints, None)
    );
}

#[test]
fn a12_internal_policy_local_narrows_the_cluster_ip_only() {
    let mut program = program();
    program.port.internal_policy = TrafficPolicy::Local;
    let plan = plan_service(&program, Some(&local(&program, &[(2, true)])), &node());
    assert_eq!(at(&plan, CLUSTER_IP).endpoints, [endpoint(2)]);
    assert_eq!(at(&plan, LB_IP).endpoints, program.endpoints);
}

#[test]
fn a16_external_policy_local_keeps_all_endpoints_for_the_inside() {
    let mut program = program();
    program.port.external_policy = TrafficPolicy::Local;
    let plan = plan_service(&program, Some(&local(&program, &[(2, true)])), &node());
    for external in [at(&plan, LB_IP), at(&plan, EXTERNAL_IP), node_port(&plan)] {
        assert_eq!(external.endpoints, [endpoint(2)]);
        assert_eq!(external.inside.as_ref(), Some(&program.endpoints));
        assert!(!external.masquerade);
    }
    assert_eq!(at(&plan, CLUSTER_IP).endpoints, program.endpoints);
}

#[test]
fn a18_reject_without_any_endpoint_drop_without_a_local_one() {
    let mut program = program();
    program.port.external_policy = TrafficPolicy::Local;
    let plan = plan_service(&program, None, &node());
    assert_eq!(at(&plan, LB_IP).unserved, Some(Unserved::Drop));
    assert_eq!(at(&plan, CLUSTER_IP).unserved, None);
    program.port.internal_policy = TrafficPolicy::Local;
    let plan = plan_service(&program, None, &node());
    assert_eq!(at(&plan, CLUSTER_IP).unserved, Some(Unserved::Drop));
    program.endpoints.clear();
    program.has_any = false;
    let plan = plan_service(&program, None, &node());
    for frontend in &plan.frontends {
        assert_eq!(frontend.unserved, Some(Unserved::Reject), "{}", frontend.at);
    }
}

#[test]
fn a8_a9_source_ranges_guard_load_balancer_addresses_only() {
    let mut program = program();
    let ranges = |plan: &ServicePlan, ip| {
        at(plan, ip).source_ranges.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    program.port.source_ranges = vec!["192.0.2.0/24".parse().unwrap()];
    let plan = plan_service(&program, None, &node());
    assert_eq!(ranges(&plan, LB_IP), ["192.0.2.0/24"]);
    assert!(ranges(&plan, CLUSTER_IP).is_empty() && ranges(&plan, EXTERNAL_IP).is_empty());
    assert!(node_port(&plan).source_ranges.is_empty());
    program.port.source_ranges = vec!["172.18.0.0/16".parse().unwrap()];
    let plan = plan_service(&program, None, &node());
    assert_eq!(ranges(&plan, LB_IP), ["172.18.0.0/16", "198.51.100.1/32"]);
}

#[test]
fn a15_hairpin_needs_every_local_endpoint_ready_or_draining() {
    let program = program();
    let plan = plan_service(
        &program,
        Some(&local(&program, &[(1, true), (2, false)])),
        &node(),
    );
    assert_eq!(plan.local, [endpoint(1), endpoint(2)]);
}

#[test]
fn no_place_is_planned_twice() {
    let mut program = program();
    program.port.external_ips = vec![LB_IP.into(), LB_IP.into(), CLUSTER_IP.into()];
    let plan = plan_service(&program, None, &node());
    let mut frontends: Vec<_> = plan.frontends.iter().map(|f| f.at).collect();
    let all = frontends.len();
    frontends.sort();
    frontends.dedup();
    assert_eq!((frontends.len(), all), (3, 3));
}

fn frontends(plan: &ServicePlan) -> Vec<String> {
    plan.frontends.iter().map(|f| f.at.to_string()).collect()
}

/// Returns the frontends of [`program`] that are withheld: ClusterIP, load balancer, external, node port.
fn withheld(reserved: &Reserved) -> Vec<usize> {
    let mut plan = plan_service(&program(), None, &node());
    let all = frontends(&plan);
    let reason = reserved.withhold(&node(), &mut plan);
    let left = frontends(&plan);
    let gone: Vec<usize> = (0..all.len()).filter(|n| !left.contains(&all[*n])).collect();
    match (gone.first(), reason) {
        (None, None) => {}
        (Some(first), Some(reason)) => {
            let expected = format!("{} is where kplane's", all[*first]);
            assert!(reason.starts_with(&expected), "{reason}");
        }
        (gone, reason) => panic!("{gone:?}: {reason:?}"),
    }
    gone
}

#[test]
fn no_service_gets_the_way_to_the_control_plane() {
    let peer = |place: &str| Reserved {
        peers: BTreeSet::from([place.parse().unwrap()]),
        own: BTreeSet::from([IpAddr::from(LB_IP)]),
        ..Reserved::default()
    };
    assert_eq!(withheld(&peer("203.0.113.1:80")), [2]);
    assert_eq!(withheld(&peer("203.0.113.1:81")), [0; 0]);
    // A control plane may be reached through a ClusterIP.
    assert_eq!(withheld(&peer("10.96.0.1:81")), [0; 0]);
    // A control plane on this node listens on the node's other addresses too, and at node ports. For a
    // control plane elsewhere, a port alone means nothing.
    assert_eq!(withheld(&peer("172.18.0.2:80")), [1]);
    assert_eq!(withheld(&peer("172.18.0.2:30080")), [3]);
    assert_eq!(withheld(&peer("192.0.2.7:80")), [0; 0]);
    // With IPVS a Service's address is the node's own, whatever the port.
    let ipvs = |place: &str| Reserved {
        whole_peers: true,
        ..peer(place)
    };
    assert_eq!(withheld(&ipvs("203.0.113.1:81")), [2]);
    assert_eq!(withheld(&ipvs("198.51.100.1:81")), [0; 0]);
}

#[test]
fn no_service_gets_the_ports_of_the_nodes_own_programs() {
    let ports = |port| Reserved {
        ports: ReservedPorts::default().with(port, Holder::NodeAgent),
        own: BTreeSet::from([IpAddr::from(LB_IP)]),
        ..Reserved::default()
    };
    assert_eq!(withheld(&Reserved::default()), [0; 0]);
    assert_eq!(withheld(&ports(80)), [1]);
    assert_eq!(withheld(&ports(10256)), [0; 0]);
    assert_eq!(withheld(&ports(30080)), [3]);
}

#[test]
fn udp_is_not_what_tcp_programs_listen_on() {
    let mut program = program();
    program.port.key.protocol = Protocol::Udp;
    let reserved = Reserved {
        peers: BTreeSet::from(["203.0.113.1:80".parse().unwrap()]),
        ports: ReservedPorts::default().with(30080, Holder::Kubelet),
        ..Reserved::default()
    };
    let mut plan = plan_service(&program, None, &node());
    assert_eq!(reserved.withhold(&node(), &mut plan), None);
}

fn cidrs(texts: &[&str]) -> Vec<Cidr> {
    texts.iter().map(|t| t.parse().unwrap()).collect()
}

#[test]
fn a15_a17_who_is_masqueraded_towards_cluster_ips() {
    let mut settings = NodeSettings {
        cluster_cidrs: cidrs(&["10.244.0.0/16", "fd00::/48"]),
        ..NodeSettings::default()
    };
    let plan = NodePlan::new(Family::V4, &node(), &settings);
    assert_eq!(plan.unmasqueraded_sources, cidrs(&["10.244.0.0/16"]));
    assert_eq!(plan.pod_sources, cidrs(&["10.244.0.0/16"]));
    settings.masquerade_all = true;
    assert_eq!(
        NodePlan::new(Family::V4, &node(), &settings).unmasqueraded_sources,
        []
    );
    // Where pods are not distinguished, nothing is masqueraded.
    let plan = NodePlan::new(Family::V4, &node(), &NodeSettings::default());
    assert_eq!(plan.unmasqueraded_sources, cidrs(&["0.0.0.0/0"]));
    assert_eq!(plan.pod_sources, []);
}

#[test]
fn a21_node_ports_are_served_on_the_nodes_own_address_unless_told_otherwise() {
    let mut settings = NodeSettings::default();
    let ips = |settings: &_, node: &_| NodePlan::new(Family::V4, node, settings).nodeport_ips;
    assert_eq!(ips(&settings, &node()), cidrs(&["172.18.0.2/32"]));
    assert_eq!(ips(&settings, &NodeFacts::default()), cidrs(&["0.0.0.0/0"]));
    settings.nodeport_primary = true;
    assert_eq!(ips(&settings, &NodeFacts::default()), []);
    settings.nodeport_primary = false;
    settings.nodeport_addresses = cidrs(&["192.168.0.0/16", "10.0.0.0/8", "10.1.0.0/16"]);
    assert_eq!(
        ips(&settings, &node()),
        cidrs(&["10.0.0.0/8", "192.168.0.0/16"])
    );
}

/// Without the address on which they are served, node ports are served on the last known one, or nowhere. A source that
/// has no Nodes at all is a folder of somebody who asks for no restriction.
#[test]
fn a21_a_missing_address_opens_no_node_port() {
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let named = |addresses: &[&str]| NodeFacts {
        known: true,
        addresses: addresses.iter().map(|text| ip(text)).collect(),
        ..NodeFacts::default()
    };
    let others = NodeFacts {
        other_nodes: true,
        ..NodeFacts::default()
    };
    let (alone, bare) = (NodeFacts::default(), named(&[]));
    let v4_only = named(&["192.0.2.1"]);
    let silent = NodeSettings::default();
    let primary = NodeSettings {
        nodeport_primary: true,
        ..NodeSettings::default()
    };
    let remembers = |settings: &NodeSettings| NodeSettings {
        last_known: [Some(ip("192.0.2.9")), None],
        ..settings.clone()
    };
    let bound = NodeSettings {
        node_ip: Some(ip("192.0.2.7")),
        ..NodeSettings::default()
    };
    let own = |text| NodePorts::Own(ip(text));
    let last = || NodePorts::LastKnown(ip("192.0.2.9"));
    let (nowhere, everywhere) = (|| NodePorts::Nowhere, || NodePorts::Everywhere);
    for (settings, node, v4, v6) in [
        (&silent, &v4_only, own("192.0.2.1"), nowhere()),
        (&remembers(&silent), &v4_only, own("192.0.2.1"), nowhere()),
        // The Node object has lost its addresses.
        (&silent, &bare, nowhere(), nowhere()),
        (&remembers(&silent), &bare, last(), nowhere()),
        (&remembers(&primary), &bare, last(), nowhere()),
        // It is gone, and others are there, or were never.
        (&silent, &others, nowhere(), nowhere()),
        (&remembers(&silent), &others, last(), nowhere()),
        (&silent, &alone, everywhere(), everywhere()),
        (&remembers(&silent), &alone, last(), nowhere()),
        (&primary, &alone, nowhere(), nowhere()),
        (&remembers(&primary), &alone, last(), nowhere()),
        (&bound, &alone, own("192.0.2.7"), nowhere()),
        (&bound, &bare, own("192.0.2.7"), nowhere()),
    ] {
        let chosen = Family::ALL.map(|family| NodePorts::choose(family, node, settings));
        assert_eq!(chosen, [v4, v6], "{settings:?} {node:?}");
    }
}

/// K1: `primary` beside ranges.
#[test]
fn k1_the_own_address_counts_beside_ranges() {
    let mut settings = NodeSettings {
        nodeport_primary: true,
        nodeport_addresses: cidrs(&["192.168.1.0/24", "172.18.0.0/24"]),
        ..NodeSettings::default()
    };
    let ips = |settings: &_, node: &_| NodePlan::new(Family::V4, node, settings).nodeport_ips;
    let ranges = cidrs(&["172.18.0.0/24", "192.168.1.0/24"]);
    assert_eq!(
        ips(&settings, &node()),
        ranges,
        "the own address is in a range"
    );
    settings.nodeport_addresses = cidrs(&["192.168.1.0/24"]);
    assert_eq!(
        ips(&settings, &node()),
        cidrs(&["172.18.0.2/32", "192.168.1.0/24"])
    );
    // What is not known opens nothing, in either family.
    let unknown = NodeFacts::default();
    assert_eq!(ips(&settings, &unknown), cidrs(&["192.168.1.0/24"]));
    let v6 = NodePlan::new(Family::V6, &unknown, &settings).nodeport_ips;
    assert_eq!(v6, []);
}

#[test]
fn f2_udp_flows_go_on_to_whatever_serves() {
    let mut program = program();
    program.serving_others = vec![endpoint(3)];
    let local = local(&program, &[(1, true), (4, false)]);
    assert!(plan_service(&program, Some(&local), &node()).serving.is_empty());
    program.port.key.protocol = Protocol::Udp;
    for policy in [TrafficPolicy::Cluster, TrafficPolicy::Local] {
        (program.port.internal_policy, program.port.external_policy) = (policy, policy);
        let plan = plan_service(&program, Some(&local), &node());
        assert_eq!(plan.serving, [1, 2, 3, 4].map(endpoint));
    }
    program.serving_others.clear();
    let plan = plan_service(&program, None, &node());
    assert_eq!(plan.serving, [1, 2].map(endpoint), "an old control plane");
}

/// (i) `detectLocalMode: NodeCIDR`: the first pod range of each family, and no cluster-wide ones.
#[test]
fn a15_i6_the_nodes_own_pod_ranges_may_tell_pods() {
    let settings = NodeSettings {
        node_cidr: true,
        cluster_cidrs: cidrs(&["10.0.0.0/8"]),
        ..NodeSettings::default()
    };
    let mut node = node();
    node.pod_cidrs = cidrs(&["fd00::/64", "10.244.1.0/24", "10.244.0.0/24"]);
    let plan = |family, node: &NodeFacts| NodePlan::new(family, node, &settings);
    let v4 = plan(Family::V4, &node);
    assert_eq!(v4.pod_sources, cidrs(&["10.244.1.0/24"]));
    assert_eq!(v4.unmasqueraded_sources, v4.pod_sources);
    assert_eq!(plan(Family::V6, &node).pod_sources, cidrs(&["fd00::/64"]));
    // Without a pod range, no client counts as a pod, and none is masqueraded for being none.
    node.pod_cidrs.clear();
    let v4 = plan(Family::V4, &node);
    assert_eq!(v4.pod_sources, []);
    assert_eq!(v4.unmasqueraded_sources, cidrs(&["0.0.0.0/0"]));
}

/// (i) `bindAddress` is the node's address in its family, and overrides the Node object.
#[test]
fn a21_the_bind_address_is_the_primary_address() {
    let settings = NodeSettings {
        node_ip: Some([10, 9, 8, 7].into()),
        ..NodeSettings::default()
    };
    let mut node = node();
    node.addresses.push("fd00::2".parse().unwrap());
    let ips = |family, settings: &_| NodePlan::new(family, &node, settings).nodeport_ips;
    assert_eq!(ips(Family::V4, &settings), cidrs(&["10.9.8.7/32"]));
    assert_eq!(ips(Family::V6, &settings), cidrs(&["fd00::2/128"]));
    let ranges = NodeSettings {
        nodeport_addresses: cidrs(&["192.168.0.0/16"]),
        ..settings
    };
    assert_eq!(ips(Family::V4, &ranges), cidrs(&["192.168.0.0/16"]));
}
