//! Earlier states, published again at two replicas of one folder, and what a third one does that does not know them.

use std::path::Path;
use std::time::Duration;

use kp_controlplane::app::Bound;
use kplane_model::Digest;
use kplane_proto::v1 as pb;
use kplane_proto::v1::change_rollback_request::Change;
use kplane_proto::v1::status_service_client::StatusServiceClient;
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};
use tonic::Code;

use crate::support::replica::replica;

const DEADLINE: Duration = Duration::from_secs(30);

/// Makes the folder contain so many Services, in one step.
fn services(folder: &Path, names: &[&str]) {
    let text: String = names
        .iter()
        .enumerate()
        .map(|(number, name)| {
            format!(
                "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\n\
                 spec: {{clusterIP: 10.96.0.{}, ports: [{{port: 80}}]}}\n",
                number + 1
            )
        })
        .collect();
    let beside = folder.join(".new");
    std::fs::write(&beside, text).unwrap();
    std::fs::rename(beside, folder.join("all.yaml")).unwrap();
}

fn digest(bound: &Bound) -> Digest {
    bound.hub().store.digest("n1")
}

async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !done() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until the source of a replica has so many Services.
async fn reads(bound: &Bound, services: usize) {
    let mut summary = bound.hub().summary();
    let read = summary.wait_for(|summary| summary.totals.services == services);
    timeout(DEADLINE, read).await.unwrap().unwrap();
}

async fn change(at: &Bound, change: Change) -> Result<pb::History, tonic::Status> {
    let address = format!("http://{}", at.status_addr.unwrap());
    let mut client = StatusServiceClient::connect(address).await.unwrap();
    let request = pb::ChangeRollbackRequest {
        change: Some(change),
        reason: "a drill".to_owned(),
    };
    Ok(client.change_rollback(request).await?.into_inner())
}

async fn history(at: &Bound) -> pb::History {
    let address = format!("http://{}", at.status_addr.unwrap());
    let mut client = StatusServiceClient::connect(address).await.unwrap();
    let request = pb::GetHistoryRequest {};
    client.get_history(request).await.unwrap().into_inner()
}

#[tokio::test]
async fn an_earlier_state_is_published_by_all_replicas_until_that_is_undone() {
    let (folder, shared) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    services(folder.path(), &["a", "b", "c"]);
    let first = replica(folder.path(), shared.path()).await;
    let second = replica(folder.path(), shared.path()).await;
    let before = digest(&first);
    assert_eq!(digest(&second), before);
    // Replicas tell states of a folder apart by their times.
    let age = || first.hub().store.points()[0].at.elapsed();
    until("a second has passed", || {
        age().is_ok_and(|age| age > Duration::from_millis(1_500))
    })
    .await;
    services(folder.path(), &["a", "b"]);
    for replica in [&first, &second] {
        until("the change", || digest(replica) != before).await;
    }
    let points = history(&first).await.points;
    assert_eq!(points.len(), 2, "{points:?}");

    let done = change(&first, Change::ToRevision(points[0].revision))
        .await
        .unwrap();
    assert_eq!(done.rollback.unwrap().reason, "a drill");
    assert_eq!(digest(&first), before, "published when the answer comes");
    until("the other replica follows", || digest(&second) == before).await;
    // The source goes on, and waits.
    services(folder.path(), &["a", "b", "c", "d"]);
    for replica in [&first, &second] {
        reads(replica, 4).await;
        assert_eq!(digest(replica), before);
    }

    // A replica that starts now does not know the state: it sends nothing to nodes that hold something.
    let third = replica(folder.path(), shared.path()).await;
    let node = "n1".into();
    until("it says so", || third.hub().orders.frozen(&node).is_some()).await;
    assert!(history(&third).await.lost);
    assert!(first.hub().orders.frozen(&node).is_none());

    change(&second, Change::Undo(pb::Undo {})).await.unwrap();
    for replica in [&first, &second, &third] {
        until("the newest state", || digest(replica) == digest(&third)).await;
        until("no rollback", || replica.hub().orders.rollback().is_none()).await;
    }
    assert_ne!(digest(&first), before);
    until("it goes on", || third.hub().orders.frozen(&node).is_none()).await;
}

#[tokio::test]
async fn a_state_that_nobody_remembers_is_refused() {
    let (folder, shared) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    services(folder.path(), &["a"]);
    let bound = replica(folder.path(), shared.path()).await;
    for to in [Change::ToRevision(4_711), Change::ToMs(1)] {
        let refused = change(&bound, to).await.unwrap_err();
        assert_eq!(refused.code(), Code::NotFound);
        assert!(refused.message().contains("kpctl history"), "{refused}");
    }
    assert_eq!(bound.hub().orders.rollback(), None);
    // Undoing nothing is no error.
    change(&bound, Change::Undo(pb::Undo {})).await.unwrap();
}
