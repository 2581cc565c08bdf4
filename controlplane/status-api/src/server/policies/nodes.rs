//! What the addresses of nodes, and of their Pods, mean for a connection.

use std::collections::BTreeMap;
use std::sync::Arc;

use kplane_model::{NodeFacts, NodeName};
use kplane_policy::{End, Policies};
use kplane_proto::v1 as pb;
use tonic::Status;

use super::Connection;

/// The nodes, by name.
pub(super) type Nodes = BTreeMap<NodeName, Arc<NodeFacts>>;

/// Checks that an address in a node's range of Pods is known: policies count for the Pod that has it.
///
/// # Errors
/// [`tonic::Code::NotFound`]: no known Pod has the address.
pub(super) fn no_pods_address(end: &End, policies: &Policies, nodes: &Nodes) -> Result<(), Status> {
    let End::Address(address) = end else {
        return Ok(());
    };
    let mut known = nodes.values();
    if policies.pod_at(*address).is_some() || known.any(|of| of.addresses.contains(address)) {
        return Ok(());
    }
    let holds = |of: &&Arc<NodeFacts>| of.pod_cidrs.iter().any(|range| range.contains(*address));
    let node = nodes.values().find(holds);
    node.map_or(Ok(()), |node| {
        Err(Status::not_found(format!(
            "no known Pod has {address}, an address in the range of Pods of {}: what policies say of it is unknown; \
             kubectl get pods -A -o wide lists the Pods",
            node.name
        )))
    })
}

impl Connection {
    /// Returns the answer for a Pod and its own node, which always reach each other (NP11); `None` for other ends.
    pub(super) fn own_node(
        &self,
        policies: &Policies,
        nodes: &Nodes,
    ) -> Option<pb::ConnectionJudgement> {
        let pods = self.pods(policies);
        let mut ends = [&self.from, &self.to].into_iter().zip(pods.iter().rev());
        let (node, pod) = ends.find_map(|(end, pod)| {
            let (End::Address(address), Some((pod, node))) = (end, pod) else {
                return None;
            };
            let is_own = nodes.get(node)?.addresses.contains(address);
            is_own.then_some((node, pod))
        })?;
        let reported = pb::DirectionJudgement {
            verdict: pb::PolicyVerdict::NotIsolated.into(),
            reason: format!(
                "{node} is the node of Pod {pod}: a Pod and its own node always reach each other, whatever policies say"
            ),
            ..pb::DirectionJudgement::default()
        };
        Some(pb::ConnectionJudgement {
            allowed: true,
            egress: Some(reported.clone()),
            ingress: Some(reported),
            notes: Vec::new(),
        })
    }

    /// Returns what the policies do not say: that a Pod and its own node always reach each other (NP11).
    pub(super) fn notes(&self, nodes: &Nodes) -> Vec<String> {
        let note = |end: &End| {
            let End::Address(address) = end else {
                return None;
            };
            let node = nodes.values().find(|of| of.addresses.contains(address))?;
            let name = &node.name;
            Some(format!(
                "{address} is an address of {name}: a Pod that runs on {name} can always reach it and be reached by it, \
                 whatever policies say"
            ))
        };
        [&self.from, &self.to].into_iter().filter_map(note).collect()
    }
}
