use std::collections::{BTreeMap, BTreeSet};

use kplane_model::ServiceKey;

use super::gather::Invalid;
use super::*;
use crate::freshness::{Freshness, Versions};
use crate::source::relayed::Heard;
use crate::trust::Trust;

const SECOND: Duration = Duration::from_secs(1);

async fn target(place: &str) -> Target {
    let mut found = resolve(&place.parse().unwrap()).await.unwrap();
    found.remove(0)
}

fn heard(seen: u64, changed: u64, current_at: Instant) -> Heard {
    let mut freshness = Freshness::default();
    freshness.set(Kind::Service, Versions { seen, changed });
    Heard {
        snapshot: true,
        ports: BTreeMap::new(),
        nodes: BTreeMap::new(),
        unread_nodes: BTreeSet::new(),
        service_cidrs: Vec::new(),
        changed_at: SystemTime::UNIX_EPOCH,
        triggers: Vec::new(),
        trust: Trust::Whole,
        freshness,
        current_at,
    }
}

#[tokio::test]
async fn control_planes_are_tried_in_turn() {
    let mut all = Vec::new();
    for place in ["192.0.2.1", "192.0.2.2", "192.0.2.3"] {
        all.push(target(place).await);
    }
    let [a, b, c] = [0, 1, 2].map(|n| all[n].clone());
    assert_eq!(in_turn(all.clone(), None), all);
    assert_eq!(in_turn(all.clone(), Some(&b)), [c.clone(), a.clone(), b]);
    assert_eq!(in_turn(all.clone(), Some(&c)), all);
    assert_eq!(in_turn(Vec::new(), Some(&a)), []);
    assert_eq!(in_turn(vec![a.clone()], Some(&a)), [a]);
}

/// As with agents: the API server itself went back, if all of them insist.
#[tokio::test]
async fn an_older_state_is_taken_if_all_insist_on_it_for_a_minute() {
    let (one, other) = (target("192.0.2.1").await, target("192.0.2.2").await);
    let start = Instant::now();
    let at = |seconds: u32| start + SECOND * seconds;
    let mut memory = Memory::default();
    let old = |now| heard(100, 90, now);
    memory
        .admit(&one, &heard(200, 150, start), false, start)
        .unwrap();
    let refused = |memory: &mut Memory, of, now, current_at| {
        memory.admit(of, &old(current_at), false, now).is_err()
    };
    assert!(refused(&mut memory, &one, at(1), at(1)));
    assert!(refused(&mut memory, &other, at(2), at(2)));
    assert!(refused(&mut memory, &one, at(40), at(40)));
    // The other one is cut off, which proves nothing.
    assert!(refused(&mut memory, &other, at(62), at(30)));
    assert!(refused(&mut memory, &one, at(63), at(63)));
    assert!(!refused(&mut memory, &other, at(64), at(64)));
    // From then on it is what the relay holds.
    memory
        .admit(&one, &heard(95, 80, at(65)), false, at(65))
        .unwrap();
    assert!(
        memory
            .admit(&one, &heard(80, 80, at(66)), false, at(66))
            .is_err()
    );
}

#[tokio::test]
async fn a_control_plane_that_is_cut_off_is_left_for_one_that_is_not_and_kept_if_all_are() {
    let (one, other) = (target("192.0.2.1").await, target("192.0.2.2").await);
    let start = Instant::now() + SECOND * 1_000;
    let at = |seconds: u32| start + SECOND * seconds;
    let mut memory = Memory::default();
    let mut says = |of: &Target, current_at: Instant, alone: bool, now: Instant| {
        memory
            .admit(of, &heard(9, 9, current_at), alone, now)
            .is_ok()
    };
    assert!(says(&one, start, false, start));
    assert!(says(&one, start, false, at(10)));
    assert!(!says(&one, start, false, at(11)), "it is left");
    assert!(
        !says(&other, start - SECOND * 100, false, at(11)),
        "this one is worse"
    );
    assert!(says(&one, start, false, at(12)), "nothing is better");
    assert!(says(&one, start, false, at(40)));
    assert!(!says(&one, start, false, at(41)), "another attempt");
    assert!(says(&other, at(41), false, at(42)));
    // The only one is never left: agents see the age.
    assert!(says(&other, at(41), true, at(500)));
}

