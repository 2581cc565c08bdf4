//! Human-readable views of the control plane's state.

use std::time::{Duration, Instant, SystemTime};

use kplane_agents::fleet::{AgentRecord, LatencySummary, holding};
use kplane_agents::hub::Hub;
use kplane_agents::peers::Collected;
use kplane_desired_state::index::{Held, PortView};
use kplane_desired_state::k8s::Kind;
use kplane_desired_state::publish::Store;
use kplane_model::{Endpoint, Issue, NodeFacts, NodeName, ObjectRef, Reason};
use kplane_proto::v1 as pb;

use super::issues::Issues;
use super::{confidence, millis, wall_ms};

/// Time without a comparison after which a kernel's state counts as unknown. An agent compares every five minutes
/// and reports that; this is three times as long.
pub(super) const UNVERIFIED_AFTER: Duration = Duration::from_secs(15 * 60);

/// Returns the control plane's status, with as many problems of its input as fit into an answer.
pub(super) fn control_plane(hub: &Hub, others: &Collected) -> pb::ControlPlaneStatus {
    let summary = hub.index().summary().borrow().clone();
    let (head, replica) = (*hub.store().head().borrow(), hub.replica());
    let age = hub.upstream_age();
    let mut issues = hub.issues().to_vec();
    issues.splice(..0, disagreement(hub.store().enforcement(), others));
    let issues = Issues::bounded(&issues);
    let trust = hub.store().trust();
    pb::ControlPlaneStatus {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        epoch: hub.store().epoch(),
        revision: head.revision,
        now_ms: millis(SystemTime::now()),
        started_at_ms: wall_ms(replica.started_at),
        revision_at_ms: summary.revision_at.map_or(0, wall_ms),
        source: replica.source.to_owned(),
        synced: head.synced,
        upstream_age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        services: summary.totals.services as u64,
        endpoints: summary.totals.endpoints as u64,
        policies: summary.totals.policies as u64,
        issues: issues.listed,
        issues_omitted: issues.omitted,
        errors: issues.errors,
        warnings: issues.warnings,
        held: summary.held.as_deref().map(held),
        confidence: confidence(&trust).into(),
        doubt: trust.doubt().to_owned(),
        plain_text_ports: replica.plain_text_ports.get().cloned().unwrap_or_default(),
        enforcement: hub.store().enforcement().into(),
        cluster_policies_absent: hub.upstream().is_absent(Kind::ClusterNetworkPolicy),
    }
}

/// Returns the issue of the first replica that says something else about NetworkPolicies than this one: nodes would enforce
/// them or not, by the replica that they are connected to.
pub(super) fn disagreement(ours: pb::Enforcement, others: &Collected) -> Option<Issue> {
    let word = |said| match said {
        pb::Enforcement::Unspecified => "without --network-policy",
        pb::Enforcement::Off => "with --network-policy=off",
        pb::Enforcement::On | pb::Enforcement::Unread => "with --network-policy",
    };
    let ours = word(ours);
    let mut theirs = others.answers.iter().map(|answer| (answer.address, word(answer.enforcement)));
    let (address, theirs) = theirs.find(|(_, theirs)| *theirs != ours)?;
    let replica = ObjectRef::new("replica", "", address.to_string());
    let reason = format!(
        "was started {theirs}, and the replica that was asked {ours}: what a node enforces depends on its replica; start all \
         with the same flag"
    );
    Some(Issue::error(Reason::ReplicasDiffer, replica, reason))
}

fn held(held: &Held) -> pb::Held {
    pb::Held {
        services: held.services as u64,
        without_endpoints: held.without_endpoints as u64,
        policies: held.policies as u64,
        reason: held.reason.to_string(),
        since_ms: millis(held.since),
        examples: held.examples.iter().map(ToString::to_string).collect(),
    }
}

