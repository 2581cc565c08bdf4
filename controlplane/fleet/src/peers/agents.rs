//! Questions to agents that are connected to other replicas.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
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

/// Longest time to wait for agents.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For each of them.
    pub each: Duration,
    /// For all together.
    pub within: Duration,
}

impl Patience {
    /// Returns the patience that is the same for one agent and for all.
    pub fn all(within: Duration) -> Self {
        let each = within;
        Self { each, within }
    }
}

/// What an agent said.
#[derive(Debug)]
pub struct Heard {
    /// The node.
    pub node: NodeName,
    /// Version of the agent; empty = not known.
    pub version: String,
    /// The answer, or the reason why there is none.
    pub outcome: Result<pb::Inspection, String>,
}

fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

impl Peers {
    /// Returns which agents are connected to which replica.
    pub async fn everything(&self) -> Collected {
        self.collect(&Question::default()).await
    }

    /// Asks agents that are connected to the replica at this address: one answer for each node.
    pub async fn agents(
        &self,
        address: SocketAddr,
        nodes: Vec<(NodeName, Arc<pb::Inspect>)>,
        patience: Patience,
    ) -> Vec<Heard> {
        let _turn = self.turns.agents().await;
        let mut open: BTreeSet<NodeName> = nodes.iter().map(|(node, _)| node.clone()).collect();
        let mut heard = Vec::new();
        let (nodes, questions): (Vec<NodeName>, Vec<Arc<pb::Inspect>>) = nodes.into_iter().unzip();
        let all_alike = questions
            .windows(2)
            .all(|pair| Arc::ptr_eq(&pair[0], &pair[1]));
        let each = questions
            .iter()
            .map(|question| pb::Inspect::clone(question));
        let request = pb::AskRequest {
            question: questions
                .first()
                .map(|question| pb::Inspect::clone(question)),
            nodes: nodes.iter().map(ToString::to_string).collect(),
            within_ms: millis(patience.within),
            each_ms: millis(patience.each),
            questions: if all_alike {
                Vec::new()
            } else {
                each.collect()
            },
        };
        let until = Instant::now() + patience.within + SLACK;
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
