//! `DesiredStateService`: what nodes should have, for tools.
//!
//! A stream is a cursor, as an agent's is. It reads from the store when the client has taken the message before, so a
//! client that reads slowly costs one message, and gets the latest state. A change that does not concern the node causes
//! no message.

use std::sync::Arc;
use std::time::Duration;

use kplane_agents::hub::Hub;
use kplane_agents::identity::{Caller, Right, spawn_watch};
use kplane_agents::streams::Attendance;
use kplane_desired_state::freshness::Freshness;
use kplane_desired_state::publish::{Cursor, Head, Piece, PieceEnd, Store};
use kplane_desired_state::trust::Trust;
use kplane_model::Digest;
use kplane_proto::v1 as pb;
use prost::Message;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::{confidence, millis};

/// Longest name of an object, in bytes: a DNS subdomain (RFC 1123), as in the API server.
const MAX_NAME: usize = 253;
/// Number of objects in a snapshot that cost as much as the question itself.
const OBJECTS_FOR_ONE: usize = 200;

/// Maximum time between two messages of a stream.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// The server of desired state.
#[derive(Clone, Debug)]
pub struct DesiredServer {
    hub: Arc<Hub>,
}

impl DesiredServer {
    /// Creates a server from a hub.
    pub fn new(hub: Arc<Hub>) -> Self {
        Self { hub }
    }
}

type DesiredStream = ReceiverStream<Result<pb::DesiredState, Status>>;

#[tonic::async_trait]
impl pb::desired_state_service_server::DesiredStateService for DesiredServer {
    type WatchNodeStream = DesiredStream;

