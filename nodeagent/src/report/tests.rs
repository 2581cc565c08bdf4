//! Tests of reports: what counts as news, and the wire format.

use kplane_model::{EndpointAddr, KeyParts, PolicyKey, PolicyName, Protocol, ServiceName};

use super::failures::MAX_FAILURES;
use super::*;
use kplane_dataplane::backend::{Connections, Drain};

fn failure(reason: String) -> Failure {
    Failure {
        about: Subject::Node,
        reason,
        since_ms: 7,
        degraded: false,
    }
}

fn long_key(length: usize, protocol: Protocol, family: Family) -> ServiceKey {
    let name = "n".repeat(length);
    ServiceKey::from(KeyParts {
        service: ServiceName::new(&name, &name),
        port_name: name.as_str().into(),
        protocol,
        family,
    })
}

/// A report that names as many draining servers as any does.
fn draining(key: &ServiceKey, at: EndpointAddr, failures: Vec<Failure>) -> Report {
    let drain = Drain {
        key: key.clone(),
        server: at,
        at,
        connections: Connections::default(),
    };
    let servers = Some(ServerCounts {
        drains: vec![drain; ServerCounts::DRAINS].into(),
        ..ServerCounts::default()
    });
    Report {
        failures,
        servers: [servers.clone(), servers],
        ..Report::default()
    }
}

#[test]
fn a_report_stays_below_the_size_of_a_message() {
    let key = long_key(63, Protocol::Sctp, Family::V6);
    let at = EndpointAddr::new([0xffff_u16; 8], u16::MAX);
    let named = Failure {
        about: Subject::Object(DesiredKey::Local(key.clone())),
        ..failure("ä".repeat(5_000))
    };
    let wire = draining(&key, at, vec![named; 20_000]).to_wire();
    assert_eq!(wire.failures.len(), MAX_FAILURES + 1);
    let last = wire.failures.last().unwrap();
    assert_eq!(
        last.reason,
        "19600 further objects are not applied and not listed"
    );
    assert!(wire.encoded_len() < kplane_proto::MAX_MESSAGE_BYTES);
}

/// What fails of NetworkPolicies has no ServicePort either, and is told from what fails of the node.
#[test]
fn failures_of_policies_are_marked() {
    let policy = PolicyKey::Policy(PolicyName::new("shop", "db"));
    for (about, expected) in [
        (Subject::Node, (false, "broken")),
        (
            Subject::Object(DesiredKey::Node),
            (false, "facts of the node: broken"),
        ),
        (Subject::Policies, (true, "broken")),
        (
            Subject::Object(DesiredKey::Policy(policy)),
            (true, "NetworkPolicy shop/db: broken"),
        ),
    ] {
        let report = Report {
            failures: vec![Failure {
                about,
                ..failure("broken".to_owned())
            }],
            ..Report::default()
        };
        let [reported] = &*report.to_wire().failures else {
            panic!("one failure is one failure");
        };
        assert!(reported.key.is_none(), "{reported:?}");
        assert_eq!((reported.policies, &*reported.reason), expected);
    }
}

/// Only the source limits the length of names, and names in manifests may be long.
#[test]
fn a_report_with_long_names_stays_below_the_size_of_a_message() {
    for length in [253, 1_000, 50_000] {
        let key = long_key(length, Protocol::Tcp, Family::V4);
        let named = Failure {
            about: Subject::Object(DesiredKey::Service(key.clone())),
            ..failure("r".repeat(300))
        };
        let at = EndpointAddr::new([10, 0, 0, 1], 1);
        let wire = draining(&key, at, vec![named; 500]).to_wire();
        assert!(wire.encoded_len() <= REPORT_BYTES, "{}", wire.encoded_len());
        let listed = wire.failures.len() - 1;
        let last = wire.failures.last().unwrap();
        let rest = format!("{} further objects", 500 - listed);
        assert!(last.reason.starts_with(&rest), "{}", last.reason);
        assert!(listed > 0 || length > 10_000);
    }
}

/// Connections come and go, and this alone wakes no receiver.
#[test]
fn real_servers_alone_are_no_news() {
    let mut held = Report::default();
    let seen = ServerCounts {
        real_servers: 7,
        ..ServerCounts::default()
    };
    let report = Report {
        servers: [Some(seen), None],
        ..Report::default()
    };
    assert!(!report.clone().replace(&mut held));
    assert_eq!(held, report);
    let synced = Report {
        syncs_ok: 1,
        ..Report::default()
    };
    assert!(synced.clone().replace(&mut held));
    assert_eq!(held, synced);
}

/// A read-back is told at most once a minute, whatever the wall clock does: after a step of an hour back, the control
/// plane does not wait for an hour.
#[test]
fn read_backs_are_told_when_the_clock_was_set_back() {
    let verified = |verified_at_ms| {
        let mut report = Report::default();
        for family in &mut report.families {
            family.verified_at_ms = verified_at_ms;
        }
        report
    };
    let mut reported = verified(7_200_000);
    assert!(!verified(7_230_000).replace(&mut reported));
    assert!(verified(7_260_000).replace(&mut reported));
    assert!(verified(3_660_000).replace(&mut reported), "an hour back");
}

#[test]
fn positions_of_another_epoch_are_not_reported() {
    let position = |epoch, revision| Some(Position { epoch, revision });
    let report = Report {
        held: position(2, 5),
        applied: position(1, 90),
        verified: position(2, 4),
        ..Report::default()
    };
    let wire = report.to_wire();
    let revisions = (
        wire.received_revision,
        wire.applied_revision,
        wire.verified_revision,
    );
    assert_eq!((wire.epoch, revisions), (2, (5, 0, 4)));
}
