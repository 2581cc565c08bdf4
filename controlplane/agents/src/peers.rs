//! The other replicas: what they know of their own agents.
//!
//! ```text
//! status API --Question--> Peers --PeerService--> replicas, all at once, one second at most
//!            <--Collected--      <--Answer, or a reason why not--
//! ```
//!
//! Nothing is asked while nobody asks: a question of the status API is passed on, and watches share one question a
//! replica for as long as there are any (`follow.rs`). Every replica answers for its own agents only, and the one that was
//! asked puts the answers together (`kplane-status-api`: `server/peer.rs`, `server/pages.rs`, `server/convergence.rs`).

mod agents;
mod answer;
mod config;
mod follow;
mod listed;
mod recorded;
mod turns;
mod way;

pub use config::{Config, PeerFlags, ReplicaAddress};
pub use listed::Listed;
pub use way::{ClientTls, PeerCover};

use answer::PeerQuestion;
pub use answer::{Answer, Claim};
pub use follow::Following;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use kplane_model::{NodeName, ServiceName};
use kplane_proto::v1 as pb;
use tokio::time::{Instant, timeout_at};
use tonic::{Code, Response, Status};

use self::answer::{Invalid, Read, Unread, read};
use self::follow::SharedWatches;
use self::turns::Turns;
use self::way::{Client, Target, Way};
use crate::fleet::{bound_held, label};

/// Maximum time to wait for all other replicas together.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);
/// Longest text of a replica in a reason, in bytes.
const MAX_REASON: usize = 300;
/// Maximum number of nodes in the result of an approval.
const MAX_NODES: usize = 65_536;

/// The other replicas of this control plane.
#[derive(Debug)]
pub struct Peers {
    /// Epoch of this replica, by which it recognizes itself.
    epoch: u64,
    way: Way,
    shared: SharedWatches,
    turns: Arc<Turns>,
}

/// The answers of all other replicas.
#[derive(Clone, Debug, Default)]
pub struct Collected {
    /// The answers.
    pub answers: Vec<Arc<Answer>>,
    /// Replicas that did not answer.
    pub missing: Vec<pb::MissingReplica>,
}

/// The reason why a replica is missing.
#[derive(Debug, thiserror::Error)]
enum Missing {
    #[error("it did not answer within {} s", PATIENCE.as_secs())]
    Late,
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    Invalid(#[from] Invalid),
}

/// The answer of one replica; `None` if it is this one.
type Asked = Result<Option<Arc<Answer>>, Missing>;

/// The nodes whose agents are connected to other replicas.
#[derive(Debug, Default)]
pub(crate) struct Served {
    pub(crate) nodes: BTreeSet<NodeName>,
    /// A replica did not answer.
    pub(crate) incomplete: bool,
}

impl Served {
    /// Returns whether another replica serves a node, or may.
    pub(crate) fn may_have(&self, node: &NodeName) -> bool {
        self.incomplete || self.nodes.contains(node)
    }
}

impl Collected {
    /// Returns the number of other replicas that were asked.
    pub fn replicas(&self) -> usize {
        self.answers.len() + self.missing.len()
    }
}

impl Peers {
    /// Creates the questions of the replica with this epoch; `None` if the configuration names no other replicas.
    pub fn new(
        epoch: u64,
        config: &Config,
        cover: PeerCover,
        listed: Option<Listed>,
    ) -> Option<Arc<Self>> {
        (!config.flags.peers.is_empty()).then(|| {
            Arc::new(Self {
                epoch,
                way: Way::new(config, cover, listed),
                shared: SharedWatches::default(),
                turns: Arc::default(),
            })
        })
    }

    /// Returns the number of other replicas that are connected, for the cost of questions.
    pub fn known(&self) -> usize {
        self.way.known()
    }

    /// Returns the number of other replicas that an answer of this one alone leaves out.
    pub async fn unasked(peers: Option<&Self>) -> u32 {
        match peers {
            Some(peers) => peers.latest_nodes().await.replicas().try_into().unwrap_or(u32::MAX),
            None => 0,
        }
    }

