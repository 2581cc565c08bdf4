//! `/healthz` and `/livez` (behaviours G1-G4, G6), answered from the engine's latest report.
//!
//! Healthy means that packets are served as desired, so unlike kube-proxy it begins when the first
//! complete snapshot is in the kernel, not when the program is. In detail:
//! * Before the first snapshot: 503.
//! * Every family must have been programmed once, except one that cannot be (a kernel without
//!   IPv6); at least one must have been.
//! * A family that worked and then fails for longer than `GRACE`: 503 until it works again.
//! * Without a control plane: as before, since the kernel keeps serving; the answer says so.
//! * `/healthz` only: 503 while the node is being deleted or drained, so that load balancers leave
//!   it. A node that the control plane does not know counts as eligible.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use kplane_model::Family;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::desired::now_ms;
use crate::report::{FamilyReport, NodeState, Report};
use crate::sync::Connection;

/// How long a family may fail before the node is called unhealthy: two of kube-proxy's sync
/// periods, its own limit (G2).
const GRACE: Duration = Duration::from_secs(60);

/// Pause before a port that is taken is tried again (G6).
const REBIND: Duration = Duration::from_secs(5);

/// What the answers are made of.
#[derive(Clone, Debug)]
pub struct Health {
    /// Of the engine.
    pub reports: watch::Receiver<Report>,
    /// To the control plane.
    pub connection: watch::Receiver<Connection>,
}

/// Opens the port, or says why not.
pub async fn bind(address: SocketAddr) -> Option<TcpListener> {
    match TcpListener::bind(address).await {
        Ok(listener) => Some(listener),
        Err(error) => {
            tracing::error!(
                %address,
                %error,
                "cannot listen for health checks, retried every {REBIND:?}: is another proxy \
                 (kube-proxy?) running on this node? See --healthz-bind-address"
            );
            None
        }
    }
}

/// Answers for ever; without a listener it is opened as soon as the address is free.
pub async fn serve(address: SocketAddr, mut listener: Option<TcpListener>, health: Health) {
    let router = Router::new()
        .route("/healthz", get(healthz))
        .route("/livez", get(livez))
        .with_state(health);
    loop {
        if let Some(listener) = listener.take()
            && let Err(error) = axum::serve(listener, router.clone()).await
        {
            tracing::error!(%error, "health checks broke off");
        }
        tokio::time::sleep(REBIND).await;
        listener = bind(address).await;
    }
}

async fn healthz(State(health): State<Health>) -> (StatusCode, Json<Answer>) {
    let mut answer = health.answer();
    let node = health.reports.borrow().node;
    let eligible = is_eligible(node);
    answer.node_eligible = Some(eligible);
    answer.node_known = Some(node.is_some_and(|node| node.known));
    (status(answer.healthy && eligible), Json(answer))
}

async fn livez(State(health): State<Health>) -> (StatusCode, Json<Answer>) {
    let answer = health.answer();
    (status(answer.healthy), Json(answer))
}

fn status(ok: bool) -> StatusCode {
    if ok {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    }
}

/// The body: kube-proxy's fields (G4) and some of our own.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    /// Now when healthy, else when some family was last as desired.
    last_updated: String,
    current_time: String,
    healthy: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_known: Option<bool>,
    status: Families,
    control_plane: ControlPlane,
}

