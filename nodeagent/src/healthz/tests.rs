//! Tests of the rules (G2, G3) and of the bytes (G4).

use http_body_util::BodyExt;

use super::body::HealthzBody;
use super::*;
use crate::report::{LastingError, time};

fn standing(since: Instant) -> Option<LastingError> {
    Some(LastingError {
        reason: "no such family".into(),
        since_ms: 1,
        since,
    })
}

fn ready() -> FamilyReport {
    FamilyReport {
        programmed: true,
        ever_programmed: true,
        programmed_at_ms: 1_700_000_000_500,
        ..FamilyReport::default()
    }
}

fn report(v4: &FamilyReport, v6: &FamilyReport) -> Report {
    Report {
        families: [v4.clone(), v6.clone()],
        ..Report::default()
    }
}

#[test]
fn g2_health_follows_the_families() {
    let start = Instant::now();
    let later = |s| start + Duration::from_secs(s);
    let pending = FamilyReport::default();
    let ready = ready();
    let absent = FamilyReport {
        error: standing(start),
        ..FamilyReport::default()
    };
    let failing = FamilyReport {
        programmed: false,
        error: standing(start),
        ..ready.clone()
    };
    let stuck = FamilyReport {
        programmed: false,
        behind_since: Some(start),
        ..ready.clone()
    };
    let unreadable = FamilyReport {
        error: standing(start),
        ..ready.clone()
    };
    let cases = [
        ("nothing yet", &pending, &pending, 0, false),
        ("half of it", &ready, &pending, 0, false),
        ("all", &ready, &ready, 0, true),
        ("idle for long", &ready, &ready, 36_000, true),
        ("a kernel without IPv6", &ready, &absent, 3_600, true),
        ("a kernel without anything", &absent, &absent, 0, false),
        ("failing for a moment", &ready, &failing, 59, true),
        ("failing for long", &failing, &ready, 60, false),
        ("a kernel that takes its time", &ready, &stuck, 59, true),
        ("a kernel that does not answer", &ready, &stuck, 60, false),
        ("not readable", &unreadable, &ready, 3_600, true),
    ];
    for (what, v4, v6, after, healthy) in cases {
        assert_eq!(is_healthy(&report(v4, v6), later(after)), healthy, "{what}");
    }
}

/// The kernel serves what it served, so load balancers may keep using the node.
#[test]
fn a_kernel_that_is_left_as_it_is_counts_as_served() {
    let pending = FamilyReport::default();
    let mut report = report(&pending, &pending);
    report.keeps = Some(Held::default());
    assert!(is_healthy(&report, Instant::now()));
    report.keeps = Some(Held {
        services: 1,
        ..Held::default()
    });
    assert!(!is_healthy(&report, Instant::now()), "to be programmed");
}

#[test]
fn g3_only_a_known_node_can_be_leaving() {
    let node = |known, eligible| Some(NodeState { known, eligible });
    assert!(is_eligible(None));
    assert!(is_eligible(node(false, false)) && is_eligible(node(true, true)));
    assert!(!is_eligible(node(true, false)));
}

const NOW_MS: u64 = 1_700_000_001_120;

