//! Agents that get a trigger, and agents that do not.

use std::time::SystemTime;

use kplane_model::{Endpoint, EndpointAddr, KeyParts, NodeFacts, Protocol, ServicePort};

use super::*;
use crate::publish::{Cursor, Publication, Published, Store};

fn key(name: &str, family: Family) -> ServiceKey {
    ServiceKey::from(KeyParts {
        service: ServiceName::new("shop", name),
        port_name: "http".into(),
        protocol: Protocol::Tcp,
        family,
    })
}

fn endpoint(octet: u8, node: &str) -> Endpoint {
    Endpoint {
        node: Some(node.into()),
        ..Endpoint::ready(EndpointAddr::new([10, 0, 0, octet], 80))
    }
}

fn published(name: &str, endpoints: &[Endpoint]) -> (ServiceKey, Option<Published>) {
    let key = key(name, Family::V4);
    let published = Published::new(ServicePort::sample(key.clone()), endpoints);
    (key, Some(published))
}

fn trigger(name: &str, at_ms: u64) -> Trigger {
    Trigger {
        at_ms,
        service: ServiceName::new("shop", name),
        family: Family::V4,
    }
}

fn publish(
    store: &Store,
    services: Vec<(ServiceKey, Option<Published>)>,
    triggers: Vec<Trigger>,
) -> u64 {
    store.publish(Publication {
        observed_at: SystemTime::UNIX_EPOCH,
        triggers,
        ..Publication::sample(services, vec![])
    })
}

/// Times of the triggers in a node's next update.
fn next(store: &Store, node: &str, cursor: &mut Cursor) -> Vec<u64> {
    let end = loop {
        if let Some(end) = store.collect(node, cursor).end {
            break end;
        }
    };
    end.triggers.iter().map(|trigger| trigger.at_ms).collect()
}

/// A store with `web` and `api`, and the cursor of an agent that has both.
fn settled() -> (Store, Cursor) {
    let store = Store::new(7);
    let services = ["web", "api"].map(|name| published(name, &[]));
    publish(
        &store,
        services.into(),
        vec![trigger("web", 1), trigger("api", 2)],
    );
    let mut cursor = Cursor::at(0);
    assert_eq!(next(&store, "n", &mut cursor), [0; 0], "a snapshot");
    (store, cursor)
}

#[test]
fn h_a_trigger_comes_with_the_update_that_it_led_to_and_once() {
    let (store, mut cursor) = settled();
    let mut behind = cursor;
    let web = |octet| published("web", &[endpoint(octet, "n")]);
    publish(&store, vec![web(1)], vec![trigger("web", 10)]);
    assert_eq!(next(&store, "n", &mut cursor), [10]);
    assert_eq!(next(&store, "n", &mut cursor), [0; 0]);
    publish(
        &store,
        vec![web(2)],
        vec![trigger("web", 20), trigger("web", 21)],
    );
    assert_eq!(next(&store, "n", &mut cursor), [20, 21]);
    // An agent that was behind gets all of them at once; one that begins from nothing gets none.
    assert_eq!(next(&store, "n", &mut behind), [10, 20, 21]);
    assert_eq!(next(&store, "n", &mut Cursor::at(0)), [0; 0]);
}

#[test]
fn h_a_trigger_that_changes_nothing_is_dropped() {
    let (store, mut cursor) = settled();
    publish(
        &store,
        vec![published("web", &[])],
        vec![trigger("web", 10)],
    );
    // The next update does not have them either, for the same or another Service.
    publish(
        &store,
        vec![published("api", &[endpoint(1, "n")])],
        vec![trigger("web", 11)],
    );
    assert_eq!(next(&store, "n", &mut cursor), [0; 0]);
    // A deletion makes no trigger: its time would be that of an earlier change.
    publish(
        &store,
        vec![(key("web", Family::V4), None)],
        vec![trigger("web", 12)],
    );
    assert_eq!(next(&store, "n", &mut cursor), [0; 0]);
    // Another family's endpoints.
    let mut other = trigger("api", 13);
    other.family = Family::V6;
    publish(&store, vec![published("api", &[])], vec![other]);
    assert_eq!(next(&store, "n", &mut cursor), [0; 0]);
}

/// Because of hints or its own endpoints, a node's update may not be affected by a change.
#[test]
fn h_nodes_that_a_change_does_not_concern_do_not_hear_of_its_trigger() {
    let (store, _) = settled();
    let nodes = ["x", "y"].map(|zone| NodeFacts {
        name: zone.into(),
        zone: Some(zone.into()),
        ..NodeFacts::default()
    });
    store.publish(Publication {
        observed_at: SystemTime::UNIX_EPOCH,
        ..Publication::sample(vec![], nodes.into())
    });
    let hinted = |octet, zone: &str| Endpoint {
        zone_hints: vec![zone.into()],
        ..endpoint(octet, "elsewhere")
    };
    let before = [hinted(1, "x"), hinted(2, "y")];
    publish(&store, vec![published("web", &before)], Vec::new());
    let mut cursors = [Cursor::at(0); 2];
    let mut hear = || {
        let [x, y] = &mut cursors;
        [next(&store, "x", x), next(&store, "y", y)]
    };
    hear();
    let after = [hinted(1, "x"), hinted(2, "y"), hinted(3, "y")];
    publish(
        &store,
        vec![published("web", &after)],
        vec![trigger("web", 10)],
    );
    assert_eq!(hear(), [vec![], vec![10]]);
    // Endpoints that move to a node change the node's own objects.
    let moved = [
        hinted(1, "x"),
        hinted(2, "y"),
        Endpoint {
            node: Some("x".into()),
            ..hinted(3, "y")
        },
    ];
    publish(
        &store,
        vec![published("web", &moved)],
        vec![trigger("web", 11)],
    );
    assert_eq!(hear(), [vec![11], vec![]]);
}

#[test]
fn numbers_stand_for_triggers_while_they_are_remembered() {
    let (store, mut cursor) = settled();
    let count = REMEMBERED as u64 + 10;
    for n in 0..count {
        let octet = u8::try_from(n % 2).unwrap();
        publish(
            &store,
            vec![published("web", &[endpoint(octet, "n")])],
            vec![trigger("web", n)],
        );
    }
    // Two changes came before the first of these.
    assert_eq!(store.trigger(count + 2), Some(trigger("web", count - 1)));
    assert_eq!(store.trigger(13), Some(trigger("web", 10)));
    assert_eq!(store.trigger(12), None);
    assert_eq!(store.trigger(0), None);
    assert_eq!(store.trigger(count + 3), None);
    let newest: Vec<u64> = (count - PER_UPDATE as u64..count).collect();
    assert_eq!(next(&store, "n", &mut cursor), newest);
}
