//! What the control plane knows, as people and tools see it.

use std::collections::BTreeMap;
use std::time::SystemTime;

use kplane_model::{Endpoint, EndpointAddr, NodeFacts, NodeName, ServiceName};
use kplane_proto::v1 as pb;

use super::millis;
use super::questions::Answers;
use crate::fleet::{AgentRecord, LatencySummary, holding};
use crate::hub::Hub;
use crate::index::{PortView, ServiceDetail};
use crate::publish::Store;

/// The fleet at this moment.
pub(super) fn fleet(hub: &Hub) -> pb::Fleet {
    let mut records = hub.fleet.records();
    let facts = hub.store.nodes();
    let names: std::collections::BTreeSet<NodeName> =
        records.keys().chain(facts.keys()).cloned().collect();
    let nodes = names.into_iter().filter_map(|name| {
        let record = records.remove(&name);
        let facts = facts.get(&name);
        // A node that was deleted and has no agent is history.
        if record.is_none() && !facts.is_some_and(|f| f.known) {
            return None;
        }
        Some(node_status(hub, &name, record, facts))
    });
    pb::Fleet {
        nodes: nodes.collect(),
        control_plane: Some(control_plane(hub)),
    }
}

/// Nodes by the state of their agent; every state is there.
pub(crate) fn node_states(hub: &Hub) -> BTreeMap<&'static str, usize> {
    let names = [
        "conflict",
        "disconnected",
        "failing",
        "holding",
        "in_sync",
        "no_agent",
        "syncing",
        "unverified",
    ];
    let mut states = BTreeMap::from(names.map(|name| (name, 0)));
    for node in fleet(hub).nodes {
        let name = match node.state() {
            pb::NodeState::InSync => "in_sync",
            pb::NodeState::Syncing => "syncing",
            pb::NodeState::Failing => "failing",
            pb::NodeState::Disconnected => "disconnected",
            pb::NodeState::Unverified => "unverified",
            pb::NodeState::Holding => "holding",
            pb::NodeState::Conflict => "conflict",
            pb::NodeState::NoAgent | pb::NodeState::Unspecified => "no_agent",
        };
        *states.entry(name).or_default() += 1;
    }
    states
}

fn control_plane(hub: &Hub) -> pb::ControlPlaneStatus {
    let summary = hub.summary().borrow().clone();
    let head = *hub.store.head().borrow();
    let age = hub.upstream_age();
    pb::ControlPlaneStatus {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        epoch: hub.store.epoch(),
        revision: head.revision,
        now_ms: millis(SystemTime::now()),
        started_at_ms: millis(hub.started_at),
        revision_at_ms: summary.revision_at.map_or(0, millis),
        source: hub.source.to_owned(),
        synced: head.synced,
        upstream_age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        services: summary.totals.services as u64,
        endpoints: summary.totals.endpoints as u64,
        issues: summary.issues.iter().map(Into::into).collect(),
        ..pb::ControlPlaneStatus::default()
    }
}

/// The state of one node, with the reason when it is not in sync.
struct State {
    state: pb::NodeState,
    since_ms: u64,
    last_error: String,
}

fn node_status(
    hub: &Hub,
    name: &NodeName,
    record: Option<AgentRecord>,
    facts: Option<&NodeFacts>,
) -> pb::NodeStatus {
    let wanted = hub.store.wanted(name);
    let state = match &record {
        None => State {
            state: pb::NodeState::NoAgent,
            since_ms: millis(hub.started_at),
            last_error: "no agent has connected for this node".to_owned(),
        },
        Some(record) => agent_state(&hub.store, record, wanted),
    };
    let facts = facts.cloned().unwrap_or_default();
    pb::NodeStatus {
        name: name.to_string(),
        state: state.state.into(),
        since_ms: state.since_ms,
        last_error: state.last_error,
        wanted_revision: wanted,
        zone: facts.zone.as_deref().unwrap_or_default().to_owned(),
        addresses: facts.addresses.iter().map(ToString::to_string).collect(),
        pod_cidrs: facts.pod_cidrs.iter().map(ToString::to_string).collect(),
        backend: record
            .as_ref()
            .map(|r| r.backend.clone())
            .unwrap_or_default(),
        agent_version: record
            .as_ref()
            .map(|r| r.version.clone())
            .unwrap_or_default(),
        peer: record
            .as_ref()
            .filter(|r| r.connected)
            .map(|r| r.peer.clone())
            .unwrap_or_default(),
        last_heard_ms: record.as_ref().map_or(0, |r| millis(r.last_heard)),
        network_programming: record
            .as_ref()
            .and_then(|r| r.latencies.summary())
            .map(network_programming),
        report: record.and_then(|r| r.report),
    }
}

