//! One question to the agents of many nodes, whichever replica each is connected to.
//!
//! Answers are bounded in number, size and time. A node without an answer is in the result, with the reason: it never
//! counts as one that answered "nothing".

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, Stream, StreamExt as _};
use kplane_fleet::fleet::{Fleet, More, label};
use kplane_fleet::hub::Hub;
use kplane_fleet::peers::{Collected, Heard, Patience, Peers};
use kplane_model::{NodeName, ServiceName};
use kplane_proto::v1 as pb;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use super::pages::{MAY_BE_ELSEWHERE, Picture};

/// Maximum number of agents that are asked at once.
const AT_A_TIME: usize = 1_024;
/// Maximum size of all answers together, in bytes.
const ANSWERS_BYTES: usize = 16 << 20;
/// Longest time that another replica may want.
const LONGEST: Duration = Duration::from_secs(30);
/// Maximum number of nodes without an answer that are named.
const SILENT: usize = 1_000;
/// Longest text of an agent that is shown, in bytes.
const TEXT: usize = 300;

/// The answer of one agent, or the reason why there is none.
#[derive(Debug)]
pub(super) struct Answered {
    /// Version of the agent; empty = not known.
    pub(super) version: String,
    pub(super) outcome: Result<pb::Inspection, String>,
}

impl Answered {
    fn none(reason: impl Into<String>) -> Self {
        Self {
            version: String::new(),
            outcome: Err(reason.into()),
        }
    }

    /// Returns a part of the answer. An agent that leaves it out does not know the question.
    pub(super) fn part<T>(
        self,
        part: impl Fn(pb::Inspection) -> Option<T>,
        error: impl Fn(&T) -> &str,
    ) -> Result<T, String> {
        let version = self.version;
        let part = part(self.outcome?).ok_or_else(|| match version.as_str() {
            "" => "its agent does not know this question: it is of an older version".to_owned(),
            version => format!(
                "its agent of version {} does not know this question: update it",
                label(version, TEXT)
            ),
        })?;
        match error(&part) {
            "" => Ok(part),
            text => Err(label(text, TEXT)),
        }
    }
}

/// The answers of all nodes that were asked.
#[derive(Debug, Default)]
pub(super) struct Answers {
    pub(super) nodes: BTreeMap<NodeName, Answered>,
    /// All nodes, asked or not, sorted.
    pub(super) all: Vec<NodeName>,
    pub(super) missing: Vec<pb::MissingReplica>,
}

/// The parts of answers that a question is about, and who has none.
#[derive(Debug)]
pub(super) struct Parts<T> {
    /// Number of nodes that were asked.
    pub(super) asked: u64,
    pub(super) answered: Vec<(NodeName, T)>,
    /// Nodes without an answer, 1,000 at most, and the number of further ones.
    pub(super) silent: Vec<pb::SilentNode>,
    pub(super) more_silent: u64,
    pub(super) missing: Vec<pb::MissingReplica>,
}

impl Answers {
    /// Returns a part of all answers; see [`Answered::part`].
    pub(super) fn parts<T>(
        self,
        part: impl Fn(pb::Inspection) -> Option<T>,
        error: impl Fn(&T) -> &str,
    ) -> Parts<T> {
        let mut parts = Parts {
            asked: self.nodes.len() as u64,
            answered: Vec::new(),
            silent: Vec::new(),
            more_silent: 0,
            missing: self.missing,
        };
        for (node, answered) in self.nodes {
            match answered.part(&part, &error) {
                Ok(found) => parts.answered.push((node, found)),
                Err(_) if parts.silent.len() == SILENT => parts.more_silent += 1,
                Err(reason) => parts.silent.push(pb::SilentNode {
                    node: node.to_string(),
                    reason,
                }),
            }
        }
        parts
    }
}

/// Asks the agents of all nodes, or of those that `wanted` names.
pub(super) async fn ask(
    hub: &Hub,
    peers: Option<&Peers>,
    question: pb::Inspect,
    wanted: impl Fn(&NodeName) -> bool,
    within: Duration,
) -> Answers {
    let (question, patience) = (Arc::new(question), Patience::all(within));
    ask_each(hub, peers, |_, _| Arc::clone(&question), wanted, patience).await
}

