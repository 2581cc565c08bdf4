//! A control plane whose tests publish themselves.

use kp_controlplane::app::{Bound, Config};
use kplane_desired_state::trust::Trust;
use tempfile::TempDir;

use super::empty;

/// Starts a control plane with ports on an empty folder, which is believed, after a change of its configuration.
pub(crate) async fn start(change: impl FnOnce(&mut Config)) -> (Bound, TempDir) {
    let (bound, folder) = empty(change).await;
    bound.hub().store().set_trust(Trust::Whole);
    (bound, folder)
}
