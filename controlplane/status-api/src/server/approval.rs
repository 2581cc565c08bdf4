//! The operator's approval, given here or at another replica.

use kplane_agents::overrides::OverrideStore;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::SystemTime;

use kplane_agents::connection_limits::ConnectionGuard;
use kplane_agents::hub::{Approvals, Approved, Hub, Seen, Summary};
use kplane_agents::identity::{Caller, Right};
use kplane_agents::overrides::{Approval, Backend, Overrides};
use kplane_agents::peers::Peers;
use kplane_desired_state::publish::Head;
use kplane_model::NodeName;
use kplane_proto::v1 as pb;
use tokio::sync::watch;
use tonic::{Request, Status};
use tracing::{info, warn};

use super::{millis, operator, views};

/// Approves for all replicas. Replicas that share the document with the orders find the approval there, also if they
/// start later; without such a document the approval goes to the replicas that run.
pub(super) async fn approve_for_all(
    hub: &Hub,
    peers: Option<&Arc<Peers>>,
    request: Request<pb::ApproveRequest>,
) -> Result<pb::ApproveResponse, Status> {
    let seen = *request.get_ref();
    let caller = request.extensions().get::<Caller>();
    let by = operator(caller);
    let is_shared = hub.overrides().backend().is_some_and(Backend::is_shared);
    let elsewhere = if is_shared && let Some(peers) = peers {
        holding_elsewhere(peers).await
    } else {
        BTreeSet::new()
    };
    let (mut response, approved) = approve(hub, request, &Right::Act, &elsewhere).await?;
    let is_kept = match approved {
        Some(approved) => keep(hub.overrides(), by, approved).await,
        None => true,
    };
    if (!is_shared || !is_kept)
        && let Some(peers) = peers
    {
        let (others, missing) = peers.approve(seen).await;
        add(&mut response, others);
        response.missing_replicas = missing;
    }
    Ok(response)
}

/// Returns the nodes whose agents hold objects, and are connected to other replicas.
async fn holding_elsewhere(peers: &Peers) -> BTreeSet<NodeName> {
    let others = peers.nodes().await;
    others
        .answers
        .iter()
        .flat_map(|answer| &answer.agents)
        .filter(|(_, agent)| {
            let report = agent.status.as_ref().and_then(|status| status.report.as_ref());
            report.is_some_and(|report| report.held.is_some())
        })
        .map(|(node, _)| node.clone())
        .collect()
}

/// Writes an approval down for other replicas; returns whether it is there.
async fn keep(overrides: &OverrideStore, by: String, approved: Approved) -> bool {
    if overrides.backend().is_none() {
        return false;
    }
    let approval = Approval {
        id: approved.id,
        by,
        at_ms: millis(SystemTime::now()),
        held_state: approved.held_state,
    };
    let kept = overrides.approve(approval).await;
    if let Err(error) = &kept {
        warn!(%error, "cannot write the approval down: replicas that start later do not learn of it");
    }
    kept.is_ok()
}

/// Approves at this replica, for a caller who has the right. `elsewhere` are nodes of other replicas that wait for an
/// approval, too. Also returns what was approved, if anything was.
pub(super) async fn approve(
    hub: &Hub,
    request: Request<pb::ApproveRequest>,
    right: &Right,
    elsewhere: &BTreeSet<NodeName>,
) -> Result<(pb::ApproveResponse, Option<Approved>), Status> {
    let connection = request.extensions().get::<ConnectionGuard>().cloned();
    let caller = request.extensions().get::<Caller>().cloned();
    let seen = request.into_inner();
    let here = hub.agents().holding();
    let nodes: BTreeSet<NodeName> = here.into_iter().chain(elsewhere.iter().cloned()).collect();
    let nodes: Vec<NodeName> = nodes.into_iter().collect();
    let held = hub.index().summary().borrow().held.is_some();
    if !held && nodes.is_empty() && !hub.store().trust().is_partial() {
        let revision = hub.store().head().borrow().revision;
        if let Some(caller) = caller {
            caller.did(right, "approved deletions while nothing was held");
        }
        let nothing = views::approved(None, String::new(), &nodes, revision);
        return Ok((nothing, None));
    }
    let count = |number| usize::try_from(number).unwrap_or(usize::MAX);
    let seen = Seen {
        services: count(seen.services),
        without_endpoints: count(seen.without_endpoints),
    };
    let approved = hub
        .index()
        .approvals()
        .approve(seen)
        .await?
        .map_err(|more| Status::failed_precondition(more.to_string()))?;
    let released = approved.released.as_ref();
    let services = released.map_or(0, |held| held.services);
    let endpoints = released.map_or(0, |held| held.without_endpoints);
    info!(
        peer = connection.as_ref().map(|connection| connection.peer().to_string()),
        by = caller.as_ref().and_then(Caller::name),
        services,
        without_endpoints = endpoints,
        nodes = nodes.len(),
        doubt = approved.doubt,
        revision = approved.revision,
        "approved: objects that are missing from the source are removed"
    );
    if let Some(caller) = caller {
        caller.did(
            right,
            &format!(
                "approved that {services} Services go and {endpoints} more lose their endpoints, on {} nodes that held \
                 objects",
                nodes.len()
            ),
        );
    }
    let response = views::approved(released, approved.doubt.clone(), &nodes, approved.revision);
    Ok((response, Some(approved)))
}

/// Adds what other replicas approved. All of them hold the same objects, so only nodes add up.
fn add(approved: &mut pb::ApproveResponse, others: Vec<pb::ApproveResponse>) {
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

/// Takes approvals that other replicas were given, until the control plane ends. Tries again when the orders, the index
/// or the store change.
pub async fn follow(
    approvals: Approvals,
    mut overrides: watch::Receiver<Option<Arc<Overrides>>>,
    mut summary: watch::Receiver<Arc<Summary>>,
    mut head: watch::Receiver<Head>,
) {
    loop {
        let now = millis(SystemTime::now());
        let in_force: Vec<Approval> = match &*overrides.borrow_and_update() {
            Some(overrides) => overrides.approvals(now).cloned().collect(),
            None => Vec::new(),
        };
        summary.borrow_and_update();
        head.borrow_and_update();
        for approval in in_force {
            let by = approval.by.clone();
            match approvals.take(approval).await {
                Ok(true) => info!(
                    by,
                    "an operator has approved this at another replica: objects that are missing from the source are \
                     removed"
                ),
                Ok(false) => {}
                Err(_) => return,
            }
        }
        let alive = tokio::select! {
            changed = overrides.changed() => changed.is_ok(),
            changed = summary.changed() => changed.is_ok(),
            changed = head.changed() => changed.is_ok(),
        };
        if !alive {
            return;
        }
    }
}
