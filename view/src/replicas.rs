//! Replicas of the control plane that did not answer.

use crate::style::{Canvas, Tone};
use crate::text::{Span, paragraph};
use crate::wire::view_of;

view_of! {
    /// A replica of the control plane whose agents are not in an answer.
    pub struct MissingReplicaView: MissingReplica {
        address: String,
        reason: String,
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

/// Returns a note below an answer that one replica gave for itself, if there are others. `each` says what each has.
pub(super) fn alone_text(unasked: u32, each: &str, canvas: &Canvas) -> String {
    if unasked == 0 {
        return String::new();
    }
    let text = format!(
        "Of one replica alone; {unasked} more {} not asked. Each has {each}: {} --server ADDRESS asks another one.",
        if unasked == 1 { "was" } else { "were" },
        canvas.program
    );
    paragraph(&Span::new(text, Tone::Faint), canvas, 0)
}

fn warnings(lines: impl Iterator<Item = String>, canvas: &Canvas) -> String {
    let lines: String =
        lines.map(|line| paragraph(&Span::new(line, Tone::Bad), canvas, 0)).collect();
    if lines.is_empty() { lines } else { format!("\n{lines}") }
}