/// Returns the result of an approval.
pub(super) fn approved(
    released: Option<&Held>,
    doubt: String,
    nodes: &[NodeName],
    revision: u64,
) -> pb::ApproveResponse {
    pb::ApproveResponse {
        released: released.map(held),
        doubt,
        nodes: nodes.iter().map(ToString::to_string).collect(),
        revision,
        missing_replicas: Vec::new(),
    }
}

/// The state of one node, with the reason when it is not in sync.
pub(super) struct State {
    pub(super) state: pb::NodeState,
    pub(super) since_ms: u64,
    pub(super) last_error: String,
}

/// Returns the state of one node that must hold revision `wanted`.
pub(super) fn node_state(
    hub: &Hub,
    name: &NodeName,
    record: Option<&AgentRecord>,
    wanted: u64,
    stranger: Option<&str>,
) -> State {
    match record {
        None => State {
            state: pb::NodeState::NoAgent,
            since_ms: wall_ms(hub.replica().started_at),
            last_error: "no agent has connected for this node".to_owned(),
        },
        Some(record) => {
            let state = agent_state(hub.store(), record, wanted, stranger);
            if state.is_healthy()
                && let Some(order) = hub.overrides().frozen(name)
            {
                State {
                    state: pb::NodeState::Frozen,
                    since_ms: order.at_ms,
                    last_error: order.to_string(),
                }
            } else {
                state
            }
        }
    }
}

impl State {
    fn is_healthy(&self) -> bool {
        matches!(self.state, pb::NodeState::Syncing | pb::NodeState::InSync)
    }
}

/// Returns the status of one node, with or without an agent.
pub(super) fn node_status(
    hub: &Hub,
    name: &NodeName,
    record: Option<&AgentRecord>,
    facts: Option<&NodeFacts>,
    stranger: Option<&str>,
) -> pb::NodeStatus {
    let wanted = hub.store().wanted(name);
    let mut state = node_state(hub, name, record, wanted, stranger);
    if let Some(suspicion) = hub.suspects().of(name) {
        let other = std::mem::take(&mut state.last_error);
        let parts = [suspicion, other].into_iter().filter(|part| !part.is_empty());
        state.last_error = parts.collect::<Vec<_>>().join("; ");
    }
    let facts = facts.cloned().unwrap_or_default();
    pb::NodeStatus {
        name: name.to_string(),
        state: state.state.into(),
        since_ms: state.since_ms,
        last_error: state.last_error,
        wanted_revision: wanted,
        zone: facts.zone.as_deref().unwrap_or_default().to_owned(),
        addresses: strings(&facts.addresses),
        pod_cidrs: strings(&facts.pod_cidrs),
        backend: record.map(|r| r.backend.clone()).unwrap_or_default(),
        agent_version: record.map(|r| r.version.clone()).unwrap_or_default(),
        peer: record.filter(|r| r.connected).map(|r| r.peer.clone()).unwrap_or_default(),
        last_heard_ms: record.map_or(0, |r| wall_ms(r.last_heard)),
        network_programming: record.and_then(|r| r.latencies.summary()).map(network_programming),
        report: record.and_then(AgentRecord::local_report),
        frozen: hub.overrides().frozen(name).map(Into::into),
        // The replica that asks knows where the answer comes from.
        replica: String::new(),
        epoch: 0,
    }
}

/// Returns the first of a node's addresses or ranges as text.
fn strings<T: ToString>(all: &[T]) -> Vec<String> {
    /// Maximum number of entries: a node has a few, but its author may write thousands.
    const SHOWN: usize = 64;
    all.iter().take(SHOWN).map(ToString::to_string).collect()
}

fn network_programming(latencies: LatencySummary) -> pb::NetworkProgramming {
    pb::NetworkProgramming {
        count: u32::try_from(latencies.count).unwrap_or(u32::MAX),
        last_ms: latencies.last_ms.into(),
        p50_ms: latencies.p50_ms.into(),
        max_ms: latencies.max_ms.into(),
        last_at_ms: wall_ms(latencies.last_at),
    }
}

