//! Agents that come from another replica.

use kplane_model::{
    DesiredKey, EndpointAddr, NodeFacts, ObjectHash, Ranges, ServiceKey, ServicePort,
};
use kplane_proto::convert::decode_object;
use prost::Message as _;

use super::*;
use crate::publish::log::REMEMBERED;
use crate::publish::{Publication, Published, Store};

const NODE: &str = "n1";

fn publication(services: Vec<(ServiceKey, Option<Published>)>) -> Publication {
    Publication::sample(services, vec![])
}

fn key(number: usize) -> ServiceKey {
    ServiceKey::sample("shop", &format!("web-{number}"))
}

fn published(number: usize, octet: u8) -> Published {
    let ip = [10, 0, 0, octet].into();
    let endpoint = kplane_model::Endpoint::ready(EndpointAddr { ip, port: 80 });
    Published::new(ServicePort::sample(key(number)), &[endpoint])
}

/// A replica with so many Services.
fn replica(epoch: u64, services: usize) -> Store {
    let store = Store::new(epoch);
    let all = (0..services).map(|number| (key(number), Some(published(number, 1))));
    store.publish(Publication {
        nodes: vec![NodeFacts::sample(NODE)],
        ..publication(all.collect())
    });
    store
}

fn change(store: &Store, number: usize, octet: u8) -> u64 {
    store.publish(publication(vec![(
        key(number),
        Some(published(number, octet)),
    )]))
}

/// Returns the digests of an agent that holds everything that a replica has now.
fn digests(store: &Store) -> Vec<u8> {
    let mut cursor = Cursor::at(0);
    let mut digests = RangeDigests::new(store.ranges(NODE));
    loop {
        let piece = store.collect(NODE, &mut cursor);
        for bytes in piece.objects {
            let object = decode_object(bytes.clone()).unwrap().unwrap();
            if let key @ DesiredKey::Service(_) = object.key() {
                digests.add(&key, ObjectHash::of(&bytes));
            }
        }
        if piece.end.is_some() {
            return digests.to_bytes();
        }
    }
}

fn update(message: &Bytes) -> Update {
    let message = ServerMessage::decode(&message[5..]).unwrap();
    let Some(server_message::Kind::Update(update)) = message.kind else {
        panic!("{message:?}");
    };
    update
}

#[test]
fn an_earlier_state_of_another_replica_is_recognised() {
    let [one, other] = [1, 2].map(|epoch| replica(epoch, 100));
    // The revisions of the two replicas differ.
    other.publish(publication(vec![(key(100), Some(published(100, 1)))]));
    other.publish(publication(vec![(key(100), None)]));
    let held = one.digest(NODE);
    let before = other.head().borrow().revision;
    assert_eq!(
        other.resume(NODE, held, None),
        Some(Way::Equal(Cursor::at(before)))
    );
    for number in 0..10 {
        change(&other, number, 2);
    }
    assert_eq!(
        other.resume(NODE, held, None),
        Some(Way::Changes(Cursor::at(before)))
    );
    change(&one, 50, 9);
    assert_eq!(other.resume(NODE, one.digest(NODE), None), None);
    let limit = u8::try_from(REMEMBERED / 100 + 3).unwrap();
    for octet in 3..=limit {
        for number in 0..100 {
            change(&other, number, octet);
        }
    }
    assert_eq!(other.resume(NODE, held, None), None, "forgotten");
    let history = &other.read().history;
    assert_eq!(history.revision_of.len(), history.oldest_first.len());
    assert_eq!(history.oldest_first.len(), REMEMBERED);
}

#[test]
fn few_differences_cost_little() {
    let [one, other] = [1, 2].map(|epoch| replica(epoch, 10_000));
    change(&one, 7, 2);
    change(&other, 8, 3);
    other.publish(publication(vec![(key(9), None)]));
    one.publish(publication(vec![(key(10_000), Some(published(10_000, 1)))]));
    let digests = digests(&one);
    assert_eq!(digests.len(), 1_024);
    let mut cursor = Cursor::at(0);
    let message = other.replace_ranges(NODE, &digests, &mut cursor).unwrap();
    let ranges = Ranges::from_bytes(&update(&message).ranges).unwrap();
    assert_eq!(ranges.iter().count(), 4);
    assert!([7, 8, 9, 10_000].iter().all(|n| ranges.contain(&DesiredKey::Service(key(*n)))));
    assert!(message.len() < 16 * 1024, "{}", message.len());
    let rest = other.collect(NODE, &mut cursor);
    assert!(rest.end.is_some());
    assert_eq!((rest.objects.len(), rest.deleted.len()), (1, 0), "the node");
}

#[test]
fn many_differences_and_senseless_digests_mean_a_snapshot() {
    let store = replica(1, 10_000);
    let count = usize::from(store.ranges(NODE));
    let mut cursor = Cursor::at(5);
    for digests in [vec![1; count * 4], vec![1; count * 4 - 1], Vec::new()] {
        assert!(store.replace_ranges(NODE, &digests, &mut cursor).is_none());
        assert_eq!(cursor, Cursor::at(5));
    }
}

#[test]
fn ranges_are_computed_once_for_many_agents() {
    let store = replica(1, 1_000);
    let index = |store: &Store| store.range_index(&store.read(), NODE);
    let first = index(&store);
    for number in 0..STALE_AFTER - 1 {
        change(&store, number, 2);
    }
    assert!(Arc::ptr_eq(&first, &index(&store)));
    change(&store, STALE_AFTER, 2);
    assert!(!Arc::ptr_eq(&first, &index(&store)));
}