fn program(name: &str) -> pb::SharedProgram {
    let key = ServiceKey::sample("shop", name);
    let program = pb::ServiceProgram {
        key: Some((&key).into()),
        endpoints: vec![10, 0, 0, 1, 0, 80].into(),
        has_any: true,
        ..pb::ServiceProgram::default()
    };
    pb::SharedProgram {
        program: Some(program),
        zones: Vec::new(),
    }
}

fn add(gathering: &mut Gathering, message: pb::LayeredState) -> Result<Option<Heard>, Invalid> {
    gathering.add(message, Instant::now(), SystemTime::now())
}

fn complete(mut message: pb::LayeredState) -> pb::LayeredState {
    message.complete = true;
    message.source = Some(pb::SourceState {
        read: true,
        ..pb::SourceState::default()
    });
    message
}

#[test]
fn pieces_become_one_change_and_the_latest_state_of_a_key_counts() {
    let mut gathering = Gathering::default();
    let key = ServiceKey::sample("shop", "web");
    let begin = pb::LayeredState {
        programs: vec![program("web"), program("db")],
        snapshot: true,
        ..pb::LayeredState::default()
    };
    assert_eq!(add(&mut gathering, begin).unwrap(), None);
    let gone = pb::LayeredState {
        deleted_programs: vec![(&key).into()],
        ..pb::LayeredState::default()
    };
    let first = add(&mut gathering, complete(gone.clone()))
        .unwrap()
        .unwrap();
    assert!(first.snapshot && first.ports[&key].is_none());
    let db = first.ports[&ServiceKey::sample("shop", "db")]
        .as_ref()
        .unwrap();
    assert!(db.whole);
    assert_eq!(db.program.as_ref().unwrap().endpoints, 1);
    // It is there, is deleted, and is there again, before the picture is complete.
    let there = pb::LayeredState {
        programs: vec![program("web")],
        ..pb::LayeredState::default()
    };
    add(&mut gathering, there.clone()).unwrap();
    add(&mut gathering, gone).unwrap();
    let heard = add(&mut gathering, complete(there)).unwrap().unwrap();
    assert!(!heard.snapshot);
    let change = heard.ports[&key].as_ref().unwrap();
    assert!(
        change.whole && change.program.is_some(),
        "nothing stays of before"
    );
    // Nothing is left of it.
    let empty = complete(pb::LayeredState::default());
    assert!(
        add(&mut gathering, empty)
            .unwrap()
            .unwrap()
            .ports
            .is_empty()
    );
}

#[test]
fn messages_that_make_no_sense_are_refused() {
    let refused = |message| add(&mut Gathering::default(), message).unwrap_err();
    let waiting = pb::LayeredState {
        source: Some(pb::SourceState::default()),
        ..pb::LayeredState::default()
    };
    assert_eq!(add(&mut Gathering::default(), waiting), Ok(None));
    assert_eq!(
        refused(complete(pb::LayeredState::default())),
        Invalid::Disorder
    );
    let mut message = complete(pb::LayeredState {
        snapshot: true,
        ..pb::LayeredState::default()
    });
    message.source = None;
    assert_eq!(refused(message), Invalid::NoSource);
    let mut nameless = program("web");
    nameless.program.as_mut().unwrap().key = None;
    for broken in [nameless, pb::SharedProgram::default()] {
        let message = pb::LayeredState {
            snapshot: true,
            programs: vec![broken],
            ..pb::LayeredState::default()
        };
        assert!(matches!(refused(message), Invalid::Field(_)));
    }
}

/// A node that cannot be read is there all the same.
#[test]
fn a_node_that_cannot_be_read_is_not_gone() {
    let config = pb::NodeConfig {
        name: "a".to_owned(),
        addresses: vec![vec![1, 2, 3]],
        known: true,
        ..pb::NodeConfig::default()
    };
    let object = pb::Object {
        kind: Some(pb::object::Kind::Node(config)),
    };
    let message = complete(pb::LayeredState {
        snapshot: true,
        node_objects: vec![pb::NodeObject {
            node: "a".to_owned(),
            object: Some(object),
        }],
        ..pb::LayeredState::default()
    });
    let heard = add(&mut Gathering::default(), message).unwrap().unwrap();
    assert!(heard.nodes.is_empty() && heard.unread_nodes.contains("a"));
}
