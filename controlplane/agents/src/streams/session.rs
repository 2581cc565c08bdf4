//! One agent's session: who the agent is, what it says, and how long it may stay. What it gets is in `updates.rs`.
//!
//! A message of the agent wakes its session, which puts the answer into the stream's mailbox (`mailbox.rs`).

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kplane_desired_state::freshness::Freshness;
use kplane_model::NodeName;
use kplane_proto::PROTOCOL_VERSION;
use kplane_proto::shared::Messages;
use kplane_proto::v1::{self as pb, AgentMessage, Hello, agent_message, server_message};
use kplane_tls::Token;
use kplane_util::buckets::{Bucket, Rate};
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until, timeout};
use tonic::Status;
use tracing::info;

use super::attendance::Attendance;
use super::mailbox::Postman;
use super::millis;
use super::questions::AgentQuestions;
use super::updates::{HeldState, Updates, must_be_node};
use crate::connection_limits::ConnectionGuard;
use crate::draining;
use crate::fleet::{BEATS, Misbehaviour, NotBegun, Session, bound_hello};
use crate::hub::{Closing, Hub, ReplicaInfo};
use crate::identity::{Caller, CredentialWatch};
use crate::prestop::NodeDepartures;

/// Maximum time until an agent that connects has sent its Hello.
const HELLO_WITHIN: Duration = Duration::from_secs(10);
/// Maximum time between two messages to an agent.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// Silence after which an agent counts as gone: agents answer pings. Half-open connections are
/// detected within 20 s.
const SILENCE: Duration = Duration::from_secs(15);
/// Messages of an agent. One that sends more is read more slowly; a busy agent sends some 100 a second.
const MESSAGES: Rate = Rate {
    burst: 2_000,
    refill: Duration::from_millis(5),
};
/// Time after which an agent tries again if another agent speaks for its node.
const RETRY: Duration = Duration::from_secs(2);
/// The capability to compare ranges, as a bit: capability N is bit N - 1.
const RANGES: u64 = 1 << (pb::Capability::Ranges as u64 - 1);
/// The capability to read compressed pieces.
const PACKED: u64 = 1 << (pb::Capability::Packed as u64 - 1);
/// The capability to enforce NetworkPolicies.
const POLICIES: u64 = 1 << (pb::Capability::Policies as u64 - 1);
/// The capability to enforce ClusterNetworkPolicies.
const CLUSTER_POLICIES: u64 = 1 << (pb::Capability::ClusterPolicies as u64 - 1);
/// The capability to answer an urgent question beside another one.
const URGENT: u64 = 1 << (pb::Capability::Urgent as u64 - 1);
/// Longest name of a Node: a DNS subdomain (RFC 1123), as in the API server.
const MAX_NODE_NAME: usize = 253;

/// The end of a stream: a last message, or the reason.
type End = Result<Option<server_message::Kind>, Status>;

/// The origin of a stream.
#[derive(Debug)]
pub(super) struct Peer {
    /// The peer's address; empty in the same process.
    pub(super) address: String,
    /// The connection that carries the stream; `None` in the same process.
    pub(super) connection: Option<ConnectionGuard>,
    /// The caller; `None` in the same process.
    pub(super) caller: Option<Caller>,
}

