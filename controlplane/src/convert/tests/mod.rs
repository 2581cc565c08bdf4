//! One test a rule, its id in the name. Objects are written as people write them.

use kplane_model::Issue;
use serde::de::DeserializeOwned;

mod addresses;
mod cluster;
mod ports;
mod service;
mod slice;

fn yaml<T: DeserializeOwned>(text: &str) -> T {
    serde_saphyr::from_str(text).unwrap()
}

/// Issues as people read them.
fn lines(issues: &[Issue]) -> Vec<String> {
    issues
        .iter()
        .map(|issue| format!("{}: {issue}", issue.severity))
        .collect()
}
