use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

fn endpoint(last: u8) -> EndpointAddr {
    EndpointAddr::new([10, 0, 0, last], 80)
}

fn endpoints(all: impl IntoIterator<Item = u8>) -> Endpoints {
    Endpoints {
        cluster: all.into_iter().map(endpoint).collect(),
        ..Endpoints::default()
    }
}

fn picker(all: &Endpoints) -> Picker {
    let mut picker = Picker::new(7);
    picker.configure(all);
    picker
}

fn pick(picker: &mut Picker, now: Instant) -> EndpointAddr {
    let choice = picker.pick(Pool::Cluster, None, &[], now);
    choice.unwrap().endpoint
}

/// Returns how often each endpoint is chosen, for `count` connections.
fn counts(picker: &mut Picker, count: u32) -> BTreeMap<EndpointAddr, u32> {
    let now = Instant::now();
    let mut counts = BTreeMap::new();
    for _ in 0..count {
        *counts.entry(pick(picker, now)).or_default() += 1;
    }
    counts
}

#[test]
fn u12_round_robin_keeps_its_position_when_endpoints_change() {
    let now = Instant::now();
    let mut picker = picker(&endpoints([1, 2, 4]));
    while pick(&mut picker, now) != endpoint(2) {}
    picker.configure(&endpoints([1, 2, 3, 4]));
    assert_eq!(pick(&mut picker, now), endpoint(3));
    picker.configure(&endpoints([1, 2, 4]));
    assert_eq!(
        [0, 1].map(|_| pick(&mut picker, now)),
        [endpoint(4), endpoint(1)]
    );
}

#[test]
fn u53_avoided_endpoints_come_last_and_are_never_all() {
    let now = Instant::now();
    let mut picker = picker(&endpoints([1, 2, 3]));
    let fails = |picker: &mut Picker, last| (0..3).any(|_| picker.failed(endpoint(last), now));
    assert!(fails(&mut picker, 1));
    assert!(fails(&mut picker, 2));
    assert!(!fails(&mut picker, 3), "one is left");
    assert_eq!(counts(&mut picker, 10).len(), 1);
    let tried = [endpoint(3)];
    let choice = picker.pick(Pool::Cluster, None, &tried, now);
    assert!(choice.is_some_and(|choice| choice.endpoint != endpoint(3)));
    let states = picker.states(now);
    assert_eq!(
        states.iter().filter(|state| state.avoided_for.is_some()).count(),
        2
    );
    // A single endpoint is never avoided.
    picker.configure(&endpoints([9]));
    assert!((0..9).all(|_| !picker.failed(endpoint(9), now)));
}

#[test]
fn policy_local_counts_endpoints_of_the_node_only() {
    let now = Instant::now();
    let all = Endpoints {
        local: vec![endpoint(2)],
        ..endpoints([1, 2, 3])
    };
    let mut picker = picker(&all);
    for _ in 0..9 {
        let choice = picker.pick(Pool::Local, Some(endpoint(1)), &[], now);
        assert_eq!(choice.map(|choice| choice.endpoint), Some(endpoint(2)));
    }
}

fn any_endpoints() -> impl Strategy<Value = Endpoints> {
    proptest::collection::btree_set(any::<u8>(), 1..12).prop_map(endpoints)
}

proptest! {
    #[test]
    fn round_robin_is_fair(all in any_endpoints(), rounds in 1u32..5) {
        let count = u32::try_from(all.cluster.len()).unwrap();
        let mut picker = picker(&all);
        let counts = counts(&mut picker, count * rounds);
        prop_assert!(all.cluster.iter().all(|addr| counts[addr] == rounds));
    }

    #[test]
    fn every_endpoint_is_tried_before_a_connection_fails(
        all in any_endpoints(),
        failures in proptest::collection::vec(any::<u8>(), 0..40),
    ) {
        let now = Instant::now();
        let mut picker = picker(&all);
        for last in failures {
            picker.failed(endpoint(last), now);
        }
        let mut tried = Vec::new();
        while let Some(choice) = picker.pick(Pool::Cluster, None, &tried, now) {
            prop_assert!(!tried.contains(&choice.endpoint));
            tried.push(choice.endpoint);
        }
        let tried: BTreeSet<_> = tried.into_iter().collect();
        prop_assert_eq!(tried, all.cluster.into_iter().collect());
    }
}