/// Serves one agent until one side ends the stream; `gone` fails when the stream is gone.
pub(super) async fn run(
    hub: Arc<Hub>,
    peer: Peer,
    mut inbound: Messages,
    postman: &Postman,
    gone: oneshot::Receiver<()>,
) -> End {
    let first = timeout(HELLO_WITHIN, inbound.message())
        .await
        .map_err(|_| Status::deadline_exceeded("no Hello within 10 s"))??;
    let Some(agent_message::Kind::Hello(mut hello)) = first.and_then(|m| m.kind) else {
        return Err(Status::invalid_argument("the first message must be Hello"));
    };
    let node = check_hello(&hello)?;
    must_enforce_policies(hub.replica(), &hello)?;
    let mut draining = hub.streams().draining.follow();
    if hub.streams().draining.is_on() {
        return Ok(Some(farewell(&hub)));
    }
    let credential_watch = match &peer.caller {
        Some(caller) => caller.authorize_agent(&node).await?,
        None => CredentialWatch::idle(),
    };
    // An agent in the same process is trusted: the cluster may even lack its Node.
    let needs_node = peer.connection.is_some();
    if needs_node {
        must_be_node(&hub, &node)?;
        if let Err(wait) = hub.agents().moderation.admit(&node) {
            let reason = "the agent of this node connects too often";
            return Ok(Some(come_back_later(wait, reason)));
        }
    }
    let too_long = bound_hello(&mut hello);
    let _attendance = Attendance::begin(hub.store(), &node);
    let begun = Session::begin(hub.agents(), &node, &hello, peer.address);
    let (session, superseded, questions) = match begun {
        Ok(begun) => begun,
        Err(error @ NotBegun::TooMany) => {
            return Err(Status::resource_exhausted(error.to_string()));
        }
        Err(error @ NotBegun::Taken(_)) => {
            return Ok(Some(come_back_later(RETRY, &error.to_string())));
        }
    };
    if let Some(too_long) = too_long {
        session.tell_too_long(Misbehaviour::Hello, too_long);
    }
    let _occupied = peer.connection.as_ref().map(ConnectionGuard::occupy);
    info!(%node, version = ?hello.agent_version, backend = ?hello.backend, "agent connected");
    let freshness = hub.store().freshness();
    let welcome = welcome(&hub, &node, &freshness);
    let dispatch = session.dispatch();
    let claim = claim(&hello);
    let updates = Updates::new(&hub, node.clone(), needs_node, claim, freshness, dispatch);
    postman.open(welcome, updates, millis(SystemTime::now()));
    let conversation = Conversation {
        postman,
        questions: AgentQuestions::new(questions, hello.capabilities & URGENT != 0),
        last_heard: Instant::now(),
        credential_watch,
        messages: Bucket::new(MESSAGES),
        pause: None,
        leaving: NodeDepartures::default(),
        hub: Arc::clone(&hub),
        node,
        beats: hello.capabilities & BEATS != 0 && hub.suspects().beat_ms() > 0,
        session,
    };
    tokio::select! {
        biased;
        () = hub.shutdown().cancelled() => Err(Closing.into()),
        _ = superseded => Err(Status::aborted("the agent has opened a newer stream")),
        () = draining::turn(&mut draining) => Ok(Some(farewell(&hub))),
        _ = gone => Ok(None),
        end = conversation.go_on(inbound) => end,
    }
}

/// Asks the agent to leave: the control plane is about to end.
fn farewell(hub: &Hub) -> server_message::Kind {
    server_message::Kind::ComeBackLater(hub.streams().draining.farewell(hub.replica().replicas()))
}

/// Returns what an agent says about the state that it holds.
fn claim(hello: &Hello) -> HeldState {
    HeldState {
        compares: hello.capabilities & RANGES != 0,
        unpacks: hello.capabilities & PACKED != 0,
        resume: hello.resume.clone(),
    }
}

/// Asks the agent to come back.
fn come_back_later(after: Duration, reason: &str) -> server_message::Kind {
    server_message::Kind::ComeBackLater(pb::ComeBackLater {
        after_ms: u32::try_from(after.as_millis()).unwrap_or(u32::MAX),
        reason: reason.to_owned(),
        replicas: Vec::new(),
    })
}

fn check_hello(hello: &Hello) -> Result<NodeName, Status> {
    if hello.protocol_version != PROTOCOL_VERSION {
        return Err(Status::failed_precondition(format!(
            "this control plane speaks protocol version {PROTOCOL_VERSION}, the agent {}: \
             upgrade the older of the two",
            hello.protocol_version
        )));
    }
    let name = &hello.node_name;
    if !is_node_name(name) {
        return Err(Status::invalid_argument(
            "node_name must be the name of a Node: lower case letters, digits, '-' and '.'; it \
             begins and ends with a letter or digit",
        ));
    }
    Ok(name.as_str().into())
}

/// Refuses an agent that would serve its node without the NetworkPolicies that the node must enforce.
fn must_enforce_policies(replica: &ReplicaInfo, hello: &Hello) -> Result<(), Status> {
    let needed = POLICIES | CLUSTER_POLICIES;
    if !replica.network_policies || hello.capabilities & needed == needed {
        return Ok(());
    }
    Err(Status::failed_precondition(
        "this control plane has NetworkPolicies (--network-policy), and this agent does not know them, or no \
         ClusterNetworkPolicies: upgrade the agent",
    ))
}

/// Returns whether a text is a valid name of a Node: a DNS subdomain.
pub fn is_node_name(name: &str) -> bool {
    name.len() <= MAX_NODE_NAME && name.split('.').all(is_label)
}

