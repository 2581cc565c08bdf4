//! Decides when a node takes an older state than the one that it holds. Pure.
//!
//! One replica that shows an older state lags behind, and the agent goes to another. If all of them do,
//! the API server itself went back, for example because a backup was restored. The agent believes that
//! once all replicas that answer and are in touch with the API server have shown an older state, each
//! of them [`ANSWERS`] times, for [`INSISTENCE`].

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::transport::Replica;

/// Shortest time for which all replicas must show an older state before the agent takes it.
pub(super) const INSISTENCE: Duration = Duration::from_secs(60);

/// Times that each replica must show an older state before the agent takes it.
const ANSWERS: u32 = 2;

/// The replicas that have shown an older state since the node last took an update.
#[derive(Debug, Default)]
pub(super) struct Older {
    since: Option<Instant>,
    answers: BTreeMap<Replica, u32>,
}

impl Older {
    /// Records that a replica shows an older state. It counts as an answer if the replica is in touch
    /// with the API server.
    pub(super) fn shown(&mut self, by: Replica, in_touch: bool, now: Instant) {
        self.since.get_or_insert(now);
        let answers = self.answers.entry(by).or_default();
        *answers += u32::from(in_touch);
    }

    /// Records that the node took an update.
    pub(super) fn taken(&mut self) {
        *self = Self::default();
    }

    /// Forgets replicas that do not exist any more.
    pub(super) fn retain(&mut self, exists: impl Fn(&Replica) -> bool) {
        self.answers.retain(|replica, _| exists(replica));
    }

    /// Returns whether the node takes an older state.
    pub(super) fn is_believed(&self, now: Instant) -> bool {
        let insisted = self.since.is_some_and(|since| now - since >= INSISTENCE);
        let mut answers = self.answers.values();
        insisted && !self.answers.is_empty() && answers.all(|answers| *answers >= ANSWERS)
    }
}