/// Byte for byte what kube-proxy prints: no spaces, no line end, zeros of fractions cut.
#[test]
fn g4_the_body_of_a_healthy_node() {
    let report = report(&ready(), &ready());
    let mut body = HealthzBody::new(&report, Instant::now(), NOW_MS);
    let families = r#""status":{"IPv4":{"lastUpdated":"2023-11-14T22:13:20.5Z","healthy":true},"IPv6":{"lastUpdated":"2023-11-14T22:13:20.5Z","healthy":true}}}"#;
    let times =
        r#"{"lastUpdated":"2023-11-14T22:13:21.12Z","currentTime":"2023-11-14T22:13:21.12Z","#;
    assert_eq!(
        body.to_json(),
        format!(r#"{times}"healthy":true,{families}"#)
    );
    assert!(body.add_node(true));
    assert_eq!(
        body.to_json(),
        format!(r#"{times}"nodeEligible":true,"healthy":true,{families}"#)
    );
    // The node is leaving, but the proxy stays healthy.
    assert!(!body.add_node(false));
    assert_eq!(
        body.to_json(),
        format!(r#"{times}"nodeEligible":false,"healthy":true,{families}"#)
    );
}

/// A proxy that serves one family only lists that one.
#[test]
fn g4_the_body_of_an_unhealthy_node() {
    let now = Instant::now();
    let late = FamilyReport {
        programmed: false,
        error: standing(now - GRACE * 2),
        ..ready()
    };
    let absent = FamilyReport {
        error: standing(now),
        ..FamilyReport::default()
    };
    assert_eq!(
        HealthzBody::new(&report(&late, &absent), now, NOW_MS).to_json(),
        r#"{"lastUpdated":"2023-11-14T22:13:20.5Z","currentTime":"2023-11-14T22:13:21.12Z","healthy":false,"status":{"IPv4":{"lastUpdated":"2023-11-14T22:13:20.5Z","healthy":false}}}"#
    );
    let never = HealthzBody::new(&Report::default(), now, NOW_MS).to_json();
    assert!(
        never.starts_with(r#"{"lastUpdated":"0001-01-01T00:00:00Z","#),
        "{never}"
    );
}

#[test]
fn g4_times_are_written_as_go_does() {
    assert_eq!(time(0), "0001-01-01T00:00:00Z");
    assert_eq!(time(1_700_000_000_000), "2023-11-14T22:13:20Z");
    assert_eq!(time(1_700_000_000_120), "2023-11-14T22:13:20.12Z");
    assert_eq!(time(1_700_000_000_123), "2023-11-14T22:13:20.123Z");
    time(u64::MAX);
}

async fn respond(health: &Health, path: &str) -> (u16, Option<String>, String) {
    let request = Request::builder().uri(path).body(()).unwrap();
    let answer = health.respond(&request);
    let kind = answer.headers().get("content-type");
    let kind = kind.map(|kind| kind.to_str().unwrap().to_owned());
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (status, kind, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn g1_paths_and_what_is_counted() {
    let mut report = report(&ready(), &ready());
    report.node = Some(NodeState {
        known: true,
        eligible: false,
    });
    report.keeps = Some(Held {
        services: 3,
        reason: "3 of 3 Services would be removed at once".to_owned(),
        since_ms: 1,
        ..Held::default()
    });
    let (_reports, reports) = watch::channel(report);
    let (_connection, connection) = watch::channel(Connection {
        live: true,
        since_ms: 1,
        ..Connection::default()
    });
    let health = Health {
        reports,
        connection,
        pulse: Pulse::default(),
        proxy: Default::default(),
        answers: Arc::default(),
    };
    let json = Some("application/json".to_owned());
    let (status, kind, body) = respond(&health, "/healthz").await;
    assert_eq!((status, &kind), (503, &json));
    assert!(!body.contains("controlPlane"), "{body}");
    assert!(!body.contains("keeps"), "{body}");
    for _ in 0..2 {
        let (status, kind, body) = respond(&health, "/livez?x&verbose").await;
        assert_eq!((status, &kind), (200, &json));
        assert!(
            body.contains(r#""controlPlane":{"connected":true"#),
            "{body}"
        );
        assert!(
            body.contains(r#""keeps":{"services":3,"withoutEndpoints":0,"reason":"3 of 3"#),
            "{body}"
        );
    }
    // There is no such path (G1).
    assert_eq!(respond(&health, "/readyz").await.0, 404);
    assert_eq!(health.answers.healthz.counts(), [(200, 0), (503, 1)]);
    assert_eq!(health.answers.livez.counts(), [(200, 2), (503, 0)]);
}

/// A failing `/livez` causes a restart. A restart does not help without a control plane, or against a kernel
/// that refuses.
#[tokio::test]
async fn livez_fails_only_when_the_engine_is_hung() {
    let late = FamilyReport {
        programmed: false,
        error: standing(Instant::now() - GRACE * 2),
        ..ready()
    };
    let (reports, seen) = watch::channel(Report::default());
    let (_connection, connection) = watch::channel(Connection {
        live: false,
        since_ms: 1,
        ..Connection::default()
    });
    let health = Health {
        reports: seen,
        connection,
        pulse: Pulse::default(),
        proxy: Default::default(),
        answers: Arc::default(),
    };
    for report in [Report::default(), report(&late, &late)] {
        reports.send_replace(report);
        assert_eq!(respond(&health, "/healthz").await.0, 503);
        let (status, _, body) = respond(&health, "/livez").await;
        assert_eq!(status, 200);
        assert!(body.contains(r#""healthy":true,"status""#), "{body}");
    }
    let now = Instant::now();
    health.pulse.begin(now - HUNG / 2);
    assert_eq!(respond(&health, "/livez").await.0, 200);
    health.pulse.begin(now - HUNG);
    let (status, _, body) = respond(&health, "/livez").await;
    assert_eq!(status, 503);
    assert!(body.contains(r#""healthy":false,"status""#), "{body}");
}

#[test]
fn a_state_is_stale_while_no_control_plane_confirms_it() {
    let connection = |live| Connection {
        live,
        since_ms: 5,
        ..Connection::default()
    };
    let mut report = report(&ready(), &ready());
    assert_eq!(
        stale_since(&report, &connection(false)),
        None,
        "nothing is served"
    );
    report.held = Some(crate::desired::Position {
        epoch: 1,
        revision: 1,
    });
    assert_eq!(stale_since(&report, &connection(true)), None);
    assert_eq!(stale_since(&report, &connection(false)), Some(5));
    // A control plane that welcomes the agent and sends nothing confirms nothing.
    report.stale_since_ms = Some(3);
    let mut frozen = connection(true);
    frozen.frozen = Some(crate::connection::Frozen {
        since_ms: 3,
        by: "alice".to_owned(),
        reason: "a drill".to_owned(),
    });
    let mut body = HealthzBody::new(&report, Instant::now(), 10);
    body.add_details(&report, frozen);
    let json = body.to_json();
    let order = r#""frozen":{"since":"1970-01-01T00:00:00.003Z","by":"alice","reason":"a drill"}"#;
    assert!(json.contains(order), "{json}");
    for live in [true, false] {
        assert_eq!(stale_since(&report, &connection(live)), Some(3));
        let mut body = HealthzBody::new(&report, Instant::now(), 10);
        body.add_details(&report, connection(live));
        let json = body.to_json();
        assert!(
            json.contains("\"staleSince\":\"1970-01-01T00:00:00.003Z\""),
            "{json}"
        );
        assert!(json.contains("\"healthy\":true"), "{json}");
    }
}
