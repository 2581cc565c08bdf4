//! Tests of reports: what counts as news, and the wire format.

use kplane_model::{EndpointAddr, KeyParts, Protocol, ServiceName};

use super::*;
use kplane_dataplane::backend::{Connections, Drain};

fn failure(reason: String) -> Failure {
    Failure {
        object: None,
        reason,
        since_ms: 7,
        degraded: false,
    }
}

#[test]
fn a_report_stays_below_the_size_of_a_message() {
    let longest = "n".repeat(63);
    let key = ServiceKey::from(KeyParts {
        service: ServiceName::new(&longest, &longest),
        port_name: longest.as_str().into(),
        protocol: Protocol::Sctp,
        family: Family::V6,
    });
    let at = EndpointAddr {
        ip: [0xffff_u16; 8].into(),
        port: u16::MAX,
    };
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
    let named = Failure {
        object: Some(DesiredKey::Local(key)),
        ..failure("ä".repeat(5_000))
    };
    let report = Report {
        failures: vec![named; 20_000],
        servers: [servers.clone(), servers],
        ..Report::default()
    };
    let wire = report.to_wire();
    assert_eq!(wire.failures.len(), MAX_FAILURES + 1);
    let last = wire.failures.last().unwrap();
    assert_eq!(
        last.reason,
        "19600 further objects are not applied and not listed"
    );
    assert!(wire.encoded_len() < kplane_proto::MAX_MESSAGE_BYTES);
}

/// Only the source limits the length of names, and names in manifests may be long.
#[test]
fn a_report_with_long_names_stays_below_the_size_of_a_message() {
    for length in [253, 1_000, 50_000] {
        let long = "n".repeat(length);
        let key = ServiceKey::from(KeyParts {
            service: ServiceName::new(&long, &long),
            port_name: long.as_str().into(),
            protocol: Protocol::Tcp,
            family: Family::V4,
        });
        let at = EndpointAddr {
            ip: [10, 0, 0, 1].into(),
            port: 1,
        };
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
        let named = Failure {
            object: Some(DesiredKey::Service(key)),
            ..failure("r".repeat(300))
        };
        let report = Report {
            failures: vec![named; 500],
            servers: [servers.clone(), servers],
            ..Report::default()
        };
        let wire = report.to_wire();
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
    let mut told = verified(7_200_000);
    assert!(!verified(7_230_000).replace(&mut told));
    assert!(verified(7_260_000).replace(&mut told));
    assert!(verified(3_660_000).replace(&mut told), "an hour back");
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
