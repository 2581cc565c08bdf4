//! Watches of more than one node: the desired state in layers.

use std::sync::Arc;

use kplane_fleet::hub::Hub;
use kplane_model::{NodeName, ServiceName};
use kplane_picture::publish::{Followed, Head, LayerCursor, LayerEnd, LayerPiece, Store};
use kplane_proto::v1 as pb;
use kplane_proto::v1::ServiceState;
use kplane_proto::v1::object::Kind;
use prost::Message;
use prost::bytes::Bytes;
use tonic::Status;

use super::convergence;
use super::feeds::{Feed, source_state};
use super::millis;

/// The picture of all nodes, of one Service or of all.
pub(super) struct LayerFeed {
    cursor: LayerCursor,
    /// The Service of interest, to tell why it is not served.
    followed: Option<Followed>,
    /// The picture of the client lacks pieces.
    torn: bool,
    /// [`Head::trust`] of the last message.
    trust_told: u64,
    _registered: Registered,
}

/// The registration of a watch in the store, until the value is dropped.
struct Registered(Arc<Store>);

impl Drop for Registered {
    fn drop(&mut self) {
        self.0.leave_all();
    }
}

impl LayerFeed {
    /// Creates the picture of one Service or of all.
    pub(super) fn new(hub: &Hub, only: Option<ServiceName>) -> Self {
        hub.store.attend_all();
        Self {
            cursor: LayerCursor::new(only.clone()),
            followed: only.map(Followed::new),
            torn: true,
            trust_told: 0,
            _registered: Registered(Arc::clone(&hub.store)),
        }
    }

    /// Completes the last message of a picture or of a change.
    fn finish(&mut self, hub: &Hub, end: &LayerEnd, message: &mut pb::LayeredState) {
        message.revision = end.revision;
        message.complete = true;
        message.source = Some(source_state(hub, &end.trust, &end.freshness));
        message.changed_at_ms = end.changed_at.map_or(0, millis);
        let Some(followed) = &mut self.followed else {
            message.service_cidrs = end.service_cidrs.iter().map(Into::into).collect();
            return;
        };
        hub.store.follow(followed);
        let (state, reason) = match (end.serves, followed.is_served()) {
            (true, _) => (ServiceState::Served, String::new()),
            (false, false) => convergence::state(hub, followed),
            (false, true) => (
                ServiceState::Deleted,
                "the Service was deleted and is there again: the next message has it".to_owned(),
            ),
        };
        message.set_service_state(state);
        message.reason = reason;
    }
}

impl Feed for LayerFeed {
    type Message = pb::LayeredState;

    fn is_behind(&self, head: &Head) -> bool {
        self.torn || self.cursor.is_behind(head.revision) || self.trust_told < head.trust
    }

    fn next(&mut self, hub: &Hub, long_quiet: bool) -> Result<Option<Self::Message>, Status> {
        let piece = hub.store.collect_layers(&mut self.cursor);
        let was_torn = std::mem::replace(&mut self.torn, piece.end.is_none());
        let trust_told = self.trust_told;
        if let Some(end) = &piece.end {
            self.trust_told = end.trust_changes;
        }
        let is_quiet = piece.is_empty() && !was_torn;
        if is_quiet && !long_quiet && self.trust_told == trust_told {
            return Ok(None);
        }
        let mut message = message(&piece)?;
        if let Some(end) = &piece.end {
            self.finish(hub, end, &mut message);
        }
        if is_quiet {
            message.changed_at_ms = 0;
        }
        Ok(Some(message))
    }

    fn waiting(source: pb::SourceState) -> Self::Message {
        pb::LayeredState {
            source: Some(source),
            ..pb::LayeredState::default()
        }
    }
}

/// Returns a piece for the wire, without its end.
fn message(piece: &LayerPiece) -> Result<pb::LayeredState, Status> {
    let programs = piece.programs.iter().map(|(default, zones)| {
        let zones = zones.iter().map(|(zone, bytes)| {
            let program = Some(program(bytes)?);
            let zone = zone.to_string();
            Ok(pb::ZoneProgram { zone, program })
        });
        Ok(pb::SharedProgram {
            program: Some(program(default)?),
            zones: zones.collect::<Result<_, Status>>()?,
        })
    });
    let objects = piece.node_objects.iter().map(|(node, bytes)| {
        let object = Some(object(bytes)?);
        let node = node.to_string();
        Ok(pb::NodeObject { node, object })
    });
    let deleted = piece.deleted_node_objects.iter();
    let deleted = deleted.map(|(node, key): &(NodeName, _)| pb::NodeObjectKey {
        node: node.to_string(),
        key: Some(key.into()),
    });
    Ok(pb::LayeredState {
        programs: programs.collect::<Result<_, Status>>()?,
        deleted_programs: piece.deleted.iter().map(Into::into).collect(),
        node_objects: objects.collect::<Result<_, Status>>()?,
        deleted_node_objects: deleted.collect(),
        snapshot: piece.snapshot,
        ..pb::LayeredState::default()
    })
}

fn object(bytes: &Bytes) -> Result<pb::Object, Status> {
    let object = pb::Object::decode(bytes.clone());
    object.map_err(|error| Status::internal(error.to_string()))
}

fn program(bytes: &Bytes) -> Result<pb::ServiceProgram, Status> {
    match object(bytes)?.kind {
        Some(Kind::Service(program)) => Ok(program),
        // A bug: the store encoded a program.
        _ => Err(Status::internal("a program of the store is none")),
    }
}
