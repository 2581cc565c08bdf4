//! One agent's stream.
//!
//! The session keeps a cursor, and asks the store for more only when the stream has room. The
//! latest state wins, and an agent that reads slowly costs others nothing.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kplane_model::{Digest, NodeName};
use kplane_proto::PROTOCOL_VERSION;
use kplane_proto::shared::frame;
use kplane_proto::v1::{
    self as pb, AgentMessage, Hello, ServerMessage, agent_message, server_message,
};
use kplane_tls::Token;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until, timeout};
use tonic::{Status, Streaming};
use tracing::{info, warn};

use super::attendance::Attendance;
use super::questions::Questions;
use super::{confidence, millis};
use crate::buckets::{Bucket, Rate};
use crate::doors::Occupancy;
use crate::draining;
use crate::fleet::{NotBegun, Session};
use crate::freshness::Freshness;
use crate::hub::Hub;
use crate::identity::{Sentry, Visitor};
use crate::publish::{Cursor, Head, Piece, PieceEnd, Walk};

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
/// Longest name of a Node: a DNS subdomain (RFC 1123), as in the API server.
const MAX_NODE_NAME: usize = 253;

type Outbox = mpsc::Sender<Result<Bytes, Status>>;

/// The origin of a stream.
#[derive(Debug)]
pub(super) struct Peer {
    /// The peer's address; empty in the same process.
    pub(super) address: String,
    /// The connection that carries the stream; `None` in the same process.
    pub(super) connection: Option<Occupancy>,
    /// The caller; `None` in the same process.
    pub(super) visitor: Option<Visitor>,
}

/// Serves one agent until one side ends the stream.
pub(super) async fn run(
    hub: Arc<Hub>,
    peer: Peer,
    mut inbound: Streaming<AgentMessage>,
    outbox: &Outbox,
) -> Result<(), Status> {
    let first = timeout(HELLO_WITHIN, inbound.message()).await;
    let first = first.map_err(|_| Status::deadline_exceeded("no Hello within 10 s"))??;
    let Some(agent_message::Kind::Hello(hello)) = first.and_then(|m| m.kind) else {
        return Err(Status::invalid_argument("the first message must be Hello"));
    };
    let node = check_hello(&hello)?;
    let mut draining = hub.draining.follow();
    if hub.draining.is_on() {
        return send(outbox, farewell(&hub)).await;
    }
    let sentry = match &peer.visitor {
        Some(visitor) => visitor.speak_for(&node).await?,
        None => Sentry::idle(),
    };
    // An agent in the same process is trusted: the cluster may even lack its Node.
    let needs_node = peer.connection.is_some();
    if needs_node {
        must_be_node(&hub, &node)?;
    }
    let _attendance = Attendance::begin(&hub, &node);
    let begun = Session::begin(&hub, &node, &hello, peer.address);
    let (session, superseded, questions) = match begun {
        Ok(begun) => begun,
        Err(error @ NotBegun::TooMany) => {
            return Err(Status::resource_exhausted(error.to_string()));
        }
        Err(error @ NotBegun::Taken(_)) => return send(outbox, come_back_later(&error)).await,
    };
    let _occupied = peer.connection.as_ref().map(Occupancy::occupy);
    let freshness = hub.store.freshness();
    send(outbox, welcome(&hub, &freshness)).await?;
    let stream = AgentStream {
        told: freshness,
        head: hub.store.head(),
        // Until something is sent, the cursor is only the agent's claim: see `AgentStream::resume`.
        cursor: Cursor::at(0),
        resume: Some(hello.resume.clone()),
        snapshot: false,
        walk: Walk::default(),
        trust_told: 0,
        // The agent learns at once how fresh this replica is.
        control: Control {
            heartbeat: true,
            ping: true,
            ..Control::default()
        },
        questions: Questions::new(questions),
        last_heard: Instant::now(),
        sentry,
        messages: Bucket::new(MESSAGES),
        pause: None,
        hub: &hub,
        node,
        needs_node,
        session,
    };
    info!(node = %stream.node, version = ?hello.agent_version, backend = ?hello.backend, "agent connected");
    tokio::select! {
        biased;
        () = hub.shutdown.cancelled() => Err(closing()),
        _ = superseded => Err(Status::aborted("the agent has opened a newer stream")),
        () = draining::turn(&mut draining) => tokio::select! {
            biased;
            () = hub.shutdown.cancelled() => Err(closing()),
            sent = send(outbox, farewell(&hub)) => sent,
        },
        result = stream.serve(inbound, outbox) => result,
    }
}

