//! The fate of a packet: what the control plane expects, what the node's kernel says, and what its agent has tried.

use std::sync::Arc;

use kplane_fleet::inquiry::Heard;
use kplane_model::{NodeName, ServiceName};
use kplane_proto::v1 as pb;
use tonic::Status;

use super::super::on_node::{around, on_node};
use super::super::pages::Node;
use super::super::request::detail;
use super::super::{attempts, inquiry, policies, why};
use super::StatusServer;
use crate::findings::Finding;

impl StatusServer {
    /// Returns the fate of a packet, and lets the node's agent try it if it shall.
    pub(super) async fn fate_of(
        &self,
        mut request: pb::ExplainRequest,
        tries: bool,
    ) -> Result<pb::TryResponse, Status> {
        let name = ServiceName::new(&request.namespace, &request.name);
        let detail = detail(&self.hub, &name).await?;
        if !request.sender_pod.is_empty() {
            let to = why::family(&request, &detail);
            policies::send_by_pod(&self.hub, &mut request, to).await?;
        }
        let others = self.others(&name).await;
        let node = on_node(&self.hub, &name, &request.node, &others)?;
        let (mut explanation, expected) = why::explain(&name, &request, &detail, &node)?;
        let Some((expected, ways)) = expected else {
            return Ok(attempts::not_proxied(explanation));
        };
        let unlike = ways.judge(&self.hub, &mut explanation).await?;
        let mut plan = attempts::Plan::new(&explanation, expected.protocol(), tries);
        if let Some(reason) = unlike {
            plan.refuse(reason);
        }
        let question = Arc::new(pb::Inspect {
            destination: Some(expected.destination.clone()),
            attempts: plan.addresses(),
            ..inquiry::about(&name)
        });
        let node = |of: &NodeName, _: &Node<'_>| *of == expected.node;
        let agents = self.agents(&others);
        let answers = agents.ask(|_| Arc::clone(&question), node, inquiry::SERVICE);
        let heard = answers.await.nodes.pop();
        let gone = || Heard::nothing(expected.node.clone(), "it has no agent");
        let heard = heard.unwrap_or_else(gone);
        let kernel = heard.part(|told| told.kernel.as_ref(), |kernel| &kernel.error);
        let (kernel, finding) = expected.compare(kernel);
        explanation.kernel = Some(kernel);
        explanation
            .findings
            .extend(finding.as_ref().map(Finding::to_wire));
        let nodes = why::nodes_of(&explanation);
        let around = around(&self.hub, &name, &nodes, &others);
        explanation.findings.extend(around);
        Ok(plan.result(explanation, attempts::of(&heard)))
    }
}
