//! The Services that change most, and the slowest nodes of this replica.

use std::cmp::Reverse;
use std::time::SystemTime;

use kplane_fleet::fleet::AgentRecord;
use kplane_fleet::hub::Hub;
use kplane_model::NodeName;
use kplane_proto::v1 as pb;

use super::super::lag::report_of;
use super::super::millis;
use super::limit;

/// Number of lines, unless the question says otherwise, and the largest number.
const LINES: (usize, usize) = (10, 100);

/// Returns the answer.
pub(super) fn top(hub: &Hub, asked: u32) -> pb::Top {
    let limit = limit(asked, LINES);
    let (busiest, since_ms) = hub.recorder.busiest(limit);
    let services = busiest.into_iter().map(|busy| pb::BusyService {
        namespace: busy.service.namespace.to_string(),
        name: busy.service.name.to_string(),
        changes: busy.changes,
        last_ms: busy.last_ms,
        endpoints: busy.endpoints,
    });
    let records = hub.fleet.records();
    let nodes = records.iter().map(|(node, record)| slow(hub, node, record));
    let mut nodes: Vec<_> = nodes.collect();
    nodes.sort_by_cached_key(|slow| {
        let slowest = Reverse((slow.lag_ms, slow.p50_ms, slow.sync_us));
        (slowest, slow.node.clone())
    });
    nodes.truncate(limit);
    pb::Top {
        services: services.collect(),
        nodes,
        now_ms: millis(SystemTime::now()),
        since_ms,
    }
}

fn slow(hub: &Hub, node: &NodeName, record: &AgentRecord) -> pb::SlowNode {
    let report = report_of(&hub.store, Some(record));
    let applied = report.map_or(0, |report| report.applied_revision);
    let wanted = hub.store.wanted(node);
    let lacks = (applied < wanted).then(|| hub.store.changed_after(applied));
    let lag = lacks.flatten().map(|since| since.elapsed());
    let latency = record.latencies.summary();
    let sync = report.and_then(|report| report.last_sync.as_ref());
    pb::SlowNode {
        node: node.to_string(),
        behind: wanted.saturating_sub(applied),
        lag_ms: lag.map_or(0, |lag| u64::try_from(lag.as_millis()).unwrap_or(u64::MAX)),
        p50_ms: latency.as_ref().map_or(0, |latency| latency.p50_ms.into()),
        max_ms: latency.as_ref().map_or(0, |latency| latency.max_ms.into()),
        sync_us: sync.map_or(0, |sync| sync.total_us),
    }
}
