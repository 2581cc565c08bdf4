//! Values of the picture as messages have them.

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
