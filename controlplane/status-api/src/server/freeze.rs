//! `Freeze`: an operator freezes nodes, or thaws them.

use kplane_desired_state::publish::Store;
use std::time::SystemTime;

use kplane_agents::hub::Hub;
use kplane_agents::identity::{Caller, Right};
use kplane_agents::overrides::{MAX_OVERRIDES, MAX_REASON, Scope, Unchanged, Wish};
use kplane_agents::streams::is_node_name;
use kplane_model::NodeName;
use kplane_proto::v1 as pb;
use tonic::Status;
use tracing::info;

use super::pages::Snapshot;
use super::{millis, operator};

/// Puts an order in force, and writes it down.
pub(super) async fn freeze(
    hub: &Hub,
    caller: Option<&Caller>,
    request: pb::FreezeRequest,
) -> Result<pb::FreezeResponse, Status> {
    let nodes = check(hub, &request)?;
    let scopes = if request.all {
        vec![Scope::All]
    } else {
        nodes.iter().cloned().map(Scope::Node).collect()
    };
    let by = operator(caller);
    let wish = Wish {
        scopes,
        frozen: !request.thaw,
        by: by.clone(),
        at_ms: millis(SystemTime::now()),
        reason: request.reason.clone(),
    };
    let changed = hub.overrides().order(&wish).await;
    changed.map_err(|why| refusal(&why))?;
    let what = if request.thaw { "thawed" } else { "froze" };
    let whom = if request.all { "all nodes".to_owned() } else { nodes.join(", ") };
    info!(by, nodes = whom, reason = request.reason, "{what} nodes");
    if let Some(caller) = caller {
        let text = format!("{what} {whom}: {:?}", request.reason);
        caller.did(&Right::Act, &text);
    }
    Ok(pb::FreezeResponse {
        nodes,
        frozen: frozen(hub) as u64,
    })
}

/// Returns the number of known nodes that are frozen.
fn frozen(hub: &Hub) -> usize {
    let snapshot = Snapshot::now(hub);
    snapshot
        .nodes()
        .filter(|(name, ..)| hub.overrides().frozen(name).is_some())
        .count()
}

/// Returns the answer to an order that is not in force, or perhaps is.
fn refusal(why: &Unchanged) -> Status {
    if why.is_unsure() {
        Status::unavailable(why.to_string())
    } else {
        Status::failed_precondition(format!(
            "the order cannot be kept, so nothing changed: {why}"
        ))
    }
}

/// Checks the reason that an operator gave.
fn check_reason(reason: &str) -> Result<(), Status> {
    if reason.len() > MAX_REASON || reason.chars().any(char::is_control) {
        return Err(Status::invalid_argument(format!(
            "the reason must be one line of at most {MAX_REASON} bytes"
        )));
    }
    Ok(())
}

/// Checks a request; returns the nodes that it names.
fn check(hub: &Hub, request: &pb::FreezeRequest) -> Result<Vec<String>, Status> {
    let ways = [
        request.all,
        !request.nodes.is_empty(),
        !request.zone.is_empty(),
    ];
    if ways.iter().filter(|way| **way).count() != 1 {
        return Err(Status::invalid_argument(
            "select nodes by exactly one of: names, a zone, all",
        ));
    }
    check_reason(&request.reason)?;
    if request.all {
        return Ok(Vec::new());
    }
    let mut nodes = match request.zone.as_str() {
        "" => request.nodes.clone(),
        zone => in_zone(hub.store(), zone)?,
    };
    nodes.sort();
    nodes.dedup();
    if nodes.len() > MAX_OVERRIDES {
        return Err(Status::invalid_argument(format!(
            "these are more than {MAX_OVERRIDES} nodes; use --all"
        )));
    }
    for name in &nodes {
        let node = NodeName::from(name.as_str());
        if !is_node_name(name) {
            return Err(Status::invalid_argument(format!(
                "{name:?} is not the name of a Node"
            )));
        }
        if !request.thaw && hub.lacks_node(&node) {
            return Err(Status::not_found(format!(
                "the cluster has no Node {name:?}"
            )));
        }
    }
    Ok(nodes)
}

fn in_zone(store: &Store, zone: &str) -> Result<Vec<String>, Status> {
    let nodes = store.nodes().into_iter();
    let its = nodes.filter(|(_, facts)| facts.known && facts.zone.as_deref() == Some(zone));
    let names: Vec<String> = its.map(|(name, _)| name.to_string()).collect();
    if names.is_empty() {
        Err(Status::not_found(format!(
            "no Node is in the zone {zone:?}"
        )))
    } else {
        Ok(names)
    }
}
