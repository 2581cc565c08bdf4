//! The fate of a packet: what the control plane expects, what the node's kernel says, and what its agent has tried.

use kplane_fleet::fleet::More;
use kplane_fleet::peers::{Collected, NodeAnswer};
use kplane_fleet::streams::questions;
use kplane_model::{NodeName, ServiceName};
use kplane_proto::v1 as pb;
use tonic::Status;

use super::super::on_node::{around, on_node};
use super::super::request::unknown;
use super::super::{attempts, closing, why};
use super::StatusServer;
use crate::findings::Finding;

impl StatusServer {
    /// Asks the agent of a node, through the replica to which it is connected.
    async fn ask_one(
        &self,
        name: &ServiceName,
        node: &NodeName,
        more: More,
        others: &Collected,
    ) -> Result<NodeAnswer, String> {
        let fleet = &self.hub.fleet;
        if fleet.record(node).is_some_and(|record| record.connected) {
            return questions::ask_one(fleet, node, name, more).await;
        }
        let elsewhere = match &self.peers {
            Some(peers) => peers.ask_one(name, node, more, others).await,
            None => None,
        };
        elsewhere.unwrap_or_else(|| Err("its agent is not connected".to_owned()))
    }

    /// Returns the fate of a packet, and lets the node's agent try it if it shall.
    pub(super) async fn fate_of(
        &self,
        request: pb::ExplainRequest,
        tries: bool,
    ) -> Result<pb::TryResponse, Status> {
        let name = ServiceName::new(&request.namespace, &request.name);
        let detail = self.hub.detail(name.clone()).await.map_err(closing)?;
        let detail = detail.ok_or_else(|| unknown(&name))?;
        let others = match &self.peers {
            Some(peers) => peers.service(&name).await,
            None => Collected::default(),
        };
        let node = on_node(&self.hub, &name, &request.node, &others)?;
        let (mut explanation, expected) = why::explain(&name, &request, &detail, &node)?;
        let Some(expected) = expected else {
            return Ok(attempts::not_proxied(explanation));
        };
        let plan = attempts::Plan::new(&explanation, expected.protocol(), tries);
        let more = More {
            destination: Some(expected.destination.clone()),
            attempts: plan.addresses(),
            ..More::default()
        };
        let answer = self.ask_one(&name, &expected.node, more, &others).await;
        let (kernel, finding) = expected.compare(&answer);
        explanation.kernel = Some(kernel);
        explanation
            .findings
            .extend(finding.as_ref().map(Finding::to_wire));
        let nodes = why::nodes_of(&explanation);
        let around = around(&self.hub, &name, &nodes, &others);
        explanation.findings.extend(around);
        Ok(plan.result(explanation, answer))
    }
}
