use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// A replica at an address of its own.
fn at(number: u8) -> Replica {
    Replica {
        place: Some(SocketAddr::from(([10, 0, 0, number], 7465))),
        url: 0,
    }
}

fn known(node: &str, replicas: impl IntoIterator<Item = u8>) -> Replicas {
    let mut all = Replicas::new(node.into());
    let found = replicas.into_iter().map(at).collect();
    all.begin_round(vec![Ok(found)], Instant::now());
    all
}

/// The order in which a round tries the replicas.
fn round(replicas: &mut Replicas) -> Vec<Replica> {
    let mut round = Vec::new();
    while let Next::Try(replica) = replicas.next(Instant::now()) {
        round.push(replica);
    }
    round
}

fn favourites(replicas: std::ops::RangeInclusive<u8>) -> Vec<Replica> {
    (0..10_000)
        .map(|number| format!("node-{number}"))
        .map(|node| round(&mut known(&node, replicas.clone()))[0])
        .collect()
}

#[test]
fn agents_spread_evenly_and_only_those_move_that_must() {
    let (three, four) = (favourites(1..=3), favourites(1..=4));
    for replica in 1..=3 {
        let agents = three.iter().filter(|one| **one == at(replica)).count();
        assert!((3_000..3_700).contains(&agents), "{agents}");
    }
    let moved = three.iter().zip(&four).filter(|(one, other)| one != other);
    let targets: BTreeSet<_> = moved.clone().map(|(_, to)| to.place).collect();
    assert_eq!(
        targets,
        BTreeSet::from([at(4).place]),
        "a new replica takes from all"
    );
    let moved = moved.count();
    assert!((2_250..2_750).contains(&moved), "{moved} of 10000");
    // The agents of a replica that goes spread over all others.
    let mut second = BTreeMap::new();
    for number in 0..10_000 {
        let order = round(&mut known(&format!("node-{number}"), 1..=4));
        if order[0] == at(4) {
            *second.entry(order[1]).or_insert(0) += 1;
        }
    }
    assert!(
        second.len() == 3 && second.values().all(|agents| *agents > 700),
        "{second:?}"
    );
}

#[test]
fn a_round_tries_each_address_once_and_the_lost_replica_last() {
    let mut replicas = Replicas::new("n1".into());
    let twice = Replica { url: 1, ..at(1) };
    replicas.begin_round(
        vec![Ok(vec![at(1), at(2), at(3)]), Ok(vec![twice])],
        Instant::now(),
    );
    let order = round(&mut replicas);
    assert_eq!(order.len(), 3);
    replicas.begin_round(
        vec![Ok(vec![at(1), at(2), at(3)]), Ok(vec![twice])],
        Instant::now(),
    );
    assert_eq!(replicas.next(Instant::now()), Next::Try(order[0]));
    replicas.ended(false, Instant::now());
    replicas.begin_round(
        vec![Ok(vec![at(1), at(2), at(3)]), Ok(vec![])],
        Instant::now(),
    );
    assert_eq!(round(&mut replicas), [order[1], order[2], order[0]]);
}

#[test]
fn a_name_that_cannot_be_resolved_leads_where_it_led_before() {
    let failure = || OpenError::Connect {
        address: "http://kplane:7465".into(),
        reason: "no DNS".into(),
    };
    let mut replicas = Replicas::new("n1".into());
    let failures = replicas.begin_round(vec![Err(failure()), Ok(vec![])], Instant::now());
    assert!(failures.len() == 1 && !replicas.any());
    replicas.begin_round(
        vec![Ok(vec![at(1), at(2)]), Ok(vec![at(3)])],
        Instant::now(),
    );
    replicas.begin_round(vec![Err(failure()), Ok(vec![at(4)])], Instant::now());
    let places = [1, 2, 4].map(|number| at(number).place.unwrap());
    assert_eq!(replicas.places(), BTreeSet::from(places));
    assert_eq!(round(&mut replicas).len(), 3);
}

#[test]
fn rounds_are_apart_by_growing_random_times() {
    let mut longest = Duration::ZERO;
    for _ in 0..200 {
        let mut replicas = known("n1", 1..=3);
        round(&mut replicas);
        for bound_ms in [200, 400, 800, 1_600, 3_200, 6_400, 10_000, 10_000] {
            let Next::Wait(wait) = replicas.next(Instant::now()) else {
                panic!("the round is over");
            };
            assert!(wait <= Duration::from_millis(bound_ms), "{wait:?}");
            longest = longest.max(wait);
        }
        replicas.healthy();
        assert!(replicas.ended(false, Instant::now()) <= Duration::from_millis(100));
    }
    assert!(longest > 9 * SECOND, "{longest:?}");
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_wants_to_be_left_alone_is_left_alone() {
    let mut replicas = known("n1", 1..=2);
    let order = round(&mut known("n1", 1..=2));
    let begin = |replicas: &mut Replicas| {
        replicas.begin_round(vec![Ok(vec![at(1), at(2)])], Instant::now());
    };
    assert_eq!(replicas.next(Instant::now()), Next::Try(order[0]));
    replicas.rest(20 * SECOND, Instant::now());
    assert_eq!(
        replicas.ended(true, Instant::now()),
        Duration::ZERO,
        "there is another"
    );
    begin(&mut replicas);
    assert_eq!(replicas.next(Instant::now()), Next::Try(order[1]));
    replicas.rest(60 * SECOND, Instant::now());
    let wait = replicas.ended(true, Instant::now());
    assert!(wait >= 20 * SECOND && wait <= 30 * SECOND, "{wait:?}");
    // The first to be free again is the one to try.
    tokio::time::advance(wait).await;
    begin(&mut replicas);
    assert_eq!(round(&mut replicas), [order[0]]);
}

#[test]
fn replicas_in_the_nodes_zone_come_first_and_those_elsewhere_last() {
    let mut replicas = known("node-1", 1..=4);
    let order = round(&mut replicas);
    let says = |replicas: &mut Replicas, replica, same| {
        replicas.current = Some(replica);
        replicas.says_zone(same);
    };
    assert!(!replicas.seeks_zone(), "nobody says anything");
    says(&mut replicas, order[0], Some(false));
    assert!(replicas.seeks_zone());
    let found = || vec![Ok((1..=4).map(at).collect())];
    let next = replicas.favourite_elsewhere(found(), Instant::now());
    assert_eq!(next, Some(order[1]), "one that is not known yet");

    says(&mut replicas, order[1], None);
    assert!(!replicas.seeks_zone(), "it may be in the zone");
    says(&mut replicas, order[2], Some(true));
    replicas.begin_round(found(), Instant::now());
    let rest = [order[1], order[3], order[0]];
    // The replica whose stream ended comes last in the round; otherwise it is the favourite.
    assert_eq!(round(&mut replicas)[..3], rest);
    replicas.current = Some(order[1]);
    let next = replicas.favourite_elsewhere(found(), Instant::now());
    assert_eq!(next, Some(order[2]));

    says(&mut replicas, order[3], Some(false));
    assert!(!replicas.seeks_zone(), "all are known");
    replicas.begin_round(vec![Ok(vec![at(9)])], Instant::now());
    assert_eq!(
        replicas.in_zone,
        BTreeMap::new(),
        "nothing is kept of replicas that are gone"
    );
}
