//! Events of lists: every short history of a list, for every earlier known state.

use super::*;
use crate::k8s::{ObjectMeta, Service};

const NAMES: [&str; 2] = ["a", "b"];
const STATES: [&str; 2] = ["1", "2"];

type World = BTreeMap<ObjectId, Object>;

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

/// Returns all worlds: each name has no object, or an object in one of its states.
fn worlds() -> Vec<World> {
    let choices = |name| {
        let some = STATES.map(|state| Some(object(name, state)));
        some.into_iter().chain([None])
    };
    let pairs = choices(NAMES[0]).flat_map(|a| choices(NAMES[1]).map(move |b| [a.clone(), b]));
    pairs
        .map(|pair| pair.into_iter().flatten().map(|o| (o.id(), o)).collect())
        .collect()
}

/// Every statement that a list can make about an object.
fn all_said() -> Vec<WatchEvent> {
    let of = |name| {
        let put = STATES.map(|state| WatchEvent::Put(object(name, state), 1));
        let gone = WatchEvent::Gone(object(name, "").id(), 1);
        let unreadable = Unreadable {
            namespace: "default".into(),
            name: name.into(),
            reason: String::new(),
        };
        put.into_iter()
            .chain([gone, WatchEvent::Unreadable(unreadable, 1)])
    };
    NAMES.into_iter().flat_map(of).collect()
}

/// Returns the expected objects after a list: those that it named last; unreadable ones stay.
fn after(known: &World, said: &[WatchEvent]) -> World {
    let mut world = World::new();
    for one in said {
        match one {
            WatchEvent::Put(object, _) => drop(world.insert(object.id(), object.clone())),
            WatchEvent::Gone(id, _) => drop(world.remove(id)),
            WatchEvent::Unreadable(unreadable, _) => {
                let last = known.iter().find(|(id, _)| unreadable.is(id));
                if let Some((id, object)) = last {
                    world.entry(id.clone()).or_insert_with(|| object.clone());
                }
            }
            WatchEvent::Bookmark { .. } => {}
        }
    }
    world
}

#[test]
fn a_list_tells_exactly_the_differences_and_is_then_known() {
    let all = all_said();
    let mut histories: Vec<Vec<WatchEvent>> = vec![Vec::new()];
    let mut longest = histories.clone();
    for _ in 0..3 {
        let longer = |begun: &Vec<WatchEvent>| {
            let parts = all
                .iter()
                .map(|said| [&begun[..], std::slice::from_ref(said)].concat());
            parts.collect::<Vec<_>>()
        };
        longest = longest.iter().flat_map(longer).collect();
        histories.extend_from_slice(&longest);
    }
    assert_eq!(histories.len(), 1 + 8 + 64 + 512);
    for known in worlds() {
        for history in &histories {
            let mut memory = Memory::new(Kind::Service);
            memory.advance(1);
            known.values().for_each(|object| memory.put(object));
            let wanted = after(&known, history);
            let events = list(&mut memory, history);
            assert_tells(&known, &wanted, &events);
            // The same list again causes no events.
            let again: Vec<_> = wanted
                .values()
                .map(|o| WatchEvent::Put(o.clone(), 2))
                .collect();
            assert_eq!(list(&mut memory, &again), [Event::Looked(Kind::Service)]);
        }
    }
}

/// Feeds a list to the gathering and accepts it.
fn list(memory: &mut Memory, history: &[WatchEvent]) -> Vec<Event> {
    let mut list = Gathering::new(memory);
    for said in history {
        assert_eq!(list.said(memory, said.clone()), None);
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
    let unreadable = all_said().into_iter().filter_map(|said| match said {
        WatchEvent::Unreadable(unreadable, _) => Some(unreadable),
        _ => None,
    });
    let mut unreadable = unreadable.last().unwrap();
    unreadable.name = "web".into();
    let events = list(&mut memory, &[WatchEvent::Unreadable(unreadable, 1)]);
    let gone = Event::Vanished(vec![object("webs/0/IPv4", "").id()]);
    assert_eq!(events, [Event::Looked(Kind::Service), gone]);
}
