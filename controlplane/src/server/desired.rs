//! `DesiredStateService`: a node's desired state, for tools.

use std::sync::Arc;

use kplane_proto::v1 as pb;
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::attendance::Attendance;
use super::guarded::spawn_watch;
use crate::hub::Hub;
use crate::identity::{Right, Visitor};
use crate::publish::{Cursor, Piece};

/// The server of desired state.
#[derive(Clone, Debug)]
pub struct DesiredServer {
    hub: Arc<Hub>,
}

impl DesiredServer {
    /// Creates a server from a hub.
    #[must_use]
    pub fn new(hub: Arc<Hub>) -> Self {
        Self { hub }
    }
}

#[tonic::async_trait]
impl pb::desired_state_service_server::DesiredStateService for DesiredServer {
    type WatchNodeStream = ReceiverStream<Result<pb::DesiredState, Status>>;

    async fn watch_node(
        &self,
        request: Request<pb::WatchNodeRequest>,
    ) -> Result<Response<Self::WatchNodeStream>, Status> {
        let visitor = request.extensions().get::<Visitor>().cloned();
        let node = request.into_inner().node_name;
        if let Some(visitor) = &visitor {
            visitor.may(&Right::ReadDesired(node.clone())).await?;
        }
        if !self.hub.store.knows(&node) && self.hub.fleet.record(&node).is_none() {
            return Err(Status::not_found(format!(
                "no node named {node:?} is known"
            )));
        }
        let (outbox, stream) = mpsc::channel(1);
        let last = outbox.clone();
        let watch = watch(Arc::clone(&self.hub), node, outbox);
        spawn_watch(visitor, last, watch)?;
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// Follows a node until the client disconnects or the control plane ends.
async fn watch(
    hub: Arc<Hub>,
    node: String,
    outbox: mpsc::Sender<Result<pb::DesiredState, Status>>,
) {
    let _attendance = Attendance::begin(&hub, &node.as_str().into());
    let mut head = hub.store.head();
    let mut cursor = Cursor::at(0);
    if head.wait_for(|head| head.synced).await.is_err() {
        return;
    }
    loop {
        loop {
            let Ok(permit) = outbox.reserve().await else {
                return;
            };
            let answer = answer(&hub.store.collect(&node, &mut cursor));
            let last = answer.as_ref().map_or(true, |a| a.complete);
            permit.send(answer);
            if last {
                break;
            }
        }
        let newer = head.wait_for(|head| cursor.is_behind(head.revision));
        tokio::select! {
            changed = newer => if changed.is_err() { return },
            () = outbox.closed() => return,
            () = hub.shutdown.cancelled() => return,
        }
    }
}

fn answer(piece: &Piece) -> Result<pb::DesiredState, Status> {
    let objects = piece
        .objects
        .iter()
        .map(|bytes| pb::Object::decode(bytes.clone()));
    let objects = objects.collect::<Result<_, _>>();
    Ok(pb::DesiredState {
        objects: objects.map_err(|error| Status::internal(error.to_string()))?,
        deleted: piece.deleted.iter().map(Into::into).collect(),
        revision: piece.end.as_ref().map_or(0, |end| end.revision),
        complete: piece.end.is_some(),
    })
}
