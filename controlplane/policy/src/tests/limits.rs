//! What does not fit into a message, what a change costs in objects, and answers for operators.

use kplane_model::{PolicyKey, PolicyPort, Protocol, Tier, TierAction};

use super::agent::Agent;
use super::cluster::*;
use crate::limits::Limits;
use crate::{
    ClusterPolicy, End, NetworkPolicy, Policies, Requirement, Rule, Selector, TierRule, Verdict,
};

#[test]
fn a_policy_that_fits_into_no_message_isolates_and_allows_nothing() {
    let many: Vec<_> =
        (1..8_000).map(|port| PolicyPort::Range(Protocol::Tcp, port, port)).collect();
    let few = ports(&many[..1_000]);
    let large = ingress("a/p", &[], &[ports(&many), ports(&many)]);
    let web = pod("a/web", &["10.0.0.1"], &[]);
    let cluster = Cluster::two().with(web).policy(large);
    let mut index = cluster.index();
    let too_large: Vec<_> = index.too_large().map(|(name, _)| name.to_string()).collect();
    assert_eq!(too_large, ["a/p"]);
    let mut agent = Agent::default();
    agent.apply(index.take());
    let [from, to] = ["192.0.2.1", "10.0.0.1"].map(|a| a.parse().unwrap());
    assert!(!agent.allows(from, to, Protocol::Tcp, 80));
    let judged = index.judge(&End::Address(from), &End::Address(to), Protocol::Tcp, 80);
    assert_eq!(judged.ingress, Verdict::Denied(vec![name("a/p")]));

    index.put_policy(ingress("a/p", &[], &[few]));
    agent.apply(index.take());
    assert_eq!(index.too_large().count(), 0);
    assert!(agent.allows(from, to, Protocol::Tcp, 80));
}

#[test]
fn a_pod_with_too_many_policies_stays_isolated() {
    let mut cluster = Cluster::two().with(pod("a/web", &["10.0.0.1"], &[]));
    for number in 0..6_000 {
        let name = format!("a/allows-everybody-to-come-to-the-pod-{number:05}");
        cluster = cluster.policy(ingress(&name, &[], &[from(&[block("0.0.0.0/0", &[])])]));
    }
    cluster = cluster.policy(egress("a/z", &[], &[]));
    let mut index = cluster.index();
    let mut agent = Agent::default();
    agent.apply(index.take());
    let crowded: Vec<_> = index.crowded().map(|(pod, n)| (pod.to_string(), n)).collect();
    assert_eq!(crowded, [("a/web".to_owned(), 6_001)]);
    let (_, pod) = agent.pods().next().unwrap();
    let bytes: usize = pod.policies.iter().map(|p| p.to_string().len() + 9).sum();
    assert!((150 << 10..=160 << 10).contains(&bytes), "{bytes}");
    let [web, outside] = ["10.0.0.1", "192.0.2.1"].map(|a| a.parse().unwrap());
    assert!(!agent.allows(web, outside, Protocol::Tcp, 80));
    assert!(agent.allows(outside, web, Protocol::Tcp, 80));
    index.delete_pod(&name("a/web"));
    agent.apply(index.take());
    assert_eq!(index.crowded().count(), 0);
}

/// Two namespaces with workloads, and policies that use the label `app`.
fn workloads() -> Policies {
    let web = || from(&[pods(Some(selector(&[])), Some(selector(&[("app", "web")])))]);
    let mut cluster = Cluster::two()
        .policy(ingress("a/p", &[("app", "db")], &[web()]))
        .policy(ingress("b/p", &[], &[web()]));
    for number in 1..=9 {
        let address = format!("10.0.0.{number}");
        let with = [("app", "web"), ("hash", "1")];
        cluster = cluster.with(pod(&format!("a/web-{number}"), &[&address], &with));
    }
    cluster.index()
}

