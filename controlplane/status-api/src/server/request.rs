//! What requests have in common: the names in them, what they cost, and how often watches answer.

use std::time::Duration;

use kplane_agents::hub::{Hub, IndexHandle};
use kplane_agents::identity::Caller;
use kplane_desired_state::index::ServiceDetail;
use kplane_model::ServiceName;
use tonic::{Request, Status};

/// Minimum time between two answers of a watch.
pub(super) const WATCH_PAUSE: Duration = Duration::from_millis(100);
/// Maximum time between two answers of a watch, so that ages stay current.
pub(super) const WATCH_REFRESH: Duration = Duration::from_secs(2);

/// Longest name of an object, in bytes: a DNS subdomain (RFC 1123), as in the API server.
pub(super) const MAX_NAME: usize = 253;

/// Number of objects in an answer that cost as much as the question itself.
const OBJECTS_FOR_ONE: usize = 200;

pub(super) fn unknown(name: &ServiceName) -> Status {
    Status::not_found(format!("no Service {name} is known"))
}

pub(super) fn unknown_node(node: &str) -> Status {
    Status::not_found(format!(
        "no node {node:?} is known: kpctl get nodes lists them"
    ))
}

/// Returns a Service.
pub(super) async fn detail(
    index: &IndexHandle,
    name: &ServiceName,
) -> Result<ServiceDetail, Status> {
    let detail = index.detail(name.clone()).await?;
    detail.ok_or_else(|| unknown(name))
}

/// Returns the Service of a question to all nodes, or to one.
pub(super) async fn detail_for(
    hub: &Hub,
    name: &ServiceName,
    node: &str,
) -> Result<ServiceDetail, Status> {
    bounded_names(&[&name.namespace, &name.name, node])?;
    let detail = detail(hub.index(), name).await?;
    if !node.is_empty() {
        known_node(hub, node)?;
    }
    Ok(detail)
}

/// Refuses a node that neither exists nor has had an agent.
pub(super) fn known_node(hub: &Hub, node: &str) -> Result<(), Status> {
    if hub.store().knows(node) || hub.agents().record(node).is_some() {
        Ok(())
    } else {
        Err(unknown_node(node))
    }
}

/// Refuses names that are longer than names of objects are.
pub(super) fn bounded_names(names: &[&str]) -> Result<(), Status> {
    if names.iter().all(|name| name.len() <= MAX_NAME) {
        Ok(())
    } else {
        Err(Status::invalid_argument(
            "the name is longer than names are",
        ))
    }
}

/// Charges the caller of a request; requests in the same process are free.
pub(super) fn charge<T>(request: &Request<T>, cost: u32) -> Result<(), Status> {
    match request.extensions().get::<Caller>() {
        Some(caller) => Ok(caller.charge(cost)?),
        None => Ok(()),
    }
}

/// Returns the cost of an answer about this many objects.
pub(super) fn cost(objects: usize) -> u32 {
    u32::try_from(objects / OBJECTS_FOR_ONE).map_or(u32::MAX, |more| more.saturating_add(1))
}
