//! Approvals that count for all replicas, also for those that start later.

use std::time::Duration;

use kplane_desired_state::index::HeldState;
use serde::{Deserialize, Serialize};

/// Time for which other replicas take an approval.
pub const APPROVAL_LASTS: Duration = Duration::from_secs(3_600);
/// Maximum number of approvals in the document; the latest stay.
pub(super) const MAX_APPROVALS: usize = 16;
/// Longest text in an approval, in bytes.
const MAX_TEXT: usize = 256;

/// An operator's approval of what is held.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Approval {
    /// A random number, by which replicas tell approvals apart.
    pub id: u64,
    /// The operator; empty if the caller was not named.
    pub by: String,
    /// Time of the approval, milliseconds since 1970.
    pub at_ms: u64,
    /// Held objects and doubts that the operator saw.
    #[serde(rename = "picture")]
    pub held_state: HeldState,
}

impl Approval {
    /// Returns whether other replicas may still take the approval. Clocks may differ.
    pub fn is_in_force(&self, now_ms: u64) -> bool {
        u128::from(now_ms.abs_diff(self.at_ms)) < APPROVAL_LASTS.as_millis()
    }

    /// Returns whether all texts are as short as those that kplane writes.
    pub(super) fn is_bounded(&self) -> bool {
        let HeldState { held, doubts, .. } = &self.held_state;
        self.by.len().max(held.len()).max(doubts.len()) <= MAX_TEXT
    }
}
