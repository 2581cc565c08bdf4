//! The server: one stream per agent.

use std::sync::Arc;

use kplane_proto::shared::{AgentService, Messages};
use tonic::{Request, Status};
use tracing::{Instrument, debug, info_span};

use super::mailbox::mailbox;
use super::outbound::Outbound;
use super::session;
use crate::connection_limits::ConnectionGuard;
use crate::hub::{Closing, Hub};
use crate::identity::{Authenticator, Port};

/// The server of agents' streams.
#[derive(Clone, Debug)]
pub struct AgentServer {
    hub: Arc<Hub>,
    authenticator: Arc<Authenticator>,
}

impl AgentServer {
    /// Creates a server for agents from a hub, behind a gate.
    pub fn new(hub: Arc<Hub>, authenticator: Arc<Authenticator>) -> Self {
        Self { hub, authenticator }
    }
}

impl AgentService for AgentServer {
    type Frames = Outbound;

    async fn sync(&self, request: Request<Messages>) -> Result<Self::Frames, Status> {
        // An agent in the same process can still ask.
        if self.hub.shutdown().is_cancelled() {
            return Err(Closing.into());
        }
        let connection = request.extensions().get::<ConnectionGuard>().cloned();
        let caller = match &connection {
            Some(connection) => {
                let headers = request.metadata().as_ref();
                Some(self.authenticator.authenticate(Port::Agents, connection, headers).await?)
            }
            None => None,
        };
        let address = connection.as_ref().map(|c| c.peer().to_string()).unwrap_or_default();
        let (postman, mailbox) = mailbox();
        let (outbound, gone) = Outbound::new(mailbox, Arc::clone(&self.hub.streams().traffic));
        let hub = Arc::clone(&self.hub);
        let span = info_span!("agent", peer = address);
        let peer = session::Peer {
            address,
            connection,
            caller,
        };
        let inbound = request.into_inner();
        let session = async move {
            let end = session::run(hub, peer, inbound, &postman, gone).await;
            if let Err(status) = &end {
                debug!(%status, "stream ended");
            }
            postman.end(end);
        };
        tokio::spawn(session.instrument(span));
        Ok(outbound)
    }
}