#[derive(Debug, Serialize)]
struct Families {
    #[serde(rename = "IPv4")]
    v4: FamilyAnswer,
    #[serde(rename = "IPv6")]
    v6: FamilyAnswer,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FamilyAnswer {
    last_updated: String,
    healthy: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ControlPlane {
    connected: bool,
    since: String,
}

impl Health {
    fn answer(&self) -> Answer {
        let (now, now_ms) = (Instant::now(), now_ms());
        let connection = *self.connection.borrow();
        let report = self.reports.borrow();
        let healthy = is_healthy(&report, now);
        let [v4, v6] = Family::ALL.map(|family| {
            let family = &report.families[family as usize];
            let healthy = Condition::of(family, now) == Condition::Ready;
            FamilyAnswer {
                last_updated: time(if healthy {
                    now_ms
                } else {
                    family.programmed_at_ms
                }),
                healthy,
                error: family.error.as_ref().map(|error| error.reason.clone()),
            }
        });
        let newest = report
            .families
            .iter()
            .map(|family| family.programmed_at_ms)
            .max();
        Answer {
            last_updated: time(if healthy { now_ms } else { newest.unwrap_or(0) }),
            current_time: time(now_ms),
            healthy,
            node_eligible: None,
            node_known: None,
            status: Families { v4, v6 },
            control_plane: ControlPlane {
                connected: connection.live,
                since: time(connection.since_ms),
            },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    /// Not programmed yet.
    Pending,
    /// Programmed; what fails, fails for a short time only.
    Ready,
    /// Programmed once, failing for long.
    Failing,
    /// Never programmed because it cannot be.
    Absent,
}

impl Condition {
    fn of(family: &FamilyReport, now: Instant) -> Self {
        match (&family.error, family.ever_programmed) {
            (None, false) => Self::Pending,
            (Some(_), false) => Self::Absent,
            (Some(error), true) if !family.programmed && now - error.since > GRACE => Self::Failing,
            (_, true) => Self::Ready,
        }
    }
}

fn is_healthy(report: &Report, now: Instant) -> bool {
    let conditions = report
        .families
        .each_ref()
        .map(|family| Condition::of(family, now));
    let good = |condition: &Condition| match condition {
        Condition::Ready | Condition::Absent => true,
        Condition::Pending | Condition::Failing => false,
    };
    conditions.iter().all(good) && conditions.contains(&Condition::Ready)
}

/// A node that nobody knows of is not taken out: manifests need not name nodes.
fn is_eligible(node: Option<NodeState>) -> bool {
    node.is_none_or(|node| node.eligible || !node.known)
}

/// A time as RFC 3339 in UTC.
fn time(ms: u64) -> String {
    let ms = i64::try_from(ms).unwrap_or(i64::MAX);
    jiff::Timestamp::from_millisecond(ms)
        .unwrap_or(jiff::Timestamp::MAX)
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::Position;
    use crate::report::Standing;

    fn standing(since: Instant) -> Option<Standing> {
        Some(Standing {
            reason: "no such family".into(),
            since_ms: 1,
            since,
        })
    }

    #[test]
    fn health_follows_the_families() {
        let start = Instant::now();
        let later = |s| start + Duration::from_secs(s);
        let pending = FamilyReport::default();
        let ready = FamilyReport {
            programmed: true,
            ever_programmed: true,
            ..FamilyReport::default()
        };
        let absent = FamilyReport {
            error: standing(start),
            ..FamilyReport::default()
        };
        let failing = FamilyReport {
            programmed: false,
            error: standing(start),
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
            ("a kernel without IPv6", &ready, &absent, 3_600, true),
            ("a kernel without anything", &absent, &absent, 0, false),
            ("failing for a moment", &ready, &failing, 60, true),
            ("failing for long", &failing, &ready, 61, false),
            ("not readable", &unreadable, &ready, 3_600, true),
        ];
        for (what, v4, v6, after, healthy) in cases {
            let report = Report {
                held: Some(Position {
                    epoch: 1,
                    revision: 1,
                }),
                families: [v4.clone(), v6.clone()],
                ..Report::default()
            };
            assert_eq!(is_healthy(&report, later(after)), healthy, "{what}");
        }
    }

    #[test]
    fn only_a_known_node_can_be_leaving() {
        let node = |known, eligible| Some(NodeState { known, eligible });
        assert!(is_eligible(None));
        assert!(is_eligible(node(false, false)) && is_eligible(node(true, true)));
        assert!(!is_eligible(node(true, false)));
    }

    /// A port that is taken is tried again (G6).
    #[tokio::test(start_paused = true)]
    async fn a_port_is_taken_over_once_it_is_free() {
        let other = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = other.local_addr().unwrap();
        let listener = bind(address).await;
        assert!(listener.is_none());
        let (_reports, reports) = watch::channel(Report::default());
        let disconnected = Connection {
            live: false,
            since_ms: 0,
        };
        let (_connection, connection) = watch::channel(disconnected);
        let health = Health {
            reports,
            connection,
        };
        let server = tokio::spawn(serve(address, listener, health));
        drop(other);
        let deadline = tokio::time::Instant::now() + REBIND * 3;
        while tokio::net::TcpStream::connect(address).await.is_err() {
            assert!(tokio::time::Instant::now() < deadline);
            tokio::time::sleep(REBIND / 10).await;
        }
        server.abort();
    }

    #[test]
    fn times_are_rfc_3339() {
        assert_eq!(time(1_700_000_000_123), "2023-11-14T22:13:20.123Z");
        time(u64::MAX);
    }
}
