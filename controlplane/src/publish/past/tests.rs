//! Going back to earlier states, and on.

use std::time::Duration;

use bytes::Bytes;
use kplane_model::{Digest, Endpoint, ObjectHash, ServicePort};

use super::super::{Publication, Published};
use super::*;

fn key(name: &str) -> ServiceKey {
    ServiceKey::sample("shop", name)
}

/// Publishes a Service with another port, or that it is gone.
fn publish(store: &Store, name: &str, port: Option<u16>) -> u64 {
    let endpoints: &[Endpoint] = &[];
    let published = port.map(|port| {
        let sample = ServicePort::sample(key(name));
        Published::new(ServicePort { port, ..sample }, endpoints)
    });
    store.publish(Publication {
        services: vec![(key(name), published)],
        nodes: Vec::new(),
        service_cidrs: None,
        observed_at: SystemTime::now() - Duration::from_secs(1),
        triggers: Vec::new(),
    })
}

fn store() -> Store {
    let store = Store::new(1);
    publish(&store, "a", Some(1));
    publish(&store, "b", Some(1));
    store.set_synced();
    store
}

fn digest(store: &Store) -> Digest {
    store.digest("n1")
}

#[test]
fn any_remembered_state_can_be_published_again_and_left() {
    let store = store();
    let begin = (store.points()[0].revision, digest(&store));
    let mut states = vec![begin];
    for (name, port) in [
        ("a", Some(2)),
        ("c", Some(1)),
        ("b", None),
        ("a", None),
        ("a", Some(3)),
    ] {
        let revision = publish(&store, name, port);
        states.push((revision, digest(&store)));
    }
    let (newest, latest) = *states.last().unwrap();
    for (revision, digest_then) in &states {
        let rolled = store.roll_back(*revision).unwrap();
        assert!(rolled >= newest, "revisions never go back");
        assert_eq!(digest(&store), *digest_then, "at {revision}");
        assert!(store.is_rolled_back());
        assert!(store.go_on() >= rolled);
        assert_eq!(digest(&store), latest);
        assert!(!store.is_rolled_back());
    }
    // From one earlier state to another, and to a state that was itself one.
    store.roll_back(states[1].0).unwrap();
    let again = store.roll_back(states[3].0).unwrap();
    assert_eq!(digest(&store), states[3].1);
    store.go_on();
    publish(&store, "d", Some(1));
    store.roll_back(again).unwrap();
    assert_eq!(digest(&store), states[3].1);
}

#[test]
fn what_the_source_changes_meanwhile_is_put_off() {
    let store = store();
    let begin = (store.points()[0].revision, digest(&store));
    publish(&store, "a", Some(2));
    store.roll_back(begin.0).unwrap();
    publish(&store, "a", Some(3));
    publish(&store, "b", None);
    publish(&store, "new", Some(1));
    assert_eq!(digest(&store), begin.1);
    store.go_on();
    let other = self::store();
    for (name, port) in [("a", Some(3)), ("b", None), ("new", Some(1))] {
        publish(&other, name, port);
    }
    assert_eq!(digest(&store), digest(&other));
}

#[test]
fn what_is_remembered_is_bounded_and_what_is_not_is_refused() {
    let store = store();
    let begin = store.points()[0].revision;
    assert_eq!(
        store.roll_back(begin - 1),
        Err(Forgotten),
        "before the first complete state"
    );
    for port in 0..=MAX_POINTS {
        publish(&store, "a", u16::try_from(port + 10).ok());
    }
    assert_eq!(store.points().len(), MAX_POINTS);
    assert_eq!(store.roll_back(begin), Err(Forgotten));

    let mut past = Past::default();
    past.add(Point {
        revision: 1,
        at: SystemTime::now(),
        changes: 1,
        freshness: Arc::default(),
    });
    let object = (Bytes::from(vec![0; MAX_BYTES / 4]), ObjectHash::of(b"x"));
    for revision in 2..10 {
        let before = Encoded {
            default: object.clone(),
            by_zone: BTreeMap::new(),
            by_node: BTreeMap::new(),
            local: Vec::new(),
        };
        past.note(revision, key("a"), Some(before));
    }
    assert!(past.bytes <= MAX_BYTES && past.undone.len() == 4);
    assert_eq!(
        past.points.len(),
        0,
        "a state that cannot be restored cannot be chosen"
    );
}
