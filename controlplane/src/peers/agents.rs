//! Questions to agents that are connected to other replicas.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use kplane_model::NodeName;
use kplane_proto::v1 as pb;
use prost::Message as _;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use super::answer::Question;
use super::{Collected, MAX_INSPECTED, MAX_REASON, Peers, describe};
use crate::fleet::label;

/// Time for which a replica is waited for beyond its agents' time.
const SLACK: Duration = Duration::from_millis(500);

/// What an agent said.
#[derive(Debug)]
pub(crate) struct Heard {
    pub(crate) node: NodeName,
    /// Version of the agent; empty = not known.
    pub(crate) version: String,
    /// The answer, or the reason why there is none.
    pub(crate) outcome: Result<pb::Inspection, String>,
}

impl Peers {
    /// Returns which agents are connected to which replica.
    pub(crate) async fn everything(&self) -> Collected {
        self.collect(&Question::default()).await
    }

    /// Asks agents that are connected to the replica at this address: one answer for each node.
    pub(crate) async fn agents(
        &self,
        address: SocketAddr,
        question: &pb::Inspect,
        nodes: Vec<NodeName>,
        within: Duration,
    ) -> Vec<Heard> {
        let _turn = self.turns.agents().await;
        let mut open: BTreeSet<NodeName> = nodes.into_iter().collect();
        let mut heard = Vec::new();
        let request = pb::AskRequest {
            question: Some(question.clone()),
            nodes: open.iter().map(ToString::to_string).collect(),
            within_ms: u32::try_from(within.as_millis()).unwrap_or(u32::MAX),
        };
        let until = Instant::now() + within + SLACK;
        let asking = self.ask_agents(address, request, &mut open, &mut heard);
        let failure = match timeout_at(until, asking).await {
            Ok(Ok(())) => "its agent is not connected any more".to_owned(),
            Ok(Err(reason)) => {
                format!("the replica {address} of the control plane failed: {reason}")
            }
            Err(_) => format!("the replica {address} of the control plane did not answer in time"),
        };
        let silent = open.into_iter().map(|node| Heard {
            node,
            version: String::new(),
            outcome: Err(failure.clone()),
        });
        heard.extend(silent);
        heard
    }

    async fn ask_agents(
        &self,
        address: SocketAddr,
        request: pb::AskRequest,
        open: &mut BTreeSet<NodeName>,
        heard: &mut Vec<Heard>,
    ) -> Result<(), String> {
        let refused = |status: Status| describe(&status);
        let (targets, _) = self.way.targets().await;
        let target = targets.iter().find(|target| target.address == address);
        let mut client = self.way.client(target.ok_or("it is not there any more")?);
        let stream = client.ask(request).await.map_err(refused)?;
        let mut stream = stream.into_inner();
        let mut bytes = 0;
        while let Some(asked) = stream.message().await.map_err(refused)? {
            bytes += asked.encoded_len();
            if bytes > MAX_INSPECTED.1 {
                return Err("its answer is too large".to_owned());
            }
            // An answer for a node that was not asked is none.
            let Some(node) = open.take(asked.node.as_str()) else {
                continue;
            };
            heard.push(Heard {
                node,
                version: label(&asked.version, MAX_REASON),
                outcome: asked.answer.ok_or_else(|| label(&asked.error, MAX_REASON)),
            });
        }
        Ok(())
    }
}
