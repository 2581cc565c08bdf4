//! What all orders of operators have in common: a name, a reason, and a document that may refuse them.

use tonic::Status;

use crate::identity::Visitor;
use crate::orders::{MAX_REASON, Unchanged};

/// Returns the operator's name, as long as the document keeps it; empty if the caller has none.
pub(super) fn name(visitor: Option<&Visitor>) -> String {
    let name = visitor.and_then(Visitor::name).unwrap_or_default();
    name[..name.floor_char_boundary(MAX_REASON)].to_owned()
}

/// Checks the reason that an operator gave.
pub(super) fn check_reason(reason: &str) -> Result<(), Status> {
    if reason.len() > MAX_REASON || reason.chars().any(char::is_control) {
        return Err(Status::invalid_argument(format!(
            "the reason must be one line of at most {MAX_REASON} bytes"
        )));
    }
    Ok(())
}

/// Returns the answer to an order that is not in force, or perhaps is.
pub(super) fn refusal(consequence: &str, why: &Unchanged) -> Status {
    match why.is_unsure() {
        true => Status::unavailable(why.to_string()),
        false => Status::failed_precondition(format!("{consequence}: {why}")),
    }
}
