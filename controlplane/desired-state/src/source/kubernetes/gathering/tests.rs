//! Events of lists: every list of two objects, for every earlier known state.

use std::collections::BTreeMap;

use super::*;
use crate::k8s::{ObjectId, ObjectMeta, Service};

const NAMES: [&str; 2] = ["a", "b"];
const STATES: [&str; 2] = ["1", "2"];

type World = BTreeMap<ObjectId, Object>;
type Item = Result<Object, Unreadable>;

fn object(name: &str, state: &str) -> Object {
    Object::Service(Service {
        metadata: ObjectMeta {
            name: name.into(),
            creation_timestamp: Some(state.into()),
            ..ObjectMeta::default()
        },
        ..Service::default()
    })
}

fn unreadable(name: &str) -> Unreadable {
    Unreadable {
        namespace: "default".into(),
        name: name.into(),
        reason: String::new(),
    }
}

/// Returns all lists: each name has an object in one of its states, one that cannot be read, or none.
fn lists() -> Vec<Vec<Item>> {
    let choices = |name| {
        STATES
            .map(|state| Some(Ok(object(name, state))))
            .into_iter()
            .chain([Some(Err(unreadable(name))), None])
    };
    choices(NAMES[0])
        .flat_map(|a| choices(NAMES[1]).map(move |b| [a.clone(), b]))
        .map(|pair| pair.into_iter().flatten().collect())
        .collect()
}

/// Returns the expected objects after a list: those that it names; unreadable ones stay.
fn after(known: &World, list: &[Item]) -> World {
    list.iter()
        .filter_map(|item| match item {
            Ok(object) => Some(object),
            Err(unreadable) => known.get(&object(&unreadable.name, "").id()),
        })
        .map(|object| (object.id(), object.clone()))
        .collect()
}

#[test]
fn a_list_tells_exactly_the_differences_and_is_then_known() {
    let lists = lists();
    assert_eq!(lists.len(), 16);
    // Unreadable objects that were never known are not known.
    for known in lists.iter().map(|list| after(&World::new(), list)) {
        for list in &lists {
            let mut memory = Memory::new(Kind::Service);
            memory.advance(1);
            known.values().for_each(|object| memory.put(object));
            let wanted = after(&known, list);
            assert_tells(&known, &wanted, &events(&mut memory, list));
            // The same list again causes no events.
            let again: Vec<_> = wanted.into_values().map(Ok).collect();
            assert_eq!(events(&mut memory, &again), [Event::Looked(Kind::Service)]);
        }
    }
}

/// Feeds a list to the gathering, each item as a page, and accepts it.
fn events(memory: &mut Memory, items: &[Item]) -> Vec<Event> {
    let mut list = Gathering::new(memory);
    for item in items {
        let page = ObjectPage {
            objects: item.iter().cloned().collect(),
            unreadable: item.clone().err().into_iter().collect(),
            ..ObjectPage::default()
        };
        assert_eq!(list.page(memory, page), []);
    }
    list.complete(memory);
    list.accept(Kind::Service, memory, 2, false).0
}

fn assert_tells(known: &World, wanted: &World, events: &[Event]) {
    let mut world = known.clone();
    for event in events {
        let news = match event {
            Event::Apply(located) => {
                let object = located.object.clone();
                world.insert(object.id(), object.clone()) != Some(object)
            }
            Event::Vanished(ids) => ids.iter().all(|id| world.remove(id).is_some()),
            Event::Looked(_) => true,
            other => panic!("{other:?}"),
        };
        assert!(news, "{events:?} of {known:?}");
    }
    assert_eq!(&world, wanted);
    // Removed objects come last. The event `Looked` precedes them: it confirms earlier removals
    // only.
    let order = events.iter().map(|event| match event {
        Event::Looked(_) => 1,
        Event::Vanished(_) => 2,
        _ => 0,
    });
    assert!(order.is_sorted(), "{events:?}");
}

/// Legacy Endpoints that cannot be read keep all of their slices, but not those of other Endpoints.
#[test]
fn unreadable_endpoints_keep_their_slices() {
    let mut memory = Memory::new(Kind::EndpointSlice);
    memory.advance(1);
    for name in ["web/0/IPv4", "web/1/IPv6", "webs/0/IPv4"] {
        memory.put(&object(name, "1"));
    }
    let events = events(&mut memory, &[Err(unreadable("web"))]);
    let gone = Event::Vanished(vec![object("webs/0/IPv4", "").id()]);
    assert_eq!(events, [Event::Looked(Kind::Service), gone]);
}