fn network_programming(latencies: LatencySummary) -> pb::NetworkProgramming {
    pb::NetworkProgramming {
        count: u32::try_from(latencies.count).unwrap_or(u32::MAX),
        last_ms: latencies.last_ms.into(),
        p50_ms: latencies.p50_ms.into(),
        max_ms: latencies.max_ms.into(),
        last_at_ms: millis(latencies.last_at),
    }
}

fn agent_state(store: &Store, record: &AgentRecord, wanted: u64) -> State {
    let state = |state, since_ms, last_error: String| State {
        state,
        since_ms,
        last_error,
    };
    let report = record.report.as_ref();
    if !record.connected {
        let error = "the agent is not connected; the node keeps serving what it held".to_owned();
        return state(pb::NodeState::Disconnected, millis(record.since), error);
    }
    if let Some(report) = report
        && let Some((since_ms, error)) = failure(report)
    {
        return state(pb::NodeState::Failing, since_ms, error);
    }
    if let Some(report) = report
        && let Some(held) = held(report, store.epoch(), wanted)
    {
        return state(
            pb::NodeState::Holding,
            held.since_ms,
            holding::describe(held),
        );
    }
    match report {
        Some(report) if report.epoch == store.epoch() && report.applied_revision >= wanted => {
            state(
                pb::NodeState::InSync,
                millis(record.applied_at),
                String::new(),
            )
        }
        Some(report) if report.epoch == store.epoch() => {
            let since = store
                .changed_after(report.applied_revision)
                .unwrap_or(record.since);
            state(pb::NodeState::Syncing, millis(since), String::new())
        }
        _ => state(pb::NodeState::Syncing, millis(record.since), String::new()),
    }
}

/// What an agent keeps that is in step otherwise, or that does not begin for fear of losing it.
fn held(report: &pb::Report, epoch: u64, wanted: u64) -> Option<&pb::Held> {
    let applied = report.epoch == epoch && report.applied_revision >= wanted;
    let held = report.held.as_ref();
    held.filter(|held| applied || holding::is_untouched(held))
}

/// The worst thing that an agent reports, and since when.
fn failure(report: &pb::Report) -> Option<(u64, String)> {
    if let Some(family) = report.families.iter().find(|f| !f.error.is_empty()) {
        return Some((family.error_since_ms, family.error.clone()));
    }
    let failed = report.failures.iter().filter(|f| !f.degraded);
    let first = failed.clone().min_by_key(|f| f.since_ms)?;
    let more = match failed.count() {
        0 | 1 => String::new(),
        n => format!(" (and {} more)", n - 1),
    };
    Some((first.since_ms, describe_failure(first) + &more))
}

fn describe_failure(failure: &pb::ObjectFailure) -> String {
    let key = failure.key.clone().unwrap_or_default();
    format!(
        "{}/{} {}: {}",
        key.namespace, key.name, key.port_name, failure.reason
    )
}

/// One ServicePort.
pub(super) fn service(store: &Store, view: &PortView) -> pb::ServiceView {
    let port = &view.port;
    let strings = |ips: &[std::net::IpAddr]| ips.iter().map(ToString::to_string).collect();
    pb::ServiceView {
        key: Some((&port.key).into()),
        port: port.port.into(),
        cluster_ip: port.cluster_ip.to_string(),
        external_ips: strings(&port.external_ips),
        load_balancer_ips: strings(&port.load_balancer_ips),
        node_port: port.node_port.unwrap_or(0).into(),
        internal_policy: pb::TrafficPolicy::from(port.internal_policy).into(),
        external_policy: pb::TrafficPolicy::from(port.external_policy).into(),
        affinity_timeout_s: port.affinity_timeout_s.unwrap_or(0),
        source_ranges: port.source_ranges.iter().map(ToString::to_string).collect(),
        health_check_node_port: port.health_check_node_port.unwrap_or(0).into(),
        endpoints: view.endpoints.iter().map(endpoint).collect(),
        revision: store.wanted_of("", &port.key),
        ipvs_scheduler: port
            .ipvs_scheduler
            .map(|scheduler| scheduler.to_string())
            .unwrap_or_default(),
    }
}

fn endpoint(endpoint: &Endpoint) -> pb::EndpointView {
    let strings = |names: &[NodeName]| names.iter().map(ToString::to_string).collect();
    pb::EndpointView {
        address: endpoint.addr.to_string(),
        node: endpoint.node.as_deref().unwrap_or_default().to_owned(),
        ready: endpoint.ready,
        serving: endpoint.serving,
        terminating: endpoint.terminating,
        zone_hints: strings(&endpoint.zone_hints),
        node_hints: strings(&endpoint.node_hints),
    }
}

