//! Lists that are believed, and lists that are not.

use super::*;
use crate::k8s::{ObjectMeta, Service};

const SECOND: Duration = Duration::from_secs(1);

/// Verdicts depend on names only; all objects are Services here.
fn object(number: usize) -> Object {
    Object::Service(Service {
        metadata: ObjectMeta {
            name: format!("o{number}").into(),
            ..ObjectMeta::default()
        },
        ..Service::default()
    })
}

fn census(memory: &Memory, numbers: impl IntoIterator<Item = usize>) -> Census {
    let mut census = Census::default();
    for number in numbers {
        memory.note(&mut census, &object(number));
    }
    census
}

/// A memory that has seen `count` objects up to state 100.
fn memory(kind: Kind, count: usize) -> Memory {
    let mut memory = Memory::new(kind);
    let named = census(&memory, 0..count);
    memory.replace(100, 0, named);
    memory
}

/// Wants a list to keep what it lacks.
fn keeps(memory: &mut Memory, version: u64, named: &Census, now: Instant) {
    let verdict = memory.judge(version, named, now);
    assert!(matches!(verdict, Verdict::KeepMissing(_)), "{verdict:?}");
}

#[test]
fn ordinary_changes_are_believed_at_once() {
    let mut memory = memory(Kind::Service, 20);
    let now = Instant::now();
    for (version, numbers) in [(100, 0..20), (101, 5..30), (102, 0..11), (103, 9..20)] {
        let all = numbers.clone();
        let named = census(&memory, all.chain(1_000..1_010));
        assert_eq!(
            memory.judge(version, &named, now),
            Verdict::Accept,
            "{numbers:?}"
        );
    }
    // Nine missing objects of ten are too few to be doubtful.
    let mut memory = self::memory(Kind::Node, 10);
    let named = census(&memory, 0..1);
    assert_eq!(memory.judge(101, &named, now), Verdict::Accept);
}

#[test]
fn a_list_from_the_past_counts_when_two_more_say_so() {
    let mut memory = memory(Kind::Service, 20);
    let now = Instant::now();
    let named = census(&memory, 0..20);
    for _ in 0..2 {
        let verdict = memory.judge(90, &named, now);
        let Verdict::Ignore(hold) = verdict else {
            panic!("{verdict:?}");
        };
        assert_eq!(hold.pause, BACKWARDS_PAUSE);
    }
    assert_eq!(memory.judge(91, &named, now), Verdict::Confirmed);
    memory.replace(91, 0, named);
    assert_eq!(memory.seen(), 91);
}

#[test]
fn a_replica_that_lags_behind_does_not_confirm_itself_through_an_up_to_date_one() {
    let mut memory = memory(Kind::Service, 20);
    let now = Instant::now();
    let named = census(&memory, 0..20);
    for _ in 0..5 {
        assert!(matches!(memory.judge(90, &named, now), Verdict::Ignore(_)));
        assert!(matches!(memory.judge(90, &named, now), Verdict::Ignore(_)));
        assert_eq!(memory.judge(100, &named, now), Verdict::Accept);
    }
}

#[test]
fn a_list_that_lacks_most_objects_counts_when_two_more_say_so() {
    let mut memory = memory(Kind::EndpointSlice, 30);
    let now = Instant::now();
    let named = census(&memory, 0..10);
    let verdict = memory.judge(101, &named, now);
    let Verdict::KeepMissing(hold) = verdict else {
        panic!("{verdict:?}");
    };
    assert!(hold.reason.contains("lacks 20 of 30"), "{}", hold.reason);
    keeps(&mut memory, 102, &named, now);
    assert_eq!(memory.judge(103, &named, now), Verdict::Confirmed);
}

#[test]
fn an_interrupted_doubt_starts_over() {
    let mut memory = memory(Kind::EndpointSlice, 30);
    let now = Instant::now();
    let few = census(&memory, 0..10);
    let all = census(&memory, 0..30);
    for _ in 0..2 {
        keeps(&mut memory, 101, &few, now);
        keeps(&mut memory, 101, &few, now);
        assert_eq!(memory.judge(101, &all, now), Verdict::Accept);
    }
}

#[test]
fn all_of_a_few_are_many() {
    let now = Instant::now();
    let mut memory = memory(Kind::Node, 1);
    let nothing = Census::default();
    for _ in 0..2 {
        keeps(&mut memory, 101, &nothing, now);
    }
    assert_eq!(memory.judge(101, &nothing, now), Verdict::Confirmed);
}

#[test]
fn no_services_at_all_takes_a_minute() {
    for kind in [Kind::Service, Kind::EndpointSlice] {
        let mut memory = memory(kind, 3);
        let start = Instant::now();
        let nothing = Census::default();
        for second in 0..60 {
            let verdict = memory.judge(101, &nothing, start + second * SECOND);
            assert!(matches!(verdict, Verdict::KeepMissing(_)), "{second} s");
        }
        assert_eq!(
            memory.judge(101, &nothing, start + 60 * SECOND),
            Verdict::Confirmed
        );
    }
}

/// A database that came back empty has one Service, from an early state.
#[test]
fn a_lost_database_takes_a_minute() {
    let mut memory = memory(Kind::Service, 30);
    let start = Instant::now();
    let named = census(&memory, 0..1);
    for second in 0..60 {
        let verdict = memory.judge(5, &named, start + second * SECOND);
        assert!(matches!(verdict, Verdict::Ignore(_)), "{second} s");
    }
    assert_eq!(
        memory.judge(5, &named, start + 60 * SECOND),
        Verdict::Confirmed
    );
}

#[test]
fn watches_keep_the_census_up_to_date() {
    let mut memory = memory(Kind::Service, 12);
    let now = Instant::now();
    for number in 0..11 {
        memory.gone(&object(number).id());
    }
    memory.put(&object(50));
    let named = census(&memory, [11, 50]);
    assert_eq!(memory.judge(101, &named, now), Verdict::Accept);
    memory.advance(120);
    memory.advance(110);
    assert_eq!(memory.seen(), 120);
}
