//! The rules of NetworkPolicies, one by one. Each connection is decided three times: see [`Cluster::allows`].

use kplane_model::{PolicyPort, Protocol};

use super::agent::Agent;
use super::cluster::*;
use crate::{NetworkPolicy, Node, Pod, Policies, Requirement, Rule, Selector};

const WEB: &str = "10.0.0.1";
const DB: &str = "10.0.0.2";
/// A Pod of the other namespace.
const FAR: &str = "10.0.1.1";
const OUTSIDE: &str = "192.0.2.1";

/// Pods `a/web` (app=web), `a/db` (app=db, tier=1) and `b/far` (app=web).
fn cluster() -> Cluster {
    let db = Pod {
        ports: vec![
            named("sql", Protocol::Tcp, 5432),
            named("sql", Protocol::Udp, 99),
        ],
        ..pod("a/db", &[DB, "fd00::2"], &[("app", "db"), ("tier", "1")])
    };
    Cluster::two()
        .with(pod("a/web", &[WEB, "fd00::1"], &[("app", "web")]))
        .with(db)
        .with(pod("b/far", &[FAR, "fd00:1::1"], &[("app", "web")]))
}

/// Returns which of the Pod `a/web`, the Pod `b/far` and an outside address reach the Pod `a/db`.
fn reach(policy: NetworkPolicy) -> [bool; 3] {
    let cluster = cluster().policy(policy);
    [WEB, FAR, OUTSIDE].map(|from| cluster.tcp(from, DB, 80))
}

fn reach_by(rules: &[Rule]) -> [bool; 3] {
    reach(ingress("a/p", &[("app", "db")], rules))
}

#[test]
fn np1_isolation_is_for_a_direction_and_both_ends_must_allow() {
    let cluster = cluster();
    assert!(cluster.tcp(WEB, DB, 80));
    let cluster = cluster.policy(ingress("a/in", &[("app", "db")], &[]));
    assert!(!cluster.tcp(WEB, DB, 80));
    assert!(cluster.tcp(DB, WEB, 80));
    assert!(cluster.tcp(WEB, FAR, 80));
    let cluster = cluster.policy(ingress("a/in", &[("app", "db")], &[ports(&[])]));
    assert!(!cluster.tcp(WEB, DB, 80));
    let everybody = from(&[pods(Some(selector(&[])), None)]);
    let cluster = cluster.policy(ingress("a/in", &[("app", "db")], &[everybody]));
    assert!(cluster.tcp(WEB, DB, 80));
    let cluster = cluster.policy(egress("a/out", &[("app", "web")], &[]));
    assert!(!cluster.tcp(WEB, DB, 80));
    assert!(cluster.tcp(FAR, DB, 80));
}

#[test]
fn np1_policies_are_for_pods_of_their_own_namespace() {
    assert_eq!(reach(ingress("b/p", &[("app", "db")], &[])), [true; 3]);
}

#[test]
fn np2_policies_add_up_and_rules_do_not_mix() {
    let web = from(&[pods(None, Some(selector(&[("app", "web")])))]);
    let rule = Rule {
        ports: Some(vec![PolicyPort::Range(Protocol::Tcp, 81, 81)]),
        ..web
    };
    let far = from(&[pods(Some(selector(&[("team", "y")])), None)]);
    assert_eq!(reach_by(&[rule.clone(), far.clone()]), [false, true, false]);
    let cluster = cluster().policy(ingress("a/p", &[("app", "db")], &[rule])).policy(ingress(
        "a/q",
        &[],
        &[far],
    ));
    assert!(cluster.tcp(WEB, DB, 81));
    assert!(cluster.tcp(FAR, DB, 80));
    assert!(!cluster.tcp(WEB, DB, 80));
}

#[test]
fn np3_a_direction_without_rules_is_not_isolated() {
    assert_eq!(reach(egress("a/p", &[("app", "db")], &[])), [true; 3]);
    assert_eq!(reach(policy("a/p", &[("app", "db")])), [true; 3]);
}

#[test]
fn np4_missing_parts_do_not_restrict_and_empty_ones_do() {
    assert_eq!(reach_by(&[]), [false; 3]);
    let everything = Rule {
        peers: None,
        ports: None,
    };
    assert_eq!(reach_by(&[everything]), [true; 3]);
    assert_eq!(reach_by(&[from(&[])]), [false; 3]);
    let nobody = pods(None, Some(selector(&[("app", "none")])));
    assert_eq!(reach_by(&[from(&[nobody])]), [false; 3]);
}

