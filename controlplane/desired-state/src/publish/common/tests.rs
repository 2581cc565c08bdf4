//! Updates for many agents compared with those that agents get alone.

use kplane_model::{Endpoint, EndpointAddr, NodeFacts, ServiceKey, ServicePort};
use kplane_proto::v1::server_message::Kind;
use prost::Message as _;

use super::*;
use crate::k8s;
use crate::publish::{Publication, Published, Store, Trigger};
use crate::trust::Trust;

fn publication() -> Publication {
    Publication::sample(vec![], vec![])
}

fn node(name: &str, zone: Option<&str>) -> NodeFacts {
    NodeFacts {
        zone: zone.map(Into::into),
        ..NodeFacts::sample(name)
    }
}

fn endpoint(octet: u8) -> Endpoint {
    let ip = [10, 0, 0, octet].into();
    Endpoint::ready(EndpointAddr { ip, port: 8080 })
}

/// Publishes a Service with endpoints, whose change has a trigger.
fn publish(store: &Store, name: &str, endpoints: &[Endpoint]) -> u64 {
    let key = ServiceKey::sample("shop", name);
    let port = ServicePort::sample(key.clone());
    let trigger = Trigger {
        at_ms: 7,
        service: key.service.clone(),
        family: key.family,
    };
    store.publish(Publication {
        services: vec![(key, Some(Published::new(port, endpoints)))],
        triggers: vec![trigger],
        ..publication()
    })
}

/// Decodes a message with its frame.
fn decode(bytes: &[u8]) -> Update {
    let message = ServerMessage::decode(&bytes[5..]).unwrap();
    assert_eq!(bytes[0], 0);
    let length = u32::from_be_bytes(bytes[1..5].try_into().unwrap());
    assert_eq!(length as usize, bytes.len() - 5);
    let Some(Kind::Update(update)) = message.kind else {
        panic!("{message:?}");
    };
    update
}

/// Returns the update that an agent at a cursor gets alone.
fn alone(store: &Store, node: &str, mut cursor: Cursor, sent: &Freshness) -> Update {
    let mut piece = store.collect(node, &mut cursor);
    let end = piece.end.take().unwrap();
    let news = end.freshness.news(sent);
    decode(&message(piece, Some(update_end(end, news))))
}

/// Returns the update that an agent shares with others, which must equal the one that it gets alone.
fn shared(store: &Store, node: &str, base: u64, sent: &Arc<Freshness>) -> Option<Ready> {
    let mut cursor = Cursor::at(base);
    let Some(ready) = store.take_common(node, &mut cursor, sent) else {
        assert_eq!(cursor, Cursor::at(base), "the cursor stays");
        return None;
    };
    let rest = ready.rest.clone().unwrap_or_default();
    let update = decode(&[&ready.first[..], &rest[..]].concat());
    assert_eq!(update, alone(store, node, Cursor::at(base), sent), "{node}");
    assert_eq!(cursor, Cursor::at(ready.mark.revision));
    Some(ready)
}

fn store_with(nodes: &[NodeFacts]) -> Store {
    let store = Store::new(1);
    store.publish(Publication {
        nodes: nodes.to_vec(),
        ..publication()
    });
    store
}

#[test]
fn agents_get_the_same_update_with_their_own_digests() {
    let store = store_with(&[node("a", None), node("b", None), node("c", None)]);
    let base = publish(&store, "web", &[]);
    let sent = store.freshness();
    let mut freshness = Freshness::default();
    let (seen, changed) = (9, 8);
    freshness.set(
        k8s::Kind::Service,
        crate::freshness::Versions { seen, changed },
    );
    store.set_freshness(&freshness);
    store.set_trust(Trust::Partial("half".into()));
    publish(&store, "db", &[]);
    let a = shared(&store, "a", base, &sent).unwrap();
    let b = shared(&store, "b", base, &sent).unwrap();
    assert_ne!(a.first, b.first, "digests differ");
    assert_eq!(a.mark.freshness.of(k8s::Kind::Service).unwrap().seen, 9);
    // An agent that knows the versions, one that is behind, and one that only lacks the trust.
    shared(&store, "c", base, &a.mark.freshness).unwrap();
    shared(&store, "c", base - 1, &sent).unwrap();
    store.set_trust(Trust::Whole);
    let end = shared(&store, "a", a.mark.revision, &a.mark.freshness).unwrap();
    assert_eq!(end.mark.trust_changes, 2);
    let kept = store.commons.lock().0.len();
    assert_eq!(kept, 1, "updates to older states are forgotten");
}

#[test]
fn deletions_are_shared() {
    let store = store_with(&[node("a", None)]);
    let base = publish(&store, "web", &[]);
    store.publish(Publication {
        services: vec![(ServiceKey::sample("shop", "web"), None)],
        ..publication()
    });
    let ready = shared(&store, "a", base, &store.freshness()).unwrap();
    assert_eq!(decode(&ready.first).deleted.len(), 1);
}

#[test]
fn a_large_update_is_copied_for_nobody() {
    let store = store_with(&[node("a", None), node("b", None)]);
    let base = publish(&store, "web", &[]);
    for number in 0..200 {
        publish(&store, &format!("service-{number}"), &[]);
    }
    let sent = store.freshness();
    let [a, b] = ["a", "b"].map(|node| shared(&store, node, base, &sent).unwrap());
    assert!(a.first.len() > COPIED && a.first.as_ptr() == b.first.as_ptr());
    assert!(a.rest.unwrap().len() < a.first.len() / 4);
    for number in 200..3_000 {
        publish(&store, &format!("service-{number}"), &[]);
    }
    assert!(
        shared(&store, "a", base, &sent).is_none(),
        "more than one message"
    );
}

#[test]
fn agents_with_changes_of_their_own_get_their_own_update() {
    let store = store_with(&[node("a", None), node("b", None)]);
    let base = publish(&store, "web", &[]);
    let sent = store.freshness();
    assert!(shared(&store, "a", 0, &sent).is_none(), "holds nothing");
    let on_a = Endpoint {
        node: Some("a".into()),
        ..endpoint(1)
    };
    publish(&store, "web", &[on_a]);
    assert!(shared(&store, "a", base, &sent).is_none());
    shared(&store, "b", base, &sent).unwrap();
    // A node without a Node object, whose configuration contains the cluster's ranges.
    shared(&store, "stranger", base, &sent).unwrap();
    store.publish(Publication {
        service_cidrs: Some(vec!["10.96.0.0/16".parse().unwrap()]),
        ..publication()
    });
    assert!(shared(&store, "stranger", base, &sent).is_none());
}

#[test]
fn zones_with_endpoints_of_their_own_share_among_themselves() {
    let zones = [node("a", Some("x")), node("b", Some("y")), node("c", None)];
    let store = store_with(&zones);
    let base = publish(&store, "web", &[]);
    let sent = store.freshness();
    let hinted = ["x", "y"].map(|zone| Endpoint {
        zone_hints: vec![zone.into()],
        ..endpoint(zone.as_bytes()[0])
    });
    publish(&store, "db", &hinted);
    let updates = ["a", "b", "c"].map(|node| shared(&store, node, base, &sent).unwrap());
    let objects = updates.each_ref().map(|ready| decode(&ready.first).objects);
    assert_ne!(objects[0], objects[1]);
    assert_eq!(store.commons.lock().0.len(), 3);
}
