//! The answer of another replica: bytes from outside, with limits on everything.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use kplane_model::{Digest, NodeName, ServiceName};
use kplane_proto::v1 as pb;
use kplane_proto::v1::collected::Kind;
use kplane_util::clock::millis;
use prost::Message as _;
use tokio::time::Instant;
use tonic::Streaming;

use crate::fleet::{Durations, bound_avoided, bound_report, label, translate};

/// Maximum number of agents of one replica.
const MAX_AGENTS: usize = 65_536;
/// Maximum size of an answer, in bytes: 10,000 agents with reports of some 6 kB.
const MAX_BYTES: usize = 64 << 20;
/// Longest text of a replica that is shown, in bytes.
const MAX_TEXT: usize = 300;

/// A question to all replicas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PeerQuestion {
    /// Whether the statuses of nodes are wanted.
    pub(super) statuses: bool,
    /// The Services that are wanted.
    pub(super) services: Vec<ServiceName>,
}

impl PeerQuestion {
    /// Asks for the statuses of all nodes.
    pub(super) fn nodes() -> Self {
        Self {
            statuses: true,
            services: Vec::new(),
        }
    }

    /// Asks for one Service.
    pub(super) fn service(name: ServiceName) -> Self {
        Self {
            statuses: false,
            services: vec![name],
        }
    }

    /// Returns whether an answer to this question answers the other one as well.
    pub(super) fn covers(&self, other: &Self) -> bool {
        let knows = |name| self.services.contains(name);
        (self.statuses || !other.statuses) && other.services.iter().all(knows)
    }
}

/// A replica's answer.
#[derive(Debug)]
pub struct Answer {
    /// The replica's address.
    pub address: SocketAddr,
    /// The epoch of the replica's revisions.
    pub epoch: u64,
    /// What the replica says to agents about NetworkPolicies as a whole.
    pub enforcement: pb::Enforcement,
    /// Changes with everything that the replica knows.
    pub(super) state: u64,
    /// Time at which the answer arrived.
    received: Instant,
    /// Clock of the replica, and this replica's own at the same moment.
    clocks: (u64, u64),
    pub(super) question: PeerQuestion,
    services: Vec<PublishedService>,
    /// The replica's agents, by node.
    pub agents: BTreeMap<NodeName, pb::PeerAgent>,
}

/// One Service, as a replica publishes it.
#[derive(Debug)]
struct PublishedService {
    digest: Option<Digest>,
    durations: Durations,
}

/// The right to tell about a node: the replica with the newest connection has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Whether the agent is connected.
    pub connected: bool,
    /// Time since the agent connected, or since its stream ended.
    pub age: Duration,
}

impl Claim {
    /// Returns whether this claim counts, and the other one does not.
    pub fn beats(self, other: Self) -> bool {
        match (self.connected, other.connected) {
            (true, false) => true,
            (false, true) => false,
            _ => self.age < other.age,
        }
    }
}

/// An answer that no replica gives.
#[derive(Debug, thiserror::Error)]
pub(super) enum Invalid {
    #[error("its answer ends too early")]
    Incomplete,
    #[error("its answer is none of a replica")]
    Disorder,
    #[error("its answer is too large")]
    TooLarge,
}

/// The result of reading an answer.
pub(super) enum Read {
    Answer(Box<Answer>),
    /// The replica has not changed since the answer before.
    Unchanged,
    /// The answer comes from this replica itself.
    Oneself,
}

/// The reason why an answer cannot be read.
pub(super) enum Unread {
    Status(Box<tonic::Status>),
    Invalid(Invalid),
}

impl From<tonic::Status> for Unread {
    fn from(status: tonic::Status) -> Self {
        Self::Status(Box::new(status))
    }
}

impl From<Invalid> for Unread {
    fn from(invalid: Invalid) -> Self {
        Self::Invalid(invalid)
    }
}

