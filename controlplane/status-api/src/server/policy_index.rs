//! Questions to the index about NetworkPolicies.

use std::net::IpAddr;

use kplane_agents::hub::IndexHandle;
use kplane_model::{Issue, NodeName, PodName};
use kplane_policy::Policies;
use tonic::Status;

/// The answer of a control plane without policies.
const NOT_ENFORCED: &str = "nodes enforce no NetworkPolicies of this control plane: update all agents, then start it with \
     --network-policy (in the chart: networkPolicies.enforce=true)";

/// Returns what the index answers.
pub(super) async fn ask<T: Send + 'static>(
    index: &IndexHandle,
    answer: impl FnOnce(&Policies, &dyn Fn() -> Vec<Issue>) -> T + Send + 'static,
) -> Result<T, Status> {
    let answer = ask_if_enforced(index, answer).await?;
    answer.ok_or_else(|| Status::failed_precondition(NOT_ENFORCED))
}

/// Returns what the index answers; `None` if nodes enforce no policies. The second argument of `answer` are the index's
/// issues, worked out if they are called for.
pub(super) async fn ask_if_enforced<T: Send + 'static>(
    index: &IndexHandle,
    answer: impl FnOnce(&Policies, &dyn Fn() -> Vec<Issue>) -> T + Send + 'static,
) -> Result<Option<T>, Status> {
    let answered = index.look(|index| {
        let policies = index.policies()?;
        Some(answer(policies, &|| index.issues()))
    });
    Ok(answered.await?)
}

/// Returns a Pod's node and the addresses that are its own.
///
/// # Errors
/// The outer `None`: nodes enforce no policies, so no Pods are known. The inner one: this Pod is not known.
pub(super) async fn place_of(
    index: &IndexHandle,
    pod: &PodName,
) -> Result<Option<Option<(NodeName, Vec<IpAddr>)>>, Status> {
    let of = pod.clone();
    ask_if_enforced(index, move |policies, _| {
        let node = policies.node_of(&of)?.clone();
        Some((node, policies.addresses_of(&of).collect()))
    })
    .await
}

/// Returns the error that there is no such Pod.
pub(super) fn no_pod(pod: &PodName) -> Status {
    Status::not_found(format!(
        "no Pod {pod} with an address of its own is known: it does not exist, has finished, or is on its node's network; \
         of such a Pod ask by its address"
    ))
}
