//! Services with more endpoints than a node may use.

use std::collections::BTreeSet;

use kplane_model::{EndpointAddr, NodeFacts, Reason, Severity};

use super::*;

/// Number of nodes of a DaemonSet with one Pod on each.
const NODES: u16 = 20_000;

/// Number of endpoints in a slice.
const IN_SLICE: u16 = 1_000;

fn pod(node: u16) -> String {
    let [high, low] = node.to_be_bytes();
    format!("10.0.{high}.{low}")
}

/// Returns a slice with the Pods of some nodes.
fn of_nodes(first: u16) -> Value {
    let endpoints =
        (first..first + IN_SLICE).map(|node| objects::endpoint(pod(node), &format!("n{node}")));
    objects::slice("shop", &format!("agent-{first}"), "agent", endpoints)
}

fn daemon_set() -> Vec<Value> {
    let mut service = service("agent", "10.96.0.1");
    service["spec"]["internalTrafficPolicy"] = json!("Local");
    service["spec"]["type"] = json!("NodePort");
    service["spec"]["ports"][0]["nodePort"] = json!(30_080);
    let slices = (0..NODES / IN_SLICE).map(|n| of_nodes(n * IN_SLICE));
    [service].into_iter().chain(slices).collect()
}

fn published(publication: &Publication) -> &Published {
    publication.services.last().unwrap().1.as_ref().unwrap()
}

#[test]
fn each_node_of_a_large_daemon_set_has_its_own_endpoint() {
    let mut objects = daemon_set();
    let (mut index, first) = index(&objects);
    let of_all = published(&first).clone();
    let own = |node: &u16| of_all.local.get(&*format!("n{node}")).is_some_and(|own| own.len() == 1);
    assert_eq!((0..NODES).filter(own).count(), usize::from(NODES));
    let before: BTreeSet<EndpointAddr> = of_all.variants.default.iter().copied().collect();
    assert_eq!(before.len(), 16_384);

    // One Pod is not ready any more.
    objects[1]["endpoints"][7]["conditions"] = json!({"ready": false});
    let change = apply(&mut index, &objects[1]);
    let after = published(&change).variants.default.iter().copied().collect();
    assert!(before.difference(&after).count() <= 1);
    assert!(after.difference(&before).count() <= 1);

    // People are told of the sample, and what a node uses is what they see.
    let name = ServiceName::new("shop", "agent");
    let detail = index.detail(&name, &[]).unwrap();
    let issue = detail.issues.iter().find(|issue| issue.code == Reason::TooLarge).unwrap();
    assert_eq!(issue.severity, Severity::Warning);
    assert!(
        issue.reason.starts_with("19999 endpoints"),
        "{}",
        issue.reason
    );
    let node = NodeFacts {
        name: "n19998".into(),
        ..NodeFacts::default()
    };
    let seen = detail.ports[0].on_node(&node);
    assert_eq!(
        seen.cluster.as_deref(),
        Some(&*published(&change).variants.default)
    );
    assert_eq!(seen.local.unwrap().len(), 1);
}

#[test]
fn hints_have_lists_of_their_own() {
    let mut objects = daemon_set();
    objects[0]["spec"]["internalTrafficPolicy"] = json!("Cluster");
    for slice in &mut objects[1..] {
        for endpoint in slice["endpoints"].as_array_mut().unwrap() {
            let node = endpoint["nodeName"].clone();
            endpoint["hints"] = json!({"forNodes": [{"name": node}]});
        }
    }
    let (index, first) = index(&objects);
    let variants = &published(&first).variants;
    assert_eq!(variants.by_node.len(), usize::from(NODES));
    assert_eq!(variants.default.len(), 16_384);
    assert_eq!(index.totals().endpoints, usize::from(NODES));
}
