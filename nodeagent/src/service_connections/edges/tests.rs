//! Times, bounds and overflow of edges.

use kplane_dataplane::beginnings::{Stage, Tracked, Traffic};
use kplane_model::Protocol;

use super::*;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);

fn web() -> ServiceKey {
    ServiceKey::sample("shop", "web")
}

fn began(client: u32, endpoint: u16) -> Reported {
    let connection = Tracked {
        protocol: Protocol::Tcp,
        client: (IpAddr::V4(client.into()), 40_000).into(),
        to: "10.96.0.1:80".parse().unwrap(),
        endpoint: ([10, 244, 1, 5], endpoint).into(),
        stage: Stage::Unreplied,
        traffic: None,
        began_ns: None,
    };
    Reported {
        connection,
        ending: None,
    }
}

fn ended(ending: Ending, bytes: Option<u64>) -> Reported {
    let mut reported = began(1, 80);
    let way = |bytes| Traffic { packets: 1, bytes };
    reported.connection.traffic = bytes.map(|bytes| [way(bytes), way(2 * bytes)]);
    Reported {
        ending: Some(ending),
        ..reported
    }
}

fn all(edges: &mut Edges, now: Duration, ago: Duration) -> (u64, EdgeSums) {
    let sums = edges.sums(now, ago, |_| true);
    let begun = sums.edges.iter().map(|(_, counts, _)| u64::from(counts.begun));
    (begun.sum(), sums)
}

#[test]
fn an_edge_counts_beginnings_ends_and_bytes() {
    let mut edges = Edges::default();
    let port = web();
    for reported in [
        began(1, 80),
        began(1, 80),
        began(1, 81),
        ended(Ending::Over, Some(100)),
        ended(Ending::Failed, Some(10)),
        ended(Ending::Failed, None),
        ended(Ending::Reset, None),
    ] {
        edges.add(&port, &reported);
    }
    edges.add(&ServiceKey::sample("shop", "api"), &began(2, 90));
    let sums = edges.sums(MINUTE, HOUR, |key| *key == port);
    let expected = EdgeCounts {
        begun: 2,
        failed: 2,
        reset: 1,
        bytes: [110, 220],
    };
    assert_eq!(sums.edges.len(), 2, "{sums:?}");
    assert_eq!(sums.edges[0].1, expected);
    assert_eq!(sums.edges[0].0.client, Some([0, 0, 0, 1].into()));
    assert_eq!(sums.edges[1].0.endpoint.port(), 81);
}

#[test]
fn failing_edges_are_among_the_first() {
    let mut edges = Edges::default();
    let port = web();
    for endpoint in [81, 81, 82, 82, 80] {
        edges.add(&port, &began(1, endpoint));
    }
    edges.add(&port, &ended(Ending::Failed, None));
    let sums = edges.sums(MINUTE, HOUR, |_| true);
    let endpoints = sums.edges.iter().map(|(key, ..)| key.endpoint.port());
    assert_eq!(endpoints.collect::<Vec<_>>(), [80, 81, 82]);
}

#[test]
fn an_end_that_counts_nothing_is_no_edge() {
    let mut edges = Edges::default();
    edges.add(&web(), &ended(Ending::Over, None));
    assert_eq!(edges.sums(MINUTE, HOUR, |_| true).edges, []);
}

#[test]
fn minutes_pass() {
    let mut edges = Edges::default();
    let port = web();
    // One connection a minute for two hours.
    for minute in 0..120 {
        edges.set_time(MINUTE * minute);
        edges.add(&port, &began(1, 80));
    }
    let now = MINUTE * 119 + Duration::from_secs(30);
    let slots = edges.edges.values().next().unwrap().0.len();
    assert_eq!(slots, 16);
    // The minute itself is half over, and the one before is asked for in part.
    for (ago, begun, covered_s) in [
        (Duration::from_secs(10), 1, 30),
        (MINUTE, 2, 90),
        (MINUTE * 5, 6, 330),
        // 119 - 15 = 104: the slot begins at 100.
        (MINUTE * 15, 20, 1_170),
        // 119 - 60 = 59: the slot begins at 50.
        (HOUR, 70, 4_170),
        (HOUR * 5, 70, 4_170),
    ] {
        let (found, sums) = all(&mut edges, now, ago);
        let covered_s_found = sums.covered.as_secs();
        assert_eq!((found, covered_s_found), (begun, covered_s), "{ago:?}");
    }
    // The ends of minute 118, and of the slot that begins at 50.
    for (ago, age_s) in [(MINUTE, 30), (HOUR, 3_570)] {
        let (_, sums) = all(&mut edges, now, ago);
        assert_eq!(sums.edges[0].2.as_secs(), age_s, "{ago:?}");
    }
    // An hour without connections.
    let (found, sums) = all(&mut edges, now + MINUTE * 75, HOUR);
    assert_eq!((found, edges.edges.len()), (0, 0), "{sums:?}");
}