/// One Service, and what each node holds of it; those with virtual servers have said which.
pub(super) fn description(
    hub: &Hub,
    name: &ServiceName,
    detail: &ServiceDetail,
    mut servers: Answers,
) -> pb::ServiceDescription {
    let records = hub.fleet.records();
    let nodes: BTreeMap<NodeName, NodeFacts> = hub.store.nodes();
    let nodes = nodes
        .values()
        .filter(|node| node.known || records.contains_key(&node.name));
    pb::ServiceDescription {
        ports: detail
            .ports
            .iter()
            .map(|view| service(&hub.store, view))
            .collect(),
        nodes: nodes
            .map(|node| pb::NodeServiceStatus {
                servers: servers.remove(&node.name),
                ..node_service(hub, name, detail, node, records.get(&node.name))
            })
            .collect(),
        issues: detail.issues.iter().map(Into::into).collect(),
        now_ms: millis(SystemTime::now()),
    }
}

fn node_service(
    hub: &Hub,
    name: &ServiceName,
    detail: &ServiceDetail,
    node: &NodeFacts,
    record: Option<&AgentRecord>,
) -> pb::NodeServiceStatus {
    let wanted = detail
        .ports
        .iter()
        .map(|view| hub.store.wanted_of(&node.name, &view.port.key))
        .max();
    let wanted = wanted.unwrap_or(0);
    let report = record.and_then(|r| r.report.as_ref());
    let report = report.filter(|r| r.epoch == hub.store.epoch());
    let applied = report.map_or(0, |r| r.applied_revision);
    let missing = not_programmed(name, record, report, wanted);
    let programmed = missing.is_none();
    let degraded = || {
        let failure = report.and_then(|report| failure_of(name, report, true));
        failure.map(|failure| format!("degraded: {}", failure.reason))
    };
    pb::NodeServiceStatus {
        node: node.name.to_string(),
        programmed,
        reason: missing.or_else(degraded).unwrap_or_default(),
        wanted_revision: wanted,
        applied_revision: applied,
        endpoints: detail
            .ports
            .iter()
            .map(|view| node_endpoints(view, node))
            .collect(),
        last_change: record
            .and_then(|record| record.latencies.of(name))
            .map(|change| pb::ProgrammedChange {
                latency_ms: change.latency_ms.into(),
                at_ms: millis(change.at),
            }),
        servers: None,
    }
}

/// What an agent reports of a Service: that it is not served, or not in every respect.
fn failure_of<'a>(
    name: &ServiceName,
    report: &'a pb::Report,
    degraded: bool,
) -> Option<&'a pb::ObjectFailure> {
    let is_its = |key: &pb::ServiceKey| key.namespace == *name.namespace && key.name == *name.name;
    let mut failures = report.failures.iter().filter(|f| f.degraded == degraded);
    failures.find(|f| f.key.as_ref().is_some_and(is_its))
}

/// Why a node does not hold the newest state of a Service, if it does not.
fn not_programmed(
    name: &ServiceName,
    record: Option<&AgentRecord>,
    report: Option<&pb::Report>,
    wanted: u64,
) -> Option<String> {
    let Some(record) = record else {
        return Some("no agent has connected for this node".to_owned());
    };
    let Some(report) = report else {
        return Some("the agent has not reported to this control plane yet".to_owned());
    };
    if let Some(failure) = failure_of(name, report, false) {
        return Some(failure.reason.clone());
    }
    if report.applied_revision >= wanted {
        return None;
    }
    let behind = format!("applied revision {} of {wanted}", report.applied_revision);
    let family = report.families.iter().find(|f| !f.error.is_empty());
    Some(match (record.connected, family) {
        (false, _) => format!("{behind}; the agent is not connected"),
        (true, Some(family)) => format!("{behind}; {}", family.error),
        (true, None) => behind,
    })
}

fn node_endpoints(view: &PortView, node: &NodeFacts) -> pb::NodeEndpoints {
    let selected = view.on_node(node);
    let strings = |addrs: Option<Vec<EndpointAddr>>| {
        addrs
            .unwrap_or_default()
            .iter()
            .map(ToString::to_string)
            .collect()
    };
    pb::NodeEndpoints {
        key: Some((&view.port.key).into()),
        cluster: strings(selected.cluster),
        local: strings(selected.local),
    }
}