#[test]
fn a_new_pod_of_a_known_workload_is_one_shared_object_and_one_of_its_node() {
    let mut index = workloads();
    index.put_cluster_policy(ClusterPolicy {
        name: "tiers".into(),
        tier: Tier::Admin,
        priority: 1,
        namespaces: selector(&[]),
        pods: selector(&[("app", "web")]),
        ingress: vec![TierRule {
            action: TierAction::Deny,
            rule: from(&[pods(Some(selector(&[("team", "x")])), Some(selector(&[])))]),
        }],
        egress: Vec::new(),
    });
    index.take();
    let with = [("app", "web"), ("hash", "1")];
    index.put_pod(pod("a/web-10", &["10.0.0.10"], &with));
    let changes = index.take();
    let keys: Vec<_> = changes.shared.iter().map(|(key, _)| key.clone()).collect();
    assert_eq!(keys, [PolicyKey::Peer("10.0.0.10".parse().unwrap())]);
    assert_eq!(changes.own.len(), 1);
    index.delete_pod(&name("a/web-10"));
    let changes = index.take();
    assert_eq!((changes.shared.len(), changes.own.len()), (1, 1));
}

#[test]
fn no_policy_changes_the_class_of_a_pod() {
    let mut index = workloads();
    let everything = index.take();
    assert!(everything.shared.iter().any(|(key, _)| is_of_pods(key)));
    let by_key = |key: &str| Selector(vec![Requirement::Exists(key.into())]);
    let peer = |key| from(&[pods(Some(selector(&[])), Some(by_key(key)))]);
    let dns = Rule {
        peers: None,
        ports: Some(vec![PolicyPort::Named(Protocol::Udp, "dns".into())]),
    };
    let policies = [
        ingress("b/new", &[("app", "none")], &[peer("hash")]),
        egress("b/new", &[("app", "none")], &[peer("none"), dns]),
    ];
    for policy in policies {
        index.put_policy(policy);
        let changes = index.take();
        assert!(!changes.shared.iter().any(|(key, _)| is_of_pods(key)));
        index.delete_policy(&name("b/new"));
        let changes = index.take();
        assert!(!changes.shared.iter().any(|(key, _)| is_of_pods(key)));
    }
}

fn is_of_pods(key: &PolicyKey) -> bool {
    matches!(key, PolicyKey::Peer(_) | PolicyKey::Class(_))
}

#[test]
fn a_change_that_is_undone_is_none() {
    let mut index = workloads();
    index.take();
    index.put_policy(ingress(
        "b/q",
        &[],
        &[from(&[pods(None, Some(selector(&[("x", "1")])))])],
    ));
    index.put_namespace(&"b".into(), labels(&[]));
    index.delete_pod(&name("a/web-1"));
    index.put_pod(pod("a/web-2", &["10.9.9.9"], &[("app", "other")]));
    index.delete_policy(&name("b/q"));
    index.put_namespace(&"b".into(), labels(&[("team", "y")]));
    for number in [1, 2] {
        let (name, address) = (format!("a/web-{number}"), format!("10.0.0.{number}"));
        index.put_pod(pod(&name, &[&address], &[("app", "web"), ("hash", "1")]));
    }
    assert!(index.take().is_empty());
}

#[test]
fn a_cluster_without_policies_costs_nothing() {
    let mut index = workloads();
    let everything = index.take();
    for policy in ["a/p", "b/p"] {
        index.delete_policy(&name(policy));
    }
    let changes = index.take();
    assert_eq!(changes.shared.len(), everything.shared.len());
    assert!(changes.shared.iter().all(|(_, object)| object.is_none()));
    assert!(changes.own.iter().all(|change| change.object.is_none()));
    let counts = index.counts();
    assert_eq!((counts.classes, counts.groups, counts.pods), (0, 0, 9));
}

