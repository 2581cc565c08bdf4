//! The transport between agent and control plane. Tests use a script in its place.

use futures_util::stream::BoxStream;
use kplane_proto::v1::{AgentMessage, ServerMessage};
use tokio::sync::mpsc;
use tonic::Status;

/// Most messages of the agent that wait for the stream: a pong, a ping and a report. Newer state
/// waits elsewhere, and the latest is sent once there is room.
pub const OUTBOX: usize = 3;

/// An open stream. Dropping it closes the stream.
pub struct Link {
    /// Messages to the control plane.
    pub outbox: mpsc::Sender<AgentMessage>,
    /// Messages from the control plane.
    pub inbox: BoxStream<'static, Result<ServerMessage, Status>>,
}

/// Opens streams.
pub trait Transport: Send + 'static {
    /// Opens a stream whose first message is `hello`.
    fn open(&mut self, hello: AgentMessage)
    -> impl Future<Output = Result<Link, OpenError>> + Send;

    /// Makes the next address current, because the current one failed.
    fn rotate(&mut self);
}

/// The reason why a stream cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No answer came from the address.
    #[error("cannot connect to {address}: {reason}")]
    Connect {
        /// The address of the control plane.
        address: String,
        /// The cause.
        reason: String,
    },
    /// An answer came, but not from a control plane that accepts this agent.
    #[error("{address} refuses the stream: {}", describe(status))]
    Refused {
        /// The address of the control plane.
        address: String,
        /// The status that it returned.
        status: Box<Status>,
    },
}

/// Returns a status without its metadata, human-readable.
pub(super) fn describe(status: &Status) -> String {
    match status.message() {
        "" => status.code().to_string(),
        message => format!("{}: {message}", status.code()),
    }
}
