//! The bodies of `/healthz` and `/livez` (G4): kube-proxy's fields in kube-proxy's order, with times
//! as Go writes them.

use std::time::Instant;

use serde::Serialize;

use super::{Condition, conditions, is_healthy, stale_since};
use crate::connection::Connection;
use crate::report::{FamilyReport, Report, time};

/// The body of an answer.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct HealthzBody {
    /// The current time when the answer is 200, or else the last time when some family was as desired.
    last_updated: String,
    current_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    status: Families,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    details: Option<Details>,
}

/// The address families. A family that the machine cannot serve is not listed.
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

/// Details that only kplane has.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Details {
    node_known: bool,
    control_plane: ControlPlane,
    /// The time since which no control plane confirms what the node serves.
    #[serde(skip_serializing_if = "Option::is_none")]
    stale_since: Option<String>,
    errors: Errors,
    kernel: Kernel,
    #[serde(skip_serializing_if = "Option::is_none")]
    keeps: Option<Keeps>,
    #[serde(skip_serializing_if = "Option::is_none")]
    frozen: Option<FrozenBody>,
}

/// The operator's order that keeps the node at what it serves.
#[derive(Debug, Serialize)]
struct FrozenBody {
    since: String,
    by: String,
    reason: String,
}

/// The state of the kernel's rules.
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
    /// The last time when the rules were read back and were as desired.
    verified: String,
    /// The number of repairs of other programs' changes since the start.
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

/// Services that are served although the source does not name them (any more). If both numbers are 0,
/// the agent does not know what the kernel serves, and leaves the kernel as it is.
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
    /// The reason why there is no connection.
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

impl HealthzBody {
    /// Builds the state of the proxy, without that of the node.
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
        let last_updated = if healthy { now_ms } else { updated.max().unwrap_or(0) };
        Self {
            last_updated: time(last_updated),
            current_time: time(now_ms),
            node_eligible: None,
            healthy,
            status: Families { v4, v6 },
            details: None,
        }
    }

    /// Sets whether the process works, whatever the state of the rules.
    pub(super) fn set_alive(&mut self, alive: bool) {
        if alive {
            self.last_updated.clone_from(&self.current_time);
        }
        self.healthy = alive;
    }

    /// Sets whether load balancers may use the node; returns true if the answer is 200.
    pub(super) fn add_node(&mut self, eligible: bool) -> bool {
        self.node_eligible = Some(eligible);
        self.healthy && eligible
    }

    /// Adds the details that only kplane has.
    pub(super) fn add_details(&mut self, report: &Report, connection: Connection) {
        let [v4, v6] = report.families.each_ref().map(|family| {
            let error = family.error.as_ref()?;
            Some(error.reason.clone())
        });
        let stale_since = stale_since(report, &connection).map(time);
        self.details = Some(Details {
            node_known: report.node.is_some_and(|node| node.known),
            control_plane: ControlPlane {
                connected: connection.live,
                since: time(connection.since_ms),
                reason: connection.reason,
            },
            stale_since,
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
            frozen: connection.frozen.map(|order| FrozenBody {
                since: time(order.since_ms),
                by: order.by,
                reason: order.reason,
            }),
        });
    }

    pub(super) fn to_json(&self) -> String {
        // The value has only text, numbers and fixed keys, so nothing can fail.
        serde_json::to_string(self).unwrap_or_default()
    }
}
