//! The order to publish an earlier state again. No I/O.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kplane_proto::v1 as pb;
use serde::{Deserialize, Serialize};

use super::MAX_REASON;
use crate::freshness::Freshness;
use crate::publish::Point;

/// Number of kinds of objects that a state may have versions of, at most.
const MAX_KINDS: usize = 16;
/// Longest text of a version, in bytes.
const MAX_VERSION: usize = 64;
/// Replicas of one folder read a change within this time.
const TOGETHER: Duration = Duration::from_secs(1);

/// An order to publish an earlier state until it is undone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rollback {
    /// The number of the order.
    pub number: u64,
    /// The replica that was asked, by its epoch, and the revision of the state there.
    pub epoch: u64,
    /// See `epoch`.
    pub revision: u64,
    /// Time of the state, milliseconds since 1970.
    pub state_ms: u64,
    /// The versions of the source that the state contains, as kind, version and newest change; none for a folder.
    pub versions: Vec<(String, String, String)>,
    /// The operator; empty if the caller was not named.
    pub by: String,
    /// Time of the order, milliseconds since 1970.
    pub at_ms: u64,
    /// The reason that the operator gave, or empty.
    pub reason: String,
}

impl Rollback {
    /// Returns the versions for the document.
    #[must_use]
    pub fn versions_of(freshness: &Freshness) -> Vec<(String, String, String)> {
        let all = freshness.news(&Freshness::default()).into_iter();
        all.map(|one| (one.kind, one.version, one.changed))
            .collect()
    }

    /// Returns the revision of the state at the replica of an epoch that remembers these states; `None` if it does not
    /// remember that one. Other replicas know it by the versions of the source, or else by its time.
    #[must_use]
    pub fn choose(&self, epoch: u64, points: &[Point]) -> Option<u64> {
        let mut newest_first = points.iter().rev();
        let found = if epoch == self.epoch {
            newest_first.find(|point| point.revision == self.revision)
        } else if self.versions.is_empty() {
            let at = UNIX_EPOCH + Duration::from_millis(self.state_ms) + TOGETHER;
            newest_first.find(|point| point.at <= at)
        } else {
            let state = self.freshness();
            let is_same =
                |point: &Freshness| state.lacks(point).is_none() && point.lacks(&state).is_none();
            newest_first.find(|point| is_same(&point.freshness))
        };
        found.map(|point| point.revision)
    }

    /// Returns the time of the state.
    #[must_use]
    pub fn state_at(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(self.state_ms)
    }

    fn freshness(&self) -> Freshness {
        let versions = self.versions.iter().cloned();
        let versions = versions.map(|(kind, version, changed)| pb::KindVersion {
            kind,
            version,
            changed,
        });
        Freshness::of_wire(&versions.collect::<Vec<_>>())
    }

    /// Returns whether all texts and lists are as short as those that kplane writes.
    pub(super) fn is_bounded(&self) -> bool {
        let short = |(kind, version, changed): &(String, String, String)| {
            kind.len().max(version.len()).max(changed.len()) <= MAX_VERSION
        };
        let texts = self.by.len().max(self.reason.len()) <= MAX_REASON;
        texts && self.versions.len() <= MAX_KINDS && self.versions.iter().all(short)
    }
}