    /// Asks all replicas, and waits for a second at most.
    async fn collect(&self, question: &PeerQuestion) -> Collected {
        self.collect_after(question, &Collected::default()).await
    }

    /// Asks all replicas. A replica that has not changed since its last answer to the same question need not say
    /// it again.
    async fn collect_after(&self, question: &PeerQuestion, before: &Collected) -> Collected {
        let until = Instant::now() + PATIENCE;
        let (targets, missing) = self.way.targets().await;
        let asked = targets.into_iter().map(|target| async {
            let known = before
                .answers
                .iter()
                .find(|answer| answer.address == target.address)
                .filter(|answer| answer.question == *question);
            let answer =
                timeout_at(until, self.ask(&target, question, known)).await.unwrap_or_else(|_| {
                    // A dead connection does not say so.
                    self.way.hang_up(&target);
                    Err(Missing::Late)
                });
            (target, answer)
        });
        settle(join_all(asked).await, missing)
    }

    /// Asks one replica; `None` if it is this one. A connection that has just ended fails once.
    async fn ask(
        &self,
        target: &Target,
        question: &PeerQuestion,
        known: Option<&Arc<Answer>>,
    ) -> Asked {
        match self.ask_once(target, question, known).await {
            Err(Unread::Status(status)) if status.code() == Code::Unavailable => {
                self.way.hang_up(target);
                self.ask_once(target, question, known).await
            }
            answer => answer,
        }
        .map_err(|unread| {
            self.way.hang_up(target);
            match unread {
                Unread::Status(status) => Missing::Refused(describe(&status)),
                Unread::Invalid(invalid) => Missing::Invalid(invalid),
            }
        })
    }

    async fn ask_once(
        &self,
        target: &Target,
        question: &PeerQuestion,
        known: Option<&Arc<Answer>>,
    ) -> Result<Option<Arc<Answer>>, Unread> {
        let request = pb::CollectRequest {
            from: self.epoch,
            statuses: question.statuses,
            services: question.services.iter().map(reference).collect(),
            seen: known.map_or(0, |known| known.state),
        };
        let mut client = self.way.client(target);
        let stream = client.collect(request).await?.into_inner();
        match (
            read(stream, (target.address, self.epoch), question).await?,
            known,
        ) {
            (Read::Answer(answer), _) => Ok(Some(Arc::from(answer))),
            (Read::Unchanged, Some(known)) => Ok(Some(Arc::clone(known))),
            (Read::Unchanged, None) => Err(Invalid::Disorder.into()),
            (Read::Oneself, _) => Ok(None),
        }
    }

    /// Asks all replicas about a Service.
    pub async fn service(&self, name: &ServiceName) -> Collected {
        let _turn = self.turns.service().await;
        self.collect(&PeerQuestion::service(name.clone())).await
    }

    /// Asks all replicas for the statuses of nodes.
    pub async fn nodes(&self) -> Arc<Collected> {
        self.turns.nodes(self.collect(&PeerQuestion::nodes())).await
    }

    /// Returns the latest statuses of nodes, for the later pages of a list.
    pub async fn latest_nodes(&self) -> Arc<Collected> {
        match self.turns.latest() {
            Some(latest) => latest,
            None => self.nodes().await,
        }
    }

    /// Returns what other replicas serve.
    pub(crate) async fn served(&self) -> Served {
        let collected = self.collect(&PeerQuestion::default()).await;
        let agents = collected.answers.iter().flat_map(|answer| &answer.agents);
        let connected = agents.filter(|(_, agent)| agent.connected);
        Served {
            nodes: connected.map(|(node, _)| node.clone()).collect(),
            incomplete: !collected.missing.is_empty(),
        }
    }

    /// Passes an approval on to all other replicas; returns their results, and the replicas without one.
    pub async fn approve(
        &self,
        seen: pb::ApproveRequest,
    ) -> (Vec<pb::ApproveResponse>, Vec<pb::MissingReplica>) {
        // A replica that approves twice does nothing the second time.
        let ask = |mut client: Client| async move { client.approve(seen).await };
        let (approved, missing) = self.ask_each(ask).await;
        (approved.into_iter().map(bounded).collect(), missing)
    }

