//! One node at 80 columns.

use expect_test::expect;
use kplane_proto::v1 as pb;

use super::super::fleet::FleetView;
use super::super::node::NodeDescriptionView;
use super::super::testing::{has, table};
use kpctl_samples as samples;

/// Returns the description of a node of the sample fleet.
fn describe(name: &str, findings: Vec<pb::Finding>) -> String {
    let mut fleet = samples::troubled_fleet();
    fleet.nodes.retain(|node| node.name == name);
    if let Some(report) = &mut fleet.nodes[0].report {
        report.findings = findings;
    }
    table(&NodeDescriptionView::new(fleet).unwrap())
}

#[test]
fn a_node_that_does_not_forward() {
    let finding = pb::Finding {
        code: "ForwardingOff".to_owned(),
        severity: pb::Severity::Error.into(),
        text: "net.ipv4.ip_forward is 0: the node does not forward IPv4 packets".to_owned(),
        fix: "sysctl -w net.ipv4.ip_forward=1 on the node".to_owned(),
        ..pb::Finding::default()
    };
    expect![[r#"
        Node            node-a
        State           InSync for 3h
        Agent           0.1.0, nftables, 10.0.0.11:41234, last heard 1s ago
        Zone            eu-west-1a
        Addresses       10.0.0.11, fd00::11
        Pod ranges      10.244.1.0/24, fd00:10:244:1::/64
        Revision        applied 4711 of 4711, read back 3m12s ago
        Holds           10000 Services, 20000 endpoints
        Updates         p50 9ms and max 1.3s from a change to the kernel

        FINDING  REASON
        Error    ForwardingOff
          net.ipv4.ip_forward is 0: the node does not forward IPv4 packets
          fix: sysctl -w net.ipv4.ip_forward=1 on the node

        FAMILY  PROGRAMMED  READ BACK  REPAIRS
        IPv4    Yes         3m12s ago  0
    "#]]
    .assert_eq(&describe("node-a", vec![finding]));
}

/// A node may have applied a revision that only concerns others.
#[test]
fn no_more_is_applied_than_there_is() {
    let mut fleet = samples::troubled_fleet();
    fleet.nodes.retain(|node| node.name == "node-a");
    fleet.nodes[0].wanted_revision = 4_710;
    let text = table(&NodeDescriptionView::new(fleet).unwrap());
    has(&text, "applied 4711 of 4711");
}

/// Nodes that are in sync and drop packets are no healthy ones, and what concerns most nodes is to be done first.
#[test]
fn a_fleet_whose_nodes_drop_packets() {
    let finding = |code: &str, severity: pb::Severity| pb::Finding {
        code: code.to_owned(),
        severity: severity.into(),
        ..pb::Finding::default()
    };
    let mut fleet = samples::healthy_fleet();
    let drops = finding("ForwardPolicyDrop", pb::Severity::Warning);
    let off = finding("ForwardingOff", pb::Severity::Error);
    for node in &mut fleet.nodes {
        let report = node.report.as_mut().unwrap();
        report.findings = vec![drops.clone(), finding("Firewalld", pb::Severity::Info)];
    }
    let view = FleetView::from(fleet.clone());
    assert!(view.summary.nodes_healthy, "some packets may be dropped");
    assert!(table(&view).contains("in the way of packets: ForwardPolicyDrop\n"));
    for node in &mut fleet.nodes {
        node.report.as_mut().unwrap().findings.push(off.clone());
    }
    let plane = fleet.control_plane.as_mut().unwrap();
    plane.issues = samples::troubled_fleet().control_plane.unwrap().issues;
    let view = FleetView::from(fleet.clone());
    assert!(!view.summary.nodes_healthy);
    let text = table(&view);
    let all = fleet.nodes.len();
    assert!(text.contains(&format!("{all} obstructed")), "{text}");
    has(
        &text,
        "in the way of packets: ForwardPolicyDrop, ForwardingOff",
    );
    let next = text.split_once("Next\n").unwrap().1;
    let first = format!("  kpctl describe node {}\n", fleet.nodes[0].name);
    assert!(next.starts_with(&first), "{text}");
    assert!(next.contains("  fix Service shop/checkout"), "{text}");
}

#[test]
fn a_node_that_fails() {
    expect![[r#"
        Node            node-c
        State           Failing for 3m12s
          5 objects are not applied as desired
        Agent           0.1.0, nftables, 10.0.0.11:41234, last heard 1s ago
        Zone            eu-west-1a
        Addresses       10.0.0.11, fd00::11
        Pod ranges      10.244.1.0/24, fd00:10:244:1::/64
        Revision        applied 4711 of 4711, read back 3m12s ago
        Holds           10000 Services, 20000 endpoints
        Updates         p50 9ms and max 1.3s from a change to the kernel

        FAMILY  PROGRAMMED  READ BACK  REPAIRS
        IPv4    Yes         3m12s ago  0

        FAILURE   OBJECT
        Failed    shop/web:http/TCP (IPv4)
          node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy);
            stop it or choose another port
        Degraded  shop/api:http/TCP (IPv4)
          the kernel has no nft_fib: martian sources pass
        Failed    shop/cart:http/TCP (IPv4)
          node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy);
            stop it or choose another port
        Failed    shop/search:http/TCP (IPv4)
          node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy);
            stop it or choose another port
        Failed    shop/login:http/TCP (IPv4)
          node port 30080 is in use by another program (pid 4242, /usr/bin/haproxy);
            stop it or choose another port

        Next
          kpctl describe service shop/web
    "#]]
    .assert_eq(&describe("node-c", Vec::new()));
}

#[test]
fn an_unknown_node_has_no_description() {
    assert!(NodeDescriptionView::new(pb::Fleet::default()).is_none());
}

#[test]
fn u53_endpoints_that_nodes_avoid_are_listed_and_a_service_that_several_avoid_is_the_next_step() {
    let mut fleet = samples::troubled_fleet();
    fleet.nodes.retain(|node| node.name == "node-a");
    let report = fleet.nodes[0].report.as_mut().unwrap();
    report.avoided = vec![pb::AvoidedEndpoint {
        key: Some(samples::key("shop/web", "http", pb::Family::Ipv4)),
        address: "10.244.2.7:8080".to_owned(),
    }];
    let text = table(&NodeDescriptionView::new(fleet.clone()).unwrap());
    let line = "Avoids          10.244.2.7:8080 of shop/web:http/TCP (IPv4)";
    has(&text, line);
    assert!(!text.contains("describe service"), "{text}");
    let mut other = fleet.nodes[0].clone();
    other.name = "node-b".to_owned();
    fleet.nodes.push(other);
    let text = table(&FleetView::from(fleet));
    has(&text, "kpctl describe service shop/web");
}
