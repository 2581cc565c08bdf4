//! States of nodes.

use clap::ValueEnum;
use kplane_proto::v1 as pb;
use serde::Serialize;

use crate::style::Tone;
use crate::wire::known;

/// The state of a node, with its number on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum NodeStateView {
    /// No agent has reported from the node.
    NoAgent = pb::NodeState::NoAgent as isize,
    /// Its kernel is about to get what it lacks.
    Syncing = pb::NodeState::Syncing as isize,
    /// Its kernel holds what it should.
    InSync = pb::NodeState::InSync as isize,
    /// Something could not be programmed.
    Failing = pb::NodeState::Failing as isize,
    /// Its agent is not connected.
    Disconnected = pb::NodeState::Disconnected as isize,
    /// Its kernel was not compared for too long.
    Unverified = pb::NodeState::Unverified as isize,
    /// It keeps earlier state on purpose.
    Holding = pb::NodeState::Holding as isize,
    /// Another agent claims to be the node.
    Conflict = pb::NodeState::Conflict as isize,
    /// An administrator has frozen it.
    Frozen = pb::NodeState::Frozen as isize,
    /// A replica that did not answer may serve the node, or only a newer server knows the state.
    Unknown = pb::NodeState::Unknown as isize,
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
        known(self as i32)
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
        let all = Self::value_variants().iter();
        let same = all.copied().find(|of| of.wire() == state);
        same.unwrap_or(Self::Unknown)
    }
}
