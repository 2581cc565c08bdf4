//! The desired state that an agent's stream sends: the way from what the agent holds, and then the changes.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use kplane_desired_state::freshness::Freshness;
use kplane_desired_state::publish::{self, Cursor, Head, Mark, Piece, Walk, Way, update_end};
use kplane_model::{Digest, NodeName};
use kplane_proto::shared::frame;
use kplane_proto::v1::{self as pb, ServerMessage, server_message};
use tokio::time::Instant;
use tokio_stream::wrappers::WatchStream;
use tonic::Status;
use tracing::info;

use crate::fleet::Dispatch;
use crate::hub::Hub;
use crate::overrides::Overrides;
use crate::traffic::Sent;

/// A message, and whether another one may follow.
pub(super) enum Next {
    Message(Bytes),
    Last(Bytes),
}

/// Whether a node is frozen: its agent keeps what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Frozen {
    /// The orders were not read yet.
    Unknown,
    Yes,
    No,
}

impl Frozen {
    fn by(overrides: Option<&Overrides>, node: &NodeName) -> Self {
        match overrides.map(|overrides| overrides.frozen(node).is_some()) {
            None => Self::Unknown,
            Some(true) => Self::Yes,
            Some(false) => Self::No,
        }
    }
}

/// What an agent says about the state that it holds.
#[derive(Debug)]
pub(super) struct HeldState {
    /// The state; `None` if the agent holds nothing.
    pub(super) resume: Option<pb::ResumeToken>,
    /// The agent can compare key ranges.
    pub(super) compares: bool,
    /// The agent can read compressed pieces.
    pub(super) unpacks: bool,
}

/// The way to the first piece.
#[derive(Debug)]
enum Opening {
    /// Nothing is sent yet; the agent claims to hold a state.
    Claimed(HeldState),
    /// The agent was asked for the digests of its ranges.
    Asked(Instant),
    /// The agent's digests.
    Answered(Vec<u8>),
    /// The cursor says what the agent holds.
    Done,
}

/// Maximum time until an agent has answered with the digests of its ranges. One that does not gets a snapshot.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// The desired state of one agent, message by message.
#[derive(Debug)]
pub(super) struct Updates {
    hub: Arc<Hub>,
    node: NodeName,
    /// The node must be known before the agent gets anything.
    needs_node: bool,
    changes: WatchStream<Head>,
    head: Head,
    cursor: Cursor,
    opening: Opening,
    /// The agent can read compressed pieces.
    unpacks: bool,
    /// The end of a snapshot is not sent yet.
    in_snapshot: bool,
    /// The kind of the last message.
    pub(super) sent: Sent,
    /// Messages of a snapshot that other agents get as well.
    walk: Walk,
    /// The freshness that the agent received last.
    announced: Arc<Freshness>,
    /// [`Head::trust`] of the last update that the agent got.
    trust_sent: u64,
    /// The second part of a message whose first part was sent.
    pub(super) rest: Option<Bytes>,
    /// Orders that may freeze the node.
    overrides: WatchStream<Option<Arc<Overrides>>>,
    /// Whether the orders freeze the node.
    frozen: Frozen,
    /// The last heartbeat said that the node is frozen.
    frozen_sent: bool,
    /// The replicas that the last heartbeat named.
    replicas_sent: Vec<String>,
    /// The agent holds a complete state, as far as this stream knows.
    holds: bool,
    /// The last piece was the end of an update.
    complete: bool,
    dispatch: Arc<Dispatch>,
}

impl Updates {
    /// Creates the updates of an agent that claims to hold a state, and has this freshness.
    pub(super) fn new(
        hub: &Arc<Hub>,
        node: NodeName,
        needs_node: bool,
        claim: HeldState,
        announced: Arc<Freshness>,
        dispatch: Arc<Dispatch>,
    ) -> Self {
        let changes = hub.store().announcements();
        let head = *changes.borrow();
        Self {
            head,
            changes: WatchStream::from_changes(changes),
            hub: Arc::clone(hub),
            node,
            needs_node,
            cursor: Cursor::at(0),
            unpacks: claim.unpacks,
            holds: claim.resume.is_some(),
            opening: Opening::Claimed(claim),
            complete: false,
            in_snapshot: false,
            sent: Sent::Other,
            walk: Walk::default(),
            announced,
            trust_sent: 0,
            rest: None,
            frozen: Frozen::Unknown,
            frozen_sent: false,
            replicas_sent: Vec::new(),
            overrides: WatchStream::new(hub.overrides().changes()),
            dispatch,
        }
    }

    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Next, Status>> {
        while let Poll::Ready(Some(overrides)) = Pin::new(&mut self.overrides).poll_next(cx) {
            self.frozen = Frozen::by(overrides.as_deref(), &self.node);
        }
        if self.frozen_sent != (self.frozen == Frozen::Yes) {
            let heartbeat = server_message::Kind::Heartbeat(self.heartbeat());
            self.sent = Sent::Heartbeat;
            return Poll::Ready(Ok(Next::Message(encode(heartbeat))));
        }
        while !self.has_piece() {
            let head = ready!(Pin::new(&mut self.changes).poll_next(cx));
            self.head = head.ok_or_else(|| Status::unavailable("no more changes"))?;
        }
        Poll::Ready(self.next())
    }