/// Returns whether a text is valid between the dots of a DNS subdomain.
fn is_label(text: &str) -> bool {
    let plain = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let [first, .., last] = text.as_bytes() else {
        return text.as_bytes().first().is_some_and(plain);
    };
    plain(first) && plain(last) && text.bytes().all(|b| plain(&b) || b == b'-')
}

fn welcome(hub: &Hub, node: &NodeName, freshness: &Freshness) -> pb::Welcome {
    pb::Welcome {
        protocol_version: PROTOCOL_VERSION,
        capabilities: RANGES | PACKED | POLICIES | BEATS | CLUSTER_POLICIES | URGENT,
        server_version: env!("CARGO_PKG_VERSION").to_owned(),
        epoch: hub.store().epoch(),
        heartbeat_interval_ms: u32::try_from(HEARTBEAT.as_millis()).unwrap_or(u32::MAX),
        cluster_id: hub.upstream().cluster_id().to_owned(),
        freshness: freshness.news(&Freshness::default()),
        same_zone: hub.is_in_zone_of(node),
        beat_ms: hub.suspects().beat_ms(),
    }
}

/// The agent's side of a stream.
struct Conversation<'a> {
    postman: &'a Postman,
    session: Session,
    questions: AgentQuestions,
    last_heard: Instant,
    credential_watch: CredentialWatch,
    messages: Bucket,
    /// The agent sends beats, so it need not be asked whether it is alive.
    beats: bool,
    /// Time until which no message is read, because the agent sent too many.
    pause: Option<Instant>,
    /// Questions about Pods that wait to end.
    leaving: NodeDepartures,
    hub: Arc<Hub>,
    node: NodeName,
}

impl Conversation<'_> {
    async fn go_on(mut self, mut inbound: Messages) -> End {
        let mut beat = interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            // In this order: an agent's messages are limited, so they delay nothing for long; and an agent
            // counts as silent only after everything that it sent has been read.
            tokio::select! {
                biased;
                refusal = self.credential_watch.ended() => return Err(refusal.into()),
                () = sleep_until(self.pause.unwrap_or(self.last_heard)), if self.pause.is_some() => {
                    self.pause = None;
                }
                message = inbound.message(), if self.pause.is_none() => match message? {
                    Some(message) => self.receive(message)?,
                    None => return Ok(None),
                },
                _ = beat.tick() => self.beat()?,
                inspect = self.questions.next() => self.postman.inspect(inspect),
                Some(left) = self.leaving.next() => self.postman.left(left),
            }
        }
    }

    fn beat(&mut self) -> Result<(), Status> {
        let silent = self.last_heard.elapsed();
        if silent > SILENCE {
            self.session.tell(Misbehaviour::Silent, || {
                format!("the agent has been silent for {silent:?}; closing the stream")
            });
            return Err(Status::deadline_exceeded(
                "no message from the agent for too long",
            ));
        }
        if self.beats {
            self.postman.heartbeat();
        } else {
            self.postman.beat(millis(SystemTime::now()));
        }
        Ok(())
    }

    fn receive(&mut self, message: AgentMessage) -> Result<(), Status> {
        self.last_heard = Instant::now();
        self.pause = self.messages.take(1).err().map(|wait| self.last_heard + wait);
        self.session.heard();
        match message.kind {
            Some(agent_message::Kind::Report(report)) => {
                if self.session.report(report) {
                    self.postman.look_again();
                }
            }
            Some(agent_message::Kind::Ping(ping)) => self.postman.pong(ping.token),
            Some(agent_message::Kind::Inspection(announced)) => self.questions.answered(announced),
            Some(agent_message::Kind::Leaving(leaving)) => {
                self.leaving.take(&self.hub.streams().departures, &self.node, &leaving);
            }
            Some(agent_message::Kind::Ranges(ranges)) => self.postman.compared(ranges.digests),
            Some(agent_message::Kind::Renewal(renewal)) => {
                if let Some(token) = Token::parse(&renewal.token) {
                    self.credential_watch.renew(token);
                }
            }
            // A newer agent may send kinds of messages that this version does not know.
            Some(agent_message::Kind::Pong(_) | agent_message::Kind::Beat(_)) | None => {}
            Some(agent_message::Kind::Hello(_)) => {
                return Err(Status::invalid_argument(
                    "only the first message may be Hello",
                ));
            }
        }
        Ok(())
    }
}
