//! Steps of the engine, without its thread; time is an argument.

use kplane_proto::v1::Confidence;

use super::*;
use crate::report::Subject;

#[test]
fn a_snapshot_is_applied_completely_then_read_back() {
    let mut rig = Rig::new([svc("a", &[]), svc6("a", &[]), svc("b", &["10.0.0.1:80"])]);
    assert_eq!(rig.core.report().held, None);
    assert_eq!(rig.core.due(), None, "nothing is deleted before a snapshot");
    rig.snapshot();
    assert_eq!(rig.revisions(), (3, 0));
    rig.idle();
    let calls = [
        "apply IPv4 complete a,b",
        "apply IPv6 complete a",
        "verify IPv4",
        "verify IPv6",
    ];
    assert_eq!(rig.script.calls(), calls);
    assert_eq!(rig.revisions(), (3, 3));
    let report = rig.core.report();
    assert_eq!((report.counts.services, report.counts.endpoints), (3, 1));
    assert_eq!((report.syncs_ok, report.syncs_failed), (1, 0));
    assert_eq!(report.last_sync.unwrap().operations, 3);
    assert!(
        rig.until_called() >= 240 * SECOND,
        "at rest but for the next look"
    );
    assert!(rig.script.calls()[0].starts_with("verify"));
}

#[test]
fn a_delta_costs_what_it_names_and_an_empty_one_nothing() {
    let mut rig = Rig::settled([svc("a", &[]), svc("b", &[]), svc6("c", &[])]);
    rig.plane.delete(&DesiredKey::Service(key_of("a", Family::V4)));
    rig.put(&svc("b", &["10.0.0.1:80"]));
    assert_eq!(rig.script.calls(), ["apply IPv4 -a,b"]);
    assert_eq!(rig.revisions(), (5, 3));
    assert_eq!(rig.programmed(), [true, true]);
    rig.delta();
    rig.put(&local("nobody", &[]));
    assert_eq!(rig.script.calls(), ["apply IPv4 -nobody"]);
    assert_eq!(rig.revisions(), (6, 3));
    assert_eq!(rig.core.report().syncs_ok, 4);
}

#[test]
fn an_equal_snapshot_after_a_reconnect_does_not_touch_the_kernel() {
    let mut rig = Rig::settled([svc("a", &[]), node("z1")]);
    rig.plane.epoch = 77;
    rig.snapshot();
    assert!(rig.script.calls().is_empty());
    let position = Some(Position {
        epoch: 77,
        revision: 2,
    });
    let report = rig.core.report();
    assert_eq!((report.applied, report.verified), (position, position));
}

#[test]
fn new_node_facts_plan_everything_anew() {
    let mut rig = Rig::settled([svc("a", &[]), svc("b", &[])]);
    rig.plane.delete(&DesiredKey::Service(key_of("a", Family::V4)));
    rig.put(&node("z1"));
    assert_eq!(rig.script.calls(), ["apply IPv4 b,-a", "apply IPv6 "]);
    assert_eq!(rig.script.kernel(), ["b"]);
}

#[test]
fn a_broken_family_is_retried_alone_with_growing_pauses() {
    let mut rig = Rig::new([svc("a", &[]), svc6("a", &[])]);
    rig.script.set(|s| s.broken.push(Family::V6));
    rig.snapshot();
    assert_eq!(rig.programmed(), [true, false]);
    assert_eq!(
        rig.revisions(),
        (0, 0),
        "a family that is needed does not hold it"
    );
    let error = rig.core.report().families[1].error.clone().unwrap();
    assert_eq!(
        (&*error.reason, error.since_ms),
        ("no such family", rig.now.ms)
    );
    rig.idle();
    rig.script.calls();

    // IPv4 goes on at once, IPv6 waits for its turn.
    rig.put(&svc("b", &[]));
    assert_eq!(rig.script.calls(), ["apply IPv4 b"]);
    let mut longest = Duration::ZERO;
    for _ in 0..12 {
        let mut waited = Duration::ZERO;
        while rig.script.calls().iter().all(|call| !call.starts_with("apply IPv6")) {
            waited += rig.next();
        }
        assert!(waited <= 30 * SECOND, "{waited:?}");
        longest = longest.max(waited);
    }
    assert!(longest >= 15 * SECOND, "{longest:?}");
    let report = rig.core.report();
    assert_eq!(
        report.families[1].error.as_ref().unwrap().since_ms,
        error.since_ms
    );
    assert_eq!((report.syncs_ok, report.syncs_failed), (1, 13));

    rig.script.set(|s| s.broken.clear());
    rig.put(&svc6("b", &[]));
    rig.script.calls();
    while rig.script.calls().iter().all(|call| call != "apply IPv6 complete a,b") {
        rig.next();
    }
    rig.idle();
    assert_eq!(rig.revisions(), (4, 4));
    assert_eq!(rig.core.report().families[1].error, None);
    // The backoff is reset: the next failure is retried soon.
    rig.script.set(|s| s.broken.push(Family::V6));
    rig.put(&svc6("c", &[]));
    assert!(rig.next() <= Duration::from_millis(250));
}

