use std::collections::BTreeMap;

use kplane_model::{PolicyPort, Protocol};
use kplane_policy::{NetworkPolicy, PeerSpec, Requirement, Selector};

use super::{lines, yaml};
use crate::convert;
use crate::k8s::{self, Kind, Object};

fn policy(spec: &str) -> (NetworkPolicy, Vec<String>) {
    let text = format!("{{metadata: {{name: web, namespace: shop}}, spec: {{{spec}}}}}");
    let (policy, issues) = convert::network_policy(&yaml(&text), "");
    (policy, lines(&issues))
}

fn is_about(spec: &str) -> [bool; 2] {
    let (policy, _) = policy(spec);
    [policy.ingress.is_some(), policy.egress.is_some()]
}

#[test]
fn np3_types_are_as_written_or_follow_from_the_rules() {
    assert_eq!(is_about("podSelector: {}"), [true, false]);
    assert_eq!(is_about("egress: []"), [true, false]);
    assert_eq!(is_about("egress: [{}]"), [true, true]);
    assert_eq!(
        is_about("policyTypes: [Egress], ingress: [{}]"),
        [false, true]
    );
    assert_eq!(is_about("policyTypes: []"), [true, false]);
    let (unknown, issues) = policy("policyTypes: [ingress]");
    assert!(unknown.ingress.is_some() && unknown.egress.is_some());
    assert!(
        issues[0].contains("isolates in both directions"),
        "{issues:?}"
    );
}

#[test]
fn np4_missing_and_empty_lists_do_not_restrict() {
    let (one, issues) = policy("ingress: [{}, {from: [], ports: []}]");
    let rules = one.ingress.unwrap();
    assert!(rules.iter().all(|rule| rule.peers.is_none() && rule.ports.is_none()));
    assert!(issues.is_empty());
    assert_eq!(policy("ingress: []").0.ingress, Some(Vec::new()));
}

#[test]
fn np5_np6_selectors_are_sorted_and_an_empty_one_is_there() {
    let (one, _) = policy(
        "podSelector: {matchLabels: {b: '1', a: '2'}, matchExpressions: [{key: c, operator: NotIn, values: [y, x, x]}]}, \
         ingress: [{from: [{podSelector: {}}, {namespaceSelector: {}}]}]",
    );
    let expected = vec![
        Requirement::In("a".into(), vec!["2".into()]),
        Requirement::In("b".into(), vec!["1".into()]),
        Requirement::NotIn("c".into(), vec!["x".into(), "y".into()]),
    ];
    assert_eq!(one.pods, Selector(expected));
    let peers = one.ingress.unwrap().remove(0).peers.unwrap();
    let everything = Some(Selector::default());
    let expected = [
        PeerSpec::Pods {
            namespaces: None,
            pods: everything.clone(),
        },
        PeerSpec::Pods {
            namespaces: everything,
            pods: None,
        },
    ];
    assert_eq!(peers, expected);
}

#[test]
fn a_selector_with_a_problem_isolates_all_pods() {
    let (one, issues) =
        policy("podSelector: {matchExpressions: [{key: a, operator: in, values: [x]}]}");
    assert_eq!(one.pods, Selector::default());
    assert_eq!(
        issues,
        [
            "error: NetworkPolicy shop/web: spec.podSelector: \"a\": the operator \"in\" is unknown; use In, NotIn, Exists or \
             DoesNotExist; the policy isolates all Pods of the namespace"
        ]
    );
}

#[test]
fn np8_np9_np10_ports() {
    let (one, issues) = policy(
        "ingress: [{ports: [{port: 80}, {protocol: UDP}, {port: web, protocol: SCTP}, {port: 1, endPort: 9}]}]",
    );
    assert!(issues.is_empty(), "{issues:?}");
    let ports = one.ingress.unwrap().remove(0).ports.unwrap();
    let expected = [
        PolicyPort::Range(Protocol::Tcp, 80, 80),
        PolicyPort::All(Protocol::Udp),
        PolicyPort::Named(Protocol::Sctp, "web".into()),
        PolicyPort::Range(Protocol::Tcp, 1, 9),
    ];
    assert_eq!(ports, expected);
}