fn agent_state(store: &Store, record: &AgentRecord, wanted: u64, stranger: Option<&str>) -> State {
    let state = |state, since_ms, last_error: String| State {
        state,
        since_ms,
        last_error,
    };
    let report = record.report.as_deref();
    if !record.connected {
        let error = "the agent is not connected; the node keeps serving its last state".to_owned();
        return state(pb::NodeState::Disconnected, wall_ms(record.since), error);
    }
    let competing_agent = record.competing_agent.as_ref();
    if let Some(competing_agent) =
        competing_agent.filter(|competing_agent| competing_agent.is_there(Instant::now()))
    {
        let error = format!(
            "two agents have the name of this node: the agent at {} is accepted, and the agent at \
             {} is refused; give one of them its own --node-name, or stop it",
            record.peer, competing_agent.peer
        );
        return state(
            pb::NodeState::Conflict,
            wall_ms(competing_agent.since),
            error,
        );
    }
    if let Some(report) = report
        && let Some((since_ms, error)) = failure(report)
    {
        let since_ms = record.local_ms(since_ms);
        return state(pb::NodeState::Failing, since_ms, error);
    }
    if let Some(reason) = stranger {
        let since = wall_ms(record.since);
        return state(pb::NodeState::Failing, since, reason.to_owned());
    }
    if let Some(report) = report
        && let Some(held) = held_by_agent(report, store.epoch(), wanted)
    {
        return state(
            pb::NodeState::Holding,
            record.local_ms(held.since_ms),
            holding::describe(held),
        );
    }
    match report {
        Some(report) if report.epoch == store.epoch() && report.applied_revision >= wanted => {
            if let Some(error) = unverified(record, Instant::now()) {
                return state(
                    pb::NodeState::Unverified,
                    wall_ms(record.verified_at),
                    error,
                );
            }
            state(
                pb::NodeState::InSync,
                wall_ms(record.applied_at),
                String::new(),
            )
        }
        Some(report) if report.epoch == store.epoch() => {
            let since = store.changed_after(report.applied_revision).unwrap_or(record.since);
            state(pb::NodeState::Syncing, wall_ms(since), String::new())
        }
        _ => state(pb::NodeState::Syncing, wall_ms(record.since), String::new()),
    }
}

/// Returns the reason why the state of a node's kernel is unknown, if it is.
fn unverified(record: &AgentRecord, now: Instant) -> Option<String> {
    let report = record.report.as_deref()?;
    let overdue = report.families.iter().any(|family| family.verification_overdue);
    let silent = record.unverified_for(now).filter(|age| *age >= UNVERIFIED_AFTER);
    (overdue || silent.is_some()).then(|| {
        "the agent has not verified its kernel for too long; read the agent's log".to_owned()
    })
}

/// Returns the objects that an agent holds. Only agents count that are otherwise in sync, or that do not start for
/// fear of losing these objects.
fn held_by_agent(report: &pb::Report, epoch: u64, wanted: u64) -> Option<&pb::Held> {
    let applied = report.epoch == epoch && report.applied_revision >= wanted;
    let held = report.held.as_ref();
    held.filter(|held| applied || holding::is_untouched(held))
}

/// Returns the worst failure that an agent reports, and its start.
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
    let Some(key) = &failure.key else {
        return failure.reason.clone();
    };
    format!(
        "{}/{} {}: {}",
        key.namespace, key.name, key.port_name, failure.reason
    )
}

/// Returns the view of one ServicePort.
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
        proxied: port.proxied.map(Into::into),
        finding: None,
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

/// Returns the latest publications.
pub(super) fn history(store: &Store) -> pb::History {
    let points = store.points().into_iter().map(|point| pb::HistoryPoint {
        revision: point.revision,
        at_ms: millis(point.at),
        changes: point.changes,
    });
    pb::History {
        points: points.collect(),
        now_ms: millis(SystemTime::now()),
        ..pb::History::default()
    }
}