#[test]
fn a_kernel_without_ipv6_holds_nothing_back_while_nobody_needs_it() {
    let mut rig = Rig::new([svc("a", &[])]);
    rig.script.set(|s| s.broken.push(Family::V6));
    rig.snapshot();
    rig.idle();
    assert_eq!(rig.revisions(), (1, 1));
    let report = rig.core.report();
    assert_eq!(rig.programmed(), [true, false]);
    assert!(!report.families[1].needed && report.families[1].error.is_some());
    rig.put(&svc6("a", &[]));
    assert_eq!(rig.revisions(), (0, 0));
}

/// The report keeps what the kernel held before a failure, and no more.
#[test]
fn a_failure_keeps_the_last_applied_revision() {
    let mut rig = Rig::settled([svc("a", &[])]);
    rig.script.set(|s| s.broken.push(Family::V4));
    rig.put(&svc("a", &["10.0.0.1:80"]));
    assert_eq!(rig.revisions(), (1, 1));
    assert_eq!(rig.programmed(), [false, true]);
    rig.script.set(|s| s.broken.clear());
    rig.next();
    assert_eq!(
        rig.script.calls(),
        ["apply IPv4 a", "apply IPv4 complete a"]
    );
    assert_eq!(rig.revisions(), (2, 1));
}

#[test]
fn drift_is_reported_and_then_repaired() {
    let mut rig = Rig::settled([svc("a", &[])]);
    rig.put(&svc("b", &[]));
    rig.script.set(|s| s.drift.push((Family::V4, "1 element missing")));
    rig.script.calls();
    rig.next();
    assert_eq!(rig.script.calls(), ["verify IPv4"]);
    assert_eq!(rig.revisions(), (0, 0), "retracted before it is repaired");
    assert_eq!(rig.programmed(), [false, true]);
    let error = rig.core.report().families[0].error.clone().unwrap();
    assert_eq!(
        error.reason,
        "changed by another program: 1 element missing"
    );
    assert_eq!(rig.next(), Duration::ZERO);
    assert_eq!(rig.revisions(), (2, 0));
    rig.idle();
    assert_eq!(
        rig.script.calls(),
        ["apply IPv4 complete a,b", "verify IPv4"]
    );
    assert_eq!(rig.revisions(), (2, 2));
}

/// An outdated kernel is no error of another program, and the kernel holds what it held.
#[test]
fn what_is_outdated_is_planned_anew_and_stays_programmed() {
    let mut rig = Rig::settled([svc("a", &[])]);
    rig.put(&svc("b", &[]));
    rig.script.set(|s| s.outdated = Some("another address"));
    rig.script.calls();
    rig.next();
    assert_eq!(rig.script.calls(), ["verify IPv4"]);
    assert_eq!(rig.revisions().0, 2, "still claimed");
    assert!(rig.core.report().families[0].error.is_none());
    assert_eq!(rig.next(), Duration::ZERO);
    assert_eq!(rig.script.calls(), ["apply IPv4 complete a,b"]);
    rig.idle();
    assert_eq!(rig.revisions(), (2, 2));
}

#[test]
fn somebody_who_keeps_undoing_our_rules_is_not_fought_at_full_speed() {
    let mut rig = Rig::settled([svc("a", &[])]);
    rig.script.set(|s| s.drift = vec![(Family::V4, "flushed"); 8]);
    rig.put(&svc("b", &[]));
    rig.next();
    let first_drift = rig.now.instant;
    assert_eq!(rig.next(), Duration::ZERO, "the first is repaired at once");
    while rig.revisions().1 != 2 {
        rig.next();
    }
    // Half of 0.5 + 1 + 2 + 4 + 8 + 16 + 30 s at least.
    let took = rig.now.instant - first_drift;
    assert!(took > 30 * SECOND && took < 62 * SECOND, "{took:?}");
    let repairs = rig.script.calls().iter().filter(|call| call.contains("complete")).count();
    assert_eq!(repairs, 8);
}

#[test]
fn reading_back_waits_for_quiet_and_for_its_interval() {
    let mut rig = Rig::settled([svc("a", &[])]);
    for port in 1..=5_u16 {
        rig.after(10 * SECOND);
        rig.idle();
        rig.put(&svc("a", &[&format!("10.0.0.1:{port}")]));
    }
    assert_eq!(rig.script.calls().len(), 5, "never quiet, never read");
    assert_eq!(rig.next(), 30 * SECOND);
    assert_eq!(rig.script.calls(), ["verify IPv4"]);
    assert_eq!(rig.revisions(), (6, 6));
    // Not more than once a minute, and every few minutes without a change.
    rig.put(&svc("a", &[]));
    assert_eq!(rig.next(), 60 * SECOND);
    rig.script.calls();
    let waits = [(); 2].map(|()| {
        let wait = rig.until_called();
        assert!(rig.script.calls().iter().all(|call| call.starts_with("verify")));
        wait
    });
    assert!(
        waits.iter().all(|wait| *wait > 60 * SECOND && *wait <= 300 * SECOND),
        "{waits:?}"
    );
}

