use std::time::{Duration, Instant, SystemTime};

use kplane_rig::cluster::objects;
use serde_json::json;

use super::*;
use crate::index::tests::{index, object};
use crate::source::{Batch, Event};

/// Returns the causes of a change of a slice with this many endpoints.
fn causes(endpoints: usize) -> Causes {
    let spec = json!({"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"]});
    let (mut index, _) = index(&[objects::service("shop", "web", spec)]);
    let ips = (0..endpoints).map(|n| format!("10.0.{}.{}", n / 250, n % 250 + 1));
    let endpoints = ips.map(|ip| objects::endpoint(ip, "n1"));
    let slice = objects::slice("shop", "web-1", "web", endpoints);
    let events = vec![Event::Apply(object(&slice))];
    let observed_at = SystemTime::now();
    index
        .apply(Batch {
            events,
            observed_at,
        })
        .causes
}

fn touched(service: &ServiceName, revision: u64) -> ServiceChange {
    ServiceChange {
        service: service.clone(),
        revision,
        shared: true,
    }
}

#[test]
fn changes_of_a_service_are_found_newest_first_with_their_causes() {
    let recorder = Recorder::default();
    let causes = causes(2);
    let (web, other) = (
        ServiceName::new("shop", "web"),
        ServiceName::new("shop", "other"),
    );
    for revision in 1..=5 {
        let changed = [
            touched(&web, 2 * revision),
            touched(&other, 2 * revision + 1),
        ];
        recorder.changed(&changed, &causes, SystemTime::now());
    }
    let found = recorder.of(&web, 2);
    let revisions: Vec<u64> = found.changes.iter().map(|change| change.revision).collect();
    assert_eq!((revisions, found.older), (vec![10, 8], 3));
    assert!(!found.changes[0].indirect);
    assert_eq!(found.changes[0].causes[0].details.endpoints.len(), 2);
    let found = recorder.of(&other, 9);
    assert!(found.changes.iter().all(|change| change.indirect));
}

/// The record keeps its limits under as many changes as the largest clusters have in days, each as large as a change can
/// be; it costs microseconds, and a question milliseconds.
#[test]
fn the_record_is_bounded_and_cheap() {
    let recorder = Recorder::default();
    let causes = causes(40);
    let names: Vec<ServiceName> =
        (0..5_000).map(|n| ServiceName::new("shop", &format!("web-{n}"))).collect();
    let started = Instant::now();
    let rounds: u32 = 200_000;
    for (revision, name) in (1..=u64::from(rounds)).zip(names.iter().cycle()) {
        recorder.changed(&[touched(name, revision)], &causes, SystemTime::now());
    }
    let each = started.elapsed() / rounds;
    for number in 0..20_000 {
        recorder.notice(
            NoticeKind::NodeLost,
            format!("Node/{number}"),
            "x".repeat(500),
        );
    }
    let size = recorder.size();
    let started = Instant::now();
    let found = recorder.of(&names[7], 20);
    let asked = started.elapsed();
    println!("{size:?}, {each:?} a change, {asked:?} a question");
    assert!(size.bytes <= 30 << 20, "{size:?}");
    assert!(size.changes <= 100_000 && size.changes > 10_000, "{size:?}");
    assert_eq!(size.notices, 8_192);
    assert!(!found.changes.is_empty() && found.since_ms > 0);
    // Many times what it takes in a release build.
    assert!(each < Duration::from_micros(500), "{each:?}");
    assert!(asked < Duration::from_millis(500), "{asked:?}");
}

#[test]
fn events_are_numbered_and_followed() {
    let recorder = Recorder::default();
    recorder.notice(
        NoticeKind::NodeLost,
        "Node/n1".to_owned(),
        "gone".to_owned(),
    );
    recorder.notice(
        NoticeKind::NodeConnected,
        "Node/n1".to_owned(),
        "back".to_owned(),
    );
    let (events, _) = recorder.noticed(0, 10);
    assert_eq!(events.len(), 2);
    let (events, _) = recorder.noticed(events[0].number, 10);
    assert_eq!(events.len(), 1);
    assert_eq!(
        (events[0].kind, &*events[0].text),
        (NoticeKind::NodeConnected, "back")
    );
    assert_eq!(recorder.noticed(2, 10).0, []);
}
