use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn endpoint(last: u8) -> EndpointAddr {
    EndpointAddr::new([10, 0, 0, last], 80)
}

fn client(number: u32) -> IpAddr {
    IpAddr::from((0x0a01_0000 + number).to_be_bytes())
}

fn endpoints(all: impl IntoIterator<Item = u8>) -> Endpoints {
    Endpoints {
        cluster: all.into_iter().map(endpoint).collect(),
        ..Endpoints::default()
    }
}

fn picker(balance: Balance, all: &Endpoints) -> Picker {
    let mut picker = Picker::new(7);
    picker.configure(balance, all);
    picker
}

fn pick(picker: &mut Picker, from: u32, now: Instant) -> EndpointAddr {
    let choice = picker.pick(Pool::Cluster, client(from), None, &[], now);
    choice.unwrap().endpoint
}

/// Returns how often each endpoint is chosen, for `count` clients.
fn counts(picker: &mut Picker, count: u32) -> BTreeMap<EndpointAddr, u32> {
    let now = Instant::now();
    let mut counts = BTreeMap::new();
    for number in 0..count {
        *counts.entry(pick(picker, number, now)).or_default() += 1;
    }
    counts
}

#[test]
fn u12_round_robin_keeps_its_position_when_endpoints_change() {
    let now = Instant::now();
    let mut picker = picker(Balance::RoundRobin, &endpoints([1, 2, 4]));
    while pick(&mut picker, 0, now) != endpoint(2) {}
    picker.configure(Balance::RoundRobin, &endpoints([1, 2, 3, 4]));
    assert_eq!(pick(&mut picker, 0, now), endpoint(3));
    picker.configure(Balance::RoundRobin, &endpoints([1, 2, 4]));
    assert_eq!(
        [0, 1].map(|_| pick(&mut picker, 0, now)),
        [endpoint(4), endpoint(1)]
    );
}

#[test]
fn weights_share_connections_smoothly() {
    let mut all = endpoints([1, 2, 3]);
    all.weights.insert(endpoint(1), 5);
    let mut picker = picker(Balance::Weighted, &all);
    let now = Instant::now();
    let turns: Vec<u8> = (0..7)
        .map(|_| match pick(&mut picker, 0, now).ip {
            IpAddr::V4(ip) => ip.octets()[3],
            IpAddr::V6(_) => 0,
        })
        .collect();
    assert_eq!(turns, [1, 1, 2, 1, 3, 1, 1]);
}

#[test]
fn an_endpoint_with_many_connections_gets_few_new_ones() {
    let mut picker = picker(Balance::LeastConnections, &endpoints([1, 2, 3]));
    (0..50).for_each(|_| picker.opened(endpoint(2)));
    assert_eq!(counts(&mut picker, 200).get(&endpoint(2)), None);
    (0..50).for_each(|_| picker.closed(endpoint(2)));
    assert!(counts(&mut picker, 200)[&endpoint(2)] > 20);
}

#[test]
fn u53_avoided_endpoints_come_last_and_are_never_all() {
    let now = Instant::now();
    let mut picker = picker(Balance::RoundRobin, &endpoints([1, 2, 3]));
    let fails = |picker: &mut Picker, last| (0..3).any(|_| picker.failed(endpoint(last), now));
    assert!(fails(&mut picker, 1));
    assert!(fails(&mut picker, 2));
    assert!(!fails(&mut picker, 3), "one is left");
    assert_eq!(counts(&mut picker, 10).len(), 1);
    let tried = [endpoint(3)];
    let choice = picker.pick(Pool::Cluster, client(1), None, &tried, now);
    assert!(choice.is_some_and(|choice| choice.endpoint != endpoint(3)));
    let states = picker.states(now);
    assert_eq!(
        states
            .iter()
            .filter(|state| state.avoided_for.is_some())
            .count(),
        2
    );
    // A single endpoint is never avoided.
    picker.configure(Balance::RoundRobin, &endpoints([9]));
    assert!((0..9).all(|_| !picker.failed(endpoint(9), now)));
}

#[test]
fn policy_local_counts_endpoints_of_the_node_only() {
    let now = Instant::now();
    let all = Endpoints {
        local: vec![endpoint(2)],
        ..endpoints([1, 2, 3])
    };
    for balance in ALL {
        let mut picker = picker(balance, &all);
        for number in 0..9 {
            let choice = picker.pick(Pool::Local, client(number), Some(endpoint(1)), &[], now);
            assert_eq!(choice.map(|choice| choice.endpoint), Some(endpoint(2)));
        }
    }
}

const ALL: [Balance; 4] = [
    Balance::RoundRobin,
    Balance::LeastConnections,
    Balance::Weighted,
    Balance::SourceHash,
];

fn any_endpoints() -> impl Strategy<Value = Endpoints> {
    proptest::collection::btree_map(any::<u8>(), 1u16..20, 1..12).prop_map(|all| Endpoints {
        cluster: all.keys().copied().map(endpoint).collect(),
        weights: all
            .into_iter()
            .map(|(last, weight)| (endpoint(last), weight))
            .collect(),
        ..Endpoints::default()
    })
}

proptest! {
    #[test]
    fn round_robin_is_fair(all in any_endpoints(), rounds in 1u32..5) {
        let count = u32::try_from(all.cluster.len()).unwrap();
        let mut picker = picker(Balance::RoundRobin, &all);
        let counts = counts(&mut picker, count * rounds);
        prop_assert!(all.cluster.iter().all(|addr| counts[addr] == rounds));
    }

    #[test]
    fn weighted_is_exact_over_a_whole_cycle(all in any_endpoints()) {
        let sum = all.weights.values().map(|weight| u32::from(*weight)).sum();
        let mut picker = picker(Balance::Weighted, &all);
        let counts = counts(&mut picker, sum);
        prop_assert!(all.weights.iter().all(|(addr, weight)| counts[addr] == u32::from(*weight)));
    }

    #[test]
    fn source_hash_moves_only_the_clients_of_an_endpoint_that_goes(
        all in any_endpoints(),
        gone in any::<proptest::sample::Index>(),
    ) {
        let now = Instant::now();
        let mut picker = picker(Balance::SourceHash, &all);
        let before: Vec<_> = (0..100).map(|from| pick(&mut picker, from, now)).collect();
        let mut fewer = all.clone();
        let gone = fewer.cluster.remove(gone.index(fewer.cluster.len()));
        prop_assume!(!fewer.cluster.is_empty());
        picker.configure(Balance::SourceHash, &fewer);
        for (from, was) in (0..100).zip(before) {
            prop_assert!(was == gone || pick(&mut picker, from, now) == was);
        }
    }

    #[test]
    fn every_endpoint_is_tried_before_a_connection_fails(
        all in any_endpoints(),
        balance in proptest::sample::select(&ALL),
        failures in proptest::collection::vec(any::<u8>(), 0..40),
    ) {
        let now = Instant::now();
        let mut picker = picker(balance, &all);
        for last in failures {
            picker.failed(endpoint(last), now);
        }
        let mut tried = Vec::new();
        while let Some(choice) = picker.pick(Pool::Cluster, client(1), None, &tried, now) {
            prop_assert!(!tried.contains(&choice.endpoint));
            tried.push(choice.endpoint);
        }
        let tried: BTreeSet<_> = tried.into_iter().collect();
        prop_assert_eq!(tried, all.cluster.into_iter().collect());
    }
}
