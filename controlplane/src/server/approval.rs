//! The operator's approval, given here or at another replica.

use std::collections::BTreeSet;

use kplane_proto::v1 as pb;
use tonic::{Request, Status};
use tracing::info;

use super::{closing, views};
use crate::doors::Occupancy;
use crate::hub::{Approved, Hub, Seen};
use crate::identity::{Right, Visitor};

/// Approves at this replica, for a caller who has the right.
pub(super) async fn approve(
    hub: &Hub,
    request: Request<pb::ApproveRequest>,
    right: &Right,
) -> Result<pb::ApproveResponse, Status> {
    let connection = request.extensions().get::<Occupancy>().cloned();
    let visitor = request.extensions().get::<Visitor>().cloned();
    let seen = request.into_inner();
    let nodes = hub.fleet.holding();
    let held = hub.summary().borrow().held.is_some();
    if !held && nodes.is_empty() && !hub.store.trust().is_partial() {
        let revision = hub.store.head().borrow().revision;
        if let Some(visitor) = visitor {
            visitor.did(right, "approved deletions while nothing was held");
        }
        return Ok(views::approved(None, String::new(), &nodes, revision));
    }
    let count = |number| usize::try_from(number).unwrap_or(usize::MAX);
    let seen = Seen {
        services: count(seen.services),
        without_endpoints: count(seen.without_endpoints),
    };
    let approved = hub.approve(seen).await.map_err(closing)?;
    let approved = approved.map_err(|more| Status::failed_precondition(more.to_string()))?;
    let Approved {
        released,
        doubt,
        revision,
    } = approved;
    let services = released.as_ref().map_or(0, |held| held.services);
    let endpoints = released.as_ref().map_or(0, |held| held.without_endpoints);
    info!(
        peer = connection
            .as_ref()
            .map(|connection| connection.peer().to_string()),
        by = visitor.as_ref().and_then(Visitor::name),
        services,
        without_endpoints = endpoints,
        nodes = nodes.len(),
        doubt,
        revision,
        "approved: objects that are missing from the source are removed"
    );
    if let Some(visitor) = visitor {
        visitor.did(
            right,
            &format!(
                "approved that {services} Services go and {endpoints} more lose their endpoints, on {} nodes that held \
                 objects",
                nodes.len()
            ),
        );
    }
    let released = released.as_ref();
    Ok(views::approved(released, doubt, &nodes, revision))
}

/// Adds what other replicas approved. All of them hold the same objects, so only nodes add up.
pub(super) fn add(approved: &mut pb::ApproveResponse, others: Vec<pb::ApproveResponse>) {
    let mut nodes: BTreeSet<String> = std::mem::take(&mut approved.nodes).into_iter().collect();
    for other in others {
        nodes.extend(other.nodes);
        approved.released = approved.released.take().or(other.released);
        if approved.doubt.is_empty() {
            approved.doubt = other.doubt;
        }
    }
    approved.nodes = nodes.into_iter().collect();
}