#[test]
fn answers_name_policies_rules_and_pods() {
    let index = workloads();
    let facts = index.policy(&name("a/p")).unwrap();
    assert_eq!((facts.pods, facts.names), (0, Vec::new()));
    assert!(index.policy(&name("a/none")).is_none());
    assert_eq!(index.policies_of(&name("a/web-1")), Some(Vec::new()));
    assert_eq!(index.policies_of(&name("a/none")), None);
    let list: Vec<_> = index.list().map(|line| (line.name.to_string(), line.pods)).collect();
    assert_eq!(list, [("a/p".to_owned(), 0), ("b/p".to_owned(), 0)]);

    let mut index = workloads();
    let db = pod("a/db", &["10.0.0.99"], &[("app", "db")]);
    index.put_pod(db);
    index.put_policy(NetworkPolicy {
        egress: Some(vec![from(&[block("10.0.0.0/8", &[]), pods(None, None)])]),
        ..policy("a/out", &[("app", "web")])
    });
    let [web, db] = ["a/web-1", "a/db"].map(|pod| End::Pod(name(pod)));
    let judged = index.judge(&web, &db, Protocol::Tcp, 80);
    let allowed = |policy: &str, peer| Verdict::Allowed {
        policy: name(policy),
        rule: 0,
        peer: Some(peer),
    };
    assert_eq!(judged.egress, allowed("a/out", 0));
    assert_eq!(judged.ingress, allowed("a/p", 0));
    let judged = index.judge(&db, &web, Protocol::Tcp, 80);
    assert_eq!(judged.egress, Verdict::NotIsolated);
    let outside = End::Address("192.0.2.1".parse().unwrap());
    let judged = index.judge(&outside, &db, Protocol::Tcp, 80);
    assert_eq!(judged.ingress, Verdict::Denied(vec![name("a/p")]));
    assert_eq!(
        index.judge(&db, &db, Protocol::Tcp, 80).egress,
        Verdict::Itself
    );
}

#[test]
fn a_group_that_grows_or_shrinks_is_cut_into_parts_anew() {
    let by_label = pods(Some(selector(&[])), Some(selector(&[("app", "web")])));
    let db = pod("b/db", &["10.9.0.1"], &[("app", "db")]);
    let mut cluster = Cluster::two().with(db);
    cluster = cluster.policy(ingress("b/p", &[("app", "db")], &[from(&[by_label])]));
    let web = |number: usize| {
        let (hash, address) = (
            number.to_string(),
            format!("10.1.{}.{}", number / 250, number % 250 + 1),
        );
        let with = [("app", "web"), ("hash", hash.as_str())];
        pod(&format!("a/web-{number}"), &[&address], &with)
    };
    let (mut index, mut agent) = (cluster.index(), Agent::default());
    let mut parts = Vec::new();
    for number in 1..510 {
        index.put_pod(web(number));
    }
    for number in [0].into_iter().chain(510..515).chain((0..515).rev()) {
        match index.node_of(&web(number).name) {
            None => index.put_pod(web(number)),
            Some(_) => index.delete_pod(&web(number).name),
        }
        agent.apply(index.take());
        agent.view();
        parts.push(agent.parts().count());
        let members: usize = agent.parts().map(|(_, part)| part.members.len()).sum();
        assert_eq!(members, index.counts().classes - 1);
    }
    assert_eq!((parts[0], parts[2], parts[3], parts[5]), (1, 1, 4, 4));
    assert_eq!((parts[7], parts[8], parts.last()), (4, 1, Some(&0)));
}

/// Returns whether agents let TCP pass from one address to another, at several ports.
fn tcp<const N: usize>(index: &mut Policies, from: &str, to: &str, ports: [u16; N]) -> [bool; N] {
    let mut agent = Agent::default();
    agent.apply(index.take());
    let [from, to] = [from, to].map(|a| a.parse().unwrap());
    ports.map(|port| agent.allows(from, to, Protocol::Tcp, port))
}

/// A ClusterNetworkPolicy for all Pods, with these rules for ingress.
fn cluster_policy(tier: Tier, ingress: Vec<TierRule>) -> ClusterPolicy {
    ClusterPolicy {
        name: "tiers".into(),
        tier,
        priority: 1,
        namespaces: selector(&[]),
        pods: selector(&[]),
        ingress,
        egress: Vec::new(),
    }
}

