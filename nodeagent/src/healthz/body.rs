//! What `/healthz` and `/livez` say (G4): kube-proxy's fields in kube-proxy's order, times as Go
//! writes them.

use std::time::Instant;

use serde::Serialize;

use super::{Condition, conditions, is_healthy};
use crate::connection::Connection;
use crate::report::{FamilyReport, Report};

/// Go's time of nothing, which kube-proxy prints for what never happened.
const NEVER: &str = "0001-01-01T00:00:00Z";

/// The body.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Body {
    /// Now when the answer is 200, else when some family was last as desired.
    last_updated: String,
    current_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    status: Families,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    details: Option<Details>,
}

/// A family that the machine cannot serve is not listed.
#[derive(Debug, Serialize)]
struct Families {
    #[serde(rename = "IPv4", skip_serializing_if = "Option::is_none")]
    v4: Option<FamilyBody>,
    #[serde(rename = "IPv6", skip_serializing_if = "Option::is_none")]
    v6: Option<FamilyBody>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FamilyBody {
    last_updated: String,
    healthy: bool,
}

/// What only we know.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Details {
    node_known: bool,
    control_plane: ControlPlane,
    errors: Errors,
    kernel: Kernel,
    #[serde(skip_serializing_if = "Option::is_none")]
    keeps: Option<Keeps>,
}

/// What is known of the kernel's rules.
#[derive(Debug, Serialize)]
struct Kernel {
    #[serde(rename = "IPv4")]
    v4: KernelFamily,
    #[serde(rename = "IPv6")]
    v6: KernelFamily,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct KernelFamily {
    /// When it was last read back and held what it should hold.
    verified: String,
    /// How often what somebody else changed was put right since the start.
    repairs: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_repair: Option<LastRepair>,
}

#[derive(Debug, Serialize)]
struct LastRepair {
    time: String,
    what: String,
}

impl KernelFamily {
    fn new(report: &FamilyReport) -> Self {
        let repairs = &report.repairs;
        Self {
            verified: time(report.verified_at_ms),
            repairs: repairs.count,
            last_repair: (repairs.count > 0).then(|| LastRepair {
                time: time(repairs.last_ms),
                what: repairs.last.clone(),
            }),
        }
    }
}

/// What is served although the source does not name it (any more). Without numbers nothing is known of
/// what the kernel serves, and it is left as it is.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Keeps {
    services: usize,
    without_endpoints: usize,
    reason: String,
    since: String,
    examples: Vec<String>,
}

#[derive(Debug, Serialize)]
struct ControlPlane {
    connected: bool,
    since: String,
    /// Why it is not.
    #[serde(skip_serializing_if = "String::is_empty")]
    reason: String,
}

#[derive(Debug, Serialize)]
struct Errors {
    #[serde(rename = "IPv4", skip_serializing_if = "Option::is_none")]
    v4: Option<String>,
    #[serde(rename = "IPv6", skip_serializing_if = "Option::is_none")]
    v6: Option<String>,
}

impl Body {
    /// The state of the proxy, without that of the node.
    pub(super) fn new(report: &Report, now: Instant, now_ms: u64) -> Self {
        let healthy = is_healthy(report, now);
        let mut conditions = conditions(report, now).into_iter();
        let [v4, v6] = report.families.each_ref().map(|family| {
            let condition = conditions.next()?;
            (condition != Condition::Absent).then(|| FamilyBody {
                last_updated: time(family.programmed_at_ms),
                healthy: condition == Condition::Ready,
            })
        });
        let updated = report.families.iter().map(|family| family.programmed_at_ms);
        let last_updated = if healthy {
            now_ms
        } else {
            updated.max().unwrap_or(0)
        };
        Self {
            last_updated: time(last_updated),
            current_time: time(now_ms),
            node_eligible: None,
            healthy,
            status: Families { v4, v6 },
            details: None,
        }
    }

    /// Says of the process, and not of the rules, that it is well.
    pub(super) fn set_alive(&mut self, alive: bool) {
        if alive {
            self.last_updated.clone_from(&self.current_time);
        }
        self.healthy = alive;
    }

    /// Says whether load balancers may use the node; true if the answer is 200.
    pub(super) fn add_node(&mut self, eligible: bool) -> bool {
        self.node_eligible = Some(eligible);
        self.healthy && eligible
    }

    /// Adds what only we know.
    pub(super) fn add_details(&mut self, report: &Report, connection: Connection) {
        let [v4, v6] = report.families.each_ref().map(|family| {
            let error = family.error.as_ref()?;
            Some(error.reason.clone())
        });
        self.details = Some(Details {
            node_known: report.node.is_some_and(|node| node.known),
            control_plane: ControlPlane {
                connected: connection.live,
                since: time(connection.since_ms),
                reason: connection.reason,
            },
            errors: Errors { v4, v6 },
            kernel: Kernel {
                v4: KernelFamily::new(&report.families[0]),
                v6: KernelFamily::new(&report.families[1]),
            },
            keeps: report.keeps.as_ref().map(|held| Keeps {
                services: held.services,
                without_endpoints: held.without_endpoints,
                reason: held.reason.clone(),
                since: time(held.since_ms),
                examples: held.examples.clone(),
            }),
        });
    }

    pub(super) fn to_json(&self) -> String {
        // Only text, numbers and fixed keys: there is nothing that could fail.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// A time as Go's `time.Time` becomes JSON: RFC 3339 in UTC, no zeros at the end of a fraction.
/// 0 = never.
pub(super) fn time(ms: u64) -> String {
    if ms == 0 {
        return NEVER.to_owned();
    }
    let ms = i64::try_from(ms).unwrap_or(i64::MAX);
    jiff::Timestamp::from_millisecond(ms)
        .unwrap_or(jiff::Timestamp::MAX)
        .to_string()
}
