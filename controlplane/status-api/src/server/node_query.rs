//! One question to the agents of many nodes, whichever replica each is connected to.
//!
//! A node without an answer is in the result, with the reason: it never counts as one that answered "nothing".

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use kplane_agents::fleet::AgentRegistry;
use kplane_agents::hub::Hub;
use kplane_agents::node_query::{self, Reply, Timeouts};
use kplane_agents::peers::{Collected, Peers};
use kplane_model::{NodeName, ServiceName};
use kplane_proto::v1 as pb;
use tokio::sync::mpsc;
use tonic::Status;

use super::pages::{MAY_BE_ELSEWHERE, Node, Snapshot};

/// Longest time that another replica may want.
const LONGEST: Duration = Duration::from_secs(30);
/// Maximum number of nodes without an answer that are named.
const SILENT: usize = 1_000;

/// Time for agents that are asked about one Service.
pub(super) const SERVICE: Timeouts = Timeouts {
    each: Duration::from_secs(2),
    within: Duration::from_secs(4),
};

/// The agents of all replicas.
#[derive(Clone, Copy)]
pub(super) struct Agents<'a> {
    pub(super) hub: &'a Hub,
    pub(super) peers: Option<&'a Peers>,
    /// The answers of other replicas, which say where their agents are connected.
    pub(super) others: &'a Collected,
}

/// The answers of all nodes that were asked, sorted.
#[derive(Debug)]
pub(super) struct Answers {
    pub(super) nodes: Vec<Reply>,
    pub(super) missing: Vec<pb::MissingReplica>,
}

/// The parts of answers that a question is about, and who has none.
#[derive(Debug)]
pub(super) struct Parts<'a, T> {
    pub(super) reported: Vec<(&'a NodeName, &'a T)>,
    /// Nodes without an answer are named, 1,000 at most.
    pub(super) asked: pb::NodesAsked,
}

impl Answers {
    /// Returns a part of all answers; see [`Reply::part`].
    pub(super) fn parts<T>(
        &self,
        part: impl Fn(&pb::Inspection) -> Option<&T>,
        error: impl Fn(&T) -> &str,
    ) -> Parts<'_, T> {
        let (mut reported, mut asked) = (Vec::new(), pb::NodesAsked::default());
        for heard in &self.nodes {
            match heard.part(&part, &error) {
                Ok(found) => reported.push((&heard.node, found)),
                Err(_) if asked.silent.len() == SILENT => asked.more_silent += 1,
                Err(reason) => asked.silent.push(pb::SilentNode {
                    node: heard.node.to_string(),
                    reason,
                }),
            }
        }
        asked.asked = self.nodes.len() as u64;
        asked.answered = reported.len() as u64;
        asked.missing_replicas.clone_from(&self.missing);
        Parts { reported, asked }
    }
}

/// Returns a question for the virtual servers of a Service.
pub(super) fn about(service: &ServiceName) -> pb::Inspect {
    pb::Inspect {
        namespace: service.namespace.to_string(),
        name: service.name.to_string(),
        ..pb::Inspect::default()
    }
}

/// Returns which agents are connected to which other replica.
pub(super) async fn others(peers: Option<&Peers>) -> Collected {
    match peers {
        Some(peers) => peers.everything().await,
        None => Collected::default(),
    }
}

/// Asks the agents of all nodes, or that of one.
pub(super) async fn ask(
    hub: &Hub,
    peers: Option<&Peers>,
    question: pb::Inspect,
    node: &str,
    within: Duration,
) -> Answers {
    let (question, others) = (Arc::new(question), others(peers).await);
    let agents = Agents {
        hub,
        peers,
        others: &others,
    };
    let wanted = |of: &NodeName, _: &Node<'_>| node.is_empty() || **of == *node;
    let timeouts = Timeouts::all(within);
    agents.ask(|_| Arc::clone(&question), wanted, timeouts).await
}

impl Agents<'_> {
    /// Asks the agents of the nodes that `wanted` names.
    pub(super) async fn ask(
        self,
        question: impl Fn(&NodeName) -> Arc<pb::Inspect>,
        wanted: impl Fn(&NodeName, &Node<'_>) -> bool,
        timeouts: Timeouts,
    ) -> Answers {
        let missing = self.others.missing.clone();
        let (mut nodes, mut here) = (Vec::new(), Vec::new());
        let mut there = BTreeMap::<_, Vec<_>>::new();
        for (node, seen) in Snapshot::with(self.hub, self.others).nodes() {
            if !wanted(node, seen) {
                continue;
            }
            match &seen.elsewhere {
                _ if !seen.is_connected() => {
                    let reason = match (missing.is_empty(), &seen.record, &seen.elsewhere) {
                        (false, ..) => MAY_BE_ELSEWHERE,
                        (true, None, None) => "it has no agent",
                        (true, ..) => "its agent is not connected",
                    };
                    nodes.push(Reply::nothing(node.clone(), reason));
                }
                Some(elsewhere) => there
                    .entry(elsewhere.answer.address)
                    .or_default()
                    .push((node.clone(), question(node))),
                None => here.push((node.clone(), question(node))),
            }
        }
        let there = async {
            match self.peers {
                Some(peers) => peers.agents(there, timeouts).await,
                None => Vec::new(),
            }
        };
        let here = node_query::ask(self.hub.agents(), here, timeouts).collect::<Vec<_>>();
        let (here, there) = tokio::join!(here, there);
        nodes.extend(here.into_iter().chain(there));
        nodes.sort_unstable_by(|a, b| a.node.cmp(&b.node));
        Answers { nodes, missing }
    }
}

/// Asks agents for another replica.
pub(super) async fn answer_replica(
    fleet: &AgentRegistry,
    request: pb::AskRequest,
    outbox: &mpsc::Sender<Result<pb::AskedNode, Status>>,
) {
    let question = Arc::new(request.question.unwrap_or_default());
    let within = Duration::from_millis(request.within_ms.into()).min(LONGEST);
    let mut own = request.questions.into_iter().map(Arc::new);
    let nodes = request.nodes.iter().map(|node| {
        let question = own.next().unwrap_or_else(|| Arc::clone(&question));
        (node.as_str().into(), question)
    });
    let each = match request.each_ms {
        0 => within,
        each => Duration::from_millis(each.into()),
    };
    let timeouts = Timeouts { each, within };
    let mut heard = std::pin::pin!(node_query::ask(fleet, nodes.collect(), timeouts));
    while let Some(heard) = heard.next().await {
        let (answer, error) = match heard.outcome {
            Ok(answer) => (Some(answer), String::new()),
            Err(error) => (None, error),
        };
        let node = pb::AskedNode {
            node: heard.node.to_string(),
            answer,
            error,
            version: heard.version,
        };
        if outbox.send(Ok(node)).await.is_err() {
            return;
        }
    }
}