#[test]
fn np5_missing_labels_match_not_in_and_requirements_add_up() {
    let not_in = Requirement::NotIn("tier".into(), vec!["1".into()]);
    let web = Requirement::In("app".into(), vec!["web".into()]);
    let missing = Requirement::DoesNotExist("tier".into());
    let there = Requirement::Exists("tier".into());
    for (requirements, expected) in [
        (vec![not_in.clone()], true),
        (vec![missing.clone(), not_in, web], true),
        (vec![missing, there.clone()], false),
        (vec![there], false),
    ] {
        let peer = pods(None, Some(Selector(requirements)));
        assert_eq!(reach_by(&[from(&[peer])]), [expected, false, false]);
    }
    assert_eq!(reach(ingress("a/p", &[], &[])), [false; 3]);
}

#[test]
fn np6_namespaces_of_peers() {
    let own = pods(None, Some(selector(&[("app", "web")])));
    assert_eq!(reach_by(&[from(&[own])]), [true, false, false]);
    let whole_own = pods(None, None);
    assert_eq!(reach_by(&[from(&[whole_own])]), [true, false, false]);
    let other = pods(Some(selector(&[("team", "y")])), None);
    assert_eq!(reach_by(&[from(&[other])]), [false, true, false]);
    let all = pods(Some(selector(&[])), Some(selector(&[])));
    assert_eq!(reach_by(&[from(&[all])]), [true, true, false]);
    let by_name = pods(
        Some(selector(&[("kubernetes.io/metadata.name", "b")])),
        None,
    );
    assert_eq!(reach_by(&[from(&[by_name])]), [false, true, false]);
}

#[test]
fn np6_both_selectors_of_a_peer_must_match_and_one_of_two_peers() {
    let (team, db) = (selector(&[("team", "y")]), selector(&[("app", "db")]));
    let both = pods(Some(team.clone()), Some(db.clone()));
    assert_eq!(reach_by(&[from(&[both])]), [false; 3]);
    let web = pods(None, Some(selector(&[("app", "web")])));
    let two = [pods(Some(team), None), web];
    assert_eq!(reach_by(&[from(&two)]), [true, true, false]);
}

#[test]
fn np7_blocks_match_pods_and_exceptions_narrow_one_peer() {
    let all = block("0.0.0.0/0", &["10.0.0.0/24"]);
    assert_eq!(
        reach_by(&[from(std::slice::from_ref(&all))]),
        [false, true, true]
    );
    let with_web = [all, block("10.0.0.0/30", &[])];
    assert_eq!(reach_by(&[from(&with_web)]), [true; 3]);
}

#[test]
fn np8_protocols_and_all_of_their_ports() {
    let cluster = cluster().policy(ingress(
        "a/p",
        &[],
        &[ports(&[PolicyPort::All(Protocol::Sctp)])],
    ));
    assert!(cluster.allows(WEB, DB, Protocol::Sctp, 7));
    assert!(!cluster.allows(WEB, DB, Protocol::Tcp, 7));
    assert!(!cluster.allows(WEB, DB, Protocol::Udp, 7));
}

#[test]
fn np9_names_are_those_of_the_destination() {
    let sql = || ports(&[PolicyPort::Named(Protocol::Tcp, "sql".into())]);
    let cluster = cluster();
    for policy in [
        ingress("a/p", &[], &[sql()]),
        egress("a/p", &[("app", "web")], &[sql()]),
    ] {
        let cluster = cluster.clone().policy(policy);
        assert!(cluster.tcp(WEB, DB, 5432));
        assert!(!cluster.tcp(WEB, DB, 99));
        assert!(!cluster.allows(WEB, DB, Protocol::Udp, 99));
    }
    let cluster = cluster.policy(egress("a/p", &[], &[sql()]));
    assert!(!cluster.tcp(DB, WEB, 5432));
    assert!(!cluster.tcp(WEB, OUTSIDE, 5432));
}

#[test]
fn np10_ranges_include_their_ends() {
    let range = ports(&[PolicyPort::Range(Protocol::Tcp, 80, 82)]);
    let cluster = cluster().policy(ingress("a/p", &[], &[range]));
    let allowed = [79, 80, 82, 83].map(|port| cluster.tcp(WEB, DB, port));
    assert_eq!(allowed, [false, true, true, false]);
}

#[test]
fn np15_a_pod_reaches_itself() {
    let cluster = cluster().policy(ingress("a/p", &[], &[])).policy(egress("a/q", &[], &[]));
    assert!(cluster.tcp(DB, DB, 80));
    assert!(cluster.tcp("fd00::2", "fd00::2", 80));
    assert!(!cluster.tcp(WEB, DB, 80));
}

#[test]
fn np16_labels_hold_in_both_families_and_blocks_in_one() {
    let cluster = cluster().policy(ingress("a/p", &[], &[from(&[block("::/0", &[])])]));
    assert!(cluster.tcp("fd00::1", "fd00::2", 80));
    assert!(!cluster.tcp(WEB, DB, 80));
    let cluster = cluster.policy(ingress("a/p", &[], &[from(&[pods(None, None)])]));
    assert!(cluster.tcp("fd00::1", "fd00::2", 80));
    assert!(cluster.tcp(WEB, DB, 80));
    assert!(!cluster.tcp("fd00:1::1", "fd00::2", 80));
}

