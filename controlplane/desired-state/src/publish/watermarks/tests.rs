//! Revisions of one Service, and the publications that a node passes.

use std::net::IpAddr;
use std::time::Duration;

use kplane_model::{Endpoint, EndpointAddr, NodeFacts, ServicePort};

use super::*;
use crate::publish::{Publication, Published};

fn key(name: &str) -> ServiceKey {
    ServiceKey::sample("shop", name)
}

/// Returns a Service with one endpoint in each of these zones.
fn zoned(name: &str, endpoints: &[(u8, &str)]) -> (ServiceKey, Option<Published>) {
    let endpoints: Vec<_> = endpoints
        .iter()
        .map(|(octet, zone)| {
            let ip = IpAddr::from([10, 0, 0, *octet]);
            Endpoint {
                zone_hints: vec![(*zone).into()],
                ..Endpoint::ready(EndpointAddr { ip, port: 8080 })
            }
        })
        .collect();
    let published = Published::new(ServicePort::sample(key(name)), &endpoints);
    (key(name), Some(published))
}

fn publish(store: &Store, at: u64, services: Vec<(ServiceKey, Option<Published>)>) -> u64 {
    store.publish(Publication {
        observed_at: SystemTime::UNIX_EPOCH + Duration::from_secs(at),
        ..Publication::sample(services, vec![])
    })
}

/// Returns a store with nodes in the zones x and y.
fn store() -> Store {
    let store = Store::new(7);
    let nodes = [("in-x", "x"), ("in-y", "y")].map(|(name, zone)| NodeFacts {
        zone: Some(zone.into()),
        ..NodeFacts::sample(name)
    });
    store.publish(Publication {
        observed_at: SystemTime::UNIX_EPOCH,
        ..Publication::sample(vec![], nodes.to_vec())
    });
    store
}

#[test]
fn a_service_is_followed_from_nothing_to_its_deletion() {
    let store = store();
    let mut followed = Followed::new(ServiceName::new("shop", "web"));
    let mut wanted = || {
        store.follow(&mut followed);
        let wanted = store.wanted_of_service("in-x", &followed);
        (followed.is_known(), followed.is_served(), wanted)
    };
    assert_eq!(wanted(), (false, false, 0));
    let created = publish(&store, 1, vec![zoned("web", &[(1, "x"), (2, "y")])]);
    assert_eq!(wanted(), (true, true, created));
    publish(&store, 2, vec![zoned("other", &[(1, "x")])]);
    assert_eq!(wanted(), (true, true, created));
    let deleted = publish(&store, 3, vec![(key("web"), None)]);
    assert_eq!(wanted(), (true, false, deleted));
    // A reader that comes later learns of the deletion from the store.
    let mut late = Followed::new(ServiceName::new("shop", "web"));
    store.follow(&mut late);
    assert_eq!((late.is_known(), late.is_served()), (true, false));
    assert_eq!(store.wanted_of_service("in-y", &late), deleted);
}

/// A node that has not taken the deletion may serve the Service.
#[test]
fn a_deletion_that_is_forgotten_is_wanted_as_the_latest_of_these() {
    let store = store();
    store.remember_deletions(0);
    let mut followed = Followed::new(ServiceName::new("shop", "web"));
    publish(&store, 1, vec![zoned("web", &[(1, "x")])]);
    store.follow(&mut followed);
    let deleted = publish(&store, 2, vec![(key("web"), None)]);
    assert_eq!(store.wanted_of_service("in-x", &followed), deleted);
    let mut late = Followed::new(ServiceName::new("shop", "web"));
    store.follow(&mut late);
    assert_eq!(store.wanted_of_service("in-x", &late), deleted);
}

#[test]
fn a_change_of_one_zone_is_wanted_and_passed_there_only() {
    let store = store();
    let both = publish(&store, 1, vec![zoned("web", &[(1, "x"), (2, "y")])]);
    let in_y = publish(&store, 2, vec![zoned("web", &[(1, "x"), (3, "y")])]);
    let mut followed = Followed::new(ServiceName::new("shop", "web"));
    store.follow(&mut followed);
    assert_eq!(store.wanted_of_service("in-x", &followed), both);
    assert_eq!(store.wanted_of_service("in-y", &followed), in_y);

    let passed = |node, after, up_to| {
        let passed = store.passed(node, after, up_to, &HashSet::new());
        let seconds = |m: &Moment| m.observed_at.duration_since(SystemTime::UNIX_EPOCH);
        passed.iter().map(|m| seconds(m).unwrap().as_secs()).collect::<Vec<_>>()
    };
    assert_eq!(passed("in-y", both, in_y), [2]);
    assert_eq!(passed("in-x", both, in_y), [0; 0], "does not concern it");
    assert_eq!(passed("in-y", in_y, in_y), [0; 0]);
    assert_eq!(passed("in-y", in_y, both), [0; 0], "back");
    let three = ["a", "b", "c"].map(|name| zoned(name, &[(1, "x"), (2, "y")]));
    let together = publish(&store, 3, three.to_vec());
    let gone = publish(&store, 4, vec![(key("a"), None)]);
    assert_eq!(passed("in-x", in_y, together), [3], "one publication");
    assert_eq!(passed("in-x", both, gone), [3, 4]);
    let failed = HashSet::from([key("a")]);
    assert!(store.passed("in-x", together, gone, &failed).is_empty());
}

#[test]
fn publications_are_found_by_any_of_their_revisions() {
    let store = store();
    let first = store.head().borrow().revision + 1;
    let three = ["a", "b", "c"].map(|name| zoned(name, &[(1, "x")]));
    let last = publish(&store, 9, three.to_vec());
    for revision in first..=last {
        assert_eq!(store.moment_of(revision).unwrap().first, first);
    }
    assert!(store.moment_of(first - 1).unwrap().first < first);
    assert_eq!(store.moment_of(0), None);
}

#[test]
fn the_latest_publications_are_listed_with_the_number_of_their_changes() {
    let store = store();
    let first = publish(&store, 1, vec![zoned("a", &[]), zoned("b", &[])]);
    publish(&store, 2, vec![zoned("a", &[])]);
    let second = publish(&store, 3, vec![zoned("a", &[(1, "x")])]);
    let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let points = store.points();
    let last: Vec<_> = points[points.len() - 2..]
        .iter()
        .map(|point| (point.revision, point.at))
        .collect();
    assert_eq!(
        last,
        [(first, at(1)), (second, at(3))],
        "what changes nothing is none"
    );
    assert_eq!(points[points.len() - 2].changes, 2);
    for octet in 0..=MAX_POINTS {
        let octet = u8::try_from(octet % 200).unwrap();
        publish(&store, 4, vec![zoned("a", &[(octet, "y")])]);
    }
    assert_eq!(store.points().len(), MAX_POINTS);
}
