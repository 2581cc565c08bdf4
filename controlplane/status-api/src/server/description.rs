//! The description of one Service: its ports, its state on each node, and what is wrong.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use kplane_agents::hub::Hub;
use kplane_agents::peers::Collected;
use kplane_desired_state::index::{PortView, ServiceDetail};
use kplane_desired_state::publish::Followed;
use kplane_model::{EndpointAddr, NodeFacts, NodeName, ServiceName};
use kplane_proto::v1 as pb;

use super::convergence::convergence;
use super::issues::Issues;
use super::millis;
use super::pages::Snapshot;
use super::service_on_node::{ServiceOnNode, Standings};
use super::views::service;
use crate::findings::{self, Finding, Place};

/// Returns one Service and its state on each node, with the virtual servers that agents reported, and a finding about
/// NetworkPolicies.
pub(super) fn description(
    hub: &Hub,
    name: &ServiceName,
    detail: &ServiceDetail,
    (mut servers, isolated): (BTreeMap<NodeName, pb::ServiceServers>, Option<Finding>),
    others: &Collected,
) -> pb::ServiceDescription {
    let snapshot = Snapshot::with(hub, others);
    let mut followed = Followed::new(name.clone());
    let convergence = convergence(hub, &mut followed, others);
    let standings = Standings::new(hub, &followed, others);
    let nodes: Vec<_> = snapshot
        .nodes()
        .map(|(name, node)| {
            let facts = node.facts.clone().unwrap_or_else(|| stranger(name));
            (facts, standings.of(name, node))
        })
        .collect();
    pb::ServiceDescription {
        findings: findings_of(name, detail, isolated, &nodes),
        ports: detail.ports.iter().map(|view| service(hub.store(), view)).collect(),
        nodes: nodes
            .into_iter()
            .map(|(facts, service_on_node)| pb::NodeServiceStatus {
                servers: servers.remove(&facts.name),
                ..node_service(service_on_node, detail, &facts)
            })
            .collect(),
        issues: Issues::bounded(&detail.issues).listed,
        now_ms: millis(SystemTime::now()),
        convergence: Some(convergence),
    }
}

/// Returns the causes and fixes, the worst first.
fn findings_of(
    name: &ServiceName,
    detail: &ServiceDetail,
    isolated: Option<Finding>,
    nodes: &[(Arc<NodeFacts>, ServiceOnNode)],
) -> Vec<pb::Finding> {
    let names: Vec<_> = nodes.iter().map(|(facts, _)| facts.name.clone()).collect();
    let mut found = findings::of_service(name, detail, &names);
    if !detail.ports.is_empty() {
        found.extend(findings::of_fleet(nodes.iter().map(
            |(facts, service_on_node)| Place {
                node: &facts.name,
                lag: service_on_node.lag.as_ref().map(|lag| (lag.state, lag.reason.as_str())),
                degraded: &service_on_node.degraded,
            },
        )));
        let announced = nodes
            .iter()
            .map(|(facts, service_on_node)| (&facts.name, service_on_node.avoided.as_slice()));
        found.extend(findings::avoided(name, &detail.ports, announced));
        let ended = nodes.iter().filter_map(|(facts, on)| Some((&facts.name, on.ended.as_ref()?)));
        found.extend(findings::ended(ended));
        found.extend(isolated);
        found.sort_by_key(|finding| Reverse(finding.severity));
    }
    let mut found: Vec<_> = found.iter().map(Finding::to_wire).collect();
    if !detail.ports.is_empty() {
        let all = nodes.iter();
        let around = findings::host_findings(all.map(|(facts, of)| (&facts.name, &*of.around)));
        let errors = around.into_iter().filter(|finding| finding.severity() == pb::Severity::Error);
        found.splice(0..0, errors);
    }
    found
}

/// Returns facts for a node without a Node object.
pub(super) fn stranger(name: &NodeName) -> Arc<NodeFacts> {
    Arc::new(NodeFacts {
        name: name.clone(),
        ..NodeFacts::default()
    })
}

fn node_service(
    service_on_node: ServiceOnNode,
    detail: &ServiceDetail,
    node: &NodeFacts,
) -> pb::NodeServiceStatus {
    let programmed = service_on_node.lag.is_none();
    let reason = match service_on_node.lag {
        Some(lag) => lag.reason,
        None if service_on_node.degraded.is_empty() => String::new(),
        None => format!("degraded: {}", service_on_node.degraded),
    };
    pb::NodeServiceStatus {
        node: node.name.to_string(),
        programmed,
        reason,
        wanted_revision: service_on_node.wanted,
        applied_revision: service_on_node.applied,
        endpoints: detail.ports.iter().map(|view| node_endpoints(view, node)).collect(),
        last_change: service_on_node.last_change,
        servers: None,
    }
}

fn node_endpoints(view: &PortView, node: &NodeFacts) -> pb::NodeEndpoints {
    let selected = view.on_node(node);
    let strings = |addrs: Option<Vec<EndpointAddr>>| {
        addrs.unwrap_or_default().iter().map(ToString::to_string).collect()
    };
    pb::NodeEndpoints {
        key: Some((&view.port.key).into()),
        cluster: strings(selected.cluster),
        local: strings(selected.local),
    }
}
