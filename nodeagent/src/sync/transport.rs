//! The transport between agent and control plane. Tests use a script in its place.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::stream::BoxStream;
use kplane_proto::v1::{AgentMessage, ServerMessage};
use kplane_tls::{Follower, Token};
use tokio::sync::mpsc;
use tonic::Status;

use crate::peer_probe::PeerProbe;

/// A replica of the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Replica {
    /// Its address; `None` = in the same process.
    pub place: Option<SocketAddr>,
    /// The index of the configured URL that led to it.
    pub url: usize,
}

/// The replicas to which one URL leads, or the reason why that is not known.
pub type Found = Result<Vec<Replica>, OpenError>;

impl fmt::Display for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Some(place) => write!(f, "{place}"),
            None => f.write_str("this process"),
        }
    }
}

/// Most messages of the agent that wait for the stream: a pong, a ping and a report. Newer state
/// waits elsewhere, and the latest is sent once there is room.
pub const OUTBOX: usize = 3;

/// An open stream. Dropping it closes the stream.
pub struct Link {
    /// Messages to the control plane.
    pub outbox: mpsc::Sender<AgentMessage>,
    /// Messages from the control plane.
    pub inbox: BoxStream<'static, Result<ServerMessage, Status>>,
    /// The token that proves the agent's identity; `None` = the agent has none.
    pub token: Option<Presented>,
    /// Finds out which nodes answer this one.
    pub peer_probe: PeerProbe,
}

/// A token that the control plane has, and the file in which a newer one may be.
#[derive(Debug)]
pub struct Presented {
    file: Follower<Token>,
    token: Arc<Token>,
}

impl Presented {
    /// Takes the current token of a file.
    pub fn of(file: &Follower<Token>) -> Self {
        Self {
            token: file.current(),
            file: file.clone(),
        }
    }

    /// Returns the token that was presented.
    pub fn token(&self) -> &Token {
        &self.token
    }

    /// Returns whether the file has a newer token.
    pub fn is_stale(&self) -> bool {
        self.file.current() != self.token
    }

    /// Takes the newer token of the file.
    pub fn renew(&mut self) -> Token {
        self.token = self.file.current();
        Token::clone(&self.token)
    }
}

/// Finds replicas of the control plane, and opens streams to them.
pub trait Transport: Send + 'static {
    /// Resolves the names of all configured URLs.
    fn find(&self) -> impl Future<Output = Vec<Found>> + Send + 'static;

    /// Opens a stream to a replica. The first message is `hello`.
    fn open(
        &mut self,
        replica: Replica,
        hello: AgentMessage,
    ) -> impl Future<Output = Result<Link, OpenError>> + Send;
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
