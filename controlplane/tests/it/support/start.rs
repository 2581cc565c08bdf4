//! A control plane whose tests publish themselves.

use kp_controlplane::app::{Bound, Config};
use kplane_desired_state::trust::Trust;

use super::synced;

/// Starts a control plane on an empty folder, and waits until it serves.
pub(crate) async fn start(config: Config) -> Bound {
    let bound = synced(config).await;
    // The folder is empty, and that is meant.
    bound.hub().store().set_trust(Trust::Whole);
    bound
}
