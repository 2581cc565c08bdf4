//! Endpoints on suspected nodes.

use kplane_model::select::variants;

use super::*;

fn suspicions(nodes: &[&str], act: bool) -> Suspicions {
    let suspicion = Suspicion {
        since: at(1),
        missed: 5,
        asked: 5,
    };
    let nodes = nodes.iter().map(|node| ((*node).into(), suspicion.clone()));
    Suspicions {
        nodes: nodes.collect(),
        act,
        dead: BTreeSet::new(),
    }
}

/// A slice with endpoints on these nodes: 10.0.0.1, 10.0.0.2 and so on.
fn slice_on(service: &str, nodes: &[&str]) -> Value {
    let endpoints = nodes
        .iter()
        .enumerate()
        .map(|(at, node)| objects::endpoint(format!("10.0.0.{}", at + 1), node));
    objects::slice("shop", &format!("{service}-1"), service, endpoints)
}

/// The endpoints that nodes get, as the publication has them.
fn chosen(index: &Index, service: &str) -> Vec<String> {
    let detail = index.detail(&ServiceName::new("shop", service), &[]).unwrap();
    let view = &detail.ports[0];
    let chosen = variants(&view.port, &view.endpoints).default;
    chosen.iter().map(|addr| addr.ip.to_string()).collect()
}

fn names(publication: Option<Publication>) -> Vec<String> {
    publication
        .into_iter()
        .flat_map(|publication| publication.services)
        .map(|(key, _)| key.service.name.to_string())
        .collect()
}

#[test]
fn endpoints_on_a_suspected_node_count_as_terminating_ones() {
    let (mut index, _) = index(&[
        service("web", "10.96.0.1"),
        slice_on("web", &["n1", "n2"]),
        service("only", "10.96.0.2"),
        slice_on("only", &["n2"]),
        service("other", "10.96.0.3"),
        slice_on("other", &["n1"]),
    ]);
    let outcome = index.suspect(suspicions(&["n2"], true), at(2));
    assert_eq!(outcome.causes.others().count(), 1);
    assert_eq!(names(outcome.publication), ["only", "web"]);
    assert_eq!(chosen(&index, "web"), ["10.0.0.1"]);
    assert_eq!(
        chosen(&index, "only"),
        ["10.0.0.1"],
        "nothing else is ready"
    );
    // New objects are marked as well.
    apply(&mut index, &slice_on("other", &["n1", "n2"]));
    assert_eq!(chosen(&index, "other"), ["10.0.0.1"]);
    let detail = index.detail(&ServiceName::new("shop", "web"), &[]).unwrap();
    let (found, act) = &detail.facts.suspected;
    assert!(*act && found.len() == 1 && &*found[0].0 == "n2" && found[0].2 == 1);
    // The same again changes nothing; the end of it does.
    let again = index.suspect(suspicions(&["n2"], true), at(3));
    assert!(again.publication.is_none());
    let outcome = index.suspect(suspicions(&[], true), at(4));
    assert_eq!(names(outcome.publication), ["only", "other", "web"]);
    assert_eq!(chosen(&index, "web"), ["10.0.0.1", "10.0.0.2"]);
}

/// Suspected nodes that count as dead.
fn dead(nodes: &[&str]) -> Suspicions {
    Suspicions {
        dead: nodes.iter().map(|node| (*node).into()).collect(),
        ..suspicions(nodes, true)
    }
}

/// The endpoints of each published Service to which connections end.
fn ending(publication: Option<Publication>) -> Vec<String> {
    publication
        .into_iter()
        .flat_map(|publication| publication.services)
        .map(|(key, published)| {
            let dead = published.unwrap().dead.into_iter().map(|addr| addr.ip.to_string());
            format!(
                "{}: {}",
                key.service.name,
                dead.collect::<Vec<_>>().join(" ")
            )
        })
        .collect()
}

#[test]
fn endpoints_on_a_dead_node_are_named_unless_they_may_live_elsewhere() {
    let moved = |node| {
        let endpoint = objects::endpoint("10.0.0.3", node);
        objects::slice("shop", "moved-1", "moved", [endpoint])
    };
    let (mut index, _) = index(&[
        service("web", "10.96.0.1"),
        slice_on("web", &["n1", "n2", "n2"]),
        service("moved", "10.96.0.2"),
        moved("n3"),
    ]);
    index.suspect(suspicions(&["n2"], true), at(2));
    let outcome = index.suspect(dead(&["n2"]), at(3));
    assert_eq!(ending(outcome.publication), ["web: 10.0.0.2"]);
    let detail = index.detail(&ServiceName::new("shop", "web"), &[]).unwrap();
    assert!(detail.facts.suspected.0[0].3, "connections end");
    // Nothing is new.
    assert!(index.suspect(dead(&["n2"]), at(4)).publication.is_none());
    // Another endpoint gets its address.
    let elsewhere = objects::slice(
        "shop",
        "moved-2",
        "moved",
        [objects::endpoint("10.0.0.2", "n1")],
    );
    let publication = apply(&mut index, &elsewhere);
    assert_eq!(ending(Some(publication)), ["moved: ", "web: "]);
    index.suspect(suspicions(&[], true), at(5));
    // Once more, without the other ones.
    apply(&mut index, &moved("n2"));
    apply(&mut index, &objects::slice("shop", "moved-2", "moved", []));
    let outcome = index.suspect(dead(&["n2"]), at(6));
    assert_eq!(
        ending(outcome.publication),
        ["moved: 10.0.0.3", "web: 10.0.0.2 10.0.0.3"]
    );
    let outcome = index.suspect(suspicions(&[], true), at(7));
    assert_eq!(ending(outcome.publication), ["moved: ", "web: "]);
}

#[test]
fn to_observe_changes_nothing_and_tells() {
    let (mut index, _) = index(&[service("web", "10.96.0.1"), slice_on("web", &["n1", "n2"])]);
    let outcome = index.suspect(suspicions(&["n2"], false), at(2));
    assert!(outcome.publication.is_none());
    assert_eq!(chosen(&index, "web"), ["10.0.0.1", "10.0.0.2"]);
    let detail = index.detail(&ServiceName::new("shop", "web"), &[]).unwrap();
    assert_eq!(detail.facts.suspected.0.len(), 1);
}

/// A node that is suspected before everything is listed publishes nothing early.
#[test]
fn nothing_is_published_before_the_first_complete_picture() {
    let mut index = Index::default();
    let outcome = index.suspect(suspicions(&["n2"], true), at(2));
    assert!(outcome.publication.is_none());
}
