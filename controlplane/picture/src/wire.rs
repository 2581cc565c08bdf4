//! Values of the picture as messages have them.

use std::time::{SystemTime, UNIX_EPOCH};

use kplane_proto::v1::Confidence;

use crate::trust::Trust;

/// Returns the trust in the picture.
pub fn confidence(trust: &Trust) -> Confidence {
    match trust {
        Trust::Partial(_) => Confidence::Partial,
        Trust::Whole => Confidence::Unspecified,
        Trust::Confirmed => Confidence::Confirmed,
    }
}

/// Returns milliseconds since 1970, 0 for times before.
pub fn millis(at: SystemTime) -> u64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
