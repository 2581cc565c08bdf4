//! Issues of NetworkPolicies, and of Pods with too many of them.

use kplane_model::Reason;

use super::*;
use crate::admission::Enforce;
use kplane_proto::v1::Enforcement;

fn policy(name: &str, ports: usize) -> Value {
    let ports: Vec<Value> = (1..=ports).map(|port| json!({"port": port})).collect();
    json!({
        "kind": "NetworkPolicy",
        "metadata": {"namespace": "shop", "name": name, "uid": "9ac0b1c8-9b1a-4a52-9c0e-1c1d7c4f1c11"},
        "spec": {"ingress": [{"ports": ports}]},
    })
}

fn enforcing(objects: &[Value]) -> Index {
    let mut index = Index::new(Admission {
        network_policies: Some(Enforce::On),
        ..Admission::default()
    });
    let objects = objects.iter().map(Located::sample);
    index.apply(Batch::sample(&Kind::WITH_POLICIES, objects));
    index
}

fn texts(index: &Index) -> Vec<String> {
    index.issues().iter().map(ToString::to_string).collect()
}

/// Applies an event, and returns whether the list of issues changed.
fn changes(index: &mut Index, event: Event) -> bool {
    index.apply(batch(vec![event])).issues_changed
}

#[test]
fn a_policy_that_fits_into_no_message_is_an_issue_while_it_does_not() {
    let mut index = enforcing(&[policy("web", 20_000)]);
    let issues = index.issues();
    assert_eq!(issues.len(), 1, "{issues:?}");
    let id = object(&policy("web", 0)).object.id();
    assert_eq!(
        (issues[0].code, index.uid(&id).is_some()),
        (Reason::TooLarge, true)
    );
    let text = issues[0].reason.as_str();
    assert!(
        text.starts_with("needs ") && text.ends_with("; split it"),
        "{text}"
    );
    let larger = object(&policy("web", 21_000));
    assert!(
        changes(&mut index, Event::Apply(larger)),
        "the size is another"
    );
    let smaller = object(&policy("web", 1));
    assert!(changes(&mut index, Event::Apply(smaller)));
    assert_eq!(texts(&index), [""; 0]);
    let again = object(&policy("web", 20_000));
    assert!(changes(&mut index, Event::Apply(again)));
    assert!(changes(&mut index, Event::Delete(id)));
    assert_eq!(texts(&index), [""; 0]);
}

#[test]
fn the_largest_policy_of_a_namespace_beyond_its_share_is_an_issue_while_it_is() {
    let of = |n: usize| policy(&format!("p{n:02}"), 12_000);
    let objects: Vec<_> = (0..21).map(of).collect();
    let mut index = enforcing(&objects);
    assert_eq!(texts(&index), [""; 0]);
    assert!(changes(&mut index, Event::Apply(object(&of(21)))));
    let issues = index.issues();
    assert_eq!(issues.len(), 1, "{issues:?}");
    assert_eq!(issues[0].code, Reason::TooLarge);
    let text = issues[0].to_string();
    assert!(
        text.contains("NetworkPolicy shop/p21") && text.contains("may take 4194304"),
        "{text}"
    );
    assert!(changes(
        &mut index,
        Event::Delete(object(&of(0)).object.id())
    ));
    assert_eq!(texts(&index), [""; 0]);
}

#[test]
fn a_pod_with_too_many_policies_is_an_issue_while_it_has_them() {
    let pod = json!({
        "kind": "Pod",
        "metadata": {"namespace": "shop", "name": "web-0"},
        "spec": {"nodeName": "n1"},
        "status": {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}], "phase": "Running"},
    });
    let name = |n: usize| format!("{n:04}-{}", "x".repeat(240));
    let mut objects: Vec<Value> = (0..800).map(|n| policy(&name(n), 1)).collect();
    objects.push(pod);
    let mut index = enforcing(&objects);
    let issues = texts(&index);
    assert_eq!(issues.len(), 1, "{issues:?}");
    assert!(issues[0].contains("Pod shop/web-0"), "{issues:?}");
    assert!(
        issues[0].contains("800 NetworkPolicies select it"),
        "{issues:?}"
    );
    assert_eq!(
        (index.totals().policies, index.totals().policy_pods),
        (800, 1)
    );
    let id = |n| object(&policy(&name(n), 1)).object.id();
    assert!(changes(&mut index, Event::Delete(id(0))));
    assert!(texts(&index)[0].contains("799 NetworkPolicies"));
    let gone: Vec<Event> = (1..400).map(|n| Event::Delete(id(n))).collect();
    assert!(index.apply(batch(gone)).issues_changed);
    assert_eq!(texts(&index), [""; 0]);
    assert!(!changes(&mut index, Event::Delete(id(400))));
}

