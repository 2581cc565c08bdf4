//! One Service on the nodes that handle a packet, or receive it.

use std::collections::BTreeSet;
use std::sync::Arc;

use kplane_agents::hub::Hub;
use kplane_agents::peers::Collected;
use kplane_desired_state::publish::Followed;
use kplane_model::{NodeFacts, NodeName, ServiceName};
use kplane_proto::v1 as pb;
use tonic::Status;

use super::description::stranger;
use super::pages::{Node, Snapshot};
use super::request::unknown_node;
use super::service_on_node::{ServiceOnNode, Standings};
use crate::findings;

/// A node that handles packets for a Service.
pub(super) struct OnNode {
    pub(super) facts: Arc<NodeFacts>,
    /// The Service's state there.
    pub(super) service_on_node: ServiceOnNode,
    /// The agent's latest words about each family.
    pub(super) families: Vec<pb::FamilyStatus>,
    /// The facts of all nodes.
    pub(super) all: Vec<Arc<NodeFacts>>,
}

/// Returns a node, the only one if `wanted` is empty.
pub(super) fn on_node(
    hub: &Hub,
    service: &ServiceName,
    wanted: &str,
    others: &Collected,
) -> Result<OnNode, Status> {
    let snapshot = Snapshot::with(hub, others);
    let mut followed = Followed::new(service.clone());
    hub.store().follow(&mut followed);
    let standings = Standings::new(hub, &followed, others);
    let mut nodes = snapshot.nodes();
    let found = match wanted {
        "" => match (nodes.next(), nodes.next()) {
            (Some(node), None) => Ok(node),
            _ => Err(Status::invalid_argument(
                "there are several nodes: say which one handles the packet (--via NODE)",
            )),
        },
        wanted => nodes.find(|(name, _)| ***name == *wanted).ok_or_else(|| unknown_node(wanted)),
    };
    let (name, node) = found?;
    let here = node.record.as_ref().and_then(|record| record.report.as_deref());
    let there = node
        .elsewhere
        .and_then(|elsewhere| elsewhere.agent.status.as_ref()?.report.as_ref());
    let families = there.or(here).map(|report| report.families.clone());
    let facts = |name, node: &Node<'_>| node.facts.clone().unwrap_or_else(|| stranger(name));
    Ok(OnNode {
        facts: facts(name, node),
        all: snapshot.nodes().map(|(name, node)| facts(name, node)).collect(),
        service_on_node: standings.of(name, node),
        families: families.unwrap_or_default(),
    })
}

/// Returns what stands in the way of packets on these nodes.
pub(super) fn around(
    hub: &Hub,
    service: &ServiceName,
    nodes: &BTreeSet<NodeName>,
    others: &Collected,
) -> Vec<pb::Finding> {
    let snapshot = Snapshot::with(hub, others);
    let followed = Followed::new(service.clone());
    let standings = Standings::new(hub, &followed, others);
    let reported: Vec<_> = snapshot
        .nodes()
        .filter(|(name, _)| nodes.contains(*name))
        .map(|(name, node)| (name, standings.of(name, node).around))
        .collect();
    findings::host_findings(reported.iter().map(|(name, around)| (*name, around.as_slice())))
}