#[test]
fn a_kernel_that_cannot_be_read_is_reported_and_read_later() {
    let mut rig = Rig::new([svc("a", &[])]);
    rig.script.set(|s| s.unreadable = true);
    rig.snapshot();
    rig.idle();
    assert_eq!(rig.revisions(), (1, 0));
    assert_eq!(rig.programmed(), [true, true]);
    let error = rig.core.report().families[0].error.clone().unwrap();
    assert_eq!(error.reason, "cannot read the kernel back: interrupted");
    rig.script.set(|s| s.unreadable = false);
    assert_eq!(rig.next(), 60 * SECOND);
    rig.idle();
    assert_eq!(rig.revisions(), (1, 1));
    assert_eq!(rig.core.report().families[0].error, None);
}

#[test]
fn refused_services_are_named_since_they_first_failed() {
    let mut rig = Rig::new([svc("a", &[]), svc("b", &[])]);
    rig.script.set(|s| s.refused.push(key_of("a", Family::V4)));
    rig.snapshot();
    let first = rig.core.report().failures;
    assert_eq!(first.len(), 1);
    assert_eq!(
        first[0].about,
        Subject::Object(DesiredKey::Service(key_of("a", Family::V4)))
    );
    assert!(first[0].degraded);
    assert_eq!(rig.revisions().0, 2, "all others are applied");
    rig.after(SECOND);
    rig.put(&svc("b", &["10.0.0.1:80"]));
    rig.put(&svc("a", &["10.0.0.1:80"]));
    rig.put(&node("z1"));
    assert_eq!(rig.core.report().failures, first);
    rig.script.set(|s| s.refused.clear());
    rig.put(&svc("a", &[]));
    assert_eq!(rig.core.report().failures, []);
}

#[test]
fn end_to_end_time_is_told_only_when_all_of_it_is_known() {
    let mut rig = Rig::new([svc("a", &[])]);
    rig.snapshot();
    let end_to_end = |rig: &Rig| rig.core.report().last_sync.unwrap().end_to_end_ms;
    assert_eq!(end_to_end(&rig), 0, "when it changed is not known");
    rig.plane.changed_at_ms = crate::desired::now_ms() - 5_000;
    rig.put(&svc("b", &[]));
    assert!(
        (5_000..60_000).contains(&end_to_end(&rig)),
        "{}",
        end_to_end(&rig)
    );
    rig.script.set(|s| s.broken.push(Family::V4));
    rig.put(&svc("c", &[]));
    assert_eq!(end_to_end(&rig), 0, "the kernel does not hold it");
    // The retry counts from the update that it completes.
    rig.script.set(|s| s.broken.clear());
    while rig.programmed() != [true, true] {
        rig.next();
    }
    assert!(end_to_end(&rig) >= 5_000, "{}", end_to_end(&rig));
}

/// Found by the simulation: what was read back in an epoch counted again when the agent came back to it.
#[test]
fn a_verified_position_does_not_outlive_its_epoch() {
    let mut rig = Rig::settled([svc("a", &[])]);
    assert_eq!(rig.revisions(), (1, 1));
    let epoch = rig.plane.epoch;
    rig.plane.epoch = 77;
    rig.put(&svc("b", &[]));
    assert_eq!(rig.core.report().verified, None);
    rig.script.set(|script| script.broken.push(Family::V4));
    rig.plane.epoch = epoch;
    rig.put(&svc("a", &["10.0.0.1:80"]));
    let report = rig.core.report().to_wire();
    assert_eq!((report.applied_revision, report.verified_revision), (0, 0));
}

/// Found by the simulation: what an agent keeps may go without a new revision. If the kernel refuses, the report must not
/// say that the kernel holds the revision.
#[test]
fn a_change_without_a_new_revision_is_reported_after_the_commit_too() {
    let mut rig = Rig::settled([svc("a", &[]), svc("b", &[])]);
    rig.plane.epoch = 77;
    rig.plane.confidence = Confidence::Partial;
    rig.plane.delete(&DesiredKey::Service(key_of("b", Family::V4)));
    rig.snapshot();
    assert_eq!((rig.revisions().0, rig.script.kernel().len()), (3, 2));
    rig.script.set(|script| script.broken.push(Family::V4));
    rig.plane.confidence = Confidence::Confirmed;
    rig.delta();
    assert_eq!((rig.revisions().0, rig.script.kernel().len()), (0, 2));
    rig.script.set(|script| script.broken.clear());
    rig.next();
    assert_eq!((rig.revisions().0, rig.script.kernel().len()), (3, 1));
}