/// Policies select by labels of Namespaces: a loss of many of them is as doubtful as one of policies.
#[test]
fn namespaces_that_vanish_are_held_until_a_second_look() {
    let namespaces: Vec<Value> = (0..12)
        .map(|n| json!({"kind": "Namespace", "metadata": {"name": format!("n{n}")}}))
        .collect();
    let mut index = enforcing(&namespaces);
    let ids = namespaces.iter().map(|of| object(of).object.id()).collect();
    index.apply(batch(vec![Event::Vanished(ids)]));
    let held = index.held().map(|held| held.to_string()).unwrap_or_default();
    assert!(
        held.contains("12 of 12 Namespaces would be removed"),
        "{held}"
    );
    index.apply(batch(vec![Event::Looked(Kind::Namespace)]));
    assert!(index.held().is_none());
}

/// Services are published while the kinds that policies need are not listed; policies come as a whole, or not at all.
#[test]
fn services_wait_for_nothing_of_policies() {
    let mut index = Index::new(Admission {
        network_policies: Some(Enforce::On),
        ..Admission::default()
    });
    let list = |kinds: &[Kind], objects: &[Value]| {
        Batch::sample(kinds, objects.iter().map(Located::sample))
    };
    let services = index.apply(list(
        &[&Kind::ALL[..], &[Kind::NetworkPolicy]].concat(),
        &[service("web", "10.96.0.1"), policy("web", 1)],
    ));
    assert!(index.is_synced());
    assert_eq!(index.enforcement(), Enforcement::Unread);
    let published = services.publication.expect("the Service");
    assert_eq!(
        (published.services.len(), published.policies.is_empty()),
        (1, true)
    );
    let rest = [Kind::Namespace, Kind::Pod, Kind::ClusterNetworkPolicy];
    let policies = index.apply(list(&rest, &[]));
    assert_eq!(index.enforcement(), Enforcement::On);
    assert!(!policies.publication.expect("the policy").policies.is_empty());
    for (said, expected) in [
        (None, Enforcement::Unspecified),
        (Some(Enforce::Off), Enforcement::Off),
    ] {
        let index = Index::new(Admission {
            network_policies: said,
            ..Admission::default()
        });
        assert_eq!(index.enforcement(), expected);
    }
}

#[test]
fn pods_of_two_nodes_with_one_address_are_an_issue_with_both_names() {
    let pod = |name: &str, node: &str, created: &str| {
        json!({
            "kind": "Pod",
            "metadata": {"namespace": "shop", "name": name, "creationTimestamp": created},
            "spec": {"nodeName": node},
            "status": {"podIP": "10.2.0.1", "podIPs": [{"ip": "10.2.0.1"}], "phase": "Running"},
        })
    };
    let node = |ranges: Value| {
        let node =
            json!({"kind": "Node", "metadata": {"name": "n2"}, "spec": {"podCIDRs": ranges}});
        Event::Apply(object(&node))
    };
    let older = pod("web-0", "n1", "2026-01-01T00:00:00Z");
    let younger = pod("db-0", "n2", "2026-01-02T00:00:00Z");
    let mut index = enforcing(&[policy("web", 1), older, younger.clone()]);
    let conflict = |index: &Index| {
        let issues = index.issues();
        let issue = issues.iter().find(|issue| issue.code == Reason::PodAddressConflict)?;
        Some(issue.to_string())
    };
    let text = conflict(&index).unwrap();
    assert!(
        text.contains(
            "shop/db-0: status.podIPs names 10.2.0.1, which Pod shop/web-0 of node n1 has"
        ),
        "{text}"
    );
    assert!(changes(&mut index, node(json!(["10.2.0.0/24"]))));
    let text = conflict(&index).unwrap();
    assert!(
        text.contains(
            "shop/web-0: status.podIPs names 10.2.0.1, which Pod shop/db-0 of node n2 has"
        ),
        "{text}"
    );
    assert!(changes(
        &mut index,
        Event::Delete(object(&younger).object.id())
    ));
    assert_eq!(conflict(&index), None);
}
