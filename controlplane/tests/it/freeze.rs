//! Orders to freeze nodes, and what the status API says of frozen nodes.

use std::path::Path;

use kp_controlplane::app::Bound;
use kplane_agents::fleet::Session;
use kplane_desired_state::publish::Publication;
use kplane_proto::v1 as pb;
use tonic::{Code, Status};

use crate::support::reporter::web;
use crate::support::watch::Watch;
use crate::support::{status, synced, with_ports};

/// Starts a replica on a folder without manifests: tests publish themselves.
async fn replica(folder: &Path) -> Bound {
    let bound = synced(with_ports(folder)).await;
    publish(&bound, 80);
    bound
}

fn publish(bound: &Bound, port: u16) -> u64 {
    let publication = Publication::sample(vec![web(Some(port))], vec![]);
    bound.hub().store().publish(publication)
}

async fn freeze(bound: &Bound, order: pb::FreezeRequest) -> Result<pb::FreezeResponse, Status> {
    let answer = status(bound).await.freeze(order).await?;
    Ok(answer.into_inner())
}

fn of_n1() -> pb::FreezeRequest {
    pb::FreezeRequest {
        nodes: vec!["n1".to_owned()],
        reason: "a drill".to_owned(),
        ..pb::FreezeRequest::default()
    }
}

#[tokio::test]
async fn a_frozen_node_is_shown_as_one_and_lags() {
    let folder = tempfile::tempdir().unwrap();
    let bound = replica(folder.path()).await;
    let session = Session::sample(bound.hub(), "n1");
    session.report(pb::Report {
        epoch: bound.hub().store().epoch(),
        applied_revision: publish(&bound, 81),
        ..pb::Report::default()
    });
    let answer = freeze(&bound, of_n1()).await.unwrap();
    assert_eq!((answer.nodes, answer.frozen), (vec!["n1".to_owned()], 1));
    publish(&bound, 82);
    let request = pb::GetFleetRequest::default();
    let fleet = status(&bound).await.get_fleet(request).await.unwrap();
    let shown = fleet.into_inner().nodes.remove(0);
    assert_eq!(shown.state(), pb::NodeState::Frozen);
    assert!(shown.last_error.contains("a drill"), "{shown:?}");
    assert_eq!(shown.frozen.unwrap().reason, "a drill");
    let seen = Watch::begin(&bound, "web").await.next().await;
    let [laggard] = &*seen.laggards else {
        panic!("{seen:?}");
    };
    assert!(laggard.reason.starts_with("frozen"), "{laggard:?}");
}

#[tokio::test]
async fn an_order_that_cannot_be_kept_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let bound = replica(folder.path()).await;
    std::fs::create_dir(folder.path().join(".kplane-orders.new")).unwrap();
    let refused = freeze(&bound, of_n1()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("--state-file"), "{refused}");
    let node = "n1".into();
    assert!(bound.hub().overrides().frozen(&node).is_none());
    let both = pb::FreezeRequest {
        all: true,
        ..of_n1()
    };
    let refused = freeze(&bound, both).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}
