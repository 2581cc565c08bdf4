//! What differs between two nodes, or between a node's desired state and its kernel.

use std::collections::BTreeMap;
use std::slice;
use std::time::SystemTime;

use kplane_fleet::hub::Hub;
use kplane_fleet::peers::Collected;
use kplane_model::{LocalEndpoints, NodeFacts, ServiceName, ServiceProgram};
use kplane_picture::index::Details;
use kplane_picture::publish::{Compared, Pair};
use kplane_proto::v1 as pb;
use kplane_proto::v1::diff_request::Question;
use tonic::Status;

use super::super::millis;
use super::super::pages::Picture;
use super::super::request::unknown_node;
use super::wire;

mod kernel;

/// Maximum number of Services in an answer.
const SERVICES: usize = 1_000;

/// Answers the question.
pub(super) fn diff(
    hub: &Hub,
    others: &Collected,
    request: pb::DiffRequest,
) -> Result<pb::Diff, Status> {
    let mut answer = match request.question {
        Some(Question::Nodes(nodes)) => two_nodes(hub, &nodes)?,
        Some(Question::KernelOf(node)) => {
            let picture = Picture::with(hub, others);
            kernel::kernel(hub, picture.only(&node), &node)?
        }
        None => {
            let text = "nothing to compare is named: two nodes or one node";
            return Err(Status::invalid_argument(text));
        }
    };
    let listed = answer.services.len().min(SERVICES);
    answer.omitted += (answer.services.len() - listed) as u64;
    answer.services.truncate(listed);
    answer.now_ms = millis(SystemTime::now());
    Ok(answer)
}

fn two_nodes(hub: &Hub, asked: &pb::TwoNodes) -> Result<pb::Diff, Status> {
    let nodes = hub.store.nodes();
    let facts = |name: &str| {
        let facts = nodes.iter().find(|(node, _)| ***node == *name);
        facts
            .map(|(_, facts)| facts)
            .ok_or_else(|| unknown_node(name))
    };
    let sides = [facts(&asked.left)?, facts(&asked.right)?];
    let compared = hub.store.compare_nodes(&asked.left, &asked.right);
    let zone = |node: &NodeFacts| match node.zone.as_deref() {
        Some(zone) => format!("node {} in zone {zone}", node.name),
        None => format!("node {} without a zone", node.name),
    };
    let (services, equal) = services(compared);
    Ok(pb::Diff {
        left: zone(sides[0]),
        right: zone(sides[1]),
        services,
        equal,
        notes: facts_that_differ(sides[0], sides[1]),
        ..pb::Diff::default()
    })
}

/// Returns why a ServicePort differs.
fn reason(pair: &Pair) -> String {
    let mut reasons = Vec::new();
    if pair.programs[0] != pair.programs[1] {
        reasons.push(match pair.by_node {
            true => "topology hints name single nodes",
            false => "topology hints name zones, and the nodes are in different ones",
        });
    }
    if pair.local[0] != pair.local[1] {
        reasons.push("a traffic policy is Local, so the endpoints on the node count");
    }
    reasons.join("; ")
}

/// Returns the settings of the nodes themselves that differ.
fn facts_that_differ(left: &NodeFacts, right: &NodeFacts) -> Vec<String> {
    let mut notes = Vec::new();
    if left.eligible != right.eligible {
        let out = if left.eligible { right } else { left };
        notes.push(format!(
            "{} is excluded from load balancers, or being deleted",
            out.name
        ));
    }
    for node in [left, right] {
        if !node.known {
            notes.push(format!("there is no Node object {}", node.name));
        }
    }
    notes
}

/// Returns the Services that differ, and the number of those that do not.
fn services(compared: Compared) -> (Vec<pb::ServiceDiff>, u64) {
    let mut services: BTreeMap<ServiceName, pb::ServiceDiff> = BTreeMap::new();
    for (key, pair) in compared.differ {
        let details = details(&pair);
        let name = key.service.clone();
        let diff = services.entry(name.clone()).or_default();
        diff.namespace = name.namespace.to_string();
        diff.name = name.name.to_string();
        diff.fields.extend(wire::fields(&details));
        diff.endpoints.extend(wire::endpoints(&details));
        diff.omitted += details.omitted;
        if diff.reason.is_empty() {
            diff.reason = reason(&pair);
        }
    }
    (services.into_values().collect(), compared.equal as u64)
}

fn details(pair: &Pair) -> Details {
    let mut details = Details::default();
    let [left, right] = &pair.programs;
    details.compare_ports(slice::from_ref(&left.port), slice::from_ref(&right.port));
    let chosen = |program: &ServiceProgram, local: &Option<LocalEndpoints>| {
        let mut chosen = program.endpoints.clone();
        if program.port.uses_local_endpoints()
            && let Some(local) = local
        {
            chosen.extend(local.selected());
            chosen.sort_unstable();
            chosen.dedup();
        }
        chosen
    };
    let [local_left, local_right] = &pair.local;
    details.compare_chosen(&chosen(left, local_left), &chosen(right, local_right));
    details
}
