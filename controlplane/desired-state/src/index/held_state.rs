//! The part of the index's picture that an approval names, so that other replicas can tell whether it is theirs, too.
//!
//! An approval names the held objects, the doubts, and how many Services are left. A replica whose picture it covers
//! takes it once (`controlplane/status-api/src/server/approval.rs`).

use kplane_model::{Digest, ObjectHash};
use serde::{Deserialize, Serialize};

use super::{Holding, Index};
use crate::trust::Trust;

/// A picture of the source that needs the operator's approval.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldState {
    /// Digest of the held objects; empty if there are none.
    pub held: String,
    /// Digest of the doubts that nobody has answered; empty if there are none.
    pub doubts: String,
    /// Number of Services that are served and not held.
    pub services: u64,
}

impl HeldState {
    /// Returns whether the approval of another picture covers this one: the doubts are the same, and the held objects
    /// are as well. A replica that started later never saw these objects. It names at least as many Services.
    pub fn is_covered_by(&self, approved: &Self) -> bool {
        let is_same = if self.held.is_empty() {
            self.services >= approved.services
        } else {
            self.held == approved.held
        };
        is_same && self.doubts == approved.doubts
    }
}

impl Index {
    /// Returns whether an approval would change anything.
    pub fn needs_approval(&self) -> bool {
        self.is_synced() && (self.holding.is_some() || self.trust() != Trust::Confirmed)
    }

    /// Returns the picture.
    pub fn held_state(&self) -> HeldState {
        let held = self.holding.iter().flat_map(Holding::objects);
        let names = held.map(|id| format!("{}\0{}\0{}", id.kind, id.namespace, id.name));
        let unnamed = self.holding.as_ref().map_or(0, Holding::services);
        HeldState {
            held: digest(names),
            doubts: digest(self.completeness.open()),
            services: self.totals.services.saturating_sub(unnamed) as u64,
        }
    }
}

/// Returns the digest of a set of texts; empty if there are none.
fn digest<T: AsRef<str>>(texts: impl IntoIterator<Item = T>) -> String {
    let mut digest = None::<Digest>;
    for text in texts {
        let hash = ObjectHash::of(text.as_ref().as_bytes());
        digest.get_or_insert_default().add(hash);
    }
    digest.map_or_else(String::new, |digest| digest.to_string())
}
