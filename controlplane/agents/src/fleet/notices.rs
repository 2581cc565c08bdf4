//! What the flight recorder notices about nodes: lost and back, failing and well again, repairs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kplane_desired_state::recorder::{NoticeKind, Recorder};
use kplane_model::NodeName;
use kplane_proto::v1::{FamilyStatus, Report};

/// Time after the start within which all agents connect; that is nothing new.
const START: Duration = Duration::from_secs(60);

fn object(node: &NodeName) -> String {
    format!("Node/{node}")
}

/// Notes that an agent has a stream, unless it had one or the control plane has just started.
pub(super) fn connected(
    recorder: &Recorder,
    node: &NodeName,
    before: Option<bool>,
    peer: &str,
    started_at: Instant,
) {
    let text = match before {
        Some(true) => return,
        Some(false) => format!("the agent is back, at {peer}"),
        None if started_at.elapsed() < START => return,
        None => format!("an agent connected from {peer}"),
    };
    recorder.notice(NoticeKind::NodeConnected, object(node), text);
}

/// Notes that an agent's stream ended.
pub(super) fn lost(recorder: &Recorder, node: &NodeName) {
    let text = "the agent's stream ended; the kernel keeps its state".to_owned();
    recorder.notice(NoticeKind::NodeLost, object(node), text);
}

/// Notes what is new in a report.
pub(super) fn reported(
    recorder: &Recorder,
    node: &NodeName,
    before: Option<&Arc<Report>>,
    now: &Report,
) {
    let was = before.and_then(|before| trouble(before));
    let is = trouble(now);
    match (was.is_some(), is) {
        (false, Some(text)) => recorder.notice(NoticeKind::NodeFailing, object(node), text),
        (true, None) => {
            let text = "nothing fails any more".to_owned();
            recorder.notice(NoticeKind::NodeRecovered, object(node), text);
        }
        (true, Some(_)) | (false, None) => {}
    }
    let Some(before) = before else {
        return;
    };
    let repairs: BTreeMap<i32, u64> =
        before.families.iter().map(|family| (family.family, family.repairs)).collect();
    let is_new = |family: &&FamilyStatus| {
        let known = repairs.get(&family.family).copied().unwrap_or_default();
        family.repairs > known
    };
    for family in now.families.iter().filter(is_new) {
        let text = format!("{}: {}", family.family().as_str_name(), family.last_repair);
        recorder.notice(NoticeKind::Repaired, object(node), text);
    }
}

/// Returns what fails on a node, human-readable.
fn trouble(report: &Report) -> Option<String> {
    let family = report.families.iter().find(|family| !family.error.is_empty());
    if let Some(family) = family {
        return Some(family.error.clone());
    }
    let mut failures = report.failures.iter().filter(|failure| !failure.degraded);
    let first = failures.next()?;
    let key = first.key.as_ref();
    let name = key.map_or_else(String::new, |key| {
        format!("{}/{}: ", key.namespace, key.name)
    });
    Some(match failures.count() {
        0 => format!("{name}{}", first.reason),
        more => format!("{name}{}, and {more} more ServicePorts", first.reason),
    })
}
