//! Questions about one Service to agents, for facts that no report has.
//!
//! Answers are not kept: they go into the description that was requested. Each agent gets one
//! question at a time, so that a client with many questions costs every agent little.
//!
//! Virtual servers of IPVS and their connections change all the time, so reports contain only a few counts of them.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use kplane_model::{NodeName, ServiceName};
use kplane_proto::v1 as pb;
use prost::Message as _;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::fleet::{Fleet, More, Question};
use crate::peers::NodeAnswer;

/// Maximum time to wait for an answer. An agent answers at once unless it is busy with a change.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Maximum size of all answers together, in bytes as they are sent: some 200,000 real servers.
const ANSWERS_BYTES: usize = 16 << 20;

/// Maximum number of agents that are asked at once.
const AT_A_TIME: usize = 64;

/// Virtual servers in a description, by node.
pub type Answers = BTreeMap<NodeName, pb::ServiceServers>;

/// Asks all agents that have virtual servers, 64 at once, which limits the number of
/// answers in memory.
pub async fn ask_all(fleet: &Fleet, service: &ServiceName) -> Answers {
    let asked = fleet.with_servers().into_iter().map(|node| async move {
        let answer = fleet.ask(&node, service, More::default());
        let servers = match timeout(ANSWER_WITHIN, answer).await {
            Ok(Ok(inspection)) => understood(inspection, service),
            Ok(Err(_)) => unknown("the agent disconnected, or has too many open questions"),
            Err(_) => unknown("the agent did not answer within 2 s"),
        };
        (node, servers)
    });
    let mut asked = stream::iter(asked).buffer_unordered(AT_A_TIME);
    let mut answers = Answers::new();
    let mut room = ANSWERS_BYTES;
    while let Some((node, servers)) = asked.next().await {
        let bytes = servers.encoded_len();
        let fits = bytes <= room;
        room -= if fits { bytes } else { 0 };
        let servers = if fits {
            servers
        } else {
            unknown("not shown: too many nodes")
        };
        answers.insert(node, servers);
    }
    answers
}

/// Asks one agent for more than virtual servers. Returns the reason if there is no answer.
pub async fn ask_one(
    fleet: &Fleet,
    node: &NodeName,
    service: &ServiceName,
    more: More,
) -> Result<NodeAnswer, String> {
    let answer = fleet.ask(node, service, more);
    match timeout(ANSWER_WITHIN, answer).await {
        Ok(Ok(inspection)) => Ok(NodeAnswer {
            kernel: inspection.kernel,
            attempts: inspection.attempts,
        }),
        Ok(Err(_)) => Err("the agent disconnected, or has too many open questions".to_owned()),
        Err(_) => Err("the agent did not answer within 2 s".to_owned()),
    }
}

fn unknown(error: &str) -> pb::ServiceServers {
    pb::ServiceServers {
        error: error.to_owned(),
        ..Default::default()
    }
}

/// Returns an answer, without virtual servers of other Services.
fn understood(inspection: pb::Inspection, service: &ServiceName) -> pb::ServiceServers {
    let mut servers = inspection.servers;
    servers.retain(|server| {
        let key = server.key.as_ref();
        key.is_some_and(|k| k.namespace == *service.namespace && k.name == *service.name)
    });
    let cut = kplane_proto::bound_servers(&mut servers) as u64;
    pb::ServiceServers {
        servers,
        more: inspection.more.saturating_add(cut),
        age_ms: inspection.age_ms,
        error: inspection.error,
    }
}

/// Questions to one agent.
pub(super) struct Questions {
    waiting: mpsc::Receiver<Question>,
    asked: Option<(u64, oneshot::Sender<pb::Inspection>)>,
    last: u64,
}

impl Questions {
    pub(super) fn new(waiting: mpsc::Receiver<Question>) -> Self {
        Self {
            waiting,
            asked: None,
            last: 0,
        }
    }

    /// Returns the next question, once the last one is answered or its caller has gone. Safe to
    /// drop at any time.
    pub(super) async fn next(&mut self) -> pb::Inspect {
        if let Some((_, answer)) = &mut self.asked {
            answer.closed().await;
            self.asked = None;
        }
        loop {
            let Some(question) = self.waiting.recv().await else {
                return std::future::pending().await;
            };
            if question.answer.is_closed() {
                continue;
            }
            self.last += 1;
            self.asked = Some((self.last, question.answer));
            return pb::Inspect {
                token: self.last,
                namespace: question.service.namespace.to_string(),
                name: question.service.name.to_string(),
                destination: question.more.destination,
                attempts: question.more.attempts,
                ..pb::Inspect::clone(&question.more.further)
            };
        }
    }

    /// Handles the agent's answer. An answer that was not requested, or comes too late, is dropped.
    pub(super) fn answered(&mut self, inspection: pb::Inspection) {
        let asked = self.asked.take_if(|(token, _)| *token == inspection.token);
        if let Some((_, answer)) = asked {
            // The caller may have gone.
            let _ = answer.send(inspection);
        }
    }
}
