//! What a node should hold, and what its kernel holds, as far as its agent reported.

use std::collections::BTreeMap;
use std::time::SystemTime;

use kplane_agents::hub::Hub;
use kplane_agents::peers::Collected;
use kplane_proto::v1 as pb;
use tonic::Status;

use super::super::millis;
use super::super::pages::Snapshot;
use super::super::request::unknown_node;

/// Maximum number of Services in an answer.
const SERVICES: usize = 1_000;

/// Answers the question from the node's status, which may come from another replica.
pub(super) fn diff(hub: &Hub, others: &Collected, node: &str) -> Result<pb::Diff, Status> {
    if node.is_empty() {
        return Err(Status::invalid_argument(
            "name the node whose kernel is meant",
        ));
    }
    let page = Snapshot::with(hub, others).only(node);
    let status = page.nodes.first().ok_or_else(|| unknown_node(node))?;
    let Some(report) = &status.report else {
        return Err(Status::not_found(format!(
            "the agent of node {node} has not reported to this control plane: kpctl describe node {node}"
        )));
    };
    let mut services: BTreeMap<(String, String), pb::ServiceDiff> = BTreeMap::new();
    let mut note = |key: (String, String), reason: String| {
        let diff = services.entry(key.clone()).or_default();
        (diff.namespace, diff.name) = key;
        if diff.reason.is_empty() {
            diff.reason = reason;
        }
    };
    for failure in &report.failures {
        if let Some(key) = &failure.key {
            let what = if failure.degraded {
                "it is not served in every respect"
            } else {
                "it is not served as desired"
            };
            let reason = format!("{what}: {}", failure.reason);
            note((key.namespace.clone(), key.name.clone()), reason);
        }
    }
    let mut notes = Vec::new();
    if report.epoch == hub.store().epoch() {
        let pending = hub.store().pending(node, report.applied_revision, SERVICES);
        for (service, revision) in pending {
            let reason = format!(
                "the kernel holds revision {}, and it changed with revision {revision}",
                report.applied_revision
            );
            note(
                (service.namespace.to_string(), service.name.to_string()),
                reason,
            );
        }
    } else if report.applied_revision < status.wanted_revision {
        notes.push(format!(
            "The node lacks revisions {} to {} of the replica that serves it. Ask that replica for the Services.",
            report.applied_revision + 1,
            status.wanted_revision
        ));
    }
    notes.extend(about(report));
    let total = hub.index().summary().borrow().totals.services;
    Ok(pb::Diff {
        left: format!(
            "what node {node} should hold: revision {}",
            status.wanted_revision
        ),
        right: format!(
            "its kernel: revision {} applied, revision {} read back",
            report.applied_revision, report.verified_revision
        ),
        equal: total.saturating_sub(services.len()) as u64,
        omitted: services.len().saturating_sub(SERVICES) as u64,
        services: services.into_values().take(SERVICES).collect(),
        notes,
        now_ms: millis(SystemTime::now()),
    })
}

/// Returns what the agent says about the kernel besides Services.
fn about(report: &pb::Report) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some(held) = &report.held {
        notes.push(format!(
            "The kernel also serves {} Services that the control plane does not name.",
            held.services
        ));
    }
    for family in &report.families {
        let name = match family.family() {
            pb::Family::Ipv6 => "IPv6",
            _ => "IPv4",
        };
        if !family.error.is_empty() {
            notes.push(format!("{name} fails: {}", family.error));
        }
        if family.repairs > 0 {
            notes.push(format!(
                "{name}: {} repairs of changes by other programs, the last one: {}",
                family.repairs, family.last_repair
            ));
        }
        if family.verification_overdue {
            notes.push(format!(
                "{name}: the agent has not read the kernel back for too long, so its state is unknown."
            ));
        }
    }
    notes
}
