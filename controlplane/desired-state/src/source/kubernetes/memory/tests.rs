//! Lists that are believed, and lists that are not.

use proptest::prelude::*;

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

/// A list: the pause before it in seconds, its version, and the objects that it has.
fn any_list() -> impl Strategy<Value = (u64, u64, usize)> {
    let version = prop_oneof![97_u64..100, 100_u64..102];
    let objects = prop_oneof![Just(0_usize), Just(3), Just(20), Just(20)];
    (prop_oneof![Just(0_u64), Just(40)], version, objects)
}

proptest! {
    /// A doubtful list counts if the lists before it raise the same doubts, none is older than the one before it, and they go
    /// on for long enough; and not otherwise.
    #[test]
    fn only_lists_that_do_not_go_back_confirm_each_other(lists in prop::collection::vec(any_list(), 1..40)) {
        let mut memory = memory(Kind::Service, 20);
        let mut now = Instant::now();
        // The lists since the last one that counts, with their times.
        let mut doubted: Vec<(Instant, u64, usize)> = Vec::new();
        for (pause, version, objects) in lists {
            now += u32::try_from(pause).unwrap() * SECOND;
            let named = census(&memory, 0..objects);
            doubted.push((now, version, objects));
            let doubts = |version: u64, objects: usize| (version < 100, objects < 20, objects == 0);
            let doubt = doubts(version, objects);
            let agree = |pair: &&[(Instant, u64, usize)]| {
                let same = pair.iter().all(|(_, version, objects)| doubts(*version, *objects) == doubt);
                same && pair[0].1 <= pair[1].1
            };
            let agreeing = doubted.windows(2).rev().take_while(agree).count();
            let since = now - doubted[doubted.len() - 1 - agreeing].0;
            let (backwards, shrunk, emptied) = doubt;
            let needed = if emptied || backwards && shrunk { EMPTY_FOR } else { Duration::ZERO };
            let verdict = memory.judge(version, &named, now);
            if doubt == (false, false, false) {
                prop_assert_eq!(verdict, Verdict::Accept);
                doubted.clear();
            } else if agreeing >= 2 && since >= needed {
                prop_assert_eq!(verdict, Verdict::Confirmed);
                // The next list is one of a memory as it was.
                doubted.clear();
            } else {
                prop_assert_eq!(matches!(verdict, Verdict::Ignore(_)), backwards, "{:?}", verdict);
                prop_assert_eq!(matches!(verdict, Verdict::KeepMissing(_)), !backwards, "{:?}", verdict);
            }
        }
    }
}