    /// Returns the next message; there is one.
    fn next(&mut self) -> Result<Next, Status> {
        let begun = match std::mem::replace(&mut self.opening, Opening::Done) {
            Opening::Done if self.hub.store().forgot(&self.cursor) => {
                self.begin_snapshot("the agent lacks deletions that are forgotten here")
            }
            Opening::Done => Ok(None),
            Opening::Claimed(claim) => {
                if self.needs_node {
                    must_be_node(&self.hub, &self.node)?;
                }
                self.resume(&claim)
            }
            Opening::Answered(digests) => self.replace_ranges(&digests),
            Opening::Asked(_) => self.begin_snapshot("the agent did not answer with its digests"),
        };
        Ok(match begun {
            Ok(None) => {
                self.sent = if self.in_snapshot { Sent::Snapshot } else { Sent::Update };
                Next::Message(self.next_piece())
            }
            Ok(Some(first)) => {
                self.sent = match self.opening {
                    Opening::Asked(_) => Sent::Other,
                    _ => Sent::Update,
                };
                Next::Message(first)
            }
            Err(wait) => {
                self.sent = Sent::Other;
                Next::Last(encode(sent_away(wait)))
            }
        })
    }

    /// Returns whether there is something to send: always at first.
    fn has_piece(&self) -> bool {
        let due = match &self.opening {
            Opening::Claimed(_) | Opening::Answered(_) => true,
            // Heartbeats wake the stream, so this needs no timer.
            Opening::Asked(at) => at.elapsed() > ANSWER_WITHIN,
            Opening::Done => {
                self.cursor.is_behind(self.head.revision) || self.trust_sent < self.head.trust
            }
        };
        let keeps = match self.frozen {
            Frozen::Unknown => true,
            Frozen::Yes => self.holds,
            Frozen::No => false,
        };
        // An update that has begun is sent to its end.
        self.head.synced && !keeps && due && (!self.complete || !self.dispatch.is_full())
    }

    /// Takes the digests of the agent's ranges, if it was asked for them.
    pub(super) fn answered(&mut self, digests: Vec<u8>) {
        if let Opening::Asked(_) = self.opening {
            self.opening = Opening::Answered(digests);
        }
    }

    pub(super) fn heartbeat(&mut self) -> pb::Heartbeat {
        let age = self.hub.upstream_age();
        let freshness = self.news(self.hub.store().freshness());
        let frozen = self.hub.overrides().frozen(&self.node);
        self.frozen_sent = frozen.is_some();
        let mut replicas = self.hub.replica().replicas();
        if replicas == self.replicas_sent {
            replicas.clear();
        } else {
            self.replicas_sent.clone_from(&replicas);
        }
        pb::Heartbeat {
            revision: self.head.revision,
            upstream_age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
            freshness,
            report_within_ms: self.hub.agents().report_within_ms(),
            frozen: frozen.map(Into::into),
            replicas,
        }
    }

    fn next_piece(&mut self) -> Bytes {
        self.complete = false;
        let store = self.hub.store();
        if let Some(message) = self.walk.next(&mut self.cursor) {
            return message;
        }
        if let Some(ready) = store.take_common(&self.node, &mut self.cursor, &self.announced) {
            self.ended_at(&ready.mark);
            self.rest = ready.rest;
            return ready.first;
        }
        let mut piece = store.collect(&self.node, &mut self.cursor);
        let end = piece.end.take().map(|end| self.end(end));
        publish::message(Piece { end: None, ..piece }, end)
    }

