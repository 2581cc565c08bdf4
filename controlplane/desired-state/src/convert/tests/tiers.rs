use kplane_model::{PolicyPort, Protocol, Tier, TierAction};
use kplane_policy::{ClusterPolicy, PeerSpec, Rule, TierRule};

use super::{lines, yaml};
use crate::convert;

fn policy(spec: &str) -> (Option<ClusterPolicy>, Vec<String>) {
    let text = format!("{{metadata: {{name: all}}, spec: {{{spec}}}}}");
    let (policy, issues) = convert::cluster_policy(&yaml(&text), "");
    (policy, lines(&issues))
}

/// A valid policy with one egress rule.
fn rule(rule: &str) -> (TierRule, Vec<String>) {
    let (policy, issues) = policy(&format!(
        "tier: Admin, priority: 0, subject: {{namespaces: {{}}}}, egress: [{{{rule}}}]"
    ));
    (policy.unwrap().egress.remove(0), issues)
}

#[test]
fn a_policy_is_read_as_the_api_has_it() {
    let (one, issues) = policy(
        "tier: Baseline, priority: 1000, subject: {pods: {podSelector: {matchLabels: {app: web}}}}, \
         ingress: [{name: first, action: Pass, from: [{pods: {namespaceSelector: {}, podSelector: {}}}]}], \
         egress: [{action: Deny, to: [{nodes: {}}, {networks: ['10.0.0.0/8', 'fd00::/8']}], \
         protocols: [{tcp: {destinationPort: {number: 80}}}, {udp: {destinationPort: {range: {start: 1, end: 9}}}}, \
         {sctp: {}}, {destinationNamedPort: web}]}]",
    );
    assert_eq!(issues, [""; 0]);
    let one = one.unwrap();
    assert_eq!(
        (one.tier, one.priority, &*one.name),
        (Tier::Baseline, 1000, "all")
    );
    assert_eq!((one.namespaces.0.len(), one.pods.0.len()), (0, 1));
    assert_eq!(one.ingress[0].action, TierAction::Pass);
    let Rule { peers, ports } = &one.egress[0].rule;
    let peers = peers.as_ref().unwrap();
    assert!(matches!(
        peers[..],
        [PeerSpec::Nodes(_), PeerSpec::Block(_), PeerSpec::Block(_)]
    ));
    let named = Protocol::ALL.map(|protocol| PolicyPort::Named(protocol, "web".into()));
    let mut expected = vec![
        PolicyPort::Range(Protocol::Tcp, 80, 80),
        PolicyPort::Range(Protocol::Udp, 1, 9),
        PolicyPort::All(Protocol::Sctp),
    ];
    expected.extend(named);
    assert_eq!(ports.as_ref(), Some(&expected));
}

#[test]
fn a_rule_that_is_not_understood_opens_nothing() {
    let all = "to: [{networks: ['0.0.0.0/0']}]";
    for wrong in [
        "to: [{domainNames: [example.org]}]",
        "to: [{namespaces: {}}, {unknown: {}}]",
        "to: [{namespaces: {}, pods: {podSelector: {}}}]",
        "to: []",
        "to: [{networks: ['10.0.0.0/33']}]",
        "to: [{namespaces: {matchExpressions: [{key: a, operator: Has}]}}]",
        &format!("{all}, sources: []"),
        &format!("{all}, protocols: []"),
        &format!("{all}, protocols: [{{icmp: {{}}}}]"),
        &format!("{all}, protocols: [{{tcp: {{sourcePort: 1}}}}]"),
        &format!("{all}, protocols: [{{tcp: {{destinationPort: {{number: 0}}}}}}]"),
        &format!(
            "{all}, protocols: [{{tcp: {{destinationPort: {{range: {{start: 2, end: 1}}}}}}}}]"
        ),
        "",
    ] {
        let (accept, issues) = rule(&format!("action: Accept, {wrong}"));
        assert_eq!(
            (accept.action, accept.rule.peers),
            (TierAction::Accept, Some(Vec::new())),
            "{wrong}"
        );
        assert!(issues[0].contains("the rule accepts nothing"), "{issues:?}");
        for action in ["Deny", "Pass", "Allow"] {
            let (deny, issues) = rule(&format!("action: {action}, {wrong}"));
            let everything = Rule {
                peers: None,
                ports: None,
            };
            assert_eq!(
                (deny.action, deny.rule),
                (TierAction::Deny, everything),
                "{wrong}"
            );
            assert!(
                issues[0].contains("the rule denies everything"),
                "{issues:?}"
            );
        }
    }
}

#[test]
fn peers_of_egress_are_none_of_ingress() {
    for wrong in [
        "from: [{networks: ['10.0.0.0/8']}]",
        "from: [{nodes: {}}]",
        "to: [{namespaces: {}}]",
    ] {
        let (policy, issues) = policy(&format!(
            "tier: Admin, priority: 0, subject: {{namespaces: {{}}}}, ingress: [{{action: Accept, {wrong}}}]"
        ));
        let rule = policy.unwrap().ingress.remove(0);
        assert_eq!(
            (rule.rule.peers, issues.len()),
            (Some(Vec::new()), 1),
            "{wrong}"
        );
    }
}

#[test]
fn a_policy_that_is_not_understood_has_no_effect() {
    for wrong in [
        "tier: Other, priority: 0, subject: {namespaces: {}}",
        "priority: 0, subject: {namespaces: {}}",
        "tier: Admin, subject: {namespaces: {}}",
        "tier: Admin, priority: 1001, subject: {namespaces: {}}",
        "tier: Admin, priority: 0",
        "tier: Admin, priority: 0, subject: {nodes: {}}",
        "tier: Admin, priority: 0, subject: {namespaces: {}}, mode: audit",
    ] {
        let (none, issues) = policy(wrong);
        assert_eq!((none, issues.len()), (None, 1), "{wrong}");
        assert!(issues[0].contains("the policy has no effect"), "{issues:?}");
    }
}

#[test]
fn manifests_of_both_versions_are_read() {
    for version in ["v1alpha2", "v1beta1"] {
        let text = format!(
            "apiVersion: policy.networking.k8s.io/{version}\nkind: ClusterNetworkPolicy\nmetadata: {{name: all}}\n\
             spec: {{tier: Admin, priority: 3, subject: {{namespaces: {{}}}}, odd: 1, egress: [{{action: Deny, \
             to: [{{namespaces: {{}}, more: [1, {{a: b}}]}}]}}]}}\n"
        );
        let loaded = crate::source::manifests::parse(text.into_bytes());
        assert_eq!(loaded.issues, []);
        let crate::k8s::Object::ClusterNetworkPolicy(read) = &loaded.objects[0].object else {
            panic!("{loaded:?}");
        };
        assert_eq!(read.spec.others.0, ["odd"]);
        let to = read.spec.egress.as_ref().unwrap()[0].to.as_ref().unwrap();
        assert_eq!(to[0].others.0, ["more"]);
    }
}
