//! Failures on the wire.

use kplane_model::{DesiredKey, ServiceKey};
use kplane_proto::v1 as pb;
use prost::Message as _;

use super::{Failure, Subject};

/// Most failures that a report names.
pub(super) const MAX_FAILURES: usize = 400;

/// Bytes reserved for the sentence about failures that do not fit, and more.
const OMISSION_BYTES: usize = 256;

/// Longest reason that is sent, in bytes.
const MAX_REASON_BYTES: usize = 300;

/// Returns as many failures as fit into `room` bytes, and the number of further failures.
pub(super) fn failures_to_wire(failures: &[Failure], room: usize) -> Vec<pb::ObjectFailure> {
    let mut room = room.saturating_sub(OMISSION_BYTES);
    let mut wire = Vec::new();
    for failure in failures.iter().take(MAX_FAILURES) {
        let failure = failure_to_wire(failure);
        // The size includes its tag and length in the report.
        let bytes = failure.encoded_len() + 4;
        if bytes > room {
            break;
        }
        room -= bytes;
        wire.push(failure);
    }
    if let Some(first) = failures.get(wire.len()) {
        let more = failures.len() - wire.len();
        wire.push(pb::ObjectFailure {
            key: None,
            reason: format!("{more} further objects are not applied and not listed"),
            since_ms: first.since_ms,
            degraded: false,
            policies: false,
        });
    }
    wire
}

fn failure_to_wire(failure: &Failure) -> pb::ObjectFailure {
    let reason = clip(&failure.reason);
    let (key, reason) = match &failure.about {
        Subject::Object(DesiredKey::Service(key)) => (Some(key), reason.to_owned()),
        Subject::Object(DesiredKey::Local(key)) => {
            (Some(key), format!("endpoints on the node: {reason}"))
        }
        Subject::Object(DesiredKey::Node) => (None, format!("facts of the node: {reason}")),
        Subject::Object(DesiredKey::Policy(key)) => (None, format!("{key}: {reason}")),
        Subject::Node | Subject::Policies => (None, reason.to_owned()),
    };
    let policies = matches!(
        failure.about,
        Subject::Policies | Subject::Object(DesiredKey::Policy(_))
    );
    pb::ObjectFailure {
        key: key.map(|key: &ServiceKey| key.into()),
        reason,
        since_ms: failure.since_ms,
        degraded: failure.degraded,
        policies,
    }
}

/// Returns the first [`MAX_REASON_BYTES`] of a text.
pub(super) fn clip(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_REASON_BYTES)]
}