#[test]
fn np17_labels_of_pods_and_namespaces_count_as_they_are_now() {
    let cluster = cluster();
    let mut index = cluster
        .clone()
        .policy(ingress(
            "a/p",
            &[("app", "db")],
            &[from(&[pods(
                Some(selector(&[("team", "z")])),
                Some(selector(&[("app", "new")])),
            )])],
        ))
        .index();
    let mut agent = Agent::default();
    let mut far_reaches = |index: &mut Policies| {
        agent.apply(index.take());
        let [from, to] = [FAR, DB].map(|a| a.parse().unwrap());
        agent.allows(from, to, Protocol::Tcp, 80)
    };
    assert!(!far_reaches(&mut index));
    index.put_pod(pod("b/far", &[FAR], &[("app", "new")]));
    assert!(!far_reaches(&mut index));
    index.put_namespace(&"b".into(), labels(&[("team", "z")]));
    assert!(far_reaches(&mut index));
    index.put_namespace(&"b".into(), labels(&[]));
    assert!(!far_reaches(&mut index));
}

#[test]
fn np18_the_living_pod_has_the_address_then_the_younger_then_the_first() {
    let claim = |name: &str, terminating: bool, created: Option<&str>| Pod {
        terminating,
        created: created.map(Into::into),
        ..pod(name, &[WEB], &[("who", name.split_once('/').unwrap().1)])
    };
    let older = Some("2026-01-01T00:00:00Z");
    let younger = Some("2026-01-02T00:00:00Z");
    for (pods, winner) in [
        (
            [claim("a/x", true, younger), claim("a/y", false, None)],
            "a/y",
        ),
        (
            [claim("a/x", false, older), claim("a/y", false, younger)],
            "a/y",
        ),
        (
            [claim("a/x", false, None), claim("a/y", false, older)],
            "a/y",
        ),
        ([claim("a/x", true, None), claim("a/y", true, None)], "a/x"),
    ] {
        let [one, two] = pods;
        let cluster = Cluster::two().with(one).with(two).policy(policy("a/p", &[]));
        let mut agent = Agent::default();
        agent.apply(cluster.index().take());
        let with_address = agent.pods().filter(|(_, pod)| !pod.addresses.is_empty());
        let names: Vec<_> = with_address.map(|(_, pod)| pod.name.to_string()).collect();
        assert_eq!(names, [winner]);
        assert_eq!(agent.pods().count(), 2);
    }
}

#[test]
fn np19_a_pod_without_addresses_is_published_and_one_without_a_node_is_not() {
    let waiting = Pod {
        node: "".into(),
        ..pod("a/y", &[], &[])
    };
    let cluster = Cluster::two().with(pod("a/x", &[], &[])).with(waiting);
    assert!(cluster.index().take().is_empty());
    let mut agent = Agent::default();
    agent.apply(cluster.policy(ingress("a/p", &[], &[])).index().take());
    let pods: Vec<_> = agent.pods().collect();
    let [(node, pod)] = pods[..] else {
        panic!("{agent:?}");
    };
    assert_eq!((&**node, pod.name.to_string()), ("n", "a/x".to_owned()));
    assert_eq!(pod.policies, [name("a/p")]);
}

/// A Pod on another node that says that it has the address of a web server.
fn conflicting(name: &str, created: &str) -> Pod {
    Pod {
        node: "n2".into(),
        created: Some(created.into()),
        ..pod(name, &[WEB], &[])
    }
}

/// A Node with a range of Pods.
fn of_range(range: &str) -> Option<Node> {
    Some(Node {
        ranges: vec![range.parse().unwrap()],
        ..Node::default()
    })
}

/// A cluster with an isolated web server, which the Pods of its namespace may reach.
fn isolated(created: &str) -> Cluster {
    let web = Pod {
        created: Some(created.into()),
        ..pod("a/web", &[WEB], &[("app", "web")])
    };
    let peers = [pods(None, Some(selector(&[("app", "web")])))];
    Cluster::two()
        .with(web)
        .with(pod("a/db", &["10.0.0.9"], &[("app", "db")]))
        .policy(ingress("a/web", &[("app", "web")], &[]))
        .policy(ingress("a/db", &[("app", "db")], &[from(&peers)]))
}

