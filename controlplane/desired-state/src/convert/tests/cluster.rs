use kplane_model::{Cidr, NodeFacts};

use super::{lines, yaml};
use crate::convert::{node, service_cidr};

fn facts(text: &str) -> NodeFacts {
    let (facts, issues) = node(&yaml(text), "");
    assert_eq!(lines(&issues), [""; 0]);
    facts
}

#[test]
fn a21_b9_facts_of_a_node() {
    let facts = facts(
        "metadata: {name: n1, labels: {topology.kubernetes.io/zone: a}}\n\
         spec: {podCIDR: 10.1.0.0/24, podCIDRs: [10.1.0.0/24, 'fd01::/64']}\n\
         status:\n  addresses:\n  - {type: Hostname, address: n1}\n\
         \x20 - {type: ExternalIP, address: 203.0.113.1}\n\
         \x20 - {type: InternalIP, address: 192.168.0.1}\n\
         \x20 - {type: InternalIP, address: 'fd02::1'}\n\
         \x20 - {type: InternalIP, address: 192.168.0.1}\n",
    );
    assert_eq!((&*facts.name, facts.zone.as_deref()), ("n1", Some("a")));
    let addresses: Vec<_> = facts.addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["192.168.0.1", "fd02::1", "203.0.113.1"]);
    let cidrs: Vec<_> = facts.pod_cidrs.iter().map(ToString::to_string).collect();
    assert_eq!(cidrs, ["10.1.0.0/24", "fd01::/64"]);
    assert!(facts.eligible && facts.known && facts.service_cidrs.is_empty());
}

#[test]
fn b2_a_node_without_zone() {
    assert_eq!(facts("metadata: {name: n1}").zone, None);
    let empty = "metadata: {name: n1, labels: {topology.kubernetes.io/zone: ''}}";
    assert_eq!(facts(empty).zone, None);
}

#[test]
fn g3_eligible_unless_on_the_way_out() {
    let eligible = |text: &str| facts(text).eligible;
    assert!(eligible(
        "metadata: {name: n}\nspec: {taints: [{key: node.kubernetes.io/not-ready}]}"
    ));
    assert!(!eligible(
        "metadata: {name: n, deletionTimestamp: '2026-11-21T03:47:11Z'}"
    ));
    assert!(!eligible(
        "metadata: {name: n}\nspec: {taints: [{key: x}, {key: ToBeDeletedByClusterAutoscaler}]}"
    ));
}

#[test]
fn bad_parts_of_a_node_leave_the_rest() {
    let (facts, issues) = node(
        &yaml(
            "metadata: {name: n1}\nspec: {podCIDRs: [rubbish, 10.1.0.0/24]}\nstatus:\n  addresses:\n\
             \x20 - {type: InternalIP, address: 127.0.0.1}\n\
             \x20 - {type: InternalIP, address: x}\n\
             \x20 - {type: InternalIP, address: 192.168.0.1}\n",
        ),
        "nodes.yaml, document 1, line 1",
    );
    assert_eq!((facts.addresses.len(), facts.pod_cidrs.len()), (1, 1));
    assert_eq!(
        lines(&issues),
        [
            "error: nodes.yaml, document 1, line 1: Node n1: status.addresses: InternalIP \
             127.0.0.1 is a loopback address and is refused; correct it",
            "error: nodes.yaml, document 1, line 1: Node n1: status.addresses: InternalIP \"x\" is \
             not an IP address; correct it",
            "error: nodes.yaml, document 1, line 1: Node n1: spec.podCIDRs: \"rubbish\" is not an \
             address prefix such as 10.0.0.0/8 or fd00::/8; correct it",
        ]
    );
}

#[test]
fn a20_service_cidrs() {
    let convert = |text: &str| {
        let (cidrs, issues) = service_cidr(
            &yaml(&format!("metadata: {{name: x}}\nspec: {{cidrs: [{text}]}}")),
            "",
        );
        (
            cidrs.iter().map(Cidr::to_string).collect::<Vec<_>>(),
            lines(&issues),
        )
    };
    let (cidrs, issues) = convert("10.96.0.0/12, 'fd00:10:96::/112', 10.96.0.0/12");
    assert_eq!(cidrs, ["10.96.0.0/12", "fd00:10:96::/112"]);
    assert!(issues.is_empty());
    let (cidrs, issues) = convert("0.0.0.0/0, 127.0.0.0/8, x, 10.96.0.0/12");
    assert_eq!(cidrs, ["10.96.0.0/12"]);
    assert_eq!(
        issues,
        [
            "error: ServiceCIDR x: spec.cidrs: 0.0.0.0/0 is too wide to be the range of cluster \
             addresses and is refused, because unused addresses inside are dropped; narrow it",
            "error: ServiceCIDR x: spec.cidrs: 127.0.0.0/8 is a loopback address and is refused; \
             use another range",
            "error: ServiceCIDR x: spec.cidrs: \"x\" is not an address prefix such as 10.0.0.0/8 \
             or fd00::/8; correct it",
        ]
    );
}
