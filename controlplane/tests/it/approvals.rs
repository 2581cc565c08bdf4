//! An approval at one replica counts for all that share the document of orders, also for those that start later.

use std::time::Duration;

use kp_controlplane::app::Bound;
use kplane_desired_state::trust::Trust;
use kplane_proto::v1 as pb;
use tempfile::TempDir;
use tokio::time::timeout;

use crate::support::manifests::{manifests, put};
use crate::support::replica::replica;
use crate::support::status;

const DEADLINE: Duration = Duration::from_secs(30);
/// Number of Services in a whole folder: enough for a cliff.
const SERVICES: usize = 200;

async fn approve(at: &Bound, services: u64) -> pb::ApproveResponse {
    let seen = pb::ApproveRequest {
        services,
        without_endpoints: 0,
    };
    let approved = status(at).await.approve(seen).await;
    approved.unwrap().into_inner()
}

async fn trusts(replica: &Bound, trust: Trust) {
    let mut head = replica.hub().store().head();
    let reached = async {
        while replica.hub().store().trust() != trust {
            head.changed().await.unwrap();
        }
    };
    let reached = timeout(DEADLINE, reached).await;
    assert!(reached.is_ok(), "{:?}", replica.hub().store().trust());
}

/// Waits until a replica holds objects, or none.
async fn holds(replica: &Bound, held: bool) {
    let mut summary = replica.hub().index().summary();
    let reached = summary.wait_for(|summary| summary.held.is_some() == held);
    timeout(DEADLINE, reached).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_cliff_that_is_approved_at_one_replica_is_approved_at_all() {
    let (folder, shared) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    put(folder.path(), "shop.yaml", manifests(0..SERVICES));
    let first = replica(folder.path(), shared.path()).await;
    let second = replica(folder.path(), shared.path()).await;
    put(folder.path(), "shop.yaml", manifests(0..100));
    holds(&first, true).await;
    holds(&second, true).await;
    let approved = approve(&first, 100).await;
    assert_eq!(approved.released.unwrap().services, 100);
    assert!(approved.missing_replicas.is_empty());
    holds(&second, false).await;
    assert_eq!(second.hub().index().summary().borrow().totals.services, 100);

    // The next cliff is another picture, and needs another approval.
    put(folder.path(), "shop.yaml", manifests(0..10));
    holds(&first, true).await;
    holds(&second, true).await;
    let mut overrides = second.hub().overrides().changes();
    overrides.mark_unchanged();
    let approved = approve(&first, 90).await;
    assert_eq!(approved.released.unwrap().services, 90);
    timeout(DEADLINE, overrides.changed()).await.unwrap().unwrap();
    holds(&second, false).await;
}

#[tokio::test]
async fn a_replica_that_starts_later_takes_the_approval_of_its_picture_and_no_other() {
    let [folder, other, shared] = [(); 3].map(|()| TempDir::new().unwrap());
    for (folder, broken) in [(&folder, "broken.yaml"), (&other, "wrong.yaml")] {
        put(folder.path(), "shop.yaml", manifests(0..SERVICES));
        put(folder.path(), broken, "a: [");
    }
    let first = replica(folder.path(), shared.path()).await;
    let different = replica(other.path(), shared.path()).await;
    assert!(first.hub().store().trust().is_partial());
    let approved = approve(&first, 0).await;
    assert!(approved.doubt.contains("broken.yaml"), "{approved:?}");
    let later = replica(folder.path(), shared.path()).await;
    trusts(&later, Trust::Confirmed).await;
    assert!(different.hub().store().trust().is_partial());

    // Doubts that end and come back are new ones, also for a replica that knows the approval.
    std::fs::remove_file(folder.path().join("broken.yaml")).unwrap();
    for replica in [&first, &later] {
        let mut summary = replica.hub().index().summary();
        let fixed = summary.wait_for(|summary| summary.issues.is_empty());
        timeout(DEADLINE, fixed).await.unwrap().unwrap();
    }
    // A picture with fewer Services than the approved one is not covered.
    put(other.path(), "wrong.yaml", "");
    put(other.path(), "shop.yaml", manifests(0..SERVICES - 1));
    let smaller = replica(other.path(), shared.path()).await;
    let mut changes = smaller.hub().overrides().changes();
    timeout(DEADLINE, changes.wait_for(Option::is_some)).await.unwrap().unwrap();
    assert_ne!(smaller.hub().store().trust(), Trust::Confirmed);
}
