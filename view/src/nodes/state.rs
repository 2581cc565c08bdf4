//! States of nodes.

use clap::ValueEnum;
use kplane_proto::v1 as pb;
use serde::Serialize;

use crate::style::Tone;

/// The state of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum NodeStateView {
    /// No agent has reported from the node.
    NoAgent,
    /// Its kernel is about to get what it lacks.
    Syncing,
    /// Its kernel holds what it should.
    InSync,
    /// Something could not be programmed.
    Failing,
    /// Its agent is not connected.
    Disconnected,
    /// Its kernel was not compared for too long.
    Unverified,
    /// It keeps earlier state on purpose.
    Holding,
    /// Another agent claims to be the node.
    Conflict,
    /// An administrator has frozen it.
    Frozen,
    /// A replica that did not answer may serve the node, or only a newer server knows the state.
    Unknown,
}

impl NodeStateView {
    /// Returns the state as people and programs see it: one word.
    pub fn word(self) -> &'static str {
        match self {
            Self::NoAgent => "NoAgent",
            Self::Syncing => "Syncing",
            Self::InSync => "InSync",
            Self::Failing => "Failing",
            Self::Disconnected => "Disconnected",
            Self::Unverified => "Unverified",
            Self::Holding => "Holding",
            Self::Conflict => "Conflict",
            Self::Frozen => "Frozen",
            Self::Unknown => "Unknown",
        }
    }

    /// Returns the state on the wire.
    pub fn wire(self) -> pb::NodeState {
        match self {
            Self::NoAgent => pb::NodeState::NoAgent,
            Self::Syncing => pb::NodeState::Syncing,
            Self::InSync => pb::NodeState::InSync,
            Self::Failing => pb::NodeState::Failing,
            Self::Disconnected => pb::NodeState::Disconnected,
            Self::Unverified => pb::NodeState::Unverified,
            Self::Holding => pb::NodeState::Holding,
            Self::Conflict => pb::NodeState::Conflict,
            Self::Frozen => pb::NodeState::Frozen,
            Self::Unknown => pb::NodeState::Unknown,
        }
    }

    /// Returns the urgency: states with a lower number need an operator sooner.
    pub fn urgency(self) -> u8 {
        match self {
            Self::Conflict => 0,
            Self::Failing => 1,
            Self::Disconnected => 2,
            Self::Unknown => 3,
            Self::NoAgent => 4,
            Self::Holding => 5,
            Self::Unverified => 6,
            Self::Syncing => 7,
            Self::Frozen => 8,
            Self::InSync => 9,
        }
    }

    /// Returns the tone in which the state is shown.
    pub fn tone(self) -> Tone {
        match self {
            Self::InSync => Tone::Good,
            Self::Syncing | Self::NoAgent | Self::Unknown => Tone::Warn,
            Self::Unverified | Self::Holding | Self::Frozen => Tone::Warn,
            Self::Failing | Self::Disconnected | Self::Conflict => Tone::Bad,
        }
    }
}

impl From<pb::NodeState> for NodeStateView {
    fn from(state: pb::NodeState) -> Self {
        match state {
            pb::NodeState::NoAgent => Self::NoAgent,
            pb::NodeState::Syncing => Self::Syncing,
            pb::NodeState::InSync => Self::InSync,
            pb::NodeState::Failing => Self::Failing,
            pb::NodeState::Disconnected => Self::Disconnected,
            pb::NodeState::Unverified => Self::Unverified,
            pb::NodeState::Holding => Self::Holding,
            pb::NodeState::Conflict => Self::Conflict,
            pb::NodeState::Frozen => Self::Frozen,
            pb::NodeState::Unknown | pb::NodeState::Unspecified => Self::Unknown,
        }
    }
}
