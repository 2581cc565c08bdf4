//! The order of Services that want what only one of them, or not all of them, can have.

use std::sync::Arc;

/// A Service's seniority; the smallest comes first, and equal ones are ordered by name. A Service that the source
/// names comes before one that is only held, then the older one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Seniority {
    held: bool,
    /// Services without a creation time come after those with one.
    not_dated: bool,
    created: Option<Arc<str>>,
}

impl Seniority {
    pub(super) fn new(created: Option<&Arc<str>>, held: bool) -> Self {
        Self {
            held,
            not_dated: created.is_none(),
            created: created.cloned(),
        }
    }
}
