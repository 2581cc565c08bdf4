//! Who gets what: what a tenant writes goes to the nodes of its own Pods.

use std::collections::BTreeSet;

use kplane_model::{PolicyKey, PolicyObject};

use super::agent::Agent;
use super::cluster::*;
use crate::{Pod, Policies, PolicyChanges, Requirement, Selector};

/// Namespace `a` with Pods on n1 and n2, namespace `b` with a Pod on n3.
fn tenants() -> Cluster {
    let on = |node: &str, pod: Pod| Pod {
        node: node.into(),
        ..pod
    };
    Cluster::two()
        .with(on("n1", pod("a/web", &["10.0.0.1"], &[("app", "web")])))
        .with(on("n2", pod("a/db", &["10.0.0.2"], &[("app", "db")])))
        .with(on("n3", pod("b/web", &["10.0.0.3"], &[("app", "web")])))
        .policy(ingress("b/own", &[], &[from(&[pods(None, None)])]))
}

/// An index that published everything.
fn published(cluster: &Cluster) -> (Policies, Agent) {
    let (mut index, mut agent) = (cluster.index(), Agent::default());
    agent.apply(index.take());
    (index, agent)
}

/// The keys of shared objects, and the nodes that get some.
fn concerned(changes: &PolicyChanges) -> (Vec<PolicyKey>, BTreeSet<String>) {
    let shared = changes.shared.iter().map(|(key, _)| key.clone());
    let nodes = changes.own.iter().flat_map(|change| &change.nodes);
    (shared.collect(), nodes.map(ToString::to_string).collect())
}

/// All Pods of the cluster with a label.
fn everybody_with(key: &str) -> [crate::Rule; 1] {
    let with = Selector(vec![Requirement::Exists(key.into())]);
    [from(&[pods(Some(selector(&[])), Some(with))])]
}

fn nodes<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.into_iter().map(ToOwned::to_owned).collect()
}

#[test]
fn a_policy_that_selects_nobody_costs_nobody() {
    let (mut index, _) = published(&tenants());
    let marker = PolicyKey::Namespace("a".into());
    index.put_policy(ingress("a/p", &[("app", "none")], &everybody_with("app")));
    assert_eq!(concerned(&index.take()), (vec![marker.clone()], nodes([])));
    assert_eq!(index.counts().groups, 1, "that of b/own");
    index.put_policy(ingress("a/q", &[("app", "none")], &[]));
    assert!(index.take().is_empty(), "the namespace had a policy");
    index.delete_policy(&name("a/p"));
    assert!(index.take().is_empty());
    index.delete_policy(&name("a/q"));
    assert_eq!(concerned(&index.take()), (vec![marker], nodes([])));
}

#[test]
fn what_a_tenant_writes_goes_to_the_nodes_of_its_pods() {
    let (mut index, mut agent) = published(&tenants());
    let all = everybody_with("app");
    let steps = [
        ingress("a/p", &[], &[]),
        ingress("a/p", &[], &all),
        ingress("a/q", &[("app", "db")], &all),
        egress("a/p", &[("app", "web")], &all),
    ];
    let expected = [["n1", "n2"], ["n1", "n2"], ["n2", "n2"], ["n1", "n2"]];
    for (policy, expected) in steps.into_iter().zip(expected) {
        index.put_policy(policy);
        let changes = index.take();
        let (shared, of) = concerned(&changes);
        assert!(shared.iter().all(|key| *key == PolicyKey::Namespace("a".into())));
        assert_eq!(of, nodes(expected));
        agent.apply(changes);
        agent.view();
    }
    for policy in ["a/p", "a/q"] {
        index.delete_policy(&name(policy));
        let changes = index.take();
        assert!(!concerned(&changes).1.contains("n3"));
        agent.apply(changes);
        agent.view();
    }
    assert_eq!(agent, published(&tenants()).1);
}

#[test]
fn a_member_that_comes_goes_to_the_nodes_with_the_group() {
    let (mut index, _) = published(&tenants());
    index.put_policy(ingress("a/q", &[("app", "db")], &everybody_with("app")));
    index.take();
    let new = pod("b/new", &["10.0.0.4"], &[("app", "new")]);
    index.put_pod(Pod {
        node: "n3".into(),
        ..new
    });
    let changes = index.take();
    let groups = changes.own.iter().filter(|change| matches!(change.key, PolicyKey::Group(..)));
    let of: Vec<_> = groups.flat_map(|change| &change.nodes).collect();
    assert_eq!(of, [&"n2".into()]);
}

#[test]
fn a_pod_that_moves_or_goes_takes_its_policies_and_groups_along() {
    let cluster = tenants().policy(ingress("a/q", &[("app", "db")], &everybody_with("app")));
    let (mut index, mut agent) = published(&cluster);
    let db = cluster.pods[&name("a/db")].clone();
    let nodes_of = |agent: &Agent| -> BTreeSet<String> {
        agent.view();
        agent
            .own
            .iter()
            .filter(|(_, object)| match object {
                PolicyObject::Policy(policy) => policy.name == name("a/q"),
                PolicyObject::Group(_) => true,
                _ => false,
            })
            .map(|((node, _), _)| node.to_string())
            .filter(|node| node != "n3")
            .collect()
    };
    assert_eq!(nodes_of(&agent), nodes(["n2"]));
    index.put_pod(Pod {
        node: "n4".into(),
        ..db.clone()
    });
    agent.apply(index.take());
    assert_eq!(nodes_of(&agent), nodes(["n4"]));
    index.delete_pod(&db.name);
    agent.apply(index.take());
    assert_eq!(nodes_of(&agent), nodes([]));
    index.put_pod(db);
    agent.apply(index.take());
    assert_eq!(agent, published(&cluster).1);
}

#[test]
fn nodes_with_the_same_object_get_it_in_one_change() {
    let (mut index, _) = published(&tenants());
    index.put_policy(ingress("a/p", &[], &everybody_with("app")));
    let changes = index.take();
    let of = |key: &PolicyKey| matches!(key, PolicyKey::Policy(_) | PolicyKey::Group(..));
    let new: Vec<_> = changes.own.iter().filter(|change| of(&change.key)).collect();
    assert!(new.len() > 1);
    assert!(new.iter().all(|change| change.nodes.len() == 2), "{new:?}");
}
