//! The way to a control plane: messages out, messages in. A script in tests.

use futures_util::stream::BoxStream;
use kplane_proto::v1::{AgentMessage, ServerMessage};
use tokio::sync::mpsc;
use tonic::Status;

/// Messages of the agent that wait for the stream: a pong, a ping and a report. Whatever comes
/// while they wait is the latest state once there is room.
pub const OUTBOX: usize = 3;

/// An open stream. Dropping it closes the stream.
pub struct Link {
    /// To the control plane.
    pub outbox: mpsc::Sender<AgentMessage>,
    /// From the control plane.
    pub inbox: BoxStream<'static, Result<ServerMessage, Status>>,
}

/// Opens streams.
pub trait Transport: Send + 'static {
    /// Opens a stream whose first message is `hello`.
    fn open(&mut self, hello: AgentMessage)
    -> impl Future<Output = Result<Link, OpenError>> + Send;

    /// The current address failed: the next one is used from now on.
    fn rotate(&mut self);
}

/// A stream that cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Nothing answers.
    #[error("cannot connect to {address}: {reason}")]
    Connect {
        /// Of the control plane.
        address: String,
        /// What happened.
        reason: String,
    },
    /// Something answers, but it is not a control plane that wants us.
    #[error("{address} refuses the stream: {}", describe(status))]
    Refused {
        /// Of the control plane.
        address: String,
        /// Its answer.
        status: Box<Status>,
    },
}

/// A status without its metadata, for people.
pub(super) fn describe(status: &Status) -> String {
    match status.message() {
        "" => status.code().to_string(),
        message => format!("{}: {message}", status.code()),
    }
}
