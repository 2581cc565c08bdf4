//! Settings of the whole fleet, and their way to all nodes: first to a few, then to more. No I/O.
//!
//! Each node has a place in a rollout, by a hash of its name and the rollout's number. A step covers the nodes up to a
//! place, so every replica knows the nodes of a step without talking to others.

use std::fmt;

use kplane_model::{NodeName, ObjectHash};
use kplane_proto::v1 as pb;
use serde::{Deserialize, Serialize};

use super::MAX_REASON;

/// Greatest number of steps.
pub const MAX_STEPS: usize = 16;
/// Longest name of a setting, in bytes.
const MAX_SETTING: usize = 64;

/// Settings in place of those that agents have themselves. What is empty or `None` is as agents have it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Name of the backend.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub backend: String,
    /// How a rule of mode iptables finds the Service of an address.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub iptables_layout: String,
    /// Bit of the packet mark that asks for masquerading.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub masquerade_bit: Option<u32>,
}

/// How far a rollout is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// A step is under way.
    Running,
    /// All nodes have the settings.
    Done,
    /// All nodes have the settings from before again, for this reason.
    Back(String),
}

/// A rollout of settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rollout {
    /// The number of the order.
    pub number: u64,
    /// The settings.
    pub settings: Settings,
    /// Percentages of the nodes, one for each step; the last one is 100.
    pub steps: Vec<u8>,
    /// The present step, from 0.
    pub step: usize,
    /// The last place that the present step covers.
    pub up_to: u64,
    /// Time for which the nodes of a step must be healthy, milliseconds.
    pub healthy_ms: u64,
    /// Longest time of a step, milliseconds.
    pub timeout_ms: u64,
    /// The operator; empty if the caller was not named.
    pub by: String,
    /// The reason that the operator gave, or empty.
    pub reason: String,
    /// Start of the rollout, milliseconds since 1970.
    pub at_ms: u64,
    /// Start of the present step, or the end, milliseconds since 1970.
    pub step_at_ms: u64,
    /// How far it is.
    pub stage: Stage,
}

/// The settings of all nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Fleet {
    /// Settings of the nodes that the rollout does not cover.
    pub base: Settings,
    /// The last rollout, if there was one.
    pub rollout: Option<Rollout>,
}

/// A wish to change the settings of the fleet.
#[derive(Clone, Debug)]
pub enum Turn {
    /// Begin a rollout; its number is not known yet.
    Begin(Box<Rollout>),
    /// Cover the nodes up to a place with the first step, now that the rollout has a number.
    Cover {
        /// Number of the rollout.
        number: u64,
        /// The last place of the first step.
        up_to: u64,
        /// The time, milliseconds since 1970.
        at_ms: u64,
    },
    /// Go on from a step to the next one, which covers nodes up to a place.
    Next {
        /// Number of the rollout.
        number: u64,
        /// The step that is over.
        from: usize,
        /// The last place of the next step.
        up_to: u64,
        /// The time, milliseconds since 1970.
        at_ms: u64,
    },
    /// End the rollout.
    End {
        /// Number of the rollout; `None` = whichever is running.
        number: Option<u64>,
        /// How it ended.
        stage: Stage,
        /// The time, milliseconds since 1970.
        at_ms: u64,
    },
}

/// The reason why a turn cannot be made now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotNow {
    /// Another rollout is under way.
    #[error("another rollout is under way: wait for it, or end it with `kpctl rollout stop`")]
    Running,
    /// None is under way.
    #[error("no rollout is under way")]
    NotRunning,
}

impl From<&Settings> for pb::Settings {
    fn from(settings: &Settings) -> Self {
        Self {
            backend: settings.backend.clone(),
            iptables_layout: settings.iptables_layout.clone(),
            masquerade_bit: settings.masquerade_bit,
        }
    }
}

impl From<pb::Settings> for Settings {
    fn from(settings: pb::Settings) -> Self {
        Self {
            backend: settings.backend,
            iptables_layout: settings.iptables_layout,
            masquerade_bit: settings.masquerade_bit,
        }
    }
}

/// Names the settings, such as `backend iptables, masquerade bit 15`.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bit = self
            .masquerade_bit
            .map(|bit| format!("masquerade bit {bit}"));
        let named = |what: &str, name: &str| (!name.is_empty()).then(|| format!("{what} {name}"));
        let all = [
            named("backend", &self.backend),
            named("iptables layout", &self.iptables_layout),
            bit,
        ];
        let all: Vec<String> = all.into_iter().flatten().collect();
        match all.is_empty() {
            true => f.write_str("the agents' own settings"),
            false => f.write_str(&all.join(", ")),
        }
    }
}

