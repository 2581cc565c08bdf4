//! Questions to the index about NetworkPolicies.

use kplane_fleet::hub::Hub;
use kplane_model::{Issue, PodName};
use kplane_policy::Policies;
use tonic::Status;

use super::closing;

/// The answer of a control plane without policies.
const NOT_ENFORCED: &str = "nodes enforce no NetworkPolicies of this control plane: update all agents, then start it with \
     --network-policy (in the chart: networkPolicies.enforce=true)";

/// Returns what the index answers.
pub(super) async fn ask<T: Send + 'static>(
    hub: &Hub,
    answer: impl FnOnce(&Policies, &dyn Fn() -> Vec<Issue>) -> T + Send + 'static,
) -> Result<T, Status> {
    let answer = ask_if_enforced(hub, answer).await?;
    answer.ok_or_else(|| Status::failed_precondition(NOT_ENFORCED))
}

/// Returns what the index answers; `None` if nodes enforce no policies.
pub(super) async fn ask_if_enforced<T: Send + 'static>(
    hub: &Hub,
    answer: impl FnOnce(&Policies, &dyn Fn() -> Vec<Issue>) -> T + Send + 'static,
) -> Result<Option<T>, Status> {
    hub.policies(answer).await.map_err(closing)
}

/// Returns the error that there is no such Pod.
pub(super) fn no_pod(pod: &PodName) -> Status {
    Status::not_found(format!(
        "no Pod {pod} with an address of its own is known: it does not exist, has finished, or is on its node's network; \
         of such a Pod ask by its address"
    ))
}