#[test]
fn a_tier_with_too_many_ranges_of_ports_denies_everything_between_the_pods() {
    let single = |port| PolicyPort::Range(Protocol::Tcp, port, port);
    let peers = Some(vec![pods(Some(selector(&[])), Some(selector(&[])))]);
    for tier in Tier::ALL {
        let rule = |action| TierRule {
            action,
            rule: Rule {
                peers: peers.clone(),
                ports: Some(vec![single(10), single(20), single(30)]),
            },
        };
        let cluster = Cluster::two().with(pod("a/web", &["10.0.0.1"], &[])).with(pod(
            "a/db",
            &["10.0.0.2"],
            &[],
        ));
        for action in [TierAction::Accept, TierAction::Deny] {
            let verdicts = |ranges| {
                let mut index = cluster.index_with(Limits {
                    ranges,
                    ..Limits::default()
                });
                index.put_cluster_policy(cluster_policy(tier, vec![rule(action)]));
                let verdicts = tcp(&mut index, "10.0.0.1", "10.0.0.2", [10, 11]);
                (verdicts, index.overlarge_decisions())
            };
            let at_port = action == TierAction::Accept;
            assert_eq!(verdicts(3), ([at_port, true], 0), "{tier:?} {action:?}");
            assert_eq!(verdicts(2), ([false, false], 1), "{tier:?} {action:?}");
        }
    }
}

#[test]
fn decisions_that_fit_into_no_message_deny_whatever_other_policies_allow() {
    let deny_some = TierRule {
        action: TierAction::Deny,
        rule: Rule {
            peers: Some(vec![pods(Some(selector(&[])), Some(selector(&[])))]),
            ports: Some(vec![PolicyPort::Range(Protocol::Tcp, 10, 10)]),
        },
    };
    for tier in Tier::ALL {
        let cluster = Cluster::two()
            .with(pod("a/web", &["10.0.0.1"], &[]))
            .with(pod("a/db", &["10.0.0.2"], &[("app", "db")]))
            .policy(ingress("a/in", &[], &[from(&[pods(None, None)])]))
            .policy(egress("a/out", &[], &[from(&[pods(None, None)])]));
        let verdicts = |object| {
            let mut index = cluster.index();
            index.put_cluster_policy(ClusterPolicy {
                pods: selector(&[("app", "db")]),
                ..cluster_policy(tier, vec![deny_some.clone()])
            });
            // The NetworkPolicies keep their limit.
            index.tiers.limits.object = object;
            let mut agent = Agent::default();
            agent.apply(index.take());
            let [web, db] = ["10.0.0.1", "10.0.0.2"].map(|a| a.parse().unwrap());
            let to_db = [10, 11].map(|port| agent.allows(web, db, Protocol::Tcp, port));
            let from_db = agent.allows(db, web, Protocol::Tcp, 10);
            (to_db, from_db, index.overlarge_decisions())
        };
        // A row has 16 bytes, and takes 12 for a range and 16 for an end.
        let enough = 16 + 12 + 16;
        // NetworkPolicies decide before the tier Baseline.
        let at_port = tier == Tier::Baseline;
        assert_eq!(verdicts(enough), ([at_port, true], true, 0), "{tier:?}");
        let denied = ([false, false], false, 1);
        assert_eq!(verdicts(enough - 1), denied, "{tier:?}");
    }
}