/// Asks the agents of all nodes, or of those that `wanted` names, a question of their own: `question` gets the node, and
/// all nodes, sorted.
pub(super) async fn ask_each(
    hub: &Hub,
    peers: Option<&Peers>,
    question: impl Fn(&NodeName, &[NodeName]) -> Arc<pb::Inspect>,
    wanted: impl Fn(&NodeName) -> bool,
    patience: Patience,
) -> Answers {
    let collected = match peers {
        Some(peers) => peers.everything().await,
        None => Collected::default(),
    };
    let mut answers = Answers {
        missing: collected.missing.clone(),
        ..Answers::default()
    };
    let (mut here, mut there) = (Vec::new(), BTreeMap::<SocketAddr, Vec<_>>::new());
    let picture = Picture::with(hub, &collected);
    let all: Vec<NodeName> = picture.nodes().map(|(node, _)| node.clone()).collect();
    for (node, seen) in picture.nodes() {
        if !wanted(node) {
            continue;
        }
        match &seen.elsewhere {
            _ if !seen.is_connected() => {
                let reason = match (answers.missing.is_empty(), &seen.record, &seen.elsewhere) {
                    (false, ..) => MAY_BE_ELSEWHERE,
                    (true, None, None) => "it has no agent",
                    (true, ..) => "its agent is not connected",
                };
                answers.nodes.insert(node.clone(), Answered::none(reason));
            }
            Some(elsewhere) => there
                .entry(elsewhere.answer.address)
                .or_default()
                .push((node.clone(), question(node, &all))),
            None => here.push((node.clone(), question(node, &all))),
        }
    }
    answers.all = all;
    let own = async {
        let mut heard = std::pin::pin!(own_agents(&hub.fleet, here, patience));
        let (mut settled, mut room) = (Vec::new(), ANSWERS_BYTES);
        while let Some(heard) = heard.next().await {
            settled.push(settle(heard, &mut room));
        }
        settled
    };
    let others = async {
        let asked = there.into_iter().map(|(address, nodes)| async move {
            match peers {
                Some(peers) => peers.agents(address, nodes, patience).await,
                None => Vec::new(),
            }
        });
        futures_util::future::join_all(asked).await
    };
    let (own, others) = tokio::join!(own, others);
    answers.nodes.extend(own);
    let mut room = ANSWERS_BYTES;
    for heard in others.into_iter().flatten() {
        let (node, answered) = settle(heard, &mut room);
        answers.nodes.insert(node, answered);
    }
    answers
}

/// Bounds an answer.
fn settle(heard: Heard, room: &mut usize) -> (NodeName, Answered) {
    let bytes = heard
        .outcome
        .as_ref()
        .map_or(0, prost::Message::encoded_len);
    let fits = bytes <= *room;
    *room -= if fits { bytes } else { 0 };
    let outcome = match fits {
        true => heard.outcome.map_err(|reason| label(&reason, TEXT)),
        false => Err("not shown: too many answers".to_owned()),
    };
    let answered = Answered {
        version: heard.version,
        outcome,
    };
    (heard.node, answered)
}

/// Asks agents that are connected to this replica, and yields their answers as they come.
fn own_agents<'a>(
    fleet: &'a Fleet,
    nodes: Vec<(NodeName, Arc<pb::Inspect>)>,
    patience: Patience,
) -> impl Stream<Item = Heard> + 'a {
    let end = Instant::now() + patience.within;
    let asked = nodes.into_iter().map(move |(node, question)| async move {
        let version = fleet.record(&node).map(|record| record.version.clone());
        let service = ServiceName::new(&question.namespace, &question.name);
        let more = More {
            destination: question.destination.clone(),
            attempts: question.attempts.clone(),
            further: question,
        };
        let answer = fleet.ask(&node, &service, more);
        let until = end.min(Instant::now() + patience.each);
        let outcome = match timeout_at(until, answer).await {
            Ok(Ok(inspection)) => Ok(inspection),
            Ok(Err(_)) => Err("its agent disconnected, or has too many open questions".into()),
            Err(_) => Err("its agent is connected, and did not answer in time".into()),
        };
        Heard {
            node,
            version: version.unwrap_or_default(),
            outcome,
        }
    });
    stream::iter(asked).buffer_unordered(AT_A_TIME)
}

/// Asks agents for another replica.
pub(super) async fn answer_replica(
    fleet: &Fleet,
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
    let patience = Patience { each, within };
    let mut heard = std::pin::pin!(own_agents(fleet, nodes.collect(), patience));
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