/// One bad part of a rule must open nothing, and leave the other rules alone.
#[test]
fn a_rule_with_a_problem_allows_nothing_and_others_go_on() {
    for (rule, says) in [
        (
            "{from: [{ipBlock: {cidr: 10.0.0.0/33}}]}",
            "is not an address prefix",
        ),
        (
            "{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [11.0.0.0/8]}}]}",
            "11.0.0.0/8 is not a part of 10.0.0.0/8",
        ),
        (
            "{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.0.0.0/8]}}]}",
            "is not a part of",
        ),
        (
            "{from: [{ipBlock: {cidr: 10.0.0.0/8}, podSelector: {}}]}",
            "write two peers",
        ),
        ("{from: [{}]}", "has none of podSelector"),
        (
            "{from: [{podSelector: {}}, {ipBlock: {cidr: x}}]}",
            "is not an address prefix",
        ),
        ("{ports: [{port: 9, endPort: 8}]}", "8 is below port 9"),
        ("{ports: [{endPort: 8}]}", "port is missing"),
        ("{ports: [{port: web, endPort: 8}]}", "must be a number"),
        ("{ports: [{port: 0}]}", "0 is not a port"),
        (
            "{ports: [{port: 80}, {port: 70000}]}",
            "70000 is not a port",
        ),
        (
            "{ports: [{port: 80, protocol: tcp}]}",
            "use TCP, UDP or SCTP",
        ),
    ] {
        let (one, issues) = policy(&format!("ingress: [{rule}, {{}}]"));
        let [bad, good] = one.ingress.unwrap().try_into().unwrap();
        assert_eq!(
            (bad.peers, bad.ports),
            (Some(Vec::new()), Some(Vec::new())),
            "{rule}"
        );
        assert!(good.peers.is_none() && good.ports.is_none(), "{rule}");
        assert!(
            issues[0].contains(says) && issues[0].ends_with("the rule allows nothing"),
            "{rule}: {issues:?}"
        );
    }
}

#[test]
fn np7_a_range_that_is_written_badly_counts_and_is_reported() {
    let (one, issues) =
        policy("ingress: [{from: [{ipBlock: {cidr: 10.1.2.3/8, except: [10.9.9.9/16]}}]}]");
    let peers = one.ingress.unwrap().remove(0).peers.unwrap();
    let PeerSpec::Block(block) = &peers[0] else {
        panic!("{peers:?}");
    };
    assert_eq!(block.range.to_string(), "10.0.0.0/8");
    assert_eq!(block.except[0].to_string(), "10.9.0.0/16");
    assert_eq!(issues.len(), 2);
    assert!(
        issues[0]
            .starts_with("warning: NetworkPolicy shop/web: spec.ingress[0].from[0].ipBlock.cidr: ")
    );
}

fn pod(text: &str) -> Option<kplane_policy::Pod> {
    convert::pod(&yaml(text))
}

#[test]
fn np12_np18_pods_without_an_address_of_their_own_are_nobody() {
    let pod_with = |spec: &str, status: &str| {
        pod(&format!(
            "{{metadata: {{name: a}}, spec: {{nodeName: n{spec}}}, status: {{podIP: 10.0.0.1{status}}}}}"
        ))
    };
    assert!(pod_with("", "").is_some());
    assert!(pod_with(", hostNetwork: true", "").is_none());
    assert!(pod_with("", ", phase: Succeeded").is_none());
    assert!(pod_with("", ", phase: Failed").is_none());
    assert!(
        pod("{metadata: {name: a}, status: {podIP: 10.0.0.1}}").is_none(),
        "no node yet"
    );
}

#[test]
fn np9_named_ports_are_those_of_containers_and_sidecars() {
    let pod = pod(
        "{metadata: {name: a, labels: {app: web, example.com/x: ''}}, spec: {nodeName: n, \
         containers: [{ports: [{name: web, containerPort: 80}, {containerPort: 81}, {name: web, containerPort: 82}]}, \
                      {ports: [{name: web, protocol: UDP, containerPort: 53}, {name: bad, containerPort: 0}]}], \
         initContainers: [{restartPolicy: Always, ports: [{name: side, containerPort: 90}]}, \
                          {ports: [{name: init, containerPort: 91}]}]}, \
         status: {podIPs: [{ip: 10.0.0.1}, {ip: 'fd00::1'}], podIP: 10.0.0.1}}",
    )
    .unwrap();
    let ports: Vec<_> =
        pod.ports.iter().map(|port| (&*port.name, port.protocol, port.port)).collect();
    let expected = [
        ("side", Protocol::Tcp, 90),
        ("web", Protocol::Tcp, 80),
        ("web", Protocol::Udp, 53),
    ];
    assert_eq!(ports, expected);
    assert_eq!(pod.addresses.len(), 2);
    let labels = BTreeMap::from([
        ("app".into(), "web".into()),
        ("example.com/x".into(), "".into()),
    ]);
    assert_eq!(pod.labels, labels);
}

#[test]
fn np6_each_namespace_has_a_label_with_its_name() {
    let namespace: k8s::Namespace = yaml("{metadata: {name: shop, labels: {team: a}}}");
    let labels = convert::namespace(&namespace);
    assert_eq!(
        labels.get("kubernetes.io/metadata.name").map(|name| &**name),
        Some("shop")
    );
    assert_eq!(labels.len(), 2);
}

/// What kubelet writes all the time must not look like a change.
#[test]
fn a_pod_is_what_policies_ask_for() {
    let read = |extra: &str| -> k8s::Pod {
        yaml(&format!(
            "{{metadata: {{name: a, resourceVersion: '{}', annotations: {{x: y}}}}, spec: {{nodeName: n}}, \
             status: {{phase: Running{extra}}}}}",
            extra.len()
        ))
    };
    let [one, two] = [
        read(""),
        read(", conditions: [{type: Ready}], startTime: x"),
    ];
    assert_eq!(one, two);
    assert_eq!(Object::Pod(one).kind(), Kind::Pod);
}
