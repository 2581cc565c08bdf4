//! `/healthz` and `/livez` (behaviours G1-G4), answered from the engine's latest report.
//!
//! Healthy means that packets are served as desired. Unlike kube-proxy, the agent is therefore healthy only
//! from the moment when the first complete snapshot is in the kernel, or the content of the cache file while no
//! control plane answers. In detail:
//! * Before that: 503.
//! * Every family must have been programmed once, except one that cannot be (a kernel without IPv6). At
//!   least one family must have been programmed.
//! * A family that worked and then is behind for longer than `GRACE`, because of an error or because the
//!   kernel does not answer: 503 until it has caught up (G2).
//! * Without a control plane: as before, since the kernel keeps serving.
//! * A kernel that is left as it is, because the agent does not know what it serves and the source may lack
//!   it: 200. The kernel serves, and it would be worse if a load balancer left all nodes at once.
//! * 503 while the node is being deleted or drained, so that load balancers leave it (G3). A node that the
//!   control plane does not know counts as eligible.
//!
//! The list above describes `/healthz`. `/livez` is for programs that restart the agent, which helps only
//! against a hang. It is 503 when the engine is `HUNG`, or a thread of the userspace proxy. It is 200 even if there is no control plane, or if
//! the kernel refuses changes. (kube-proxy's `/livez` returns the rules' state from its `/healthz`.)
//!
//! The body is byte for byte kube-proxy's; `?verbose` adds details that only kplane has.

mod body;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hyper::{Request, StatusCode};
use kplane_dataplane::backend::ProxyHandle;
use tokio::sync::watch;

use crate::connection::Connection;
use crate::desired::{Held, now_ms};
use crate::pulse::Pulse;
use crate::report::{FamilyReport, NodeState, Report};
use kplane_http::{self as http, Answer};

/// Longest time that a family may be behind before the node counts as unhealthy: two of kube-proxy's sync
/// periods, which is kube-proxy's own limit (G2).
const GRACE: Duration = Duration::from_secs(60);

/// Longest time that one piece of work of the engine may take before the engine counts as hung. The longest
/// work that ends by itself is shorter: listing and writing iptables of both families within the limits of
/// the programs (60 s and 180 s each).
const HUNG: Duration = Duration::from_secs(600);

/// Longest time that a thread of the userspace proxy may be busy with one event. All its work is short.
const PROXY_HUNG: Duration = Duration::from_secs(30);

/// The inputs of the answers.
#[derive(Clone, Debug)]
pub struct Health {
    /// The engine's reports.
    pub reports: watch::Receiver<Report>,
    /// The connection to the control plane.
    pub connection: watch::Receiver<Connection>,
    /// The pulse of the engine's thread.
    pub pulse: Pulse,
    /// The userspace proxy, if there is one.
    pub proxy: ProxyHandle,
    /// The counts of answers.
    pub answers: Arc<Answers>,
}

/// Counts of answers since the start.
#[derive(Debug, Default)]
pub struct Answers {
    /// Answers of `/healthz`.
    pub healthz: Outcomes,
    /// Answers of `/livez`.
    pub livez: Outcomes,
}

/// Counts of the answers of one path.
#[derive(Debug, Default)]
pub struct Outcomes {
    ok: AtomicU64,
    unavailable: AtomicU64,
}

impl Outcomes {
    /// Returns how many answers were 200, and how many 503.
    pub fn counts(&self) -> [(u16, u64); 2] {
        [
            (200, self.ok.load(Ordering::Relaxed)),
            (503, self.unavailable.load(Ordering::Relaxed)),
        ]
    }

    fn count(&self, ok: bool) -> StatusCode {
        let (counter, status) = if ok {
            (&self.ok, StatusCode::OK)
        } else {
            (&self.unavailable, StatusCode::SERVICE_UNAVAILABLE)
        };
        counter.fetch_add(1, Ordering::Relaxed);
        status
    }
}

impl Health {
    /// Returns whether packets are served as desired, whatever the state of the node.
    pub fn is_healthy(&self) -> bool {
        is_healthy(&self.reports.borrow(), Instant::now())
    }

    /// Answers a request to the port (G1).
    pub(crate) fn respond<B>(&self, request: &Request<B>) -> Answer {
        let verbose = request
            .uri()
            .query()
            .is_some_and(|query| query.split('&').any(|word| word == "verbose"));
        match request.uri().path() {
            "/healthz" => self.healthz(verbose),
            "/livez" => self.livez(verbose),
            _ => http::not_found(),
        }
    }

    fn healthz(&self, verbose: bool) -> Answer {
        let report = self.reports.borrow();
        let mut body = body::HealthzBody::new(&report, Instant::now(), now_ms());
        let ok = body.add_node(is_eligible(report.node));
        if verbose {
            body.add_details(&report, self.connection.borrow().clone());
        }
        drop(report);
        http::answer(self.answers.healthz.count(ok), http::JSON, body.to_json())
    }

    fn livez(&self, verbose: bool) -> Answer {
        let report = self.reports.borrow();
        let now = Instant::now();
        let mut body = body::HealthzBody::new(&report, now, now_ms());
        let busy = self.pulse.busy_for(now);
        let proxy = self.proxy.get();
        let alive = busy.is_none_or(|busy| busy < HUNG)
            && proxy.is_none_or(|proxy| proxy.is_alive(PROXY_HUNG));
        body.set_alive(alive);
        if verbose {
            body.add_details(&report, self.connection.borrow().clone());
        }
        drop(report);
        let status = self.answers.livez.count(alive);
        http::answer(status, http::JSON, body.to_json())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    /// Never programmed so far.
    Pending,
    /// Programmed, or left as it was found; if it is behind, then for a short time only.
    Ready,
    /// Programmed once, and behind for long.
    Late,
    /// Never programmed because it cannot be.
    Absent,
}

impl Condition {
    fn of(family: &FamilyReport, untouched: bool, now: Instant) -> Self {
        let failing_since = family.error.as_ref().map(|error| error.since);
        let since = [family.behind_since, failing_since].into_iter().flatten().min();
        match (failing_since, family.ever_programmed) {
            (None, false) if untouched => Self::Ready,
            (None, false) => Self::Pending,
            (Some(_), false) => Self::Absent,
            (_, true) if !family.programmed && since.is_some_and(|at| now - at >= GRACE) => {
                Self::Late
            }
            (_, true) => Self::Ready,
        }
    }
}

fn conditions(report: &Report, now: Instant) -> [Condition; 2] {
    let untouched = report.keeps.as_ref().is_some_and(Held::is_untouched);
    let families = report.families.each_ref();
    families.map(|family| Condition::of(family, untouched, now))
}

fn is_healthy(report: &Report, now: Instant) -> bool {
    let conditions = conditions(report, now);
    let good = |condition: &Condition| match condition {
        Condition::Ready | Condition::Absent => true,
        Condition::Pending | Condition::Late => false,
    };
    conditions.iter().all(good) && conditions.contains(&Condition::Ready)
}

/// Returns since when no control plane confirms what the node serves, milliseconds since 1970; `None` while one
/// does, and while nothing is served.
pub(crate) fn stale_since(report: &Report, connection: &Connection) -> Option<u64> {
    let lost = report.held.is_some() && !connection.live;
    report.stale_since_ms.or(lost.then_some(connection.since_ms))
}

/// Returns whether load balancers may use the node. A node that the control plane does not know counts as
/// eligible, because manifests need not name nodes.
fn is_eligible(node: Option<NodeState>) -> bool {
    node.is_none_or(|node| node.eligible || !node.known)
}
