//! Measurements from reports.

use kplane_desired_state::publish::{Publication, Published};
use kplane_model::ServicePort;
use kplane_proto::v1::{ObjectFailure, SyncStats};

use super::*;
use crate::hub::Hub;

const EPOCH: u64 = 1;

fn hub() -> Arc<Hub> {
    Hub::sample(EPOCH, "test")
}

/// Publishes a Service whose change was observed this many seconds ago.
fn publish(hub: &Hub, name: &str, ago: u64) -> u64 {
    let key = ServiceKey::sample("shop", name);
    let port = ServicePort::sample(key.clone());
    hub.store().publish(Publication {
        observed_at: SystemTime::now() - Duration::from_secs(ago),
        ..Publication::sample(vec![(key, Some(Published::new(port, &[])))], vec![])
    })
}

fn applied(revision: u64) -> Report {
    Report {
        epoch: EPOCH,
        applied_revision: revision,
        ..Report::default()
    }
}

/// Returns how many nodes were measured for a revision, and the longest duration in seconds.
fn measured(hub: &Hub, revision: u64) -> (u64, u64) {
    let moment = hub.store().moment_of(revision).unwrap();
    let durations = hub.agents().timings.of_change(moment.first).unwrap_or_default();
    (durations.count(), durations.longest().as_secs())
}

#[test]
fn each_node_is_measured_once_for_each_change_that_it_passes() {
    let hub = hub();
    let old = publish(&hub, "old", 900);
    let [a, b] = ["a", "b"].map(|name| Session::sample(&hub, name));
    for session in [&a, &b] {
        session.report(applied(old));
    }
    assert_eq!(measured(&hub, old), (0, 0), "since when is not known");

    let slow = publish(&hub, "slow", 60);
    let quick = publish(&hub, "quick", 5);
    a.report(applied(slow));
    a.report(applied(quick));
    b.report(applied(quick));
    assert_eq!(measured(&hub, slow), (2, 60));
    assert_eq!(measured(&hub, quick), (2, 5));
    // Taken back, and applied again.
    a.report(applied(old));
    a.report(applied(quick));
    assert_eq!(measured(&hub, quick), (2, 5));
    assert_eq!(hub.agents().timings.programmed().count(), 4);
}

/// A report that was put off names when the kernel reached what.
#[test]
fn the_time_that_a_report_waited_is_not_measured() {
    let hub = hub();
    let a = Session::sample(&hub, "a");
    a.report(applied(publish(&hub, "old", 900)));
    let slow = publish(&hub, "slow", 60);
    let quick = publish(&hub, "quick", 5);
    let never = publish(&hub, "never", 5);
    let step = |revision, seconds: u64| Step {
        revision,
        ago_us: seconds * 1_000_000,
    };
    a.report(Report {
        // An agent cannot make its kernel look as quick as it likes.
        steps: vec![step(slow, 4), step(quick, 1), step(never, 1_000_000)],
        ..applied(never)
    });
    assert_eq!(measured(&hub, slow), (1, 56));
    assert_eq!(measured(&hub, quick), (1, 4));
    assert_eq!(measured(&hub, never), (1, 0));
    let record = hub.agents().record("a").unwrap();
    assert_eq!(record.report.as_ref().unwrap().steps, [], "nothing is kept");
}

#[test]
fn a_large_fleet_spreads_its_reports() {
    let hub = hub();
    let within = |agents: usize| {
        let known = hub.agents().count();
        let sessions = (known..agents).map(|n| Session::sample(&hub, &format!("n{n}")));
        drop(sessions.collect::<Vec<_>>());
        hub.agents().report_within_ms()
    };
    assert_eq!([within(1), within(199), within(200)], [0, 0, 20]);
    assert_eq!(within(1_000), 100);
}

#[test]
fn an_agent_that_was_away_is_measured_and_a_foreign_or_false_report_is_not() {
    let hub = hub();
    let first = publish(&hub, "first", 90);
    let session = Session::sample(&hub, "a");
    session.report(applied(first));
    drop(session);
    let missed = publish(&hub, "missed", 30);
    let session = Session::sample(&hub, "a");
    session.report(Report {
        epoch: EPOCH + 1,
        ..applied(missed)
    });
    assert_eq!(measured(&hub, missed), (0, 0), "another epoch");
    session.report(applied(u64::MAX));
    assert_eq!(measured(&hub, missed), (1, 30));
    let next = publish(&hub, "next", 10);
    session.report(applied(next));
    assert_eq!(
        measured(&hub, next),
        (1, 10),
        "a false report costs nothing"
    );
}

#[test]
fn a_service_that_failed_does_not_count() {
    let hub = hub();
    let session = Session::sample(&hub, "a");
    session.report(applied(publish(&hub, "first", 9)));
    let failed = publish(&hub, "web", 8);
    session.report(Report {
        failures: vec![ObjectFailure {
            key: Some((&ServiceKey::sample("shop", "web")).into()),
            ..ObjectFailure::default()
        }],
        ..applied(failed)
    });
    assert_eq!(measured(&hub, failed), (0, 0));
}

#[test]
fn hops_add_up() {
    let hub = hub();
    let session = Session::sample(&hub, "a");
    let first = publish(&hub, "first", 9);
    session.dispatch().sent(first);
    session.report(applied(first));
    let hops = || {
        let hops = hub.agents().timings.hops();
        hops.into_iter()
            .filter(|(_, durations)| durations.count() > 0)
            .map(|(hop, durations)| (hop, durations.longest()))
            .collect::<Vec<_>>()
    };
    assert_eq!(hops(), [], "a snapshot says nothing about changes");
    let second = publish(&hub, "second", 8);
    session.dispatch().sent(second);
    let report = Report {
        last_sync: Some(SyncStats {
            revision: second,
            total_us: 1_000,
            plan_us: 100,
            encode_us: 200,
            kernel_us: 300,
            ..SyncStats::default()
        }),
        ..applied(second)
    };
    session.report(report.clone());
    session.report(report);
    let found = hops();
    let names: Vec<_> = found.iter().map(|(hop, _)| *hop).collect();
    assert_eq!(
        names,
        ["send", "transfer", "agent", "plan", "encode", "kernel"]
    );
    let us = |n: usize| found[n].1.as_micros();
    assert_eq!([us(2), us(3), us(4), us(5)], [400, 100, 200, 300]);
    assert!(found[0].1 < Duration::from_secs(5), "not since the change");
    let hops = hub.agents().timings.hops();
    assert!(hops.iter().all(|(_, durations)| durations.count() <= 1));
}

#[test]
fn memory_has_a_limit() {
    let hub = hub();
    let session = Session::sample(&hub, "a");
    session.report(applied(publish(&hub, "first", 0)));
    let timings = &hub.agents().timings;
    let moment = hub.store().moment_of(2).unwrap();
    let passed = (10..20_000).map(|first| Moment { first, ..moment });
    timings.reached(&passed.collect::<Vec<_>>(), &[], SystemTime::now());
    assert_eq!(timings.lock().changes.len(), REMEMBERED);
    assert!(timings.of_change(19_999).is_some() && timings.of_change(10).is_none());
}
