//! `kpctl rollback`: an earlier state is published again, at all replicas, until that is undone.

use std::sync::Arc;
use std::time::SystemTime;

use kplane_proto::v1 as pb;
use kplane_proto::v1::change_rollback_request::Change;
use tonic::Status;
use tracing::{error, info};

use super::{millis, operator};
use crate::hub::Hub;
use crate::identity::{Right, Visitor};
use crate::orders::Rollback;
use crate::publish::Point;

/// Returns the states that can be published again, and the one that is.
pub(super) fn history(hub: &Hub) -> pb::History {
    let points = hub
        .store
        .points()
        .into_iter()
        .map(|point| pb::HistoryPoint {
            revision: point.revision,
            at_ms: millis(point.at),
            changes: point.changes as u64,
        });
    let rollback = hub.orders.rollback();
    pb::History {
        points: points.collect(),
        lost: rollback.is_some() && !hub.store.is_rolled_back(),
        rollback: rollback.map(|rollback| pb::Rollback {
            state_ms: rollback.state_ms,
            at_ms: rollback.at_ms,
            by: rollback.by,
            reason: rollback.reason,
        }),
        now_ms: millis(SystemTime::now()),
    }
}

/// Puts an earlier state in force, or ends that.
pub(super) async fn change(
    hub: &Arc<Hub>,
    visitor: Option<&Visitor>,
    request: pb::ChangeRollbackRequest,
) -> Result<(), Status> {
    let reason = request.reason;
    operator::check_reason(&reason)?;
    let points = hub.store.points();
    let point = match request.change {
        None => {
            return Err(Status::invalid_argument(
                "neither a state nor undo is given",
            ));
        }
        Some(Change::Undo(_)) => None,
        Some(Change::ToRevision(revision)) => {
            let found = points.iter().find(|point| point.revision == revision);
            Some(found.ok_or_else(|| forgotten(&points))?)
        }
        Some(Change::ToMs(ms)) => {
            let found = points.iter().rev().find(|point| millis(point.at) <= ms);
            Some(found.ok_or_else(|| forgotten(&points))?)
        }
    };
    let rollback = point.map(|point| Rollback {
        number: 0,
        epoch: hub.store.epoch(),
        revision: point.revision,
        state_ms: millis(point.at),
        versions: Rollback::versions_of(&point.freshness),
        by: operator::name(visitor),
        at_ms: millis(SystemTime::now()),
        reason: reason.clone(),
    });
    let what = match &rollback {
        Some(rollback) => format!("rolled back to revision {}: {reason:?}", rollback.revision),
        None => format!("ended the rollback: {reason:?}"),
    };
    let kept = hub.orders.roll_back(rollback).await;
    kept.map_err(|why| operator::refusal("nothing changed", &why))?;
    obey(hub);
    info!("an operator {what}");
    if let Some(visitor) = visitor {
        visitor.did(&Right::Act, &what);
    }
    Ok(())
}

fn forgotten(points: &[Point]) -> Status {
    Status::not_found(match points.first() {
        Some(oldest) => format!(
            "this control plane does not remember that state; `kpctl history` lists those that it does. The oldest \
             one has revision {}",
            oldest.revision
        ),
        None => "this control plane remembers no states: it has just started, or it follows another one, which \
                 remembers them"
            .to_owned(),
    })
}

/// Publishes what the orders want for as long as the control plane runs.
pub(crate) async fn follow(hub: Arc<Hub>) {
    let mut orders = hub.orders.changes();
    let mut head = hub.store.head();
    // Which states are remembered is known when the first picture is complete.
    if head.wait_for(|head| head.synced).await.is_err() {
        return;
    }
    loop {
        orders.borrow_and_update();
        obey(&hub);
        if orders.changed().await.is_err() {
            return;
        }
    }
}

/// Publishes the state that the orders want.
fn obey(hub: &Hub) {
    let wanted = hub.orders.rollback();
    let published = hub.rolled_back.lock();
    let mut published = published.unwrap_or_else(std::sync::PoisonError::into_inner);
    if wanted.as_ref().map(|wanted| wanted.number) == *published {
        return;
    }
    *published = wanted.as_ref().map(|wanted| wanted.number);
    let Some(wanted) = wanted else {
        hub.orders.lose(None);
        if hub.store.is_rolled_back() {
            let revision = hub.store.go_on();
            info!(
                revision,
                "the rollback has ended: the newest state is published"
            );
        }
        return;
    };
    let chosen = wanted.choose(hub.store.epoch(), &hub.store.points());
    match chosen.and_then(|revision| Some((revision, hub.store.roll_back(revision).ok()?))) {
        Some((state, revision)) => {
            hub.orders.lose(None);
            info!(
                state,
                revision,
                by = wanted.by,
                "an earlier state is published"
            );
        }
        None => {
            hub.orders.lose(Some(&wanted));
            error!(
                by = wanted.by,
                "this control plane does not remember the state to which operators rolled back: it sends nothing to \
                 nodes that hold something, until `kpctl rollback --undo`"
            );
        }
    }
}
