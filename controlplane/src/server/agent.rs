//! `AgentService`: one stream per agent.

use std::sync::Arc;

use bytes::Bytes;
use kplane_proto::shared::AgentService;
use kplane_proto::v1::AgentMessage;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status, Streaming};
use tracing::{Instrument, debug, info_span};

use super::session;
use crate::doors::Occupancy;
use crate::hub::Hub;
use crate::identity::{Gate, Port};

/// Number of encoded messages that wait for a stream. Together with the transport's own window this
/// limits the cost of a slow agent: two messages of about 64 KiB at most.
const OUTBOX: usize = 1;

/// The server of agents' streams.
#[derive(Clone, Debug)]
pub struct AgentServer {
    hub: Arc<Hub>,
    gate: Arc<Gate>,
}

impl AgentServer {
    /// Creates a server for agents from a hub, behind a gate.
    #[must_use]
    pub fn new(hub: Arc<Hub>, gate: Arc<Gate>) -> Self {
        Self { hub, gate }
    }
}

impl AgentService for AgentServer {
    type Frames = ReceiverStream<Result<Bytes, Status>>;

    async fn sync(
        &self,
        request: Request<Streaming<AgentMessage>>,
    ) -> Result<Self::Frames, Status> {
        let connection = request.extensions().get::<Occupancy>().cloned();
        let visitor = match &connection {
            Some(connection) => {
                let headers = request.metadata().as_ref();
                Some(self.gate.visit(Port::Agents, connection, headers).await?)
            }
            None => None,
        };
        let address = connection.as_ref().map(|c| c.peer().to_string());
        let address = address.unwrap_or_default();
        let (outbox, stream) = mpsc::channel(OUTBOX);
        let hub = Arc::clone(&self.hub);
        let span = info_span!("agent", peer = address);
        let peer = session::Peer {
            address,
            connection,
            visitor,
        };
        let inbound = request.into_inner();
        let session = async move {
            if let Err(status) = session::run(hub, peer, inbound, &outbox).await {
                debug!(%status, "stream ended");
                // The agent may be gone already.
                let _ = outbox.send(Err(status)).await;
            }
        };
        tokio::spawn(session.instrument(span));
        Ok(ReceiverStream::new(stream))
    }
}