/// Asks the agent to leave: the control plane is about to end.
fn farewell(hub: &Hub) -> server_message::Kind {
    server_message::Kind::ComeBackLater(hub.draining.farewell())
}

fn closing() -> Status {
    Status::unavailable("the control plane is shutting down")
}

/// Asks the agent to come back: the agent that speaks for its node may be gone soon.
fn come_back_later(reason: &NotBegun) -> server_message::Kind {
    server_message::Kind::ComeBackLater(pb::ComeBackLater {
        after_ms: u32::try_from(RETRY.as_millis()).unwrap_or(u32::MAX),
        reason: reason.to_string(),
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
    if name.len() > MAX_NODE_NAME || !name.split('.').all(is_label) {
        return Err(Status::invalid_argument(
            "node_name must be the name of a Node: lower case letters, digits, '-' and '.'; it \
             begins and ends with a letter or digit",
        ));
    }
    Ok(name.as_str().into())
}

/// Returns whether a text is valid between the dots of a DNS subdomain.
fn is_label(text: &str) -> bool {
    let plain = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let [first, .., last] = text.as_bytes() else {
        return text.as_bytes().first().is_some_and(plain);
    };
    plain(first) && plain(last) && text.bytes().all(|b| plain(&b) || b == b'-')
}

/// Refuses a name that is no Node of the cluster: a client with such a name gets nothing. A new
/// Node becomes known within a moment, and agents try again.
fn must_be_node(hub: &Hub, name: &NodeName) -> Result<(), Status> {
    if !hub.lacks_node(name) {
        return Ok(());
    }
    Err(Status::not_found(format!(
        "the cluster has no Node {name:?}; check the agent's --node-name (--hostname-override). If \
         the Node is new, try again"
    )))
}

fn welcome(hub: &Hub, freshness: &Freshness) -> server_message::Kind {
    server_message::Kind::Welcome(pb::Welcome {
        protocol_version: PROTOCOL_VERSION,
        capabilities: 0,
        server_version: env!("CARGO_PKG_VERSION").to_owned(),
        epoch: hub.store.epoch(),
        heartbeat_interval_ms: u32::try_from(HEARTBEAT.as_millis()).unwrap_or(u32::MAX),
        cluster_id: hub.upstream.cluster_id().to_owned(),
        freshness: freshness.news(&Freshness::default()),
    })
}

fn encode(kind: server_message::Kind) -> Bytes {
    frame(&ServerMessage { kind: Some(kind) })
}

async fn send(outbox: &Outbox, kind: server_message::Kind) -> Result<(), Status> {
    let sent = outbox.send(Ok(encode(kind))).await;
    sent.map_err(|_| Status::cancelled("the agent disconnected"))
}

/// Small messages that wait for room; the latest of each kind.
#[derive(Default)]
struct Control {
    pong: Option<u64>,
    inspect: Option<pb::Inspect>,
    heartbeat: bool,
    ping: bool,
}

impl Control {
    fn is_empty(&self) -> bool {
        self.pong.is_none() && self.inspect.is_none() && !self.heartbeat && !self.ping
    }
}

struct AgentStream<'a> {
    hub: &'a Hub,
    node: NodeName,
    /// The node must be known before the agent gets anything.
    needs_node: bool,
    session: Session,
    head: watch::Receiver<Head>,
    cursor: Cursor,
    /// The state that the agent claims to hold, until the first piece is due.
    resume: Option<Option<pb::ResumeToken>>,
    /// The next piece begins a snapshot.
    snapshot: bool,
    /// Messages of a snapshot that other agents get as well.
    walk: Walk,
    /// The freshness that the agent received last.
    told: Arc<Freshness>,
    /// [`Head::trust`] of the last update that the agent got.
    trust_told: u64,
    control: Control,
    questions: Questions,
    last_heard: Instant,
    sentry: Sentry,
    messages: Bucket,
    /// Time until which no message is read, because the agent sent too many.
    pause: Option<Instant>,
}

impl AgentStream<'_> {
    async fn serve(
        mut self,
        mut inbound: Streaming<AgentMessage>,
        outbox: &Outbox,
    ) -> Result<(), Status> {
        let mut beat = interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let has_work = !self.control.is_empty() || self.has_piece();
            // In this order: an agent's messages are limited, so they delay nothing for long; and an agent
            // counts as silent only after everything that it sent has been read.
            tokio::select! {
                biased;
                refusal = self.sentry.ended() => return Err(refusal.into()),
                () = sleep_until(self.pause.unwrap_or(self.last_heard)), if self.pause.is_some() => {
                    self.pause = None;
                }
                message = inbound.message(), if self.pause.is_none() => match message? {
                    Some(message) => self.receive(message)?,
                    None => return Ok(()),
                },
                _ = beat.tick() => self.beat()?,
                inspect = self.questions.next() => self.control.inspect = Some(inspect),
                changed = self.head.changed() => {
                    changed.map_err(|_| closing())?;
                }
                permit = outbox.reserve(), if has_work => {
                    let permit = permit.map_err(|_| Status::cancelled("the agent disconnected"))?;
                    if self.resume.is_some() && self.needs_node {
                        must_be_node(self.hub, &self.node)?;
                    }
                    if let Some(later) = self.begin() {
                        permit.send(Ok(encode(later)));
                        return Ok(());
                    }
                    permit.send(Ok(self.next_message()));
                }
            }
        }
    }

    /// Returns whether there is news about the desired state: always true at first.
    fn has_piece(&self) -> bool {
        let head = *self.head.borrow();
        let behind = self.cursor.is_behind(head.revision) || self.trust_told < head.trust;
        head.synced && (self.resume.is_some() || behind)
    }

    fn beat(&mut self) -> Result<(), Status> {
        let silent = self.last_heard.elapsed();
        if silent > SILENCE {
            warn!(node = %self.node, ?silent, "agent is silent; closing the stream");
            return Err(Status::deadline_exceeded(
                "no message from the agent for too long",
            ));
        }
        self.control.heartbeat = true;
        self.control.ping = true;
        Ok(())
    }

    fn receive(&mut self, message: AgentMessage) -> Result<(), Status> {
        self.last_heard = Instant::now();
        self.pause = self
            .messages
            .take(1)
            .err()
            .map(|wait| self.last_heard + wait);
        self.session.heard();
        match message.kind {
            Some(agent_message::Kind::Report(report)) => self.session.report(report),
            Some(agent_message::Kind::Ping(ping)) => self.control.pong = Some(ping.token),
            Some(agent_message::Kind::Inspection(told)) => self.questions.answered(told),
            Some(agent_message::Kind::Renewal(renewal)) => {
                if let Some(token) = Token::parse(&renewal.token) {
                    self.sentry.renew(token);
                }
            }
            // A newer agent may send kinds of messages that this version does not know.
            Some(agent_message::Kind::Pong(_)) | None => {}
            Some(agent_message::Kind::Hello(_)) => {
                return Err(Status::invalid_argument(
                    "only the first message may be Hello",
                ));
            }
        }
        Ok(())
    }

    /// Begins to send the desired state, once that is due; returns the message that sends the agent away if
    /// it needs a snapshot, as too many others do.
    fn begin(&mut self) -> Option<server_message::Kind> {
        let token = self.resume.take_if(|_| self.control.is_empty())?;
        let wait = self.start(token.as_ref()).err()?;
        Some(server_message::Kind::ComeBackLater(pb::ComeBackLater {
            after_ms: u32::try_from(wait.as_millis()).unwrap_or(u32::MAX),
            reason: "too many agents need a snapshot at the same time".to_owned(),
        }))
    }

    /// Returns the next message, encoded.
    fn next_message(&mut self) -> Bytes {
        match self.next_control() {
            Some(kind) => encode(kind),
            None => self.next_piece(),
        }
    }

    fn next_control(&mut self) -> Option<server_message::Kind> {
        if let Some(token) = self.control.pong.take() {
            return Some(server_message::Kind::Pong(pb::Pong { token }));
        }
        if let Some(inspect) = self.control.inspect.take() {
            return Some(server_message::Kind::Inspect(inspect));
        }
        if std::mem::take(&mut self.control.heartbeat) {
            let age = self.hub.upstream_age();
            let freshness = self.news(self.hub.store.freshness());
            return Some(server_message::Kind::Heartbeat(pb::Heartbeat {
                revision: self.head.borrow().revision,
                upstream_age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
                freshness,
            }));
        }
        std::mem::take(&mut self.control.ping).then(|| {
            let token = millis(std::time::SystemTime::now());
            server_message::Kind::Ping(pb::Ping { token })
        })
    }

    fn next_piece(&mut self) -> Bytes {
        if let Some(message) = self.walk.next(&mut self.cursor) {
            self.snapshot = false;
            return message;
        }
        let mut piece = self.hub.store.collect(&self.node, &mut self.cursor);
        let end = piece.end.take().map(|end| {
            self.trust_told = end.trust_changes;
            self.session.sent(end.revision);
            let freshness = self.news(Arc::clone(&end.freshness));
            update_end(end, freshness)
        });
        let update = update(piece, std::mem::take(&mut self.snapshot), end);
        encode(server_message::Kind::Update(update))
    }

    /// Returns the part of the freshness that the agent has not received.
    fn news(&mut self, freshness: Arc<Freshness>) -> Vec<pb::KindVersion> {
        let news = freshness.news(&self.told);
        self.told = freshness;
        news
    }

    /// Finds the shortest way from the state that the agent holds to the desired state.
    ///
    /// # Errors
    /// The agent needs a snapshot, as too many others do; the time after which it is to come back.
    fn start(&mut self, token: Option<&pb::ResumeToken>) -> Result<(), Duration> {
        let store = &self.hub.store;
        let usable = token.filter(|t| t.schema == kplane_proto::DIGEST_SCHEMA);
        let cursor = usable.and_then(|token| {
            let digest = <[u8; 16]>::try_from(token.digest.as_slice()).ok()?;
            let revision = (token.epoch == store.epoch()).then_some(token.revision);
            store.resume(&self.node, Digest::from_bytes(digest), revision)
        });
        self.snapshot = cursor.is_none();
        if self.snapshot {
            self.hub.snapshots.admit()?;
        }
        self.cursor = cursor.unwrap_or(Cursor::at(0));
        if self.snapshot {
            self.walk = store.walk(&self.node);
        }
        info!(node = %self.node, snapshot = self.snapshot, "sync begins");
        Ok(())
    }
}

fn update(piece: Piece, snapshot: bool, end: Option<pb::UpdateEnd>) -> pb::Update {
    pb::Update {
        objects: piece.objects,
        deleted: piece.deleted.iter().map(Into::into).collect(),
        snapshot,
        end,
    }
}

fn update_end(end: PieceEnd, freshness: Vec<pb::KindVersion>) -> pb::UpdateEnd {
    pb::UpdateEnd {
        revision: end.revision,
        digest: end.digest.to_bytes().to_vec(),
        changed_at_ms: end.changed_at.map_or(0, millis),
        triggers: end.triggers.into_iter().map(Into::into).collect(),
        confidence: confidence(&end.trust).into(),
        doubt: end.trust.doubt().to_owned(),
        freshness,
    }
}
