//! A control plane whose tests publish themselves.

use kp_controlplane::app::{Bound, Config, build};
use kplane_picture::trust::Trust;
use tokio::time::timeout;

use super::DEADLINE;

/// Starts a control plane on an empty folder, and waits until it serves.
pub(crate) async fn start(config: Config) -> Bound {
    let bound = build(config).await.unwrap();
    let mut head = bound.hub().store.head();
    let synced = head.wait_for(|head| head.synced);
    timeout(DEADLINE, synced).await.unwrap().unwrap();
    // The folder is empty, and that is meant.
    bound.hub().store.set_trust(Trust::Whole);
    bound
}
