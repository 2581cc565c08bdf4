//! The reasons why there is no stream, and what follows from each.

use std::sync::Arc;
use std::time::Duration;

use kplane_proto::v1 as pb;
use tonic::Status;

use super::HANDSHAKE;
use super::transport::{self, OpenError, Replica};
use crate::desired::{Lag, Refusal, Remedy};
use crate::engine::Stopped;

/// Longest pause that a control plane may ask of an agent.
pub(super) const LONGEST_ABSENCE: Duration = Duration::from_secs(300);

/// The reason why a stream ended, or never began.
#[derive(Debug, thiserror::Error)]
pub(super) enum Lost {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("no welcome within {HANDSHAKE:?}")]
    NoWelcome,
    #[error("the control plane asks the agent to come back in {after:?} ({reason})")]
    ComeBackLater { after: Duration, reason: String },
    #[error("the control plane violates the protocol: {0}")]
    Protocol(String),
    #[error(
        "the control plane belongs to cluster {theirs:?}, and this node served cluster {ours:?}: the agent asks it for \
         a complete snapshot"
    )]
    OtherCluster { ours: Arc<str>, theirs: Arc<str> },
    #[error("the control plane closed the stream")]
    Closed,
    #[error("the stream broke: {}", transport::describe(.0))]
    Broken(Box<Status>),
    #[error("no message from the control plane for {0:?}")]
    Silent(Duration),
    #[error("{lag}")]
    Behind {
        lag: Lag,
        /// Whether the control plane is in touch with its source.
        in_touch: bool,
    },
    #[error(
        "the control plane lost touch with its source {0:?} ago: the agent looks for a replica with newer data"
    )]
    CutOff(Duration),
    #[error("the agent goes to {0}, where it belongs, so that agents are spread evenly")]
    Rebalanced(Replica),
    #[error("update refused: {0}")]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Engine(#[from] Stopped),
}

/// The reaction to a lost stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Retry {
    /// Connect to the next replica, or after a growing pause.
    Backoff,
    /// Connect to the next replica, or after a growing pause, and ask for a snapshot.
    Fresh,
    /// Connect to another replica at once. Leave this one alone for the time that it asked for, plus up to
    /// half of it.
    After(Duration),
    /// Connect to another replica, because this one shows an older state. `in_touch`: the replica is in
    /// touch with its source.
    Behind { in_touch: bool },
    /// Connect to another replica at once.
    Elsewhere,
    /// The process cannot go on.
    Never(Stopped),
}

impl Lost {
    /// Returns whether the agent goes to another control plane as planned: nothing failed.
    pub(super) fn is_move(&self) -> bool {
        matches!(self, Self::ComeBackLater { .. } | Self::Rebalanced(_))
    }

    pub(super) fn retry(&self) -> Retry {
        match self {
            Self::Open(_)
            | Self::NoWelcome
            | Self::Protocol(_)
            | Self::Closed
            | Self::Broken(_)
            | Self::Silent(_) => Retry::Backoff,
            Self::OtherCluster { .. } => Retry::Fresh,
            Self::ComeBackLater { after, .. } => Retry::After(*after),
            Self::Behind { in_touch, .. } => Retry::Behind {
                in_touch: *in_touch,
            },
            Self::CutOff(_) | Self::Rebalanced(_) => Retry::Elsewhere,
            Self::Refused(Refusal::Behind(_)) => Retry::Behind { in_touch: false },
            Self::Refused(refusal) => match refusal.remedy() {
                Remedy::Snapshot => Retry::Fresh,
                Remedy::Reconnect => Retry::Backoff,
            },
            Self::Engine(stopped) => Retry::Never(*stopped),
        }
    }
}

impl From<pb::ComeBackLater> for Lost {
    fn from(later: pb::ComeBackLater) -> Self {
        let after = Duration::from_millis(later.after_ms.into());
        Self::ComeBackLater {
            after: after.min(LONGEST_ABSENCE),
            reason: later.reason,
        }
    }
}