#[test]
fn a_pod_with_too_many_policies_is_isolated_in_the_directions_of_all() {
    const OUTSIDE: &str = "192.0.2.1";
    let everybody = || [from(&[block("0.0.0.0/0", &[])])];
    // The policies that isolate come last by name, where those for one direction alone are left out.
    let neither = |name: &str| policy(name, &[]);
    for [first, last] in [["a/x", "a/y"], ["a/y", "a/x"]] {
        let cluster = Cluster::two()
            .with(pod("a/web", &["10.0.0.1"], &[]))
            .policy(neither("a/a"))
            .policy(neither("a/b"))
            .policy(neither("a/c"))
            .policy(ingress(first, &[], &[]))
            .policy(egress(last, &[], &[]));
        // A name takes 2 bytes, and 10 more. Two fit.
        let names = 2 * 12;
        let limits = Limits {
            names,
            ..Limits::default()
        };
        let mut index = cluster.index_with(limits);
        assert_eq!(tcp(&mut index, OUTSIDE, "10.0.0.1", [80]), [false]);
        let mut index = cluster.index_with(limits);
        assert_eq!(tcp(&mut index, "10.0.0.1", OUTSIDE, [80]), [false]);
        let crowded: Vec<_> = index.crowded().map(|(_, policies)| policies).collect();
        assert_eq!(crowded, [5]);
    }
    // Where all fit, none is left out.
    let open = Cluster::two()
        .with(pod("a/web", &["10.0.0.1"], &[]))
        .policy(ingress("a/a", &[], &[]))
        .policy(ingress("a/b", &[], &everybody()));
    for (names, is_open) in [(2 * 12, true), (2 * 12 - 1, false)] {
        let mut index = open.index_with(Limits {
            names,
            ..Limits::default()
        });
        assert_eq!(tcp(&mut index, OUTSIDE, "10.0.0.1", [80]), [is_open]);
        assert_eq!(index.crowded().count(), usize::from(!is_open));
    }
}

/// The Pods of a namespace share what they may name, so that many Pods with many policies do not take a product of both.
#[test]
fn the_more_pods_a_namespace_has_the_fewer_policies_each_may_name() {
    // A name takes 2 bytes, and 10 more.
    let limits = Limits {
        names: 40 * 12,
        all_names: 4 * 2 * 12,
        ..Limits::default()
    };
    let mut cluster = Cluster::two().with(pod("b/other", &["10.0.1.1"], &[]));
    for name in ["a/a", "a/b", "a/c", "b/a", "b/b", "b/c"] {
        cluster = cluster.policy(ingress(name, &[], &[]));
    }
    let mut index = cluster.index_with(limits);
    let mut agent = Agent::default();
    for (number, crowded) in [(1, 0), (2, 0), (3, 3), (4, 4)] {
        let name = format!("a/p{number}");
        let address = format!("10.0.0.{number}");
        index.put_pod(pod(&name, &[&address], &[]));
        agent.apply(index.take());
        assert_eq!(index.crowded().count(), crowded, "{number} Pods");
    }
    assert!(index.crowded().all(|(_, policies)| policies == 3));
    for number in [4, 3] {
        index.delete_pod(&name(&format!("a/p{number}")));
    }
    agent.apply(index.take());
    assert_eq!(index.crowded().count(), 0, "two are left");
    let names = agent.pods().map(|(_, pod)| pod.policies.len());
    assert_eq!(names.collect::<Vec<_>>(), [3, 3, 3]);
}

#[test]
fn members_that_do_not_fit_into_a_part_of_a_group_are_not_allowed() {
    // A class for each Pod, whose labels differ.
    let by_label = Some(selector(&[("app", "web")]));
    let mut cluster =
        Cluster::two()
            .with(pod("b/db", &["10.9.0.1"], &[("app", "db")]))
            .policy(ingress(
                "b/p",
                &[("app", "db")],
                &[from(&[pods(Some(selector(&[])), by_label)])],
            ));
    let mut tell_apart = Vec::new();
    for number in 0..600 {
        let (hash, address) = (
            number.to_string(),
            format!("10.1.{}.{}", number / 250, number % 250 + 1),
        );
        let with = [("app", "web"), ("hash", hash.as_str())];
        cluster = cluster.with(pod(&format!("a/web-{number}"), &[&address], &with));
        tell_apart.push(address);
    }
    let members = 2;
    let mut index = cluster.index_with(Limits {
        members,
        ..Limits::default()
    });
    let mut agent = Agent::default();
    agent.apply(index.take());
    let parts: Vec<usize> = agent.parts().map(|(_, part)| part.members.len()).collect();
    assert_eq!(parts.iter().max(), Some(&members));
    let to = "10.9.0.1".parse().unwrap();
    let allowed = |from: &&String| agent.allows(from.parse().unwrap(), to, Protocol::Tcp, 80);
    assert_eq!(
        tell_apart.iter().filter(allowed).count(),
        parts.iter().sum::<usize>()
    );
    assert!(parts.iter().sum::<usize>() < tell_apart.len());
}