/// Reads an answer to its end.
pub(super) async fn read(
    mut stream: Streaming<pb::Collected>,
    (address, own_epoch): (SocketAddr, u64),
    question: &PeerQuestion,
) -> Result<Read, Unread> {
    let first = stream.message().await?.and_then(|message| message.kind);
    let Some(Kind::Replica(replica)) = first else {
        return Err(Invalid::Disorder.into());
    };
    if replica.epoch == own_epoch {
        return Ok(Read::Oneself);
    }
    if replica.unchanged {
        return Ok(Read::Unchanged);
    }
    let mut answer = Answer::begin(address, replica, question)?;
    let mut bytes = 0;
    while let Some(message) = stream.message().await? {
        bytes += message.encoded_len();
        if bytes > MAX_BYTES || answer.agents.len() >= MAX_AGENTS {
            return Err(Invalid::TooLarge.into());
        }
        match message.kind {
            Some(Kind::Agent(agent)) => answer.add(agent)?,
            Some(Kind::End(_)) => return Ok(Read::Answer(Box::new(answer))),
            // A newer replica may tell more.
            None => {}
            Some(Kind::Replica(_)) => return Err(Invalid::Disorder.into()),
        }
    }
    Err(Invalid::Incomplete.into())
}

impl Answer {
    fn begin(
        address: SocketAddr,
        replica: pb::PeerReplica,
        question: &PeerQuestion,
    ) -> Result<Self, Invalid> {
        if replica.services.len() != question.services.len() {
            return Err(Invalid::Disorder);
        }
        let enforcement = replica.enforcement();
        let services = replica.services.into_iter().map(|service| {
            let digest = <[u8; 16]>::try_from(service.digest.as_slice());
            PublishedService {
                digest: digest.ok().map(Digest::from_bytes),
                durations: Durations::from_wire(&service.durations.unwrap_or_default()),
            }
        });
        Ok(Self {
            address,
            epoch: replica.epoch,
            enforcement,
            state: replica.state,
            received: Instant::now(),
            clocks: (replica.now_ms, millis(SystemTime::now())),
            question: question.clone(),
            services: services.collect(),
            agents: BTreeMap::new(),
        })
    }

    fn add(&mut self, mut agent: pb::PeerAgent) -> Result<(), Invalid> {
        let is_name = (1..=253).contains(&agent.node.len());
        if !is_name || agent.services.len() != self.question.services.len() {
            return Err(Invalid::Disorder);
        }
        for standing in &mut agent.services {
            standing.reason = label(&standing.reason, MAX_TEXT);
            standing.degraded = label(&standing.degraded, MAX_TEXT);
            bound_avoided(&mut standing.avoided);
        }
        match &mut agent.status {
            Some(status) if self.question.statuses => self.adopt(status, &agent.node),
            Some(_) => agent.status = None,
            None if self.question.statuses => return Err(Invalid::Disorder),
            None => {}
        }
        let name: NodeName = agent.node.as_str().into();
        match self.agents.insert(name, agent) {
            None => Ok(()),
            Some(_) => Err(Invalid::Disorder),
        }
    }

    /// Makes a status one of this replica: bounded, by its clock, and with its origin.
    fn adopt(&self, status: &mut pb::NodeStatus, node: &str) {
        node.clone_into(&mut status.name);
        status.replica = self.address.to_string();
        status.epoch = self.epoch;
        if let Some(report) = &mut status.report {
            bound_report(report);
            translate(report, |ms| self.local(ms));
        }
        status.since_ms = self.local(status.since_ms);
        status.last_heard_ms = self.local(status.last_heard_ms);
        if let Some(latencies) = &mut status.network_programming {
            latencies.last_at_ms = self.local(latencies.last_at_ms);
        }
    }

    /// Returns a time of the replica's clock by this replica's own clock, in milliseconds since 1970; 0 stays 0.
    pub fn local(&self, ms: u64) -> u64 {
        let (theirs, ours) = self.clocks;
        match ms {
            0 => 0,
            _ => ours.saturating_sub(theirs.saturating_sub(ms)).max(1),
        }
    }

    /// Returns the claim to a node.
    pub fn claim(&self, agent: &pb::PeerAgent) -> Claim {
        let before = Duration::from_millis(agent.for_ms);
        Claim {
            connected: agent.connected,
            age: before.saturating_add(self.received.elapsed()),
        }
    }

    /// Returns the index of a Service in the answer.
    pub fn index_of(&self, service: &ServiceName) -> Option<usize> {
        self.question.services.iter().position(|name| name == service)
    }

    /// Returns whether the replica publishes the same of a Service.
    pub fn agrees(&self, index: usize, digest: Digest) -> bool {
        let published = self.services.get(index);
        published.is_some_and(|published| published.digest == Some(digest))
    }

    /// Returns the durations of a Service's last change.
    pub fn durations(&self, index: usize) -> Option<&Durations> {
        self.services.get(index).map(|published| &published.durations)
    }
}