#[test]
fn an_agent_that_has_just_begun_covers_less() {
    let mut edges = Edges::default();
    edges.add(&web(), &began(1, 80));
    let (begun, sums) = all(&mut edges, Duration::from_secs(7), HOUR);
    assert_eq!((begun, sums.covered.as_secs()), (1, 7));
}

#[test]
fn a_time_before_the_last_one_changes_nothing() {
    let mut edges = Edges::default();
    edges.set_time(HOUR);
    edges.add(&web(), &began(1, 80));
    edges.set_time(MINUTE);
    edges.add(&web(), &began(1, 80));
    let (begun, _) = all(&mut edges, HOUR, MINUTE);
    assert_eq!((begun, edges.now), (2, 60));
}

#[test]
fn forged_clients_fill_a_bounded_table_and_known_edges_go_on() {
    let mut edges = Edges::default();
    let port = web();
    edges.add(&port, &began(7, 80));
    let forged = 1_000_000;
    for client in 0..forged {
        edges.add(&port, &began(1_000 + client, 80));
    }
    edges.add(&port, &began(7, 80));
    assert_eq!((edges.edges.len(), edges.shares.others), (SHARE + 1, 1));
    let (begun, sums) = all(&mut edges, MINUTE, HOUR);
    assert_eq!((begun, sums.more), (u64::from(forged) + 2, 0));
    let (others, known) = (&sums.edges[0], &sums.edges[1]);
    assert_eq!(others.0.client, None);
    assert_eq!(others.1.begun as usize, forged as usize + 1 - SHARE);
    assert_eq!(
        (known.0.client, known.1.begun),
        (Some([0, 0, 0, 7].into()), 2)
    );

    // Nobody else pays for it. More than there is room for is only counted.
    let api = ServiceKey::sample("shop", "api");
    for client in 0..10_000 {
        let port = ServiceKey::sample("shop", &format!("{}", client % 100));
        edges.add(&port, &began(client, 80));
    }
    assert_eq!(edges.edges.len(), CLIENTS + 1 + 100);
    for endpoint in 0..2_000 {
        edges.add(&api, &began(1, 1_000 + endpoint));
    }
    assert_eq!(edges.edges.len(), CLIENTS + OTHERS);
    let (begun, sums) = all(&mut edges, MINUTE, HOUR);
    assert_eq!(begun + sums.more, u64::from(forged) + 12_002);
    assert_eq!(sums.more, 2_000 - (OTHERS as u64 - 101));
    assert_eq!(sums.more_failed, 0);
    edges.add(&api, &ended(Ending::Failed, None));
    assert_eq!(all(&mut edges, MINUTE, HOUR).1.more_failed, 1);
    // An hour later there is room.
    edges.set_time(MINUTE * 75);
    edges.add(&port, &began(9, 80));
    let (begun, sums) = all(&mut edges, MINUTE * 75, HOUR);
    assert_eq!((begun, sums.more, edges.shares.others), (1, 0, 0));
}

#[test]
fn a_client_that_scans_leaves_room_for_others() {
    let mut edges = Edges::default();
    let add = |edges: &mut Edges, client, number: u32| {
        let port = ServiceKey::sample("shop", &format!("{number}"));
        edges.add(&port, &began(client, 80));
    };
    (0..5_000).for_each(|number| add(&mut edges, 7, number));
    assert_eq!(edges.edges.len(), SHARE + OTHERS);
    add(&mut edges, 8, 4_999);
    assert_eq!(edges.edges.len(), SHARE + OTHERS + 1);
    // Counts of shares outlast a minute.
    edges.set_time(MINUTE);
    add(&mut edges, 7, 5_000);
    assert_eq!(edges.edges.len(), SHARE + OTHERS + 1);
}

#[test]
fn losses_are_told() {
    let mut edges = Edges::default();
    edges.lose();
    edges.lose();
    assert_eq!(all(&mut edges, MINUTE, MINUTE).1.lost, 2);
    assert_eq!(all(&mut edges, MINUTE * 90, HOUR).1.lost, 0);
}
