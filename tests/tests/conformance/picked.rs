//! Scenarios picked by hand.

use crate::scenario::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    Vec::new()
}