    async fn watch_node(
        &self,
        request: Request<pb::WatchNodeRequest>,
    ) -> Result<Response<DesiredStream>, Status> {
        let caller = request.extensions().get::<Caller>().cloned();
        let request = request.into_inner();
        must_fit(&request.node_name)?;
        if let Some(caller) = &caller {
            let right = Right::ReadDesired(request.node_name.clone());
            caller.may(&right).await?;
        }
        if self.hub.store().head().borrow().synced {
            must_be_known(&self.hub, &request.node_name)?;
        }
        // Requests in the same process are free.
        if let Some(caller) = &caller {
            let objects = self.hub.index().summary().borrow().totals.services;
            caller.charge(u32::try_from(objects / OBJECTS_FOR_ONE + 1).unwrap_or(u32::MAX))?;
        }
        let (outbox, stream) = mpsc::channel(1);
        let (hub, last) = (Arc::clone(&self.hub), outbox.clone());
        let watch = async move {
            let feed = NodeFeed::new(hub.store(), request);
            follow(hub, feed, outbox).await;
        };
        spawn_watch(caller, last, watch)?;
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// Refuses a text that is no name.
fn must_fit(name: &str) -> Result<(), Status> {
    match name.len() {
        1..=MAX_NAME => Ok(()),
        0 => Err(Status::invalid_argument("node_name is empty")),
        _ => Err(Status::invalid_argument(format!(
            "node_name is longer than names are ({MAX_NAME} bytes)"
        ))),
    }
}

/// Refuses a name that neither a Node nor an agent has.
fn must_be_known(hub: &Hub, node: &str) -> Result<(), Status> {
    if hub.store().knows(node) || hub.agents().record(node).is_some() {
        return Ok(());
    }
    Err(Status::not_found(format!(
        "no node named {node:?} is known"
    )))
}

/// The snapshot of one node.
struct NodeFeed {
    node: String,
    /// The state that the client claims to hold, until the first piece is due.
    resume: Option<Option<pb::ResumeToken>>,
    cursor: Cursor,
    /// The snapshot of the client lacks pieces.
    torn: bool,
    /// [`Head::trust`] of the last message.
    trust_reported: u64,
    _attendance: Attendance,
}

impl NodeFeed {
    fn new(store: &Arc<Store>, request: pb::WatchNodeRequest) -> Self {
        Self {
            _attendance: Attendance::begin(store, &request.node_name.as_str().into()),
            node: request.node_name,
            resume: Some(request.resume),
            cursor: Cursor::at(0),
            torn: true,
            trust_reported: 0,
        }
    }

    /// Finds the shortest way from the state that the client holds to the desired state.
    fn begin(&mut self, hub: &Hub, token: Option<&pb::ResumeToken>) -> Result<(), Status> {
        must_be_known(hub, &self.node)?;
        let store = hub.store();
        let usable = token.filter(|token| token.schema == kplane_proto::DIGEST_SCHEMA);
        let resumed = usable.and_then(|token| {
            let digest = <[u8; 16]>::try_from(token.digest.as_slice()).ok()?;
            let revision = (token.epoch == store.epoch()).then_some(token.revision);
            let way = store.resume(&self.node, Digest::from_bytes(digest), revision)?;
            Some(way.cursor())
        });
        self.cursor = resumed.unwrap_or(Cursor::at(0));
        Ok(())
    }

    fn message(hub: &Hub, piece: Piece) -> Result<pb::DesiredState, Status> {
        let objects = piece.objects.into_iter().map(pb::Object::decode).collect::<Result<_, _>>();
        let mut message = pb::DesiredState {
            objects: objects.map_err(|error| Status::internal(error.to_string()))?,
            deleted: piece.deleted.iter().map(Into::into).collect(),
            snapshot: piece.snapshot,
            ..pb::DesiredState::default()
        };
        if let Some(end) = piece.end {
            message.revision = end.revision;
            message.complete = true;
            message.resume = Some(resume_token(hub.store(), &end));
            message.source = Some(source_state(hub, &end.trust, &end.freshness));
            message.changed_at_ms = end.changed_at.map_or(0, millis);
        }
        Ok(message)
    }
}

impl NodeFeed {
    /// Returns whether there may be news. The snapshot is complete when there are none.
    fn is_behind(&self, head: &Head) -> bool {
        self.torn || self.cursor.is_behind(head.revision) || self.trust_reported < head.trust
    }

    /// Returns the next part of the news. `None` if they do not concern the snapshot, unless the stream has been quiet
    /// for long.
    ///
    /// # Errors
    /// The snapshot cannot be sent.
    fn next(&mut self, hub: &Hub, long_quiet: bool) -> Result<Option<pb::DesiredState>, Status> {
        if let Some(token) = self.resume.take() {
            self.begin(hub, token.as_ref())?;
        }
        let piece = hub.store().collect(&self.node, &mut self.cursor);
        let is_empty = !piece.snapshot && piece.objects.is_empty() && piece.deleted.is_empty();
        let was_torn = std::mem::replace(&mut self.torn, piece.end.is_none());
        let trust_reported = self.trust_reported;
        if let Some(end) = &piece.end {
            self.trust_reported = end.trust_changes;
        }
        if is_empty && !was_torn && !long_quiet && self.trust_reported == trust_reported {
            return Ok(None);
        }
        let mut message = Self::message(hub, piece)?;
        if is_empty && !was_torn {
            message.changed_at_ms = 0;
        }
        Ok(Some(message))
    }
}

fn resume_token(store: &Store, end: &PieceEnd) -> pb::ResumeToken {
    pb::ResumeToken {
        schema: kplane_proto::DIGEST_SCHEMA,
        epoch: store.epoch(),
        revision: end.revision,
        digest: end.digest.to_bytes().to_vec(),
    }
}

/// Follows a snapshot until the client disconnects or the control plane ends.
async fn follow(
    hub: Arc<Hub>,
    mut feed: NodeFeed,
    outbox: mpsc::Sender<Result<pb::DesiredState, Status>>,
) {
    let mut head = hub.store().head();
    let mut beat = Instant::now() + HEARTBEAT;
    loop {
        let long_quiet = tokio::select! {
            biased;
            () = hub.shutdown().cancelled() => return,
            () = outbox.closed() => return,
            changed = head.wait_for(|head| head.synced && feed.is_behind(head)) => match changed {
                Ok(_) => false,
                Err(_) => return,
            },
            () = sleep_until(beat) => true,
        };
        let permit = tokio::select! {
            () = hub.shutdown().cancelled() => return,
            permit = outbox.reserve() => permit,
        };
        let Ok(permit) = permit else { return };
        // The message has the state of this moment: the client may have taken its time.
        let message = if head.borrow().synced {
            feed.next(&hub, long_quiet).transpose()
        } else {
            Some(Ok(waiting(&hub)))
        };
        if let Some(message) = message {
            let failed = message.is_err();
            permit.send(message);
            if failed {
                return;
            }
            beat = Instant::now() + HEARTBEAT;
        }
    }
}

/// Returns what the control plane knows of its source, for a snapshot with this trust and these versions.
fn source_state(hub: &Hub, trust: &Trust, freshness: &Freshness) -> pb::SourceState {
    let age = hub.upstream_age();
    pb::SourceState {
        epoch: hub.store().epoch(),
        read: true,
        confidence: confidence(trust).into(),
        doubt: trust.doubt().to_owned(),
        upstream_age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        freshness: freshness.news(&Freshness::default()),
        cluster_id: hub.upstream().cluster_id().to_owned(),
        names_nodes: hub.replica().names_are_nodes(),
    }
}

/// Returns the message of a stream that waits until the source has been read.
fn waiting(hub: &Hub) -> pb::DesiredState {
    let source = pb::SourceState {
        read: false,
        ..source_state(hub, &hub.store().trust(), &Freshness::default())
    };
    pb::DesiredState {
        source: Some(source),
        ..pb::DesiredState::default()
    }
}
