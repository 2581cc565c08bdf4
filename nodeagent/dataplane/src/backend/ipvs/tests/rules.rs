//! The rules, as text.

use expect_test::{Expect, expect};
use kplane_model::Family;

use super::super::rules::{Lacks, RuleFacts, accept, compare};
use super::{node, server};
use crate::backend::iptables::{FoundRules, RuleSettings, TableName};
use crate::plan::NodePlan;
use kplane_model::Protocol;

fn shape(family: Family, node: NodePlan) -> RuleFacts {
    RuleFacts {
        settings: RuleSettings::new(family),
        node,
        external_ips: false,
        denied: Vec::new(),
        drop_invalid: false,
        lacks: Lacks::default(),
    }
}

/// All chains of a table on an empty machine.
fn text(shape: &RuleFacts, table: TableName) -> String {
    let steps = compare(shape, &FoundRules::default());
    steps
        .first
        .iter()
        .chain(&steps.last)
        .filter(|step| step.table == table)
        .flat_map(|s| &s.write)
        .map(|chain| chain.lines.as_str())
        .collect()
}

fn check(shape: &RuleFacts, table: TableName, expected: &Expect) {
    expected.assert_eq(&text(shape, table));
}

/// D4: the rules are as kube-proxy writes them, plus those that kube-proxy leaves out while a set is empty.
#[test]
fn d4_rules_of_table_nat() {
    let expected = expect![[r#"
        -A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
        -A KUBE-POSTROUTING -m comment --comment "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose" -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE
        -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
        -A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
        -A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
        -A KUBE-LOAD-BALANCER -m comment --comment "Kubernetes service load balancer ip + port with externalTrafficPolicy=local" -m set --match-set KUBE-LOAD-BALANCER-LOCAL dst,dst -j RETURN
        -A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
        -A KUBE-NODE-PORT -p tcp -m comment --comment "Kubernetes nodeport TCP port with externalTrafficPolicy=local" -m set --match-set KUBE-NODE-PORT-LOCAL-TCP dst -j RETURN
        -A KUBE-NODE-PORT -p tcp -m comment --comment "Kubernetes nodeport TCP port for masquerade purpose" -m set --match-set KUBE-NODE-PORT-TCP dst -j KUBE-MARK-MASQ
        -A KUBE-NODE-PORT -p udp -m comment --comment "Kubernetes nodeport UDP port with externalTrafficPolicy=local" -m set --match-set KUBE-NODE-PORT-LOCAL-UDP dst -j RETURN
        -A KUBE-NODE-PORT -p udp -m comment --comment "Kubernetes nodeport UDP port for masquerade purpose" -m set --match-set KUBE-NODE-PORT-UDP dst -j KUBE-MARK-MASQ
        -A KUBE-NODE-PORT -p sctp -m comment --comment "Kubernetes nodeport SCTP port with externalTrafficPolicy=local with type \'hash ip:port\'" -m set --match-set KUBE-NODE-PORT-LOCAL-SCTP-HASH dst,dst -j RETURN
        -A KUBE-NODE-PORT -p sctp -m comment --comment "Kubernetes nodeport SCTP port for masquerade purpose with type \'hash ip:port\'" -m set --match-set KUBE-NODE-PORT-SCTP-HASH dst,dst -j KUBE-MARK-MASQ
        -A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN
        -A KUBE-SERVICES -m comment --comment "Kubernetes service lb portal" -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER
        -A KUBE-SERVICES ! -s 10.1.0.0/16 -m comment --comment "Kubernetes service cluster ip + port for masquerade purpose" -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ
        -A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
        -A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
        -A KUBE-SERVICES -m set --match-set KUBE-LOAD-BALANCER dst,dst -j ACCEPT
    "#]];
    check(&shape(Family::V4, node()), TableName::Nat, &expected);
}

#[test]
fn d4_rules_of_table_filter() {
    let mut shape = shape(Family::V4, node());
    shape.denied = vec![server("203.0.113.1:80", Protocol::Tcp)];
    let expected = expect![[r#"
        -A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
        -A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
        -A KUBE-NODE-PORT -m comment --comment "Kubernetes health check node port" -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT
        -A KUBE-SOURCE-RANGES-FIREWALL -m comment --comment "Kubernetes service load balancer ip + port + source cidr for packet filter purpose" -m set --match-set KUBE-LOAD-BALANCER-SOURCE-CIDR dst,dst,src -j RETURN
        -A KUBE-SOURCE-RANGES-FIREWALL -m comment --comment "Kubernetes service load balancer ip + port + source IP for packet filter purpose" -m set --match-set KUBE-LOAD-BALANCER-SOURCE-IP dst,dst,src -j RETURN
        -A KUBE-SOURCE-RANGES-FIREWALL -j DROP
        -A KUBE-PROXY-FIREWALL -m comment --comment "Kubernetes service load balancer ip + port for load balancer with sourceRange" -m set --match-set KUBE-LOAD-BALANCER-FW dst,dst -j KUBE-SOURCE-RANGES-FIREWALL
        -A KUBE-IPVS-FILTER -m set --match-set KUBE-LOAD-BALANCER dst,dst -j RETURN
        -A KUBE-IPVS-FILTER -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
        -A KUBE-IPVS-FILTER -m set --match-set KUBE-EXTERNAL-IP dst,dst -j RETURN
        -A KUBE-IPVS-FILTER -m set --match-set KUBE-EXTERNAL-IP-LOCAL dst,dst -j RETURN
        -A KUBE-IPVS-FILTER -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j RETURN
        -A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT --reject-with icmp-port-unreachable
        -A KUBE-IPVS-OUT-FILTER -s 203.0.113.1/32 -m ipvs --vproto 6 --vaddr 203.0.113.1 --vport 80 -j DROP
    "#]];
    check(&shape, TableName::Filter, &expected);
}

/// D9: by default, packets of no connection are forwarded.
#[test]
fn d9_packets_of_no_connection_are_dropped_if_asked_for() {
    let mut shape = shape(Family::V6, node());
    let drops =
        |shape: &RuleFacts| text(shape, TableName::Filter).contains("--ctstate INVALID -j DROP");
    assert!(!drops(&shape));
    shape.drop_invalid = true;
    assert!(drops(&shape));
}

/// A Service that needs a match which the kernel lacks does not stop the others (invariant: isolation).
#[test]
fn rules_do_without_matches_that_are_missing() {
    let mut shape = shape(Family::V4, node());
    shape.external_ips = true;
    shape.denied = vec![server("203.0.113.1:80", Protocol::Tcp)];
    let has = |shape: &RuleFacts| {
        let text = text(shape, TableName::Nat) + &text(shape, TableName::Filter);
        ["-m physdev", "-m ipvs", "KUBE-EXTERNAL-IP-LOCAL dst,dst"].map(|m| text.contains(m))
    };
    assert_eq!(has(&shape), [true; 3]);
    shape.lacks.physdev = true;
    assert_eq!(has(&shape), [false, true, true]);
    shape.lacks.ipvs = true;
    assert_eq!(has(&shape), [false, false, true]);
}

/// A15, A17: masquerading on the way to a ClusterIP.
#[test]
fn a15_masquerading_of_cluster_ips() {
    let line = |pods: &[&str], all: bool| {
        let pods: Vec<_> = pods.iter().map(|range| range.parse().unwrap()).collect();
        let everything = vec![kplane_model::Cidr::everything(Family::V4)];
        let unmasqueraded_sources = match (all, pods.is_empty()) {
            (true, _) => Vec::new(),
            (false, true) => everything,
            (false, false) => pods.clone(),
        };
        let node = NodePlan {
            pod_sources: pods,
            unmasqueraded_sources,
            ..NodePlan::default()
        };
        let text = text(&shape(Family::V4, node), TableName::Nat);
        let mut lines = text.lines().filter(|line| line.contains("masquerade purpose"));
        let line = lines.find(|line| line.contains("KUBE-CLUSTER-IP")).unwrap();
        let (before, after) = line.split_once(" -m comment").unwrap();
        let after = after.split_once("KUBE-CLUSTER-IP ").unwrap().1;
        format!("{} {after}", before.replace("-A KUBE-SERVICES", "").trim())
    };
    let cases = [
        (
            &["10.1.0.0/16"][..],
            false,
            "! -s 10.1.0.0/16 dst,dst -j KUBE-MARK-MASQ",
        ),
        (&["10.1.0.0/16"], true, " dst,dst -j KUBE-MARK-MASQ"),
        // The node's own packets would have a Service's address as source.
        (&[], false, " src,dst -j KUBE-MARK-MASQ"),
        (
            &["10.1.0.0/16", "10.2.0.0/16"],
            false,
            " dst,dst -j KUBE-SVC-D-MARK-NOT-POD",
        ),
    ];
    for (pods, all, expected) in cases {
        assert_eq!(line(pods, all), expected, "{pods:?} {all}");
    }
}

/// Rules that make the kernel filter bridges exist only when needed.
#[test]
fn d4_physdev_is_for_external_addresses_only() {
    let mut shape = shape(Family::V4, node());
    assert!(!text(&shape, TableName::Nat).contains("physdev"));
    shape.external_ips = true;
    assert!(text(&shape, TableName::Nat).contains("physdev"));
}

/// Rules of mode iptables translate packets until IPVS can serve.
#[test]
fn rules_of_mode_iptables_are_replaced_last() {
    let shape = shape(Family::V4, node());
    let mut found = FoundRules::default();
    let nat = TableName::Nat;
    let services = crate::backend::iptables::ChainName::SERVICES;
    found.rule(
        nat,
        services,
        "-A KUBE-SERVICES -d 10.96.0.1/32 -j KUBE-SVC-AAAAAAAAAAAAAAAA",
    );
    let steps = compare(&shape, &found);
    let last: Vec<_> = steps.last.iter().flat_map(|step| &step.write).collect();
    assert_eq!((last.len(), last[0].name), (1, services));
    let first = steps.first.iter().flat_map(|step| &step.write);
    assert_eq!(first.filter(|chain| chain.name == services).count(), 0);
    for steps in [&steps.first, &steps.last] {
        accept(&mut found, steps);
    }
    assert_eq!(compare(&shape, &found).len(), 0);
}

/// If a jump exists twice, one copy is removed; everything else is left alone.
#[test]
fn each_jump_is_there_once() {
    let shape = shape(Family::V6, NodePlan::default());
    let mut found = FoundRules::default();
    let steps = compare(&shape, &found);
    accept(&mut found, &steps.first);
    let line =
        "-A INPUT -m comment --comment \"kubernetes ipvs access filter\" -j KUBE-IPVS-FILTER";
    found.jump(TableName::Filter, line);
    let steps = compare(&shape, &found);
    assert_eq!(steps.len(), 1);
    assert!(!steps.first[0].jumps[0].insert);
}