    fn end(&mut self, end: publish::PieceEnd) -> pb::UpdateEnd {
        let news = end.freshness.news(&self.announced);
        self.ended_at(&end.mark());
        update_end(end, news)
    }

    /// Notes that the agent gets the end of an update.
    fn ended_at(&mut self, mark: &Mark) {
        (self.holds, self.complete, self.in_snapshot) = (true, true, false);
        self.trust_sent = mark.trust_changes;
        self.announced = Arc::clone(&mark.freshness);
        self.dispatch.sent(mark.revision);
    }

    /// Returns the part of the freshness that the agent has not received.
    fn news(&mut self, freshness: Arc<Freshness>) -> Vec<pb::KindVersion> {
        let news = freshness.news(&self.announced);
        self.announced = freshness;
        news
    }

    /// Finds the shortest way from the state that the agent holds to the desired state; returns the first message, if it
    /// is not the next piece.
    ///
    /// # Errors
    /// The agent needs a snapshot, as too many others do; the time after which it is to come back.
    fn resume(&mut self, claim: &HeldState) -> Result<Option<Bytes>, Duration> {
        let usable = |token: &&pb::ResumeToken| token.schema == kplane_proto::DIGEST_SCHEMA;
        let Some(token) = claim.resume.as_ref().filter(usable) else {
            return self.begin_snapshot("the agent holds nothing");
        };
        let store = self.hub.store();
        let revision = (token.epoch == store.epoch()).then_some(token.revision);
        let digest = <[u8; 16]>::try_from(token.digest.as_slice()).ok();
        let way = digest.and_then(|digest| {
            let digest = Digest::from_bytes(digest);
            store.resume(&self.node, digest, revision)
        });
        match way {
            Some(way) => {
                self.hub.streams().snapshots.spared(|counts| match way {
                    Way::Equal(_) => counts.equal += 1,
                    Way::Changes(_) => counts.changes += 1,
                });
                self.cursor = way.cursor();
                info!(node = %self.node, ?way, "sync begins");
                Ok(None)
            }
            None if claim.compares => {
                let ranges = u32::from(store.ranges(&self.node));
                self.opening = Opening::Asked(Instant::now());
                let compare = server_message::Kind::Compare(pb::Compare { ranges });
                Ok(Some(encode(compare)))
            }
            None => self.begin_snapshot("the agent's state is not known here"),
        }
    }

    /// Returns the message that replaces the ranges in which the agent differs.
    fn replace_ranges(&mut self, digests: &[u8]) -> Result<Option<Bytes>, Duration> {
        let store = self.hub.store();
        let replaced = store.replace_ranges(&self.node, digests, &mut self.cursor);
        let Some(message) = replaced else {
            return self.begin_snapshot("the agent's state differs too much");
        };
        let snapshots = &self.hub.streams().snapshots;
        snapshots.spared(|counts| counts.ranges += 1);
        info!(node = %self.node, bytes = message.len(), "sync begins with some key ranges");
        Ok(Some(message))
    }

    fn begin_snapshot(&mut self, reason: &str) -> Result<Option<Bytes>, Duration> {
        self.hub.streams().snapshots.admit()?;
        self.in_snapshot = true;
        self.cursor = Cursor::at(0);
        self.walk = self.hub.store().walk(&self.node).packed(self.unpacks);
        info!(node = %self.node, reason, "sync begins with a snapshot");
        Ok(None)
    }
}

/// Refuses a name that is no Node of the cluster: a client with such a name gets nothing. A new
/// Node becomes known within a moment, and agents try again.
pub(super) fn must_be_node(hub: &Hub, name: &NodeName) -> Result<(), Status> {
    if !hub.lacks_node(name) {
        return Ok(());
    }
    Err(Status::not_found(format!(
        "the cluster has no Node {name:?}; check the agent's --node-name (--hostname-override). If \
         the Node is new, try again"
    )))
}

fn sent_away(wait: Duration) -> server_message::Kind {
    server_message::Kind::ComeBackLater(pb::ComeBackLater {
        after_ms: u32::try_from(wait.as_millis()).unwrap_or(u32::MAX),
        reason: "too many agents need a snapshot at the same time".to_owned(),
        replicas: Vec::new(),
    })
}

pub(super) fn encode(kind: server_message::Kind) -> Bytes {
    frame(&ServerMessage { kind: Some(kind) })
}

#[cfg(test)]
mod tests;