    /// Sends to all other replicas what this one suspects; returns the nodes whose agents are alive there.
    pub(crate) async fn suspect(&self, request: pb::SuspectRequest) -> Vec<String> {
        let until = Instant::now() + PATIENCE;
        let (targets, _) = self.way.targets().await;
        let asked = targets.iter().map(|target| async {
            let mut client = self.way.client(target);
            match timeout_at(until, client.suspect(request.clone())).await {
                Ok(Ok(reported)) => reported.into_inner().alive,
                // A dead connection does not say so.
                Ok(Err(_)) | Err(_) => {
                    self.way.hang_up(target);
                    Vec::new()
                }
            }
        });
        join_all(asked).await.into_iter().flatten().collect()
    }

    /// Asks each of the other replicas; returns their answers, and the replicas without one.
    async fn ask_each<T, F>(&self, ask: impl Fn(Client) -> F) -> (Vec<T>, Vec<pb::MissingReplica>)
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        // This finds out which address is whose.
        let Collected {
            answers,
            mut missing,
        } = self.collect(&PeerQuestion::default()).await;
        let (targets, _) = self.way.targets().await;
        let until = Instant::now() + PATIENCE;
        let asked = answers.iter().map(|answer| {
            let target = targets.iter().find(|target| target.address == answer.address);
            let asking = target.map(|target| ask(self.way.client(target)));
            async move {
                let response = timeout_at(until, asking.ok_or(Missing::Late)?)
                    .await
                    .map_err(|_| Missing::Late)?;
                response.map_err(|status| Missing::Refused(describe(&status)))
            }
        });
        let mut reported = Vec::new();
        for (answer, result) in answers.iter().zip(join_all(asked).await) {
            match result {
                Ok(response) => reported.push(response.into_inner()),
                Err(reason) => missing.push(pb::MissingReplica {
                    address: answer.address.to_string(),
                    reason: reason.to_string(),
                }),
            }
        }
        (reported, missing)
    }
}

/// Puts the answers together. A replica that answers at several addresses counts once. An address that does not answer is
/// named, since it may be that of one more replica.
fn settle(asked: Vec<(Target, Asked)>, missing: Vec<pb::MissingReplica>) -> Collected {
    let mut collected = Collected {
        answers: Vec::new(),
        missing,
    };
    let mut known = BTreeSet::new();
    for (target, answer) in asked {
        match answer {
            Ok(Some(answer)) if known.insert(answer.epoch) => collected.answers.push(answer),
            Ok(_) => {}
            Err(reason) => collected.missing.push(pb::MissingReplica {
                address: target.address.to_string(),
                reason: reason.to_string(),
            }),
        }
    }
    collected
}

/// Cuts the result of an approval to the size that a replica's has.
fn bounded(mut approved: pb::ApproveResponse) -> pb::ApproveResponse {
    approved.nodes.truncate(MAX_NODES);
    approved.doubt = label(&approved.doubt, MAX_REASON);
    if let Some(held) = &mut approved.released {
        bound_held(held);
    }
    approved
}

fn reference(service: &ServiceName) -> pb::ServiceRef {
    pb::ServiceRef {
        namespace: service.namespace.to_string(),
        name: service.name.to_string(),
    }
}

/// Returns the reason of a status: that of the connection, or the replica's own words.
fn describe(status: &Status) -> String {
    let mut cause = std::error::Error::source(status);
    let mut reason = None;
    while let Some(error) = cause {
        reason = Some(error.to_string());
        cause = error.source();
    }
    let text = match (reason, status.code()) {
        (Some(reason), _) => format!("cannot connect to it: {reason}"),
        (None, Code::Unimplemented) => "it is no replica, or an older one".to_owned(),
        (None, code) => format!("it refuses: {code}: {}", status.message()),
    };
    label(&text, MAX_REASON)
}
