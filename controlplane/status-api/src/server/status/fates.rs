//! The fate of a packet: what the control plane expects, what the node's kernel says, and what its agent has tried.

use std::net::SocketAddr;
use std::sync::Arc;

use kplane_agents::hub::Hub;
use kplane_agents::identity::{Caller, Right};
use kplane_agents::node_query::Reply;
use kplane_agents::peers::Collected;
use kplane_model::{NodeName, ServiceName};
use kplane_proto::v1 as pb;
use tonic::{Request, Status};

use super::super::on_node::{around, on_node};
use super::super::pages::{Node, Snapshot};
use super::super::request::detail;
use super::super::{attempts, node_query, policies, why};
use super::StatusServer;
use crate::findings::Finding;

impl StatusServer {
    /// Returns the fate of a packet, and lets the node's agent try it if it shall.
    pub(super) async fn fate_of(
        &self,
        request: Request<pb::ExplainRequest>,
        tries: bool,
    ) -> Result<pb::TryResponse, Status> {
        let caller = request.extensions().get::<Caller>().cloned();
        let may_judge = async {
            match caller {
                Some(caller) => caller.may(&Right::ReadPolicies).await.is_ok(),
                // The request comes from this process.
                None => true,
            }
        };
        let mut request = request.into_inner();
        let name = ServiceName::new(&request.namespace, &request.name);
        let detail = detail(self.hub.index(), &name).await?;
        if !request.sender_pod.is_empty() {
            let to = why::family(&request, &detail);
            policies::send_by_pod(self.hub.index(), &mut request, to).await?;
        }
        let others = self.others(&name).await;
        let node = on_node(&self.hub, &name, &request.node, &others)?;
        let (mut explanation, expected) = why::explain(&name, &request, &detail, &node)?;
        let Some((expected, ways)) = expected else {
            return Ok(attempts::not_proxied(explanation));
        };
        let unlike = ways.judge(self.hub.index(), may_judge, &mut explanation).await?;
        let mut plan = attempts::Plan::new(&explanation, expected.protocol(), tries);
        let is_own = |to: SocketAddr| node.facts.addresses.contains(&to.ip());
        if why::comes_from_outside(&request) && explanation.to.parse().is_ok_and(is_own) {
            plan.connect_from(neighbour(&self.hub, &others, &expected.node));
        }
        if let Some(reason) = unlike {
            plan.refuse(reason);
        }
        let question = Arc::new(pb::Inspect {
            destination: Some(expected.destination.clone()),
            attempts: plan.addresses(),
            ..node_query::about(&name)
        });
        let (beside, address) = plan.neighbour().unwrap_or_default();
        let of_neighbour = Arc::new(pb::Inspect {
            attempts: vec![address.to_owned()],
            ..pb::Inspect::default()
        });
        let asked = |of: &NodeName, _: &Node<'_>| *of == expected.node || **of == *beside;
        let question = |of: &NodeName| {
            if **of == *beside { Arc::clone(&of_neighbour) } else { Arc::clone(&question) }
        };
        let agents = self.agents(&others);
        let answers = agents.ask(question, asked, node_query::SERVICE).await.nodes;
        let gone = || Reply::nothing(expected.node.clone(), "it has no agent");
        let (mut heard, mut by_neighbour) = (gone(), gone());
        for answer in answers {
            if answer.node == expected.node {
                heard = answer;
            } else {
                by_neighbour = answer;
            }
        }
        let kernel = heard.part(|reported| reported.kernel.as_ref(), |kernel| &kernel.error);
        let (kernel, finding) = expected.compare(kernel);
        explanation.kernel = Some(kernel);
        explanation.findings.extend(finding.as_ref().map(Finding::to_wire));
        let nodes = why::nodes_of(&explanation);
        let around = around(&self.hub, &name, &nodes, &others);
        explanation.findings.extend(around);
        let tried = attempts::of(&heard);
        Ok(plan.result(explanation, tried, attempts::of(&by_neighbour)))
    }
}

/// Returns the next node by name whose agent is connected.
fn neighbour(hub: &Hub, others: &Collected, node: &NodeName) -> Option<NodeName> {
    let snapshot = Snapshot::with(hub, others);
    let connected = || snapshot.nodes().filter(|(_, of)| of.is_connected()).map(|(name, _)| name);
    let next = connected().find(|of| *of > node);
    next.or_else(|| connected().find(|of| *of < node)).cloned()
}