#[test]
fn np18_a_claim_of_another_node_takes_neither_isolation_nor_rights_away() {
    let [first, second] = ["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"];
    let reaches_db = |cluster: &Cluster| cluster.tcp(WEB, "10.0.0.9", 80);

    let with_later = isolated(first).with(conflicting("b/liar", second));
    assert!(!with_later.tcp(OUTSIDE, WEB, 80));
    assert!(reaches_db(&with_later));
    // By age alone the Pod of the other node is the older one.
    let with_earlier = isolated(second).with(conflicting("b/liar", first));
    assert!(!with_earlier.tcp(OUTSIDE, WEB, 80));
    assert!(!reaches_db(&with_earlier));
    // The ranges of nodes say more than age.
    let in_range = with_earlier.node("n", "10.0.0.0/24");
    assert!(!in_range.tcp(OUTSIDE, WEB, 80));
    assert!(reaches_db(&in_range));
    // A Pod that is being deleted keeps its isolation, and no other node's address.
    let mut leaving = isolated(first).with(conflicting("b/new", second));
    let web = leaving.pods.get_mut(&name("a/web")).unwrap();
    web.terminating = true;
    assert!(!leaving.tcp(OUTSIDE, WEB, 80));
    assert_eq!(
        leaving.index().pod_at(WEB.parse().unwrap()),
        Some(&name("b/new"))
    );
}

#[test]
fn a_claim_counts_wherever_it_lies_while_no_other_node_has_one() {
    let cluster = isolated("2026-01-01T00:00:00Z").node("n2", "10.0.0.0/24");
    assert!(cluster.tcp(WEB, "10.0.0.9", 80));
    let mut index = cluster.index();
    index.take();
    assert_eq!(index.address_conflicts().count(), 0);
}

#[test]
fn pods_of_two_nodes_with_one_address_are_named() {
    let web: std::net::IpAddr = WEB.parse().unwrap();
    let (web_pod, liar) = (name("a/web"), name("b/liar"));
    let cluster =
        isolated("2026-01-02T00:00:00Z").with(conflicting("b/liar", "2026-01-01T00:00:00Z"));
    let mut index = cluster.index();
    let mut agent = Agent::default();
    let mut address_conflicts = |index: &mut Policies| {
        agent.apply(index.take());
        let address_conflicts: Vec<_> = index
            .address_conflicts()
            .map(|(pod, a, by)| (pod.clone(), a, by.clone()))
            .collect();
        address_conflicts
    };
    let (lost, kept) = (
        (web_pod.clone(), web, liar.clone()),
        (liar.clone(), web, web_pod),
    );
    assert_eq!(address_conflicts(&mut index), std::slice::from_ref(&lost));
    index.set_node(&"n".into(), of_range("10.0.0.0/24"));
    assert_eq!(address_conflicts(&mut index), std::slice::from_ref(&kept));
    // The node's last ranges count, until another node has the range.
    index.set_node(&"n".into(), None);
    index.set_node(&"n".into(), Some(Node::default()));
    assert_eq!(address_conflicts(&mut index), [kept]);
    index.set_node(&"n2".into(), of_range("10.0.0.0/8"));
    assert_eq!(address_conflicts(&mut index), [lost]);
    index.put_pod(Pod {
        terminating: true,
        ..isolated("").pods[&name("a/web")].clone()
    });
    assert_eq!(address_conflicts(&mut index), []);
    index.delete_pod(&liar);
    assert_eq!(address_conflicts(&mut index), []);
}

/// The Pod of the node that is gone is the older one.
#[test]
fn np18_a_range_that_passed_to_another_node_takes_its_addresses_along() {
    let cluster =
        isolated("2026-01-01T00:00:00Z").with(conflicting("b/new", "2026-01-02T00:00:00Z"));
    let mut index = cluster.index();
    for node in ["n", "n2"] {
        index.set_node(&node.into(), of_range("10.0.0.0/24"));
    }
    let winner = |index: &mut Policies| {
        index.take();
        let winners: Vec<_> =
            index.address_conflicts().map(|(.., winner)| winner.clone()).collect();
        winners
    };
    assert_eq!(winner(&mut index), [name("a/web")]);
    index.set_node(&"n".into(), None);
    assert_eq!(winner(&mut index), [name("b/new")]);
    index.set_node(&"n".into(), of_range("10.0.0.0/24"));
    assert_eq!(winner(&mut index), [name("a/web")]);
}

#[test]
fn a_pod_made_anew_on_another_node_is_judged_there() {
    let there = conflicting("b/new", "2026-01-02T00:00:00Z");
    let cluster = isolated("2026-01-01T00:00:00Z").with(there.clone());
    let mut index = cluster.index();
    let mut agent = Agent::default();
    let mut has_address = |index: &mut Policies| {
        agent.apply(index.take());
        let web = agent.pods().find(|(_, pod)| pod.name == name("a/web"));
        !web.unwrap().1.addresses.is_empty()
    };
    assert!(has_address(&mut index));
    index.put_pod(Pod {
        node: "n".into(),
        ..there
    });
    assert!(!has_address(&mut index));
}
