//! Questions to agents that are connected to other replicas.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use kplane_model::NodeName;
use kplane_proto::v1 as pb;
use prost::Message as _;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use super::answer::PeerQuestion;
use super::{Collected, MAX_REASON, Peers, describe};
use crate::fleet::label;
use crate::node_query::{ANSWERS_BYTES, Questions, Reply, Room, Timeouts};

/// Time for which a replica is waited for beyond its agents' time.
const SLACK: Duration = Duration::from_millis(500);

fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

impl Peers {
    /// Returns which agents are connected to which replica.
    pub async fn everything(&self) -> Collected {
        self.collect(&PeerQuestion::default()).await
    }

    /// Asks agents that are connected to the replicas at these addresses: one answer for each node.
    pub async fn agents(
        &self,
        at: BTreeMap<SocketAddr, Questions>,
        timeouts: Timeouts,
    ) -> Vec<Reply> {
        let asked = at.into_iter().map(|(address, nodes)| self.agents_at(address, nodes, timeouts));
        let (heard, mut room) = (join_all(asked).await, Room::default());
        let heard = heard.into_iter().flatten();
        heard.map(|heard| room.fit(heard)).collect()
    }

    async fn agents_at(
        &self,
        address: SocketAddr,
        nodes: Questions,
        timeouts: Timeouts,
    ) -> Vec<Reply> {
        let is_urgent = nodes.iter().all(|(_, question)| question.urgent);
        let _turn = if is_urgent { None } else { self.turns.agents().await };
        let mut open: BTreeSet<NodeName> = nodes.iter().map(|(node, _)| node.clone()).collect();
        let mut heard = Vec::new();
        let (nodes, questions): (Vec<NodeName>, Vec<Arc<pb::Inspect>>) = nodes.into_iter().unzip();
        let all_alike = questions.windows(2).all(|pair| Arc::ptr_eq(&pair[0], &pair[1]));
        let each = questions.iter().map(|question| pb::Inspect::clone(question));
        let request = pb::AskRequest {
            question: questions.first().map(|question| pb::Inspect::clone(question)),
            nodes: nodes.iter().map(ToString::to_string).collect(),
            within_ms: millis(timeouts.within),
            each_ms: millis(timeouts.each),
            questions: if all_alike { Vec::new() } else { each.collect() },
        };
        let until = Instant::now() + timeouts.within + SLACK;
        let asking = self.ask_agents(address, request, &mut open, &mut heard);
        let failure = match timeout_at(until, asking).await {
            Ok(Ok(())) => "its agent is not connected any more".to_owned(),
            Ok(Err(reason)) => {
                format!("the replica {address} of the control plane failed: {reason}")
            }
            Err(_) => format!("the replica {address} of the control plane did not answer in time"),
        };
        let silent = open.into_iter();
        heard.extend(silent.map(|node| Reply::nothing(node, &*failure)));
        heard
    }

    async fn ask_agents(
        &self,
        address: SocketAddr,
        request: pb::AskRequest,
        open: &mut BTreeSet<NodeName>,
        heard: &mut Vec<Reply>,
    ) -> Result<(), String> {
        let refused = |status: Status| describe(&status);
        let (targets, _) = self.way.targets().await;
        let target = targets.iter().find(|target| target.address == address);
        let mut client = self.way.client(target.ok_or("it is not there any more")?);
        let mut stream = client.ask(request).await.map_err(refused)?.into_inner();
        let mut bytes = 0;
        while let Some(asked) = stream.message().await.map_err(refused)? {
            bytes += asked.encoded_len();
            if bytes > ANSWERS_BYTES {
                return Err("its answer is too large".to_owned());
            }
            // An answer for a node that was not asked is none.
            let Some(node) = open.take(asked.node.as_str()) else {
                continue;
            };
            heard.push(Reply {
                node,
                version: label(&asked.version, MAX_REASON),
                outcome: asked.answer.ok_or_else(|| label(&asked.error, MAX_REASON)),
            });
        }
        Ok(())
    }
}
