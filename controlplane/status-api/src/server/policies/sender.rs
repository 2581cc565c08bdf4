//! The Pod that sends a packet, by its name.

use kplane_agents::hub::IndexHandle;
use kplane_model::{Family, PodName};
use kplane_proto::v1 as pb;
use tonic::Status;

use super::super::policy_index::place_of;
use super::super::request::bounded_names;
use super::named;

/// Finds the node and an address of the Pod that sends a packet, of the family of `to`. Without NetworkPolicies the control
/// plane knows no Pods: then its node must be given.
///
/// # Errors
/// A name that is none, a Pod that is not known, and a node that is not the Pod's.
pub(in super::super) async fn send_by_pod(
    index: &IndexHandle,
    request: &mut pb::ExplainRequest,
    to: Family,
) -> Result<(), Status> {
    let text = &request.sender_pod;
    let pod = if request.sender() == pb::PacketSender::Pod && request.sender_address.is_empty() {
        named(text)
    } else {
        None
    };
    let pod = pod.ok_or_else(|| {
        Status::invalid_argument(
            "sender_pod is NAMESPACE/NAME, of a sender that is a Pod, without sender_address",
        )
    })?;
    bounded_names(&[&pod.namespace, &pod.name])?;
    let (node, addresses) = match place_of(index, &pod).await? {
        None if !request.node.is_empty() => return Ok(()),
        None => {
            return Err(Status::failed_precondition(format!(
                "the node of Pod {pod} is not known, since the control plane watches no Pods without --network-policy: \
                 say it with --via NODE"
            )));
        }
        Some(found) => found.ok_or_else(|| no_sender(&pod))?,
    };
    if !request.node.is_empty() && *request.node != *node {
        return Err(Status::invalid_argument(format!(
            "Pod {pod} is on node {node}, which handles its packets: leave --via out"
        )));
    }
    let address = addresses.iter().find(|ip| Family::of(**ip) == to);
    request.node = node.to_string();
    request.sender_address = address.map_or_else(String::new, ToString::to_string);
    Ok(())
}

/// Returns the error that no such Pod sends packets of its own.
fn no_sender(pod: &PodName) -> Status {
    Status::not_found(format!(
        "no running Pod {pod} with an address of its own is known: kubectl get pods -n {} -o wide lists them; of one on \
         its node's network ask with --from node/NODE",
        pod.namespace
    ))
}
