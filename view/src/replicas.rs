//! Replicas of the control plane that did not answer.

use kplane_proto::v1 as pb;
use serde::Serialize;

use crate::style::{Canvas, Tone};
use crate::text::{Span, paragraph};

/// A replica of the control plane whose agents are not in an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MissingReplicaView {
    pub(crate) address: String,
    pub(crate) reason: String,
}

impl MissingReplicaView {
    /// Returns the replicas that did not answer.
    pub fn list(missing: Vec<pb::MissingReplica>) -> Vec<Self> {
        let missing = missing.into_iter().map(|replica| Self {
            address: replica.address,
            reason: replica.reason,
        });
        missing.collect()
    }
}

/// Returns a warning for each replica that did not approve, after an empty line; an empty text when there are none.
pub(super) fn not_approved_text(missing: &[MissingReplicaView], canvas: &Canvas) -> String {
    let lines = missing.iter().map(|replica| {
        let MissingReplicaView { address, reason } = replica;
        format!("Replica {address} did not approve: {reason}. Approve again.")
    });
    warnings(lines, canvas)
}

/// Returns a warning for each missing replica, after an empty line; an empty text when there are none.
pub(super) fn missing_text<'a>(
    missing: impl IntoIterator<Item = &'a MissingReplicaView>,
    canvas: &Canvas,
) -> String {
    let lines = missing.into_iter().map(|replica| {
        let MissingReplicaView { address, reason } = replica;
        format!("Replica {address} is missing: {reason}. Nothing is known of its agents.")
    });
    warnings(lines, canvas)
}

fn warnings(lines: impl Iterator<Item = String>, canvas: &Canvas) -> String {
    let lines: String = lines
        .map(|line| paragraph(&Span::new(line, Tone::Bad), canvas, 0))
        .collect();
    match lines.is_empty() {
        true => lines,
        false => format!("\n{lines}"),
    }
}