impl Rollout {
    /// Returns the place of a node: any number, the same at each replica.
    #[must_use]
    pub fn place(number: u64, node: &str) -> u64 {
        let hash = ObjectHash::of(format!("rollout {number} {node}").as_bytes());
        let mut digest = kplane_model::Digest::default();
        digest.add(hash);
        let [a, b, c, d, e, f, g, h, ..] = digest.to_bytes();
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// Returns the last place of a step among these nodes: at least one node is in it.
    #[must_use]
    pub fn last_place<'a>(
        number: u64,
        percent: u8,
        nodes: impl Iterator<Item = &'a NodeName>,
    ) -> u64 {
        let mut places: Vec<u64> = nodes.map(|node| Self::place(number, node)).collect();
        places.sort_unstable();
        let count = (places.len() * usize::from(percent)).div_ceil(100);
        match places.get(count.max(1) - 1) {
            Some(place) if percent < 100 => *place,
            _ => u64::MAX,
        }
    }

    /// Returns whether the rollout goes on.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.stage == Stage::Running
    }

    /// Returns whether the present step covers a node.
    #[must_use]
    pub fn covers(&self, node: &str) -> bool {
        match self.stage {
            Stage::Running => self.up_to > 0 && Self::place(self.number, node) <= self.up_to,
            Stage::Done => true,
            Stage::Back(_) => false,
        }
    }

    /// Returns the percentage of the first step.
    #[must_use]
    pub fn first_percent(&self) -> u8 {
        self.steps.first().copied().unwrap_or(100)
    }

    /// Returns the percentage of the next step, if there is one.
    #[must_use]
    pub fn next_percent(&self) -> Option<u8> {
        self.steps.get(self.step + 1).copied()
    }

    fn is_bounded(&self) -> bool {
        let why = match &self.stage {
            Stage::Back(why) => why.len(),
            Stage::Running | Stage::Done => 0,
        };
        let texts = self.by.len().max(self.reason.len()) <= MAX_REASON && why <= 4 * MAX_REASON;
        let steps = self.step < self.steps.len() && self.steps.len() <= MAX_STEPS;
        texts && steps && self.settings.is_bounded()
    }
}

impl Settings {
    fn is_bounded(&self) -> bool {
        self.backend.len().max(self.iptables_layout.len()) <= MAX_SETTING
    }
}

impl Fleet {
    /// Returns the settings of a node.
    #[must_use]
    pub fn settings(&self, node: &str) -> &Settings {
        let rollout = self.rollout.as_ref().filter(|rollout| rollout.covers(node));
        rollout.map_or(&self.base, |rollout| &rollout.settings)
    }

    /// Returns whether all texts and lists are as short as those that kplane writes.
    pub(super) fn is_bounded(&self) -> bool {
        self.base.is_bounded() && self.rollout.as_ref().is_none_or(Rollout::is_bounded)
    }

    /// Returns the settings of the fleet after a turn. A turn that another replica has made already changes nothing.
    pub(super) fn after(&self, turn: &Turn, number: u64) -> Result<Self, NotNow> {
        let running = self.rollout.as_ref().filter(|rollout| rollout.is_running());
        let mut next = self.clone();
        match (turn, running) {
            (Turn::Begin(_), Some(_)) => return Err(NotNow::Running),
            (Turn::Begin(rollout), None) => {
                if let Some(last) = &self.rollout
                    && last.stage == Stage::Done
                {
                    next.base = last.settings.clone();
                }
                next.rollout = Some(Rollout {
                    number,
                    ..(**rollout).clone()
                });
            }
            (Turn::End { number: None, .. }, None) => return Err(NotNow::NotRunning),
            (Turn::Cover { .. } | Turn::Next { .. } | Turn::End { .. }, None) => {}
            (
                Turn::Cover {
                    number,
                    up_to,
                    at_ms,
                },
                Some(running),
            ) => {
                if (running.number, running.up_to) == (*number, 0) {
                    next.rollout = Some(Rollout {
                        up_to: *up_to,
                        step_at_ms: *at_ms,
                        ..running.clone()
                    });
                }
            }
            (
                Turn::Next {
                    number,
                    from,
                    up_to,
                    at_ms,
                },
                Some(running),
            ) => {
                if (running.number, running.step) == (*number, *from) {
                    next.rollout = Some(Rollout {
                        step: from + 1,
                        up_to: *up_to,
                        step_at_ms: *at_ms,
                        ..running.clone()
                    });
                }
            }
            (
                Turn::End {
                    number,
                    stage,
                    at_ms,
                },
                Some(running),
            ) => {
                if number.is_none_or(|number| number == running.number) {
                    next.rollout = Some(Rollout {
                        stage: stage.clone(),
                        step_at_ms: *at_ms,
                        ..running.clone()
                    });
                }
            }
        }
        Ok(next)
    }

    /// Returns whether a turn was made, as far as it shows.
    pub(super) fn has(&self, turn: &Turn) -> bool {
        let Some(rollout) = &self.rollout else {
            return false;
        };
        match turn {
            Turn::Begin(begun) => (rollout.at_ms, &rollout.by) == (begun.at_ms, &begun.by),
            Turn::Cover { number, .. } => rollout.number != *number || rollout.up_to > 0,
            Turn::Next { number, from, .. } => rollout.number != *number || rollout.step > *from,
            Turn::End { at_ms, .. } => !rollout.is_running() && rollout.step_at_ms == *at_ms,
        }
    }
}
